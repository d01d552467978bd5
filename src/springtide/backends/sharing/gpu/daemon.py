"""The GPU share daemon: a process of its own that gives the tenants of GPUs their tokens every few milliseconds.

`python -m springtide.backends.sharing.gpu.daemon DIRECTORY` serves one platform at a time on a socket there, and
outlives it. Killed, it leaves everything as it is and the next one goes on where it stopped; asked to end, it lets
all tenants go. Where tenants are not this user's own programs, `--tenants` is another directory for the one socket
that they may see, and `--segments` one for their shared memory that outlives the daemon's container.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path

from springtide.backends.daemons import CONTROL_VARIABLE, OwnLoad, allow_many_files, be_on_time, p99
from springtide.backends.sharing.gpu.clients import Clients
from springtide.backends.sharing.gpu.segments import private_directory, segment_directory
from springtide.backends.sharing.gpu.table import (
    EXIT_TAKEN,
    LOCK_NAME,
    SOCKET_NAME,
    STATUS_NAME,
    TABLE_NAME,
    TENANT_SOCKET_NAME,
    GpuDaemonStatus,
    GpuTable,
    read_status,
    read_table,
    write_whole,
)
from springtide.backends.sharing.gpu.tenants import GpuTenants, is_held
from springtide.backends.sharing.gpu.turn import GpuTurns
from springtide.backends.sockets import peer_process
from springtide.core.errors import BackendError
from springtide.core.status.shares import SharingStatus
from springtide.core.wire.shares import SlotReader
from springtide.core.wire.workers import FrameDecoder

_log = logging.getLogger(__name__)

TICK_S = 0.005
# Where nobody has to be spared.
_CALM_TICK_S = 0.02
# Turns over many devices come so much more seldom that they take no more of a core than this.
_MAX_COST_FRACTION = 0.06
_COST_SMOOTHING = 0.02
_STATUS_S = 0.5
_CHECK_S = 0.5
_IDLE_S = 0.5
_IDLE_EXIT_S = 10.0
_TAKEN_S = 2.0
_RECEIVE_BYTES = 1 << 16
_MAX_EVENTS = 64
_ENFORCED = (
    "a preloaded library holds CUDA launches to the device time that is granted every 5 ms, and allocations to the "
    "memory limit; programs that get around it (statically linked, without the preload) are not held"
)


class GpuDaemon:
    """Serves the platform and the tenants whose sockets lie in `directory`, until nobody needs it any more."""

    def __init__(
        self,
        directory: Path,
        lock: int,
        *,
        is_controlled: bool = True,
        tenants: Path | None = None,
        segments: Path | None = None,
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._tenants = GpuTenants(private_directory(segments) if segments else segment_directory(directory))
        self._turns = GpuTurns(self._tenants, time.monotonic_ns, is_controlled=is_controlled)
        self._late_s: deque[float] = deque(maxlen=2000)
        self._num_ticks = 0
        self._cost_s = 0.0
        self._is_ending = False
        self._load = OwnLoad()
        self._connection: socket.socket | None = None
        self._decoder: FrameDecoder[GpuTable] = FrameDecoder(GpuTable)
        # Waited for by `select`, which counts microseconds where epoll itself counts milliseconds.
        self._epoll = select.epoll()
        self._adopt()
        self._clients = Clients((tenants or directory) / TENANT_SOCKET_NAME, self._epoll, self._tenants.answer)
        path = directory / SOCKET_NAME
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        self._listener.bind(str(temporary))
        temporary.chmod(0o600)
        self._listener.setblocking(False)
        self._listener.listen()
        # Under its final name the socket accepts from the first moment; an older daemon's is replaced.
        temporary.rename(path)
        self._path, self._inode = path, path.stat().st_ino
        self._epoll.register(self._listener, select.EPOLLIN)

    def run(self) -> None:
        """Serve until asked to end, or for ten seconds without a platform and without tenants."""
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        due_s = status_s = check_s = busy_s = time.monotonic()
        try:
            while not self._is_ending:
                now_s = time.monotonic()
                is_sharing = bool(self._tenants.by_key)
                self._listen(max(0.0, due_s - now_s) if is_sharing else _IDLE_S)
                now_s = time.monotonic()
                if is_sharing and now_s >= due_s:
                    due_s = self._turn(due_s, now_s)
                elif not is_sharing:
                    due_s = now_s
                if now_s >= status_s:
                    self._tell(now_s)
                    status_s = now_s + _STATUS_S
                if now_s >= check_s:
                    self._check(now_s)
                    check_s = now_s + _CHECK_S
                if self._tenants.by_key or self._connection is not None:
                    busy_s = now_s
                elif now_s - busy_s > _IDLE_EXIT_S:
                    return
        finally:
            self._close()

    def _close(self) -> None:
        self._tenants.close(is_giving_up=self._is_owner())
        self._turns.close()
        self._clients.close()
        self._listener.close()
        self._disconnect()
        self._epoll.close()
        if self._is_current():
            self._path.unlink(missing_ok=True)
            for name in (STATUS_NAME, TABLE_NAME):
                (self._directory / name).unlink(missing_ok=True)

    def _is_owner(self) -> bool:
        """Whether no other daemon can have these tenants: somebody may have removed the lock and made another."""
        try:
            return os.path.samestat(os.fstat(self._lock), (self._directory / LOCK_NAME).stat())
        except OSError:
            return True

    def _turn(self, due_s: float, now_s: float) -> float:
        """Take a turn and return when the next one is due."""
        self._late_s.append(now_s - due_s)
        self._turns.turn(due_s)
        self._num_ticks += 1
        self._cost_s += (time.monotonic() - now_s - self._cost_s) * _COST_SMOOTHING
        tick_s = self._tick_s()
        # A turn that was missed is not made up for: the next one counts the whole time.
        return due_s + tick_s if due_s + tick_s > now_s else now_s + tick_s

    def _tick_s(self) -> float:
        """How long to the next turn: longer where nobody has to be spared, and where a turn takes long itself."""
        if self._turns.is_free:
            return _CALM_TICK_S
        return min(_CALM_TICK_S, max(TICK_S, self._cost_s / _MAX_COST_FRACTION))

    def _end(self, number: int, frame: object) -> None:
        self._is_ending = True

    def _is_current(self) -> bool:
        with contextlib.suppress(OSError):
            return self._path.stat().st_ino == self._inode
        return False

    # --- events ------------------------------------------------------------------------------------------------------

    def _listen(self, timeout_s: float) -> None:
        for pidfd in self._tenants.new_pidfds:
            with contextlib.suppress(OSError):
                self._epoll.register(pidfd, select.EPOLLIN)
        self._tenants.new_pidfds.clear()
        if not select.select([self._epoll], [], [], timeout_s)[0]:
            return
        for descriptor, _ in self._epoll.poll(0, _MAX_EVENTS):
            if descriptor == self._listener.fileno():
                self._accept()
            elif self._connection is not None and descriptor == self._connection.fileno():
                self._receive(self._connection)
            elif not self._clients.handle(descriptor):
                self._tenants.died(descriptor)

    # --- the platform ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """The next platform takes the place of the one before. Until it has said its table, the old one stands."""
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
        self._connection, self._decoder = stream, FrameDecoder(GpuTable)
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
            self._take(tables[-1])
            self._tell(time.monotonic())

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _take(self, table: GpuTable) -> None:
        self._open_slots(table.slots_path)
        self._tenants.take(entry for entry in table.tenants if is_held(entry))
        self._turns.arrange(table.sent_at_s)
        with contextlib.suppress(BackendError):
            write_whole(self._directory / TABLE_NAME, table)

    def _adopt(self) -> None:
        """Go on where an earlier daemon stopped, before anybody has said anything."""
        table = read_table(self._directory / TABLE_NAME)
        if table is not None:
            before = read_status(self._directory / STATUS_NAME)
            self._open_slots(table.slots_path)
            self._tenants.take(entry for entry in table.tenants if is_held(entry))
            if before is not None:
                self._tenants.keep_counts(
                    {(told.replica_id, told.device_id): told.num_launches for told in before.sharing.tenants}
                )
            self._turns.arrange(time.monotonic())
        self._tenants.sweep()

    def _open_slots(self, path: str) -> None:
        reader = self._turns.reader
        if reader is not None and path and reader.is_of(Path(path)):
            return
        if reader is not None:
            reader.close()
            self._turns.reader = None
        if path:
            try:
                self._turns.reader = SlotReader(Path(path))
            except BackendError as error:
                _log.error("%s; shares follow what is launched alone", error)

    # --- now and then ------------------------------------------------------------------------------------------------

    def _check(self, now_s: float) -> None:
        """Forget who has died, mend what is broken, and end if this daemon was replaced."""
        self._is_ending |= not (self._is_current() and self._clients.is_current())
        self._clients.expire(now_s)
        if self._tenants.check():
            self._turns.arrange(now_s)

    def _tell(self, now_s: float) -> None:
        unknown = self._clients.num_unknown(now_s)
        others = f"; {unknown} processes that hold no share asked for one: they are not held" if unknown else ""
        enforced = _ENFORCED if self._tenants.by_key else f"no device is shared; {_ENFORCED}"
        status = SharingStatus(
            mechanism="cuda-preload",
            enforced=f"{enforced}{others}",
            tick_s=self._tick_s(),
            late_p99_s=p99(self._late_s),
            reaction_p99_s=p99(self._turns.reactions_s),
            tenants=self._turns.statuses(),
        )
        with contextlib.suppress(BackendError):
            write_whole(
                self._directory / STATUS_NAME,
                GpuDaemonStatus(
                    pid=os.getpid(),
                    written_at_s=now_s,
                    sharing=status,
                    cpu_fraction=self._load.fraction(now_s, time.process_time()),
                    num_ticks=self._num_ticks,
                    num_processes=self._tenants.num_processes,
                    num_unknown=unknown,
                    num_answers=self._clients.num_answers,
                    num_refused=self._clients.num_refused,
                    num_deaths=self._tenants.num_deaths,
                    num_files=len(os.listdir("/proc/self/fd")) - 1,
                    num_made=self._tenants.num_made,
                    num_adopted=self._tenants.num_adopted,
                ),
            )


def take_directory(directory: Path, patience_s: float = _TAKEN_S) -> int | None:
    """Return a descriptor that holds the directory for one daemon; None if another has it and keeps it."""
    descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > end_s:
                os.close(descriptor)
                return None
            time.sleep(TICK_S)


def main() -> int:
    """Serve the platform of the directory named on the command line."""
    parser = argparse.ArgumentParser(prog="springtide.backends.sharing.gpu.daemon")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tenants", type=Path, help="where tenants find their socket (default: DIRECTORY)")
    parser.add_argument("--segments", type=Path, help="where shared memory lies (default: the machine's)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s GPU share daemon: %(message)s")
    directory = options.directory
    held = take_directory(directory)
    if held is None:
        _log.error("another one serves %s", directory)
        return EXIT_TAKEN
    allow_many_files()
    be_on_time()
    try:
        GpuDaemon(
            directory,
            held,
            is_controlled=os.environ.get(CONTROL_VARIABLE, "") != "off",
            tenants=options.tenants,
            segments=options.segments,
        ).run()
    except BackendError as error:
        _log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
