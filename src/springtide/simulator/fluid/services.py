"""The serving replicas of long traces: each takes its time to become ready, and drains before it is gone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from springtide.core.actions import StartReplica, StopReplica
from springtide.core.events import Event, LoadObserved, ReplicaLost, ReplicaReady, ReplicaStopped
from springtide.core.resources import DeviceId
from springtide.core.workload import InferenceService, ReplicaId, WorkloadId
from springtide.simulator.clock import VirtualClock
from springtide.simulator.fluid.rules import Times
from springtide.simulator.shared_devices import SharedDevices

# Runs a function with its argument at a moment.
At = Callable[[float, Callable[..., None], Any], None]


class FluidServices:
    """The replicas of services and their devices.

    `post` hands events to the control loop, `changed` is called after devices were taken or released. The load of a
    service is spread evenly over its ready replicas; it decides how much of its share each of them uses.
    """

    def __init__(
        self,
        clock: VirtualClock,
        times: Times,
        at: At,
        post: Callable[[Event], None],
        changed: Callable[[], None],
        sharing: SharedDevices,
    ) -> None:
        self._clock = clock
        self._times = times
        self._at = at
        self._post = post
        self._changed = changed
        self._sharing = sharing
        self._held: dict[ReplicaId, tuple[WorkloadId, tuple[DeviceId, ...]]] = {}
        self._services: dict[WorkloadId, InferenceService] = {}
        self._load: dict[WorkloadId, int] = {}
        self._ready: dict[ReplicaId, WorkloadId] = {}
        self._draining: set[ReplicaId] = set()
        self._gone: set[ReplicaId] = set()

    @property
    def num_held(self) -> int:
        """How many devices they hold; a draining replica still holds its own."""
        return sum(len(device_ids) for _, device_ids in self._held.values())

    def __contains__(self, replica_id: ReplicaId) -> bool:
        return replica_id in self._held

    def start(self, action: StartReplica, *, is_down: bool) -> None:
        """A replica takes its device, unless its node is away, and is ready after `service_start_s`."""
        replica_id, service_id = action.replica_id, action.workload_id
        if replica_id in self._held or replica_id in self._gone:
            return
        if is_down:
            self._gone.add(replica_id)
            self._post(ReplicaLost(workload_id=service_id, replica_id=replica_id, reason="it could not be started"))
            return
        self._held[replica_id] = (service_id, action.device_ids)
        if action.share is not None and isinstance(action.workload, InferenceService):
            self._services[service_id] = action.workload
            self._sharing.hold(replica_id, action.device_ids, action.share)
        self._changed()
        if self._times.service_start_s > 0.0:
            self._at(self._clock.now_s() + self._times.service_start_s, self._warm_up, replica_id)
        else:
            self._warm_up(replica_id)

    def _warm_up(self, replica_id: ReplicaId) -> None:
        if replica_id in self._held and replica_id not in self._draining:
            service_id = self._held[replica_id][0]
            self._post(ReplicaReady(workload_id=service_id, replica_id=replica_id))
            if replica_id in self._sharing:
                self._ready[replica_id] = service_id
                self._spread(service_id)

    def note_load(self, event: LoadObserved) -> None:
        self._load[event.service_id] = event.in_flight + event.queued
        if event.service_id in self._services:
            self._spread(event.service_id)

    def _spread(self, service_id: WorkloadId) -> None:
        """Spread the load over the ready replicas; one with `target_in_flight` requests demands its whole device."""
        ready = [replica_id for replica_id, known in self._ready.items() if known == service_id]
        if ready:
            full = self._services[service_id].target_in_flight * len(ready)
            self._sharing.set_demand(ready, min(1.0, self._load.get(service_id, 0) / full))

    def stop(self, action: StopReplica) -> None:
        """A replica answers the requests that it has, for `service_stop_s` but at most its grace, and stops."""
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
        self._post(ReplicaStopped(workload_id=service_id, replica_id=replica_id))

    def lose(self, replica_id: ReplicaId) -> None:
        """A replica dies although no action asked it to end."""
        service_id, _ = self._held[replica_id]
        self._drop(replica_id)
        self._post(ReplicaLost(workload_id=service_id, replica_id=replica_id, reason="its process ended"))

    def lose_devices(self, is_lost: Callable[[DeviceId], bool]) -> None:
        """Drop the replicas on these lost devices without an event: the loss of the node reports them."""
        for replica_id in [r for r, (_, device_ids) in self._held.items() if any(map(is_lost, device_ids))]:
            self._drop(replica_id)

    def keep_only(self, named: Collection[ReplicaId]) -> None:
        """End the replicas that are not named."""
        for replica_id in [r for r in self._held if r not in named]:
            del self._held[replica_id]
            self._draining.discard(replica_id)
            self._release(replica_id)
            self._changed()

    def _drop(self, replica_id: ReplicaId) -> None:
        is_held = self._held.pop(replica_id, None) is not None
        self._draining.discard(replica_id)
        self._gone.add(replica_id)
        if is_held:
            self._release(replica_id)
            self._changed()

    def _release(self, replica_id: ReplicaId) -> None:
        """Release its share of the device and spread its part of the load over the other replicas."""
        self._sharing.release(replica_id)
        service_id = self._ready.pop(replica_id, None)
        if service_id is not None:
            self._spread(service_id)
