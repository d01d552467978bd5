"""What the kinds of web applications in a replica have in common: they get requests on an event loop, and no calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from springtide.runtime.serving.calls import AsyncCall
from springtide.serving.applications import WebService
from springtide.serving.frames import BatchOutcome, HttpHead, HttpStart
from springtide.serving.schema import derive_schema

_LOG = logging.getLogger("springtide.replica")
# A readiness that is true once may be so by chance.
NUM_READY = 2
PROBE_S = 0.2


class RunningApplication(Protocol):
    """What answers requests, on the event loop that it was made with.

    `cache_tokens`: how many tokens of prompts it keeps, if it is a language model that says so; else 0.
    """

    @property
    def cache_tokens(self) -> int: ...

    async def respond(self, call: AsyncCall, head: HttpHead) -> BatchOutcome:
        """Answer one request; the parts of the answer are sent as they come."""
        ...

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end` on another thread, with a sentence, if it ends by itself."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class RequestAnswerer:
    """An Answerer that passes requests to an application, which works on `loop`."""

    def __init__(
        self,
        served: type[WebService],
        concurrency: int | None,
        loop: asyncio.AbstractEventLoop,
        application: RunningApplication,
    ) -> None:
        schema = derive_schema(served, concurrency)
        self.schema = msgspec.structs.replace(schema, cache_tokens=application.cache_tokens)
        self.loop: asyncio.AbstractEventLoop | None = loop
        self._application = application

    async def respond(self, call: AsyncCall, head: HttpHead) -> BatchOutcome:
        """Answer one request; the parts of the answer are sent as they come."""
        return await self._application.respond(call, head)

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end` on another thread, with a sentence, if what answers ends by itself."""
        self._application.watch(on_end)

    def close(self) -> None:
        """End what answers."""
        self._application.close()

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


async def ready_in_a_row(probe: Callable[[], Awaitable[str]]) -> None:
    """Return once `probe` has found nothing wrong twice in a row; what it finds first is logged.

    The time in which a replica has to start limits how long that takes. Whatever it raises ends the start.
    """
    num_ready, is_told = 0, False
    while num_ready < NUM_READY:
        trouble = await probe()
        if not trouble:
            num_ready += 1
            continue
        num_ready = 0
        if not is_told:
            _LOG.warning("not ready yet: %s; this replica gets no requests until it is", trouble)
            is_told = True
        await asyncio.sleep(PROBE_S)


def trouble_of_status(path: str, status: int) -> str:
    """What is wrong with an answer to the path that says whether an application is ready; empty if nothing."""
    return "" if 200 <= status < 300 else f"{path} answers {status}"


async def refuse(call: AsyncCall, status: int, code: str, message: str) -> BatchOutcome:
    """Answer a request with an error in the form of the platform's."""
    body = msgspec.json.encode({"error": {"code": code, "message": message}})
    headers = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)))
    await call.send_part(body, HttpStart(status, headers))
    return BatchOutcome("ok", b"")
