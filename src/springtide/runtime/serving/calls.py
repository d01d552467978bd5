"""The calls of an async or a generator `predict` in a replica: their credit, their cancellation and their end.

A generator works in a thread of the server, which waits there for credit and looks between two items whether the call
is still wanted. Async code works on one event loop, where a cancelled call's task is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, runtime_checkable

from springtide.runtime.serving.identity import CALL, CallScope
from springtide.serving.events import ServerSentEvent, written_item
from springtide.serving.frames import (
    CHUNK_BYTES,
    CREDIT_BYTES,
    BatchOutcome,
    Chunk,
    End,
    HttpHead,
    HttpStart,
    Open,
    Reply,
    Taken,
)
from springtide.serving.socket_messages import BadMessage, MessageReader, SocketMessage, close_message

_LOG = logging.getLogger("springtide.replica")
# How long the code of a WebSocket may take to end once its client has closed it.
_CLOSE_S = 5.0
_GOING_AWAY = 1001
_CANCELLED = BatchOutcome("error", b"the call was cancelled")


class CallAnswerer(Protocol):
    """What is needed of a model to answer calls one by one."""

    def start(self, call: bytes) -> Any:
        """What `predict` returns for a call: a generator or an awaitable. Raises InvalidCall."""
        ...

    def encoded(self, value: Any) -> bytes:
        """The JSON of a value. Raises TypeError, ValueError, OverflowError or RecursionError."""
        ...

    def outcome_of(self, value: Any) -> BatchOutcome:
        """The outcome with a value as JSON."""
        ...

    def failure(self, error: BaseException) -> BatchOutcome:
        """The outcome of an error of the user's code, which it logs."""
        ...

    def began(self, num_items: int) -> None:
        """Tell the share daemon that `predict` works. Thread-safe, like `ended`."""
        ...

    def ended(self, *, is_done: bool) -> None:
        """Tell the share daemon that a call has ended; one that failed is not counted."""
        ...


@runtime_checkable
class Responder(Protocol):
    """What answers requests to an application."""

    async def respond(self, call: AsyncCall, head: HttpHead) -> BatchOutcome:
        """Send the answer and return its outcome."""
        ...


class InvalidCall(Exception):
    """The call does not fit the type hints."""


class OpenCall:
    """One open call. `send` sends frames to its gateway; another thread adds credit and cancels."""

    def __init__(self, opened: Open, send: Callable[[Reply], None]) -> None:
        self.batch_id = opened.batch_id
        self.call = opened.call
        self.is_cancelled = False
        # When a cancelled call was cancelled, on the monotonic clock.
        self.cancelled_at_s: float | None = None
        self.http = opened.http
        is_socket = opened.http is not None and opened.http.is_socket
        self.scope = CallScope(opened.origin, 0.0 if is_socket else opened.timeout_s)
        self._is_sse = opened.is_sse
        self.has_begun = False
        self._credit = CREDIT_BYTES
        self._send = send
        self._changed = threading.Condition()

    def add_credit(self, num_bytes: int) -> None:
        """Let so many more bytes be sent."""
        with self._changed:
            self._credit += num_bytes
            self._changed.notify_all()

    def cancel(self) -> None:
        """Say that the answer is not wanted any more."""
        with self._changed:
            self._mark_cancelled()
            self._changed.notify_all()

    def answer(self, model: CallAnswerer) -> BatchOutcome:
        """Run the generator to its end, or until the call is cancelled, and close it."""
        if self.is_cancelled:
            return _CANCELLED
        items = model.start(self.call)
        try:
            for item in items:
                if self.is_cancelled or not self._send_pieces(self.written(item, model)):
                    return _CANCELLED
        finally:
            items.close()
        return BatchOutcome("ok", b"")

    def written(self, item: Any, model: CallAnswerer) -> bytes:
        """The bytes of an item, which with the first one decide whether they are server-sent events."""
        if not self.has_begun:
            self.has_begun = True
            self._is_sse = self._is_sse or isinstance(item, ServerSentEvent)
        return written_item(item, model.encoded, is_sse=self._is_sse)

    def end(self, outcome: BatchOutcome, predict_s: float) -> None:
        """Send the end of the answer."""
        self._send(End(batch_id=self.batch_id, outcome=outcome, predict_s=predict_s))

    def _mark_cancelled(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled, self.cancelled_at_s = True, time.monotonic()

    def _send_pieces(self, body: bytes) -> bool:
        """Send the bytes as there is credit for them; False if the call is cancelled meanwhile."""
        for start in range(0, len(body), CHUNK_BYTES):
            with self._changed:
                while self._credit <= 0 and not self.is_cancelled:
                    self._changed.wait()
            if self.is_cancelled:
                return False
            self._send_piece(body[start : start + CHUNK_BYTES])
        return True

    def _send_piece(self, piece: bytes, start: HttpStart | None = None) -> None:
        self.scope.renew()
        with self._changed:
            self._credit -= len(piece)
        self._send(Chunk(batch_id=self.batch_id, body=piece, is_sse=self._is_sse, start=start))


class AsyncCall(OpenCall):
    """One open call of async code. Its state belongs to the event loop `loop`."""

    def __init__(self, opened: Open, send: Callable[[Reply], None], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(opened, send)
        self.task: asyncio.Task[None] | None = None
        self._loop = loop
        self._moved = asyncio.Event()
        self._reader = MessageReader()
        # Whether the client of a WebSocket has closed it: then nothing can be sent any more.
        self.is_left = False
        self._messages: asyncio.Queue[SocketMessage] = asyncio.Queue()

    def add_credit(self, num_bytes: int) -> None:
        """Let so many more bytes be sent. From any thread."""
        _on_loop(self._loop, self._add, num_bytes)

    def cancel(self) -> None:
        """Cancel the task that answers. From any thread."""
        self._mark_cancelled()
        _on_loop(self._loop, self._cancel_task)

    def feed(self, body: bytes) -> None:
        """Add bytes of the client's messages. From any thread."""
        _on_loop(self._loop, self._feed, body)

    async def next_message(self) -> SocketMessage:
        """The client's next message on a WebSocket; the last one closes it."""
        message = await self._messages.get()
        if message.kind != "close":
            self._send(Taken(batch_id=self.batch_id, num_bytes=message.num_bytes))
        return message

    async def send_message(self, message: SocketMessage) -> None:
        """Send a message to the client, as it takes them. Raises ConnectionResetError if that has closed."""
        self._raise_if_left()
        await self.send_part(message.encode())

    def _raise_if_left(self) -> None:
        if self.is_left:
            raise ConnectionResetError("the client has closed the WebSocket")

    async def answer_async(self, model: CallAnswerer) -> BatchOutcome:
        """Await what `predict` returns, or send its items as they come."""
        if self.is_cancelled:
            return _CANCELLED
        if self.http is not None:
            if not isinstance(model, Responder):
                raise InvalidCall("this service is no application")
            return await model.respond(self, self.http)
        found = model.start(self.call)
        if isinstance(found, Coroutine):
            return model.outcome_of(await found)
        try:
            async for item in found:
                await self.send_part(self.written(item, model))
                # A generator that awaits nothing would let no other call, and no cancellation, come through.
                await asyncio.sleep(0)
        finally:
            await found.aclose()
        return BatchOutcome("ok", b"")

    async def send_part(self, body: bytes, start: HttpStart | None = None) -> None:
        """Send a part of the answer as there is credit for it; the first one takes the head of an application's."""
        head = None if self.has_begun else start
        self.has_begun = True
        for at in range(0, max(len(body), int(head is not None)), CHUNK_BYTES):
            while self._credit <= 0:
                self._moved.clear()
                await self._moved.wait()
                self._raise_if_left()
            self._send_piece(body[at : at + CHUNK_BYTES], head)
            head = None

    def _add(self, num_bytes: int) -> None:
        self._credit += num_bytes
        self._moved.set()

    def _feed(self, body: bytes) -> None:
        try:
            messages = self._reader.feed(body)
        except BadMessage as error:
            messages = [close_message(_GOING_AWAY, str(error))]
        for message in messages:
            self._messages.put_nowait(message)
            if message.kind == "close":
                self.is_left = True
                self._moved.set()
                self._loop.call_later(_CLOSE_S, self._cancel_task)

    def _cancel_task(self) -> None:
        if self.task is not None:
            self.task.cancel()


def _on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *given: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *given)
    except RuntimeError:
        # The loop has ended, and with it every call.
        pass


def answered(call: OpenCall, model: CallAnswerer) -> None:
    """Answer a call of a generator on this thread, whatever the user's code raises."""
    began_s = time.perf_counter()
    CALL.set(call.scope)
    model.began(1)
    try:
        outcome = call.answer(model)
    except (Exception, SystemExit) as error:
        outcome = _outcome_of_error(error, model)
    model.ended(is_done=outcome.status == "ok")
    call.end(outcome, time.perf_counter() - began_s)


async def answered_async(call: AsyncCall, model: CallAnswerer) -> None:
    """Answer a call of async code, whatever it raises, also when this task is cancelled."""
    began_s = time.perf_counter()
    CALL.set(call.scope)
    model.began(1)
    try:
        outcome = await call.answer_async(model)
    except asyncio.CancelledError:
        outcome = _CANCELLED
    except (Exception, SystemExit) as error:
        outcome = _CANCELLED if call.is_cancelled or call.is_left else _outcome_of_error(error, model)
    model.ended(is_done=outcome.status == "ok")
    call.end(outcome, time.perf_counter() - began_s)


def _outcome_of_error(error: BaseException, model: CallAnswerer) -> BatchOutcome:
    if isinstance(error, InvalidCall):
        return BatchOutcome("invalid", str(error).encode("utf-8", "replace"))
    return model.failure(error)
