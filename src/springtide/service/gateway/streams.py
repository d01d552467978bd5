"""A streamed answer on its way from a replica to a client: what has come and was not taken, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from springtide.core.errors import SpringtideError
from springtide.service.gateway.requests import RequestRefused
from springtide.serving.events import EVENT_STREAM, written_error
from springtide.serving.frames import CREDIT_BYTES, HttpStart
from springtide.serving.socket_messages import SocketMessage

# The status of an answer after which messages of a WebSocket come.
SWITCHING = 101
# The replica hears of the client's progress in steps of so many bytes, not with every chunk.
_CREDIT_STEP_BYTES = CREDIT_BYTES // 4


class AnswerStream:
    """The body of one streamed answer. Everything runs on the event loop.

    `give_credit` is called with bytes that the client has taken, `on_cancel` if the rest is not wanted. A silence of
    the replica for `silence_s` ends the stream, where there is one.
    """

    def __init__(
        self,
        *,
        is_sse: bool,
        start: HttpStart | None = None,
        silence_s: float | None,
        give_credit: Callable[[int], None],
        on_cancel: Callable[[], None],
    ) -> None:
        self.is_sse = is_sse
        # The head of an application's answer. If that breaks off the connection is closed, because it has no form for
        # errors, unless it is one of events.
        self.start = start
        self._has_form = start is None or _has_events(start)
        self.is_broken = False
        # Why the replica ended it before it was complete.
        self.error: SpringtideError | None = None
        # The HTTP status that the end stands for, in metrics: the answer itself has begun with 200.
        self.status = 200 if start is None else start.status
        self._silence_s = silence_s
        self._give_credit = give_credit
        self._on_cancel = on_cancel
        self._chunks: list[bytes] = []
        self._last = b""
        self._num_untold = 0
        self._is_over = False
        self._is_waiting: asyncio.Future[None] | None = None

    def feed(self, chunk: bytes) -> None:
        """Add bytes from the replica."""
        if chunk and not self._is_over:
            self._chunks.append(chunk)
            self._last = chunk
            self._wake()

    def end(self, error: SpringtideError | None = None, *, status: int = 500, code: str = "predict_failed") -> None:
        """The replica has ended the answer; with an `error` the client gets that as its last item."""
        if self._is_over:
            return
        if error is not None:
            self.error = error
            self.status = status
            self.is_broken = not self._has_form
        if error is not None and self._has_form:
            # A replica that was lost may have left half an item.
            gap = b"" if self._last.endswith(b"\n") or not self._last else b"\n\n"
            sentence = str(error).encode("utf-8", "replace").decode()
            is_sse = self.is_sse or self.start is not None
            self._chunks.append(gap + written_error({"code": code, "message": sentence}, is_sse=is_sse))
        self._is_over = True
        self._wake()

    def cancel(self, status: int = 499) -> None:
        """The client does not take the rest."""
        if not self._is_over:
            self._on_cancel()
            self.status = status
        self._is_over = True
        self._chunks.clear()
        self._wake()

    @property
    def is_whole(self) -> bool:
        """Whether all that was to come has come and been taken."""
        return self._is_over and not self._chunks and not self.is_broken and self.status != 499

    async def next(self) -> bytes:
        """What has come since the last call, which the client has taken; empty at the end of the answer."""
        if self._num_untold >= _CREDIT_STEP_BYTES:
            self._give_credit(self._num_untold)
            self._num_untold = 0
        if not self._chunks and not self._is_over:
            self._is_waiting = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self._silence_s):
                    await self._is_waiting
            except TimeoutError:
                self._on_cancel()
                what = "predict" if self.start is None else "the application"
                why = f"{what} yielded nothing for the {self._silence_s:g} s that the request allows"
                self.end(RequestRefused(504, why), status=504, code="too_late")
            finally:
                self._is_waiting = None
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._num_untold += len(body)
        return body

    def _wake(self) -> None:
        if self._is_waiting is not None and not self._is_waiting.done():
            self._is_waiting.set_result(None)


class SocketStream(AnswerStream):
    """The application's messages to the client as a stream, and the client's to the application, on credit too.

    `feed` is called with bytes for the replica. Everything runs on the event loop.
    """

    def __init__(
        self,
        *,
        start: HttpStart,
        give_credit: Callable[[int], None],
        on_cancel: Callable[[], None],
        feed: Callable[[bytes], None],
    ) -> None:
        super().__init__(is_sse=False, start=start, silence_s=None, give_credit=give_credit, on_cancel=on_cancel)
        self._to_replica = feed
        self._room = CREDIT_BYTES
        self._has_room = asyncio.Event()
        self._has_room.set()

    def taken(self, num_bytes: int) -> None:
        """The application has taken so many bytes of the client's messages."""
        self._room += num_bytes
        if self._room > 0:
            self._has_room.set()

    async def give(self, message: SocketMessage) -> None:
        """Send a message of the client to the application once that has taken enough of those before it."""
        await self._has_room.wait()
        self.give_now(message)

    def give_now(self, message: SocketMessage) -> None:
        """Send a message without waiting."""
        self._room -= message.num_bytes
        if self._room <= 0:
            self._has_room.clear()
        self._to_replica(message.encode())


def _has_events(start: HttpStart) -> bool:
    """Whether an application's answer is one of server-sent events, with an own form for errors."""
    kinds = (value for name, value in start.headers if name.lower() == b"content-type")
    is_plain = not any(name.lower() in (b"content-length", b"content-encoding") for name, _ in start.headers)
    return is_plain and any(kind.lower().startswith(EVENT_STREAM.encode()) for kind in kinds)
