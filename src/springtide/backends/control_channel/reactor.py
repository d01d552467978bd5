"""The one I/O thread: descriptors, timers and calls from other threads, and framed connections on top of it."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from springtide.backends.sockets import peer_process, prepare_tcp
from springtide.core.errors import BackendError
from springtide.core.wire.workers import FrameDecoder, encode_frame

_log = logging.getLogger(__name__)
M = TypeVar("M")

# Beyond this delay the thread itself was held up, so that the silence of workers proves nothing.
LATE_S = 1.0
_RECEIVE_BYTES = 1 << 16
_MAX_UNSENT_BYTES = 4 << 20


class Timer:
    """A function to be called at an instant of the monotonic clock, unless cancelled."""

    def __init__(self, due_s: float, function: Callable[[], None]) -> None:
        self.due_s = due_s
        self._function: Callable[[], None] | None = function

    def cancel(self) -> None:
        """Do not call the function. Harmless after the call."""
        self._function = None

    def fire(self) -> None:
        """Call the function, if that has not happened yet."""
        function, self._function = self._function, None
        if function is not None:
            function()


class Reactor:
    """Runs callbacks on one thread. Only `call` and `stop` may be used from another one.

    A callback that raises is logged and counted in `num_errors`; the thread continues, for the sake of other workers.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_stopping = False
        self._is_closed = False
        self._lock = threading.Lock()
        self.on_late: Callable[[], None] = lambda: None
        self.num_errors = 0
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._drain_wakes)

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the thread, after those passed earlier. Ignored once the reactor is closed."""
        with self._lock:
            if self._is_closed:
                return
            self._calls.append(function)
            os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Let `run` return after the calls queued so far."""
        self.call(self._stop)

    def after(self, delay_s: float, function: Callable[[], None]) -> Timer:
        """Run a function in `delay_s` seconds."""
        timer = Timer(time.monotonic() + delay_s, function)
        heapq.heappush(self._timers, (timer.due_s, next(self._numbers), timer))
        return timer

    def watch(self, descriptor: int, events: int, callback: Callable[[int], None]) -> None:
        """Call back with the ready mask whenever a descriptor is ready for `events`."""
        self._selector.register(descriptor, events, callback)

    def rewatch(self, descriptor: int, events: int, callback: Callable[[int], None]) -> None:
        """Change what a watched descriptor waits for."""
        self._selector.modify(descriptor, events, callback)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching a descriptor; does nothing if it is not watched."""
        try:
            self._selector.unregister(descriptor)
        except (KeyError, ValueError):
            pass

    def run(self) -> None:
        """Serve until stopped."""
        before_s = time.monotonic()
        while not self._is_stopping:
            timeout_s = self._timeout_s()
            ready = self._selector.select(timeout_s)
            now_s = time.monotonic()
            if now_s - before_s > LATE_S + (timeout_s or 0.0) and timeout_s is not None:
                self._guard(self.on_late)
            before_s = now_s
            for key, mask in ready:
                # A callback before this one may have closed the descriptor.
                if self._selector.get_map().get(key.fd) is key:
                    self._guard(key.data, mask)
            self._run_timers()
            for _ in range(len(self._calls)):
                self._guard(self._calls.popleft())

    def close(self) -> None:
        """Close the descriptors, after `run` has returned."""
        with self._lock:
            self._is_closed = True
        self._calls.clear()
        self._timers.clear()
        self._selector.close()
        os.close(self._wake_fd)

    def _stop(self) -> None:
        self._is_stopping = True

    def _timeout_s(self) -> float | None:
        while self._timers and self._timers[0][2]._function is None:
            heapq.heappop(self._timers)
        if self._calls:
            return 0.0
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _run_timers(self) -> None:
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s:
            self._guard(heapq.heappop(self._timers)[2].fire)

    def _drain_wakes(self, mask: int) -> None:
        os.eventfd_read(self._wake_fd)

    def _guard(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            function(*arguments)
        except Exception:
            self.num_errors += 1
            _log.exception("a callback of the executor's thread failed")


class FramedConnection(Generic[M]):
    """A framed connection over a unix socket or TCP. Owns the socket; never blocks.

    `peer_pid` and `peer_uid` are of the process at the other end of a unix socket (0 over TCP), `peer_host` is the host
    that a TCP connection comes from. `on_message` gets each message; `on_close` is called once, with an empty reason
    when the other end closed.
    """

    def __init__(
        self,
        reactor: Reactor,
        stream: socket.socket,
        message_type: object,
        on_message: Callable[[FramedConnection[M], M], None],
        on_close: Callable[[FramedConnection[M], str], None],
    ) -> None:
        stream.setblocking(False)
        self.peer_pid, self.peer_uid, self.peer_host = 0, 0, ""
        if stream.family == socket.AF_UNIX:
            self.peer_pid, self.peer_uid = peer_process(stream)
        else:
            self.peer_host = prepare_tcp(stream)
        self._reactor = reactor
        self._stream = stream
        self._descriptor = stream.fileno()
        self._decoder: FrameDecoder[M] = FrameDecoder(message_type)
        self._on_message = on_message
        self._on_close = on_close
        self._unsent = bytearray()
        self._closes_when_sent = False
        self.is_closed = False
        reactor.watch(self._descriptor, selectors.EVENT_READ, self._on_ready)

    def send(self, message: msgspec.Struct) -> bool:
        """Queue a message and send what fits; return False if the connection is closed. Raises BackendError."""
        if self.is_closed:
            return False
        frame = encode_frame(message)
        if len(self._unsent) + len(frame) > _MAX_UNSENT_BYTES:
            self.close("the other end does not read")
            return False
        self._unsent += frame
        self._flush()
        return not self.is_closed

    def close(self, reason: str = "") -> None:
        """Close now and drop unsent data."""
        if self.is_closed:
            return
        self.is_closed = True
        self._reactor.unwatch(self._descriptor)
        self._stream.close()
        self._on_close(self, reason)

    def close_when_sent(self) -> None:
        """Close as soon as everything queued is sent."""
        self._closes_when_sent = True
        if not self._unsent:
            self.close()

    def _on_ready(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if mask & selectors.EVENT_READ and not self.is_closed:
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._stream.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(error.strerror or "the connection broke")
            return
        if not data:
            self.close()
            return
        try:
            messages = self._decoder.feed(data)
        except BackendError as error:
            self.close(str(error))
            return
        for message in messages:
            if self.is_closed:
                return
            self._on_message(self, message)

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._stream.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            # Data that the other end sent before it closed is still to be read: reading then closes the connection.
            self._unsent.clear()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._reactor.rewatch(self._descriptor, wanted, self._on_ready)
        if self._closes_when_sent and not self._unsent:
            self.close()
