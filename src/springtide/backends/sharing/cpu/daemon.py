"""The share daemon: a process of its own that divides devices between their sharers every few milliseconds.

`python -m springtide.backends.sharing.cpu.daemon RUN_DIRECTORY` serves one platform at a time on a socket there, and
outlives it: the sharers that it leaves go on under the grants of this daemon until the next one comes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path

from springtide.backends.daemons import CONTROL_VARIABLE, OwnLoad, be_on_time, p99
from springtide.backends.processes import live_stat
from springtide.backends.sharing.cpu.enforcers import Enforcer, choose_enforcer
from springtide.backends.sharing.cpu.guard import LimitGuard
from springtide.backends.sharing.cpu.turn import Turns
from springtide.backends.sharing.table import (
    MECHANISM_VARIABLE,
    SOCKET_NAME,
    STATUS_NAME,
    DaemonStatus,
    ShareTable,
    group_name,
    write_status,
)
from springtide.backends.sockets import peer_process
from springtide.core.errors import BackendError
from springtide.core.status.shares import SharingStatus
from springtide.core.wire.shares import SlotReader
from springtide.core.wire.workers import FrameDecoder

_log = logging.getLogger(__name__)

TICK_S = 0.005
# Where every sharer is alone on its device.
_CALM_TICK_S = 0.02
# Turns over many devices, or on a machine whose caches others fill, take long; they come so much more seldom that they
# take no more of a core than this.
_MAX_COST_FRACTION = 0.06
_COST_SMOOTHING = 0.02
_STATUS_S = 0.5
_CHECK_S = 0.5
_IDLE_S = 0.5
_IDLE_EXIT_S = 10.0
_RECEIVE_BYTES = 1 << 16
_BUSY_FRACTION = 0.95


class ShareDaemon:
    """Serves the platform whose sockets lie in `directory` until nobody shares and nobody is connected any more."""

    def __init__(self, directory: Path, enforcer: Enforcer, *, is_controlled: bool = True) -> None:
        self._directory = directory
        self._enforcer = enforcer
        self._turns = Turns(enforcer, time.monotonic, is_controlled=is_controlled)
        self._guard = LimitGuard()
        self._device_cpus = 0.0
        self._late_s: deque[float] = deque(maxlen=2000)
        self._num_ticks = 0
        self._cost_s = 0.0
        self._is_ending = False
        self._connection: socket.socket | None = None
        self._decoder: FrameDecoder[ShareTable] = FrameDecoder(ShareTable)
        self._machine = MachineLoad()
        self._own_load = OwnLoad()
        path = directory / SOCKET_NAME
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        self._listener.bind(str(temporary))
        temporary.chmod(0o600)
        self._listener.listen()
        # Under its final name the socket accepts from the first moment; an older daemon's is replaced.
        temporary.rename(path)
        self._path, self._inode = path, path.stat().st_ino

    def run(self) -> None:
        """Serve until the socket is somebody else's, or for ten seconds without a platform and without sharers."""
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        due_s = status_s = check_s = busy_s = time.monotonic()
        try:
            while not self._is_ending:
                now_s = time.monotonic()
                is_sharing = bool(self._turns.sharers)
                self._listen(max(0.0, due_s - now_s) if is_sharing else _IDLE_S)
                now_s = time.monotonic()
                if is_sharing and now_s >= due_s:
                    self._late_s.append(now_s - due_s)
                    self._turns.turn(due_s)
                    self._num_ticks += 1
                    self._cost_s += (time.monotonic() - now_s - self._cost_s) * _COST_SMOOTHING
                    tick_s = self._tick_s()
                    # A turn that was missed is not made up for: the next one counts the whole time.
                    due_s = due_s + tick_s if due_s + tick_s > now_s else now_s + tick_s
                elif not is_sharing:
                    due_s = now_s
                if now_s >= status_s:
                    self._tell(now_s)
                    status_s = now_s + _STATUS_S
                if now_s >= check_s:
                    self._check()
                    check_s = now_s + _CHECK_S
                if self._turns.sharers or self._connection is not None:
                    busy_s = now_s
                elif now_s - busy_s > _IDLE_EXIT_S:
                    return
        finally:
            self._turns.close()
            self._guard.close()
            self._listener.close()
            if self._is_current():
                self._path.unlink(missing_ok=True)
                (self._directory / STATUS_NAME).unlink(missing_ok=True)

    def _tick_s(self) -> float:
        """How long to the next turn: longer where nobody has a neighbour, and where a turn takes long itself."""
        if not (self._turns.is_contended or self._enforcer.mechanism == "signals"):
            return _CALM_TICK_S
        return min(_CALM_TICK_S, max(TICK_S, self._cost_s / _MAX_COST_FRACTION))

    def _end(self, number: int, frame: object) -> None:
        self._is_ending = True

    def _is_current(self) -> bool:
        with contextlib.suppress(OSError):
            return self._path.stat().st_ino == self._inode
        return False

    # --- the platform ------------------------------------------------------------------------------------------------

    def _listen(self, timeout_s: float) -> None:
        sockets = [self._listener] + ([self._connection] if self._connection is not None else [])
        ready, _, _ = select.select(sockets, [], [], timeout_s)
        if self._listener in ready:
            self._accept()
        elif self._connection is not None and self._connection in ready:
            self._receive(self._connection)

    def _accept(self) -> None:
        """The next platform takes the place of the one before. Until it has said its table, the old one stands."""
        stream, _ = self._listener.accept()
        _, user_id = peer_process(stream)
        if user_id != os.getuid():
            stream.close()
            return
        self._disconnect()
        stream.setblocking(False)
        self._connection, self._decoder = stream, FrameDecoder(ShareTable)

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

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _take(self, table: ShareTable) -> None:
        self._open_slots(Path(table.slots_path))
        self._device_cpus = table.device_cpus
        living = tuple(entry for entry in table.sharers if live_stat(entry.process) is not None)
        # Whoever dies between being held and being watched would stay held: watched first, as well as afterwards.
        groups = [(entry.process.pid, entry.process.start_ticks) for entry in living]
        self._guard.watch(self._enforcer.undo_files(), groups)
        self._turns.take(living, table.device_cpus, table.sent_at_s)
        self._guard.watch(self._enforcer.undo_files(), groups)
        self._tell(time.monotonic())

    def _open_slots(self, path: Path) -> None:
        reader = self._turns.reader
        if reader is not None and reader.is_of(path):
            return
        if reader is not None:
            reader.close()
            self._turns.reader = None
        try:
            self._turns.reader = SlotReader(path)
        except BackendError as error:
            _log.error("%s; shares follow what is used alone", error)

    # --- now and then ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Forget who has died, replace a guard that was ended, and end if this daemon was replaced."""
        self._guard.ensure()
        self._is_ending |= not self._is_current()
        sharers = self._turns.sharers.values()
        living = tuple(sharer.entry for sharer in sharers if live_stat(sharer.entry.process) is not None)
        if len(living) < len(sharers) or self._turns.errors:
            self._turns.take(living, self._device_cpus, time.monotonic())

    def _tell(self, now_s: float) -> None:
        others = self._machine.others(sum(sharer.used_s for sharer in self._turns.sharers.values()), now_s)
        enforced = self._enforcer.enforced if self._turns.sharers else f"no device is shared; {self._enforcer.enforced}"
        status = SharingStatus(
            mechanism=self._enforcer.mechanism,
            enforced=f"{enforced}{others}",
            device_cpus=self._device_cpus,
            tick_s=self._tick_s(),
            late_p99_s=p99(self._late_s),
            reaction_p99_s=p99(self._turns.reactions_s),
            tenants=self._turns.statuses(),
        )
        with contextlib.suppress(BackendError):
            write_status(
                self._directory / STATUS_NAME,
                DaemonStatus(
                    pid=os.getpid(),
                    written_at_s=now_s,
                    sharing=status,
                    cpu_fraction=self._own_load.fraction(now_s, time.process_time()),
                    num_ticks=self._num_ticks,
                    num_writes=self._turns.num_writes,
                ),
            )


class MachineLoad:
    """How much of the machine programs without a share use, from /proc/stat."""

    def __init__(self) -> None:
        self._before: tuple[float, float, float, float] | None = None
        self._said = ""

    def others(self, sharers_used_s: float, now_s: float) -> str:
        """Return a sentence's end for a machine that is busy with others, over about the last second, or nothing."""
        if self._before is not None and now_s - self._before[0] < 1.0:
            return self._said
        found = _busy_and_total_s()
        before, self._said = self._before, ""
        if found is not None:
            self._before = (now_s, sharers_used_s, *found)
        if found is None or before is None or found[1] <= before[3]:
            return ""
        cores = os.cpu_count() or 1
        busy = (found[0] - before[2]) / (found[1] - before[3])
        sharers_cpus = max(0.0, sharers_used_s - before[1]) / (now_s - before[0])
        if busy > _BUSY_FRACTION:
            others_cpus = max(0.0, busy * cores - sharers_cpus)
            self._said = (
                f"; the machine is busy: others use {others_cpus:.1f} of its {cores} cores, so that requests are kept "
                "only as far as the kernel's weights go"
            )
        return self._said


def _busy_and_total_s() -> tuple[float, float] | None:
    try:
        with open("/proc/stat") as file:
            fields = [int(field) for field in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    total = float(sum(fields))
    return total - fields[3] - fields[4], total


def main() -> int:
    """Serve the platform of the directory named on the command line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s share daemon: %(message)s")
    directory = Path(sys.argv[1])
    be_on_time()
    enforcer = choose_enforcer(group_name(directory), os.environ.get(MECHANISM_VARIABLE, ""))
    _log.info("%s: %s", enforcer.mechanism, enforcer.enforced)
    ShareDaemon(directory, enforcer, is_controlled=os.environ.get(CONTROL_VARIABLE, "") != "off").run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
