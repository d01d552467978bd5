"""The serving replicas of long traces: each takes its time to become ready, and drains before it is gone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from springtide.core.actions import StartReplica, StopReplica
from springtide.core.events import Event, ReplicaLost, ReplicaReady, ReplicaStopped
from springtide.core.resources import DeviceId
from springtide.core.workload import ReplicaId, WorkloadId
from springtide.sim.clock import VirtualClock
from springtide.sim.fluid_rules import Times

# Runs a function with its argument at a moment.
At = Callable[[float, Callable[..., None], Any], None]


class FluidServices:
    """Who serves where. `tell` takes what the platform is to hear, `changed` is called when devices come or go."""

    def __init__(
        self, clock: VirtualClock, times: Times, at: At, tell: Callable[[Event], None], changed: Callable[[], None]
    ) -> None:
        self._clock = clock
        self._times = times
        self._at = at
        self._tell = tell
        self._changed = changed
        self._held: dict[ReplicaId, tuple[WorkloadId, DeviceId]] = {}
        self._draining: set[ReplicaId] = set()
        self._gone: set[ReplicaId] = set()

    @property
    def num_held(self) -> int:
        """How many devices they hold; one that drains holds its own."""
        return len(self._held)

    def __contains__(self, replica_id: ReplicaId) -> bool:
        return replica_id in self._held

    def start(self, action: StartReplica, *, is_down: bool) -> None:
        """A replica takes its device, unless its node is away, and is ready after `service_start_s`."""
        replica_id, service_id = action.replica_id, action.workload_id
        if replica_id in self._held or replica_id in self._gone:
            return
        if is_down:
            self._gone.add(replica_id)
            self._tell(ReplicaLost(workload_id=service_id, replica_id=replica_id, reason="it could not be started"))
            return
        self._held[replica_id] = (service_id, action.device_id)
        self._changed()
        if self._times.service_start_s > 0.0:
            self._at(self._clock.now_s() + self._times.service_start_s, self._warm_up, replica_id)
        else:
            self._warm_up(replica_id)

    def _warm_up(self, replica_id: ReplicaId) -> None:
        if replica_id in self._held and replica_id not in self._draining:
            self._tell(ReplicaReady(workload_id=self._held[replica_id][0], replica_id=replica_id))

    def stop(self, action: StopReplica) -> None:
        """A replica answers what it has, for `service_stop_s` and no longer than its grace, and is gone."""
        replica_id = action.replica_id
        if replica_id in self._gone or replica_id in self._draining:
            return
        drain_s = min(self._times.service_stop_s, action.grace_s)
        if drain_s > 0.0 and replica_id in self._held:
            self._draining.add(replica_id)
            self._at(self._clock.now_s() + drain_s, self._leave, (action.workload_id, replica_id))
        else:
            self._leave((action.workload_id, replica_id))

    def _leave(self, what: tuple[WorkloadId, ReplicaId]) -> None:
        service_id, replica_id = what
        if replica_id in self._gone:
            return
        self._drop(replica_id)
        self._tell(ReplicaStopped(workload_id=service_id, replica_id=replica_id))

    def lose(self, replica_id: ReplicaId) -> None:
        """A replica dies without being asked."""
        service_id, _ = self._held[replica_id]
        self._drop(replica_id)
        self._tell(ReplicaLost(workload_id=service_id, replica_id=replica_id, reason="its process ended"))

    def lose_devices(self, is_lost: Callable[[DeviceId], bool]) -> None:
        """These devices are away: who was there is gone, and whoever tells of the node says so."""
        for replica_id in [r for r, (_, device_id) in self._held.items() if is_lost(device_id)]:
            self._drop(replica_id)

    def keep_only(self, named: Collection[ReplicaId]) -> None:
        """End whoever is not named."""
        for replica_id in [r for r in self._held if r not in named]:
            del self._held[replica_id]
            self._draining.discard(replica_id)
            self._changed()

    def _drop(self, replica_id: ReplicaId) -> None:
        is_held = self._held.pop(replica_id, None) is not None
        self._draining.discard(replica_id)
        self._gone.add(replica_id)
        if is_held:
            self._changed()
