"""A web application in a replica: its lifespan, and its requests as calls of async code. No HTTP is spoken here."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Sequence
from typing import Any

from springtide.core.errors import InvalidRequest
from springtide.runtime.serving.calls import AsyncCall
from springtide.serving.applications import AsgiService
from springtide.serving.frames import BatchOutcome, HttpHead, HttpStart
from springtide.serving.schema import derive_schema

_LOG = logging.getLogger("springtide.replica")
_VERSIONS = {"version": "3.0", "spec_version": "2.3"}
_LIFESPAN_END_S = 10.0


class ServedApplication:
    """The user's ASGI application, started. What its startup raises comes out of the constructor.

    `name` is the service's: the application is below /f/NAME, which it gets as its root path.
    """

    def __init__(self, served: type[AsgiService], name: str, concurrency: int | None = None) -> None:
        self.schema = derive_schema(served, concurrency)
        self._loop = asyncio.new_event_loop()
        self.loop: asyncio.AbstractEventLoop | None = self._loop
        self._root_path = f"/f/{name}"
        self._state: dict[str, Any] = {}
        self._to_lifespan: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._lifespan: asyncio.Task[None] | None = None
        self._app = self._loop.run_until_complete(self._start(served))

    async def respond(self, call: AsyncCall, head: HttpHead) -> BatchOutcome:
        """Let the application answer one request; the parts of its answer are sent as they come."""
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
                start = HttpStart(message["status"], tuple((bytes(k), bytes(v)) for k, v in message.get("headers", ())))
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

    def close(self) -> None:
        """End the application's lifespan."""
        self._loop.run_until_complete(self._stop())

    def failure(self, error: BaseException) -> BatchOutcome:
        """The outcome of an error of the application, which it logs."""
        _LOG.error("the application failed", exc_info=error)
        return BatchOutcome("error", f"{type(error).__name__}: {str(error)[:500]}".encode("utf-8", "replace"))

    def began(self, num_items: int) -> None:
        """Does nothing: no batches are measured here."""

    def ended(self, *, is_done: bool) -> None:
        """Does nothing, as `began`."""

    def set_queue_length(self, num_batches: int) -> None:
        """Does nothing, as `began`."""

    def start(self, call: bytes) -> Any:
        """Raises RuntimeError: an application gets requests."""
        raise RuntimeError("an application gets requests, not calls")

    def encoded(self, value: Any) -> bytes:
        """Raises RuntimeError, as `start`."""
        return bytes(self.start(b""))

    def outcome_of(self, value: Any) -> BatchOutcome:
        """Raises RuntimeError, as `start`."""
        return BatchOutcome("error", self.encoded(value))

    def answer(self, calls: Sequence[bytes]) -> tuple[BatchOutcome, ...]:
        """Raises RuntimeError, as `start`."""
        return tuple(self.outcome_of(call) for call in calls)

    def _scope(self, head: HttpHead) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": _VERSIONS,
            "http_version": "1.1",
            "method": head.method,
            "scheme": head.scheme,
            "path": head.path,
            "raw_path": head.path.encode("utf-8", "replace"),
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
