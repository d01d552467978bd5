"""Finds replicas that are silent or do not start, and reports them as lost."""

from __future__ import annotations

import time

from springtide.backends.control_channel.members import MemberPhase
from springtide.backends.control_channel.replica_table import ReplicaTable
from springtide.backends.kubernetes.pods.driver import PodHandle, PodReplica

TICK_S = 0.5
# Starts take minutes, so they are checked less often.
STARTS_EVERY_S = 2.0
# How long a container may wait to be started, for anything but a pull and what only a person can fix.
STARTING_AFTER_S = 600.0
# How long a worker whose container runs may take to send its Hello.
CONNECT_AFTER_S = 180.0
# Workers reconnect at growing intervals; workers found after a restart are given the time for that.
ADOPT_WINDOW_S = 15.0


class PodWatch:
    """Checks replicas for silence twice a second, and starting ones less often. Runs on the I/O thread.

    `lost_after_s` is how long a replica may be silent.
    """

    def __init__(self, table: ReplicaTable[PodHandle], lost_after_s: float) -> None:
        self._table = table
        self._lost_after_s = lost_after_s
        self._next_starts_s = float("-inf")

    def start(self) -> None:
        """Start the periodic checks."""
        self._tick()

    def reset_silence(self) -> None:
        """The I/O thread itself was delayed: count every replica's silence from now on."""
        self._table.counts["late_wakeups"] += 1
        now_s = time.monotonic()
        for replica in self._table.replicas.values():
            if replica.heard_at_s:
                replica.heard_at_s = now_s

    def _tick(self) -> None:
        self._table.reactor.after(TICK_S, self._tick)
        now_s = time.monotonic()
        silent_since_s = now_s - self._lost_after_s
        checks_starts = now_s >= self._next_starts_s
        if checks_starts:
            self._next_starts_s = now_s + STARTS_EVERY_S
        # Filter first: of thousands of replicas hardly any needs a check.
        for replica in [
            each
            for each in self._table.replicas.values()
            if (checks_starts if each.phase is MemberPhase.SPAWNING else each.heard_at_s <= silent_since_s)
        ]:
            self._check(replica, now_s)

    def _check(self, replica: PodReplica, now_s: float) -> None:
        if replica.has_exited or replica.lost_reason is not None:
            return
        if replica.phase is MemberPhase.SPAWNING and not replica.asked_to_stop:
            self._check_start(replica, now_s)
        elif replica.phase in (MemberPhase.RUNNING, MemberPhase.ADOPTING):
            self._check_silence(replica, now_s)

    def _check_start(self, replica: PodReplica, now_s: float) -> None:
        pod = replica.handle.pod
        if pod is None or pod.phase in ("creating", "binding"):
            # The API server has not accepted it yet, which is no fault of the pod.
            return
        waited_s = now_s - pod.since_s
        if pod.phase == "running":
            if waited_s > CONNECT_AFTER_S:
                self._table.lose(replica, f"the worker did not connect within {CONNECT_AFTER_S:.0f} s of its start")
        elif pod.making.is_pulling or pod.is_stuck:
            # However large its image is. One that cannot be had is told as such, and its workload's own limit counts.
            return
        elif waited_s > STARTING_AFTER_S:
            self._table.lose(replica, f"its container was not started within {waited_s:.0f} s: {pod.reason}")

    def _check_silence(self, replica: PodReplica, now_s: float) -> None:
        silent_s = now_s - replica.heard_at_s
        is_adopting = replica.phase is MemberPhase.ADOPTING
        limit_s = max(self._lost_after_s, ADOPT_WINDOW_S) if is_adopting else self._lost_after_s
        if silent_s < limit_s:
            return
        has_gone = replica.has_left or replica.has_failed or (replica.has_finished and self._is_over(replica))
        if has_gone and replica.connection is None:
            # It has reported its own end, but that of its pod is not known yet; its device becomes free with the
            # latter.
            self._table.note_exit(replica)
        elif not replica.asked_to_stop:
            # A replica that was told to stop has a grace period of its own.
            what = "did not come back after a restart" if is_adopting else "went silent"
            self._table.lose(replica, f"the worker {what}: nothing was heard of it for {silent_s:.1f} s")

    def _is_over(self, replica: PodReplica) -> bool:
        job = self._table.jobs.get(replica.workload_id)
        return job is None or job.has_ended or job.finish is not None
