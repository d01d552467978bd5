"""Periodic checks of workers: silent ones are reported lost, and oversized logs are truncated."""

from __future__ import annotations

import time

from springtide.backends.control_channel.members import MemberPhase
from springtide.backends.control_channel.replica_table import ReplicaTable
from springtide.backends.local.members import ProcessHandle, Worker
from springtide.backends.processes import bound_log, is_starved, live_stat
from springtide.core.wire.workers import LOST_AFTER_S

TICK_S = 0.25
SUSPECT_AFTER_S = 1.0
ADOPT_WINDOW_S = 3.0
# A worker may be silent for lack of CPU time: it counts as dead only after the limit times this factor.
STARVED_FACTOR = 5.0
START_TIMEOUT_S = 180.0
MAX_LOG_BYTES = 64 << 20
KEPT_LOG_BYTES = 1 << 20


class SilenceMonitor:
    """Checks every worker every TICK_S. Runs on the I/O thread."""

    def __init__(self, table: ReplicaTable[ProcessHandle], *, max_log_bytes: int = MAX_LOG_BYTES) -> None:
        self._table = table
        self._max_log_bytes = max_log_bytes

    def start(self) -> None:
        """Start the periodic checks."""
        self._tick()

    def reset_silence(self) -> None:
        """The executor's own thread was delayed: count every worker's silence from now."""
        self._table.counts["late_wakeups"] += 1
        now_s = time.monotonic()
        for replica in self._table.replicas.values():
            if replica.heard_at_s:
                replica.heard_at_s = now_s
            replica.suspect_ticks = None

    def _tick(self) -> None:
        self._table.reactor.after(TICK_S, self._tick)
        now_s = time.monotonic()
        for replica in list(self._table.replicas.values()):
            self._check(replica, now_s)
        # On every tick: a worker in an endless loop can write a gigabyte in a second.
        for replica in self._table.replicas.values():
            if bound_log(replica.log_path, self._max_log_bytes, min(KEPT_LOG_BYTES, self._max_log_bytes)):
                self._table.counts["cut_logs"] += 1

    def _check(self, replica: Worker, now_s: float) -> None:
        # A worker that was asked to stop has a grace period of its own.
        if replica.has_exited or replica.lost_reason is not None or replica.asked_to_stop:
            return
        if replica.phase is MemberPhase.SPAWNING:
            if now_s - replica.born_at_s > START_TIMEOUT_S:
                self._table.lose(replica, f"the worker did not connect within {START_TIMEOUT_S:.0f} s")
            return
        if replica.phase not in (MemberPhase.RUNNING, MemberPhase.ADOPTING):
            return
        silent_s = now_s - replica.heard_at_s
        if silent_s < SUSPECT_AFTER_S or replica.handle.identity is None:
            return
        stat = live_stat(replica.handle.identity)
        if stat is None:
            return
        if replica.suspect_ticks is None:
            replica.suspect_ticks = stat.cpu_ticks
        limit_s = ADOPT_WINDOW_S if replica.phase is MemberPhase.ADOPTING else LOST_AFTER_S
        if silent_s < limit_s:
            return
        # A stopped process neither uses nor waits for a processor; one that does is alive and gets more time.
        is_alive = stat.cpu_ticks > replica.suspect_ticks or is_starved(replica.handle.identity)
        if is_alive and silent_s < limit_s * STARVED_FACTOR:
            return
        what = "did not come back after a restart" if replica.phase is MemberPhase.ADOPTING else "went silent"
        self._table.lose(replica, f"the worker {what}: nothing was heard of it for {silent_s:.1f} s")
