"""A replica that is a command: it is started and watched here, and requests are passed on to its port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from springtide.core.errors import InvalidRequest
from springtide.runtime.serving.calls import AsyncCall
from springtide.runtime.serving.processes.command import RunningCommand, words_of
from springtide.runtime.serving.processes.exchanges import Exchange, Upstream, UpstreamLost, written_request
from springtide.runtime.serving.processes.ports import LOOPBACK, held_port
from springtide.runtime.serving.requests import ready_in_a_row, refuse, trouble_of_status
from springtide.serving.applications import EngineService, ProcessService
from springtide.serving.frames import BatchOutcome, HttpHead, HttpStart

_LOG = logging.getLogger("springtide.replica")
_PROBE_TIMEOUT_S = 10.0
# How long a lost connection waits for the news that the command has ended.
_NEWS_S = 0.5
_NEWS_POLL_S = 0.02
# Requests that may be sent again on another connection if a kept one was closed before the answer.
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
_OWN = frozenset({b"content-length", b"expect", b"x-forwarded-host", b"x-forwarded-prefix", b"x-forwarded-proto"})


class ServedProcess:
    """The command of an `st.process`, started and ready.

    `name` is the service's; the command gets the paths without its prefix /f/NAME, which is in X-Forwarded-Prefix.
    `concurrency` is how many requests it gets at a time. Raises InvalidRequest if the command cannot be started or ends
    before it is ready.
    """

    def __init__(
        self, served: type[ProcessService], name: str, loop: asyncio.AbstractEventLoop, concurrency: int
    ) -> None:
        self._prefix = f"/f/{name}"
        self.cache_tokens = served.cache_tokens
        self._kept = contextlib.ExitStack()
        self._port = self._kept.enter_context(held_port())
        self._upstream = Upstream(LOOPBACK, self._port)
        self._command = RunningCommand(words_of(served.make, self._port, concurrency), self._port)
        self._kept.callback(self._command.stop)
        try:
            loop.run_until_complete(ready_in_a_row(lambda: self._probe(served.ready)))
            if issubclass(served, EngineService):
                self.cache_tokens = loop.run_until_complete(self._capacity(served))
        except BaseException:
            self._kept.close()
            raise

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end` on another thread, with a sentence, if the command ends by itself."""
        self._command.watch(on_end)

    def close(self) -> None:
        """Stop the command."""
        self._upstream.close()
        self._kept.close()

    async def respond(self, call: AsyncCall, head: HttpHead) -> BatchOutcome:
        """Pass one request on, and its answer back."""
        try:
            if head.is_socket:
                return await self._talk(call, head)
            return await self._pass_on(call, head)
        except (UpstreamLost, OSError, TimeoutError) as error:
            return await self._lost(call, error)

    async def _pass_on(self, call: AsyncCall, head: HttpHead) -> BatchOutcome:
        request = written_request(head, self._target(head), self._headers(head), call.call)
        exchange, start = await self._asked(head, request)
        try:
            start = self._outward(start)
            part = exchange.taken()
            await call.send_part(part, start)
            while part or not exchange.is_complete:
                part = await exchange.next()
                if part:
                    await call.send_part(part)
            self._upstream.give_back(exchange)
        except BaseException:
            exchange.abort()
            raise
        return BatchOutcome("ok", b"")

    async def _asked(self, head: HttpHead, request: bytes) -> tuple[Exchange, HttpStart]:
        """An exchange with the head of its answer, on a new connection if a kept one was closed meanwhile."""
        is_new = False
        while True:
            exchange = await self._upstream.connection(is_new=is_new)
            try:
                exchange.ask(request, is_head=head.method == "HEAD")
                return exchange, await exchange.head()
            except UpstreamLost as error:
                if not exchange.is_reused or error.has_begun or head.method not in _REPEATABLE:
                    raise
                is_new = True
            except BaseException:
                exchange.abort()
                raise

    async def _talk(self, call: AsyncCall, head: HttpHead) -> BatchOutcome:
        # Imported here, because few services have WebSockets.
        from springtide.runtime.serving.processes.sockets import UpstreamSocket

        reader, writer = await asyncio.open_connection(LOOPBACK, self._port)
        try:
            return await UpstreamSocket(call, reader, writer).relay(head, self._target(head), self._headers(head))
        finally:
            writer.transport.abort()

    async def _lost(self, call: AsyncCall, error: Exception) -> BatchOutcome:
        """The answer where the command gave none. If it has ended, the replica does, and that is the answer."""
        if call.is_left:
            return BatchOutcome("ok", b"")
        for _ in range(round(_NEWS_S / _NEWS_POLL_S)):
            if self._command.end:
                await asyncio.Event().wait()
            await asyncio.sleep(_NEWS_POLL_S)
        why = "it accepts no connections" if isinstance(error, OSError | TimeoutError) else str(error)
        if call.has_begun:
            return BatchOutcome("error", f"the process broke its answer off: {why}".encode())
        return await refuse(call, 502, "process_failed", f"the process did not answer: {why}")

    def _target(self, head: HttpHead) -> bytes:
        path = head.raw_path[len(self._prefix) :] or b"/"
        return path + b"?" + head.query if head.query else path

    def _headers(self, head: HttpHead) -> list[tuple[bytes, bytes]]:
        host = next((value for name, value in head.headers if name == b"host"), f"{LOOPBACK}:{self._port}".encode())
        scheme = {"ws": "http", "wss": "https"}.get(head.scheme, head.scheme)
        return [
            *((name, value) for name, value in head.headers if name not in _OWN),
            (b"x-forwarded-host", host),
            (b"x-forwarded-proto", scheme.encode()),
            (b"x-forwarded-prefix", self._prefix.encode()),
        ]

    def _outward(self, start: HttpStart) -> HttpStart:
        """The head of an answer, with redirects to where the client finds them."""
        headers = tuple(
            (name, self._prefix.encode() + value if name == b"location" and _is_own_path(value) else value)
            for name, value in start.headers
        )
        return HttpStart(start.status, headers)

    async def _probe(self, ready: str) -> str:
        """What is wrong with the command; empty if it can take requests. Raises InvalidRequest if it has ended."""
        if ended := self._command.end:
            raise InvalidRequest(
                f"the command {self._command.words[0]} {ended} before it was ready; its output says why"
            )
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                if ready:
                    return trouble_of_status(ready, (await self._told(ready, has_body=False))[0])
                (await self._upstream.connection(is_new=True)).abort()
                return ""
        except TimeoutError:
            return f"port {self._port} did not answer within {_PROBE_TIMEOUT_S:g} s"
        except UpstreamLost as error:
            return f"{ready}: {error}"
        except OSError:
            return f"port {self._port} accepts no connections"

    async def _told(self, path: str, *, has_body: bool = True) -> tuple[int, bytes]:
        """Status and body of what the command answers to GET on a path. Raises UpstreamLost, OSError.

        Without `has_body` nothing of the body is waited for.
        """
        exchange = await self._upstream.connection(is_new=True)
        headers = [(b"host", f"{LOOPBACK}:{self._port}".encode())]
        try:
            exchange.ask(written_request(HttpHead("GET", "http", path, b"", ()), path.encode(), headers, b""))
            status, parts = (await exchange.head()).status, []
            while has_body and (part := await exchange.next()):
                parts.append(part)
            return status, b"".join(parts)
        finally:
            exchange.abort()

    async def _capacity(self, served: type[EngineService]) -> int:
        """For how many tokens the engine keeps what it has computed; 0, with a line in the log, if it does not say."""
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                return served.capacity.tokens_in((await self._told(served.capacity.path))[1])
        except (UpstreamLost, OSError, TimeoutError, ValueError, LookupError) as error:
            _LOG.warning("%s does not say what it keeps; prompts are routed by load: %s", served.capacity.path, error)
            return 0


def _is_own_path(location: bytes) -> bool:
    return location.startswith(b"/") and not location.startswith(b"//")
