"""The share daemon of CPU devices: a process that divides cores between sharers every few milliseconds.

`python -m springtide.backends.sharing.cpu.daemon RUN_DIRECTORY` serves one platform at a time on a socket there, and
outlives it: the sharers that the platform leaves keep the grants of this daemon until the next platform connects.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import time
from pathlib import Path

from springtide.backends.processes import live_stat
from springtide.backends.sharing.cpu.enforcers import Enforcer, choose_enforcer
from springtide.backends.sharing.cpu.guard import LimitGuard
from springtide.backends.sharing.cpu.ticks import CpuTicks
from springtide.backends.sharing.daemon import (
    CONTROL_VARIABLE,
    LoopFigures,
    ShareDaemon,
    be_on_time,
    p99,
    reopen_slots,
)
from springtide.backends.sharing.table import (
    MECHANISM_VARIABLE,
    SOCKET_NAME,
    STATUS_NAME,
    DaemonStatus,
    ShareTable,
    group_name,
)
from springtide.core.status.shares import SharingStatus

_log = logging.getLogger(__name__)

_BUSY_FRACTION = 0.95


class CpuSharing:
    """CPU devices: `enforcer` limits the sharers, and a guard lifts every limit if this process dies."""

    table_type: type[ShareTable] = ShareTable
    socket_name = SOCKET_NAME
    file_names: tuple[str, ...] = (STATUS_NAME,)

    def __init__(self, enforcer: Enforcer, *, is_controlled: bool = True) -> None:
        self._enforcer = enforcer
        self._ticks = CpuTicks(enforcer, time.monotonic, is_controlled=is_controlled)
        self._guard = LimitGuard()
        self._device_cpus = 0.0
        self._machine = MachineLoad()

    @property
    def is_sharing(self) -> bool:
        return bool(self._ticks.sharers)

    @property
    def is_contended(self) -> bool:
        """Whether two sharers are on one device, or sharers are stopped and continued by signals at every tick."""
        return self._ticks.is_contended or self._enforcer.mechanism == "signals"

    def take(self, table: ShareTable) -> None:
        """Enforce the shares of exactly the sharers of the table that live."""
        self._ticks.reader = reopen_slots(self._ticks.reader, table.slots_path, "shares follow what is used alone")
        self._device_cpus = table.device_cpus
        living = tuple(entry for entry in table.sharers if live_stat(entry.process) is not None)
        # The guard is updated before and after, so that no limit remains if this daemon dies in between.
        groups = [(entry.process.pid, entry.process.start_ticks) for entry in living]
        self._guard.watch(self._enforcer.undo_files(), groups)
        self._ticks.take(living, table.device_cpus, table.sent_at_s)
        self._guard.watch(self._enforcer.undo_files(), groups)

    def tick(self, due_s: float) -> None:
        self._ticks.tick(due_s)

    def handle(self, descriptor: int) -> None:
        """Nothing to do: no descriptor is registered here."""

    def check(self, now_s: float) -> bool:
        """Remove sharers that have died, and restart the guard if it was killed."""
        self._guard.ensure()
        sharers = self._ticks.sharers.values()
        living = tuple(sharer.entry for sharer in sharers if live_stat(sharer.entry.process) is not None)
        if len(living) < len(sharers) or self._ticks.errors:
            self._ticks.take(living, self._device_cpus, now_s)
        return True

    def status(self, now_s: float, loop: LoopFigures) -> DaemonStatus:
        """The status, which says how shares are enforced and whether other programs overload the machine."""
        others = self._machine.others(sum(sharer.used_s for sharer in self._ticks.sharers.values()), now_s)
        enforced = self._enforcer.enforced if self.is_sharing else f"no device is shared; {self._enforcer.enforced}"
        return DaemonStatus(
            pid=os.getpid(),
            written_at_s=now_s,
            sharing=SharingStatus(
                mechanism=self._enforcer.mechanism,
                enforced=f"{enforced}{others}",
                device_cpus=self._device_cpus,
                tick_s=loop.tick_s,
                late_p99_s=loop.late_p99_s,
                reaction_p99_s=p99(self._ticks.reactions_s),
                tenants=self._ticks.statuses(),
            ),
            cpu_fraction=loop.cpu_fraction,
            num_ticks=loop.num_ticks,
            num_writes=self._ticks.num_writes,
        )

    def close(self) -> None:
        self._ticks.close()
        self._guard.close()


class MachineLoad:
    """How much of the machine is used by programs without a share, from /proc/stat."""

    def __init__(self) -> None:
        self._before: tuple[float, float, float, float] | None = None
        self._clause = ""

    def others(self, sharers_used_s: float, now_s: float) -> str:
        """Return a clause for the status if others kept the machine busy over the last second, else an empty text."""
        if self._before is not None and now_s - self._before[0] < 1.0:
            return self._clause
        found = _busy_and_total_s()
        before, self._clause = self._before, ""
        if found is not None:
            self._before = (now_s, sharers_used_s, *found)
        if found is None or before is None or found[1] <= before[3]:
            return ""
        cores = os.cpu_count() or 1
        busy = (found[0] - before[2]) / (found[1] - before[3])
        sharers_cpus = max(0.0, sharers_used_s - before[1]) / (now_s - before[0])
        if busy > _BUSY_FRACTION:
            others_cpus = max(0.0, busy * cores - sharers_cpus)
            self._clause = (
                f"; the machine is busy: others use {others_cpus:.1f} of its {cores} cores, so that requests are kept "
                "only as far as the kernel's weights go"
            )
        return self._clause


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
    cpus = CpuSharing(enforcer, is_controlled=os.environ.get(CONTROL_VARIABLE, "") != "off")
    ShareDaemon(directory, cpus, select.epoll()).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
