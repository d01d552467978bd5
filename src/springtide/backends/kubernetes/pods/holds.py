"""Tells the control loop which replicas cannot begin yet in the cluster, and when they have begun."""

from __future__ import annotations

import time
from collections.abc import Callable

from springtide.backends.control_channel.members import MemberPhase
from springtide.backends.control_channel.replica_table import ReplicaTable
from springtide.backends.kubernetes.pods.driver import PodHandle, PodReplica
from springtide.core.events import StartHeldUp

LOOK_S = 1.0
# A start that takes no longer is not told as held up.
HELD_AFTER_S = 5.0
# The least time between two reasons of one replica: a kubelet that cannot pull an image says so in two ways in turn.
RETELL_S = 60.0


class StartHolds:
    """Looks at starting replicas once a second, on the I/O thread. `reason_of` says why one has no pod yet."""

    def __init__(self, table: ReplicaTable[PodHandle], reason_of: Callable[[PodReplica], str]) -> None:
        self._table = table
        self._reason_of = reason_of

    def start(self) -> None:
        """Begin to look."""
        self._table.reactor.after(LOOK_S, self.start)
        now_s = time.monotonic()
        # Filter first: of thousands of replicas hardly any starts.
        for replica in [each for each in self._table.replicas.values() if not each.is_ready]:
            if not (replica.asked_to_stop or replica.has_exited or replica.lost_reason is not None):
                self._look(replica, now_s)

    def _look(self, replica: PodReplica, now_s: float) -> None:
        handle = replica.handle
        if replica.is_preparing:
            # The worker itself says what it waits for.
            handle.told_hold = ""
            return
        has_begun = replica.phase not in (MemberPhase.QUEUED, MemberPhase.SPAWNING)
        if has_begun or (handle.pod is not None and handle.pod.phase == "running"):
            if handle.told_hold != "":
                self._tell(replica, "", now_s)
            return
        start_timeout_s = replica.action.workload.start_timeout_s if replica.action is not None else 0.0
        # A short time must not be over before it is told.
        after_s = min(HELD_AFTER_S, start_timeout_s / 2) if start_timeout_s else HELD_AFTER_S
        reason = (self._reason_of(replica) if handle.pod is None else handle.pod.reason) or "its pod is being made"
        is_soon = handle.told_hold and now_s - handle.told_at_s < RETELL_S
        if now_s - replica.ordered_at_s >= after_s and reason != handle.told_hold and not is_soon:
            self._tell(replica, reason, now_s)

    def _tell(self, replica: PodReplica, reason: str, now_s: float) -> None:
        handle = replica.handle
        handle.told_hold, handle.told_at_s = reason, now_s
        is_stuck = bool(reason) and handle.pod is not None and handle.pod.is_stuck
        self._table.post(
            StartHeldUp(
                workload_id=replica.workload_id, replica_id=replica.replica_id, reason=reason, is_stuck=is_stuck
            )
        )
