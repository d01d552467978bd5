"""A web application in a replica: its lifespan, and its requests as calls of async code. No HTTP is spoken here."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

from springtide.core.errors import InvalidRequest
from springtide.runtime.serving.calls import AsyncCall
from springtide.runtime.serving.requests import ready_in_a_row, trouble_of_status
from springtide.serving.applications import AsgiService
from springtide.serving.frames import BatchOutcome, HttpHead, HttpStart
from springtide.serving.socket_messages import NORMAL_CLOSURE, SocketMessage, close_message

_LOG = logging.getLogger("springtide.replica")
_VERSIONS = {"version": "3.0", "spec_version": "2.3"}
_LIFESPAN_END_S = 10.0
_PROBE_TIMEOUT_S = 10.0
_SWITCHING = 101
_REFUSED = 403


class ServedApplication:
    """The user's ASGI application, started and ready. What its startup raises comes out of the constructor.

    `name` is the service's: the application is below /f/NAME, which it gets as its root path.
    """

    def __init__(self, served: type[AsgiService], name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._root_path = f"/f/{name}"
        self._state: dict[str, Any] = {}
        self._to_lifespan: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._lifespan: asyncio.Task[None] | None = None
        self._app = self._loop.run_until_complete(self._start(served))
        if served.ready:
            self._loop.run_until_complete(ready_in_a_row(lambda: self._probe(served.ready)))

    @property
    def cache_tokens(self) -> int:
        """How many tokens of prompts it keeps, if it is a language model that says so."""
        return int(getattr(self._app, "cache_tokens", 0))

    async def respond(self, call: AsyncCall, head: HttpHead) -> BatchOutcome:
        """Let the application answer one request, or talk on a WebSocket."""
        if head.is_socket:
            return await self._respond_socket(call, head)
        start: HttpStart | None = None
        is_read = is_complete = False
        is_over = asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": call.call, "more_body": False}
            await is_over.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal start, is_complete
            if message["type"] == "http.response.start":
                start = _start_of(message)
            elif message["type"] == "http.response.body" and not is_complete:
                if not call.has_begun and start is None:
                    raise RuntimeError("the application sent a body before http.response.start")
                await call.send_part(bytes(message.get("body", b"")), start)
                if not message.get("more_body", False):
                    is_complete = True
                    is_over.set()

        await self._app(self._scope(head), receive, send)
        if not is_complete:
            return BatchOutcome("error", b"the application returned before its answer was complete")
        return BatchOutcome("ok", b"")

    async def _respond_socket(self, call: AsyncCall, head: HttpHead) -> BatchOutcome:
        talk = _SocketTalk(call)
        protocols = next((value for name, value in head.headers if name == b"sec-websocket-protocol"), b"")
        offered = [part.strip() for part in protocols.decode("latin-1").split(",") if part.strip()]
        scope = {**self._scope(head), "type": "websocket", "subprotocols": offered}
        scope["extensions"] = {"websocket.http.response": {}}
        del scope["method"]
        await self._app(scope, talk.receive, talk.send)
        if not call.has_begun:
            return BatchOutcome("error", b"the application returned before it had accepted the WebSocket")
        return BatchOutcome("ok", b"")

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Does nothing: it ends with its replica."""

    def close(self) -> None:
        """End the application's lifespan."""
        self._loop.run_until_complete(self._stop())

    async def _probe(self, ready: str) -> str:
        """Ask the application itself whether it is ready; what is wrong, or nothing."""
        path, _, query = ready.partition("?")
        scope = self._scope(HttpHead("GET", "http", self._root_path + path, query.encode(), ((b"host", b"localhost"),)))
        statuses: list[int] = []
        is_read = False

        async def receive() -> dict[str, Any]:
            nonlocal is_read
            if is_read:
                await asyncio.Event().wait()
            is_read = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                await self._app(scope, receive, send)
        except TimeoutError:
            return f"{ready} did not answer within {_PROBE_TIMEOUT_S:g} s"
        except Exception as error:
            return f"{ready} raised {type(error).__name__}: {error}"[:300]
        return trouble_of_status(ready, statuses[0] if statuses else 500)

    def _scope(self, head: HttpHead) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": _VERSIONS,
            "http_version": "1.1",
            "method": head.method,
            "scheme": head.scheme,
            "path": head.path,
            "raw_path": head.raw_path or head.path.encode("utf-8", "replace"),
            "query_string": head.query,
            "root_path": self._root_path,
            "headers": [list(pair) for pair in head.headers],
            "client": None,
            "server": None,
            "state": dict(self._state),
        }

    async def _start(self, served: type[AsgiService]) -> Any:
        app = served.make()
        if inspect.isawaitable(app):
            app = await app
        if not callable(app):
            raise InvalidRequest(f"{served.__name__} must return an ASGI application, it returned {app!r:.80}")
        started: asyncio.Future[str] = self._loop.create_future()

        async def send(message: dict[str, Any]) -> None:
            if message["type"].startswith("lifespan.startup.") and not started.done():
                is_failed = message["type"] == "lifespan.startup.failed"
                started.set_result(message.get("message") or "it gave no reason" if is_failed else "")

        async def lifespan() -> None:
            try:
                await app({"type": "lifespan", "asgi": _VERSIONS, "state": self._state}, self._to_lifespan.get, send)
            except Exception as error:
                # One that does not know the protocol raises; one that fails in it says so before.
                _LOG.debug("no lifespan: %s", error)
            if not started.done():
                started.set_result("")

        self._to_lifespan.put_nowait({"type": "lifespan.startup"})
        self._lifespan = self._loop.create_task(lifespan())
        if why := await started:
            raise InvalidRequest(f"the startup of the application failed: {why.strip().splitlines()[-1]:.300}")
        return app

    async def _stop(self) -> None:
        self._to_lifespan.put_nowait({"type": "lifespan.shutdown"})
        if self._lifespan is not None:
            await asyncio.wait([self._lifespan], timeout=_LIFESPAN_END_S)


class _SocketTalk:
    """The two functions with which an application talks on a WebSocket."""

    def __init__(self, call: AsyncCall) -> None:
        self._call = call
        self._is_told = self._is_accepted = self._is_closed = False
        self._refusal: HttpStart | None = None

    async def receive(self) -> dict[str, Any]:
        """The next event from the client."""
        if not self._is_told:
            self._is_told = True
            return {"type": "websocket.connect"}
        message = await self._call.next_message()
        if message.kind == "close":
            return {"type": "websocket.disconnect", "code": message.code, "reason": message.body.decode()}
        if message.kind == "text":
            return {"type": "websocket.receive", "text": message.body.decode()}
        return {"type": "websocket.receive", "bytes": message.body}

    async def send(self, message: dict[str, Any]) -> None:
        """Send one event to the client. Raises RuntimeError for one that is out of turn."""
        kind = message["type"]
        if kind == "websocket.accept" and not self._call.has_begun:
            chosen = message.get("subprotocol")
            own = () if chosen is None else ((b"sec-websocket-protocol", chosen.encode("latin-1")),)
            given = tuple((bytes(name), bytes(value)) for name, value in message.get("headers") or ())
            self._is_accepted = True
            await self._call.send_part(b"", HttpStart(_SWITCHING, (*given, *own)))
        elif kind == "websocket.http.response.start" and not self._call.has_begun:
            self._refusal = _start_of(message)
        elif kind == "websocket.http.response.body" and self._refusal is not None:
            await self._call.send_part(bytes(message.get("body", b"")), self._refusal)
        elif kind == "websocket.close" and not self._is_accepted:
            await self._call.send_part(b"", HttpStart(_REFUSED, ()))
        elif not self._is_accepted or self._is_closed:
            raise RuntimeError(f"the application sent {kind} when the WebSocket was not open")
        elif kind == "websocket.close":
            self._is_closed = True
            code, reason = message.get("code", NORMAL_CLOSURE), message.get("reason") or ""
            await self._call.send_message(close_message(code, reason))
        elif (text := message.get("text")) is not None:
            await self._call.send_message(SocketMessage("text", text.encode("utf-8", "replace")))
        else:
            await self._call.send_message(SocketMessage("bytes", bytes(message["bytes"])))


def _start_of(message: dict[str, Any]) -> HttpStart:
    return HttpStart(message["status"], tuple((bytes(k), bytes(v)) for k, v in message.get("headers", ())))
