"""The loop of a share daemon: one platform's connection, a tick every few milliseconds, a status file.

CPU cores and GPUs are divided by implementations of `DeviceSharing`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from springtide.backends.sharing.table import write_whole
from springtide.backends.sockets import peer_process
from springtide.core.errors import BackendError
from springtide.core.wire.shares import SlotReader
from springtide.core.wire.workers import FrameDecoder

_log = logging.getLogger(__name__)
T = TypeVar("T", bound=msgspec.Struct)

# "off" grants every sharer its limit at all times, as under a static partition.
CONTROL_VARIABLE = "SPRINGTIDE_SHARE_CONTROL"
TICK_S = 0.005
# The interval while no sharer competes with another.
_CALM_TICK_S = 0.02
# The most of a core that ticks may take: where a tick is slow (many devices, cold caches), ticks come less often.
_MAX_COST_FRACTION = 0.06
_COST_SMOOTHING = 0.02
_STATUS_S = 0.5
_CHECK_S = 0.5
_IDLE_S = 0.5
_IDLE_EXIT_S = 10.0
_RECEIVE_BYTES = 1 << 16
_MAX_EVENTS = 64
_PRIORITY = -15


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """Measurements of the loop; `cpu_fraction` is the fraction of a core that the daemon has used lately."""

    tick_s: float
    late_p99_s: float
    cpu_fraction: float
    num_ticks: int


class DeviceSharing(Protocol[T]):
    """The devices that a daemon divides; `T` is the type of the table in which the platform lists all sharers.

    The platform connects to `socket_name`; `file_names` are removed with it, the first is the status file.
    """

    table_type: type[T]
    socket_name: str
    file_names: tuple[str, ...]

    @property
    def is_sharing(self) -> bool:
        """Whether there is a sharer."""
        ...

    @property
    def is_contended(self) -> bool:
        """Whether a sharer has to be limited in favour of another; otherwise ticks may be far apart."""
        ...

    def take(self, table: T) -> None:
        """Replace the sharers by those of the table."""
        ...

    def tick(self, due_s: float) -> None:
        """Observe sharers, decide on grants, enforce them. `due_s` is when the tick was due (monotonic clock)."""
        ...

    def handle(self, descriptor: int) -> None:
        """A descriptor that `devices` registered is ready."""
        ...

    def check(self, now_s: float) -> bool:
        """Remove sharers that have died and repair what is broken; False if another daemon has taken over."""
        ...

    def status(self, now_s: float, loop: LoopFigures) -> msgspec.Struct:
        """The contents of the status file."""
        ...

    def close(self) -> None:
        """Release everything: the daemon ends."""
        ...


class ShareDaemon(Generic[T]):
    """Serves one platform at a time in `directory` until there is neither a platform nor a sharer for ten seconds.

    `epoll` is where `devices` registers descriptors of its own.
    """

    def __init__(self, directory: Path, devices: DeviceSharing[T], epoll: select.epoll) -> None:
        self._devices = devices
        self._status_path = directory / devices.file_names[0]
        # Waited for by `select`, whose timeout has microseconds where that of epoll has milliseconds.
        self._epoll = epoll
        self._late_s: deque[float] = deque(maxlen=2000)
        self._num_ticks = 0
        self._cost_s = 0.0
        self._is_ending = False
        self._own_load = _OwnLoad()
        self._connection: socket.socket | None = None
        self._decoder: FrameDecoder[T] = FrameDecoder(devices.table_type)
        path = directory / devices.socket_name
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        self._listener.bind(str(temporary))
        temporary.chmod(0o600)
        self._listener.setblocking(False)
        self._listener.listen()
        # Renamed into place so that it accepts from the first moment; this replaces an older daemon's socket.
        temporary.rename(path)
        self._path, self._inode = path, path.stat().st_ino
        epoll.register(self._listener, select.EPOLLIN)

    def run(self) -> None:
        """Serve until told to end, replaced by another daemon, or no longer needed."""
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        due_s = status_s = check_s = busy_s = time.monotonic()
        try:
            while not self._is_ending:
                now_s = time.monotonic()
                is_sharing = self._devices.is_sharing
                self._listen(max(0.0, due_s - now_s) if is_sharing else _IDLE_S)
                now_s = time.monotonic()
                if is_sharing and now_s >= due_s:
                    due_s = self._tick(due_s, now_s)
                elif not is_sharing:
                    due_s = now_s
                if now_s >= status_s:
                    self._write_status(now_s)
                    status_s = now_s + _STATUS_S
                if now_s >= check_s:
                    is_current = self._devices.check(now_s) and self._is_current()
                    self._is_ending |= not is_current
                    check_s = now_s + _CHECK_S
                if self._devices.is_sharing or self._connection is not None:
                    busy_s = now_s
                elif now_s - busy_s > _IDLE_EXIT_S:
                    return
        finally:
            self._close()

    def _close(self) -> None:
        self._devices.close()
        self._listener.close()
        self._disconnect()
        self._epoll.close()
        if self._is_current():
            self._path.unlink(missing_ok=True)
            for name in self._devices.file_names:
                self._path.with_name(name).unlink(missing_ok=True)

    def _tick(self, due_s: float, now_s: float) -> float:
        """Return when the next tick is due."""
        self._late_s.append(now_s - due_s)
        self._devices.tick(due_s)
        self._num_ticks += 1
        self._cost_s += (time.monotonic() - now_s - self._cost_s) * _COST_SMOOTHING
        tick_s = self._tick_s()
        # A missed tick is not repeated: the next one covers the whole time.
        return due_s + tick_s if due_s + tick_s > now_s else now_s + tick_s

    def _tick_s(self) -> float:
        if not self._devices.is_contended:
            return _CALM_TICK_S
        return min(_CALM_TICK_S, max(TICK_S, self._cost_s / _MAX_COST_FRACTION))

    def _end(self, number: int, frame: object) -> None:
        self._is_ending = True

    def _is_current(self) -> bool:
        with contextlib.suppress(OSError):
            return self._path.stat().st_ino == self._inode
        return False

    def _write_status(self, now_s: float) -> None:
        figures = LoopFigures(
            tick_s=self._tick_s(),
            late_p99_s=p99(self._late_s),
            cpu_fraction=self._own_load.fraction(now_s, time.process_time()),
            num_ticks=self._num_ticks,
        )
        with contextlib.suppress(BackendError):
            write_whole(self._status_path, self._devices.status(now_s, figures))

    # --- the platform ------------------------------------------------------------------------------------------------

    def _listen(self, timeout_s: float) -> None:
        if not select.select([self._epoll], [], [], timeout_s)[0]:
            return
        for descriptor, _ in self._epoll.poll(0, _MAX_EVENTS):
            if descriptor == self._listener.fileno():
                self._accept()
            elif self._connection is not None and descriptor == self._connection.fileno():
                self._receive(self._connection)
            else:
                self._devices.handle(descriptor)

    def _accept(self) -> None:
        """A new platform replaces the connected one, whose table is in force until the new one sends its own."""
        try:
            stream, _ = self._listener.accept()
        except OSError:
            return
        _, user_id = peer_process(stream)
        if user_id != os.getuid():
            stream.close()
            return
        self._disconnect()
        stream.setblocking(False)
        self._connection, self._decoder = stream, FrameDecoder(self._devices.table_type)
        self._epoll.register(stream, select.EPOLLIN)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_RECEIVE_BYTES)
            tables = self._decoder.feed(data) if data else []
        except BlockingIOError:
            return
        except (OSError, BackendError) as error:
            _log.warning("the platform's connection broke: %s", error)
            self._disconnect()
            return
        if not data:
            self._disconnect()
        if tables:
            self._devices.take(tables[-1])
            self._write_status(time.monotonic())

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def reopen_slots(reader: SlotReader | None, path: str, otherwise: str) -> SlotReader | None:
    """Return a reader of the slots at `path` ("": there are none), which is `reader` if the file is still the same.

    `otherwise` is added to the log message if the file cannot be read.
    """
    if reader is not None and path and reader.is_of(Path(path)):
        return reader
    if reader is not None:
        reader.close()
    try:
        return SlotReader(Path(path)) if path else None
    except BackendError as error:
        _log.error("%s; %s", error, otherwise)
        return None


def be_on_time() -> None:
    """Raise this process's priority as far as its rights allow, so that ticks are not late.

    Only for a process that works much less than a tenth of the time: the kernel limits real-time processes to 95 %.
    Collections become rare, since one at the wrong moment would delay a tick; a daemon creates no garbage in cycles.
    """
    try:
        flags = os.SCHED_RR | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, flags, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


def p99(values: Iterable[float]) -> float:
    """Return the 99th percentile; 0.0 without values."""
    found = sorted(values)
    return found[min(len(found) - 1, int(0.99 * len(found)))] if found else 0.0


class _OwnLoad:
    """The fraction of a core that this process uses, over about the last ten seconds."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, float]] = deque(maxlen=20)

    def fraction(self, now_s: float, used_s: float) -> float:
        self._looks.append((now_s, used_s))
        begin_s, begin_used_s = self._looks[0]
        return (used_s - begin_used_s) / (now_s - begin_s) if now_s > begin_s else 0.0
