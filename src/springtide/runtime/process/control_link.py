"""A worker's connection to its control plane: heartbeats, orders, and numbered reports repeated until acknowledged.

If the control plane dies, the link reconnects with back-off, sends a new Hello and repeats unacknowledged reports. This
module does not import torch, so that serving replicas work without it.
"""

from __future__ import annotations

import os
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from springtide.core.errors import BackendError
from springtide.core.wire.workers import (
    HEARTBEAT_S,
    Acknowledge,
    Failed,
    FrameDecoder,
    Heartbeat,
    Hello,
    Order,
    Progress,
    Report,
    WorkerSpec,
    encode_frame,
)
from springtide.runtime.process.start_phases import StartPhases

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 1.0
_SEND_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 16
_UNCONFIRMED_MS = 8_000


@dataclass(frozen=True, slots=True)
class _WorkerStatus:
    """What a Hello reports about the worker."""

    generation: int = 0
    step: int = 0
    is_ready: bool = False
    address: str = ""


def connect(address: str, timeout_s: float) -> socket.socket:
    """Open a connection to `unix:///path` or `tcp://host:port`. Raises OSError, or BackendError for another scheme."""
    if address.startswith("unix://"):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(timeout_s)
            link.connect(address.removeprefix("unix://"))
        except OSError:
            link.close()
            raise
        return link
    if address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        link = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Without it, sending to a machine that vanished would seem to succeed for a quarter of an hour.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNCONFIRMED_MS)
        return link
    raise BackendError(f"the address {address!r} is neither unix:///path nor tcp://host:port")


class ControlLink:
    """The one connection of a worker: `start` it, `send` reports, handle orders, `close` it. Thread-safe.

    Orders other than Acknowledge go to `on_order`, or into the queue `orders` if there is no callback.
    `on_lease_expired` is called once when there has been no control plane for `spec.lease_s`. Both callbacks run on the
    control thread, which also sends heartbeats, so they must not block. `phases` measures the worker's start. What user
    code has raised is told as `redact` returns it: the journal has it then.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        on_order: Callable[[Order], None] | None = None,
        on_lease_expired: Callable[[], None] | None = None,
        redact: Callable[[str], str] = str,
    ) -> None:
        self._spec = spec
        self._redact = redact
        self.phases = StartPhases(spec.ordered_at_s)
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.on_order: Callable[[Order], None] = on_order or self.orders.put
        self.on_lease_expired = on_lease_expired
        self._condition = threading.Condition()
        self._status = _WorkerStatus()
        self._held: Progress | None = None
        self._last_seq = spec.first_seq
        self._acknowledged_seq = spec.first_seq
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._outgoing: deque[bytes] = deque()
        self._is_connected = False
        self._is_closed = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="springtide-control", daemon=True)

    def start(self) -> None:
        """Start the control thread, which connects and sends heartbeats."""
        self._thread.start()

    def update(
        self,
        *,
        generation: int | None = None,
        step: int | None = None,
        is_ready: bool | None = None,
        address: str | None = None,
    ) -> None:
        """Set what the next Hello and the heartbeats report; None leaves a value unchanged."""
        with self._condition:
            old = self._status
            self._status = _WorkerStatus(
                generation=old.generation if generation is None else generation,
                step=old.step if step is None else step,
                is_ready=old.is_ready if is_ready is None else is_ready,
                address=old.address if address is None else address,
            )

    def send(self, report: Report) -> int:
        """Number the report, send it, and repeat it on every new connection until acknowledged; returns its number.

        Heartbeat and Progress are superseded by the next one: they get number 0 and are dropped while unconnected.
        """
        if isinstance(report, Failed):
            report = replace(report, error=self._redact(report.error))
        with self._condition:
            if isinstance(report, Progress):
                self._held = None
            if isinstance(report, Heartbeat | Progress):
                if self._is_connected:
                    self._outgoing.append(encode_frame(report))
                seq = 0
            else:
                self._last_seq += 1
                seq = self._last_seq
                frame = encode_frame(msgspec.structs.replace(report, seq=seq))
                self._unacknowledged.append((seq, frame))
                if self._is_connected:
                    self._outgoing.append(frame)
        self._wake()
        return seq

    def hold(self, progress: Progress) -> None:
        """Keep progress that need not be sent yet; it is sent when no other has come for two heartbeats."""
        self._held = progress

    def wait_acknowledged(self, seq: int, timeout_s: float) -> bool:
        """Wait until every report up to `seq` is in the journal; False at the timeout or when closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._acknowledged_seq >= seq or self._is_closed, timeout_s)
            return self._acknowledged_seq >= seq

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    def close(self) -> None:
        """End the control thread and the connection; unacknowledged reports are dropped."""
        with self._condition:
            if self._is_closed:
                return
            self._is_closed = True
            self._condition.notify_all()
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=_SEND_TIMEOUT_S * 2)
        self._wake_sender.close()
        self._wake_receiver.close()

    def _wake(self) -> None:
        try:
            self._wake_sender.send(b"\0")
        except OSError:
            # The pipe is full, so the thread wakes anyway, or it is closed and no thread needs to.
            pass

    def _run(self) -> None:
        """Connect, serve and reconnect until closed."""
        last_contact_s = time.monotonic()
        backoff_s = _FIRST_BACKOFF_S
        has_expired = False
        while not self._is_closed:
            try:
                connection = connect(self._spec.control_address, _SEND_TIMEOUT_S)
            except OSError:
                connection = None
            if connection is not None:
                with connection:
                    self._serve(connection)
                if self._is_closed:
                    return
                last_contact_s = time.monotonic()
                backoff_s = _FIRST_BACKOFF_S
            elif not has_expired and time.monotonic() - last_contact_s >= self._spec.lease_s:
                has_expired = True
                if self.on_lease_expired is not None:
                    self.on_lease_expired()
            with self._condition:
                self._condition.wait_for(lambda: self._is_closed, backoff_s)
            backoff_s = min(backoff_s * 2, _LAST_BACKOFF_S)

    def _serve(self, connection: socket.socket) -> None:
        """Send Hello and all unacknowledged reports, then exchange frames until the connection breaks."""
        decoder: FrameDecoder[Order] = FrameDecoder(Order)
        with self._condition:
            self._outgoing.clear()
            self._outgoing.append(encode_frame(self._hello()))
            self._outgoing.extend(frame for _, frame in self._unacknowledged)
            self._is_connected = True
        heartbeat_at_s = time.monotonic() + HEARTBEAT_S
        held: Progress | None = None
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(connection, selectors.EVENT_READ)
                selector.register(self._wake_receiver, selectors.EVENT_READ)
                while not self._is_closed:
                    self._flush(connection)
                    ready = {key.fileobj for key, _ in selector.select(max(0.0, heartbeat_at_s - time.monotonic()))}
                    if self._wake_receiver in ready:
                        self._wake_receiver.recv(_READ_BYTES)
                    if connection in ready:
                        data = connection.recv(_READ_BYTES)
                        if not data:
                            return
                        for order in decoder.feed(data):
                            self._handle(order)
                    if time.monotonic() >= heartbeat_at_s:
                        heartbeat_at_s = time.monotonic() + HEARTBEAT_S
                        self.send(Heartbeat(step=self._status.step))
                        before, held = held, self._held
                        if held is not None and held is before:
                            self.send(held)
                self._flush(connection)
        except (OSError, BackendError):
            # The control plane is gone or sent an invalid frame: reconnect.
            return
        finally:
            with self._condition:
                self._is_connected = False
                self._outgoing.clear()

    def _flush(self, connection: socket.socket) -> None:
        while True:
            with self._condition:
                if not self._outgoing:
                    return
                frame = self._outgoing.popleft()
            connection.sendall(frame)

    def _hello(self) -> Hello:
        spec, status = self._spec, self._status
        return Hello(
            workload_id=spec.workload_id,
            replica_id=spec.replica_id,
            token=spec.token,
            pid=os.getpid(),
            generation=status.generation,
            step=status.step,
            is_ready=status.is_ready,
            address=status.address,
            proves_keys=True,
        )

    def _handle(self, order: Order) -> None:
        if not isinstance(order, Acknowledge):
            self.on_order(order)
            return
        with self._condition:
            self._acknowledged_seq = max(self._acknowledged_seq, min(order.seq, self._last_seq))
            while self._unacknowledged and self._unacknowledged[0][0] <= self._acknowledged_seq:
                self._unacknowledged.popleft()
            self._condition.notify_all()
