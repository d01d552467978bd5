"""Whether guaranteed minimums were kept, what reclaiming servers for them took, and how many were on loan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from springtide.core.actions import Action, DrainNode, LabelNode, PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.events import (
    CancelRequested,
    Event,
    JobResized,
    NodeJoined,
    NodeLost,
    ReplicaLost,
    ReplicaReady,
    ReplicaStopped,
    ScaleRequested,
    ServiceDeployed,
)
from springtide.core.ports import Step
from springtide.core.resources import DeviceId, NodeId
from springtide.core.workload import DEFAULT_GRACE_S, ReplicaId, TrainingJob, WorkloadId
from springtide.simulator.fluid.rules import Times
from springtide.simulator.fluid.runs import FluidRun
from springtide_studies.loans.reclaims import Loans, Reclaim, Reclaims, nothing_lost, percentile

# One or two turns of the loop: the demand and its end are journaled a turn late.
TOLERANCE_S = 1.0


class Shortage(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a guaranteed minimum that was not ready from `demanded_s` on, until `until_s`.

    `is_met` says that it became ready; otherwise the minimum was lowered, the service removed or the run over.
    `was_possible` says that the devices alive were enough for the minimums of all services all the time.
    """

    service_id: WorkloadId
    demanded_s: float
    until_s: float
    is_met: bool
    was_possible: bool = True

    @property
    def waited_s(self) -> float:
        return self.until_s - self.demanded_s


class _ServiceState:
    """One service: its minimum in force, its ready replicas, and since when each replica of the minimum is missing."""

    def __init__(self) -> None:
        self.minimum = 0
        self.ready: dict[ReplicaId, None] = {}
        # By number (1, 2, .. of the minimum): since when that replica is missing, and whether devices would suffice.
        self.missing: dict[int, tuple[float, bool]] = {}


class Minimums:
    """Watches the journaled steps of a run. A minimum is broken where one of its replicas is missing for too long.

    Each replica of a minimum is demanded when the service is deployed with it, when the minimum is raised to it, and
    when one that was ready is lost or asked to stop. It has to be ready again within a grace, the start of a replica
    and TOLERANCE_S: as long as it takes to reclaim a server. `grace_s` is the longest grace of the workloads that may
    hold a wanted device; `lost_of(job_id)` is how many device-seconds of work a job has had to do again so far.
    """

    def __init__(
        self,
        *,
        start_s: float = 0.0,
        grace_s: float = DEFAULT_GRACE_S,
        lost_of: Callable[[WorkloadId], float] = nothing_lost,
    ) -> None:
        self.shortages: list[Shortage] = []
        self.num_demanded = 0
        self._start_s = start_s
        self._grace_s = grace_s
        self._services: dict[WorkloadId, _ServiceState] = {}
        self._device_of: dict[ReplicaId, DeviceId] = {}
        self._owner_of: dict[ReplicaId, WorkloadId] = {}
        self._node_of: dict[DeviceId, NodeId] = {}
        self._num_alive: dict[NodeId, int] = {}
        self._is_possible = True
        self._reclaims = Reclaims(lost_of)
        self.loans = Loans()

    @property
    def bound_s(self) -> float:
        """How long a replica of a minimum may be missing."""
        return self._grace_s + self._start_s + TOLERANCE_S

    @property
    def broken(self) -> list[Shortage]:
        """The shortages that were longer than that, although there were devices enough for all minimums."""
        return [s for s in self.shortages if s.waited_s > self.bound_s and s.was_possible]

    @property
    def impossible(self) -> list[Shortage]:
        """The shortages that were longer than that while all minimums together were more than what was alive."""
        return [s for s in self.shortages if s.waited_s > self.bound_s and not s.was_possible]

    @property
    def num_broken(self) -> int:
        """How many minimums were broken: shortages of one service that overlap are one."""
        return num_episodes(self.broken)

    @property
    def longest_s(self) -> float:
        """The longest time for which a possible replica of a minimum was missing."""
        return max((s.waited_s for s in self.shortages if s.was_possible), default=0.0)

    @property
    def reclaims(self) -> Sequence[Reclaim]:
        """Every server that training was made to give up, in order."""
        return self._reclaims.all

    def begin(self, runs: Mapping[WorkloadId, FluidRun]) -> None:
        """Take the work that jobs have to do again from the runs of a simulation."""
        self._reclaims.lost_of = lambda job_id: runs[job_id].lost_device_s

    # --- what happens ------------------------------------------------------------------------------------------------

    def note(self, step: Step) -> None:
        for event in step.events:
            self._apply_event(event, step.now_s)
        # A drain and the preemptions and resizes that it causes are in one step, in any order: drains go first.
        for action in step.actions:
            if isinstance(action, DrainNode):
                self._reclaims.drain(action, step.now_s)
        for action in step.actions:
            self._apply_action(action, step.now_s)

    def finish(self, now_s: float) -> None:
        """The run is over: close every open shortage."""
        for service_id in self._services:
            self._set_minimum(service_id, 0, now_s)
        self.loans.finish(now_s)

    def _apply_event(self, event: Event, now_s: float) -> None:
        match event:
            case NodeJoined():
                self._node_of |= {device.device_id: device.node_id for device in event.node.devices}
                self._num_alive[event.node.node_id] = len(event.node.devices)
                self.loans.join(event.node, now_s)
                self._update_feasibility()
            case NodeLost():
                for replica_id in [r for r, d in self._device_of.items() if self._node_of[d] == event.node_id]:
                    self._drop(replica_id, now_s)
                self._num_alive.pop(event.node_id, None)
                self._reclaims.lose(event.node_id)
                self.loans.lose(event.node_id, now_s)
                self._update_feasibility()
            case ServiceDeployed():
                self._set_minimum(event.service.service_id, event.service.min_replicas, now_s)
            case ScaleRequested() if event.workload_id in self._services:
                self._set_minimum(event.workload_id, event.minimum, now_s)
            case CancelRequested() if event.workload_id in self._services:
                self._set_minimum(event.workload_id, 0, now_s)
            case ReplicaReady():
                self._become_ready(event, now_s)
            case ReplicaStopped() | ReplicaLost():
                self._drop(event.replica_id, now_s)
            case JobResized():
                self._reclaims.resume(event)

    def _apply_action(self, action: Action, now_s: float) -> None:
        match action:
            case StartReplica():
                self._device_of[action.replica_id] = action.device_id
                self._owner_of[action.replica_id] = action.workload_id
                is_job = isinstance(action.workload, TrainingJob)
                node_id = self._node_of[action.device_id]
                self._reclaims.start(action.replica_id, action.workload_id, node_id, now_s, is_job=is_job)
            case StopReplica():
                self._reclaims.stop(action.replica_id, now_s)
                self._stop_serving(action.replica_id, now_s)
            case PreemptJob():
                self._reclaims.preempt(action, now_s)
            case ResizeJob():
                self._reclaims.resize(action, now_s)
            case LabelNode():
                self._reclaims.label(action, now_s)
                self.loans.label(action, now_s)

    # --- minimums ----------------------------------------------------------------------------------------------------

    def _set_minimum(self, service_id: WorkloadId, minimum: int, now_s: float) -> None:
        service = self._services.setdefault(service_id, _ServiceState())
        before, service.minimum = service.minimum, minimum
        self._update_feasibility()
        for number in range(max(before, len(service.ready)) + 1, minimum + 1):
            self._demand(service, number, now_s)
        for number in range(minimum + 1, before + 1):
            self._close(service_id, service, number, now_s, is_met=False)

    def _become_ready(self, event: ReplicaReady, now_s: float) -> None:
        self._reclaims.serve(event.replica_id, now_s)
        service = self._services.get(event.workload_id)
        if service is None or event.replica_id not in self._device_of:
            return
        service.ready[event.replica_id] = None
        self._close(event.workload_id, service, len(service.ready), now_s, is_met=True)

    def _stop_serving(self, replica_id: ReplicaId, now_s: float) -> None:
        service = self._services.get(self._owner_of.get(replica_id, WorkloadId("")))
        if service is None or replica_id not in service.ready:
            return
        number = len(service.ready)
        del service.ready[replica_id]
        if number <= service.minimum:
            self._demand(service, number, now_s)

    def _drop(self, replica_id: ReplicaId, now_s: float) -> None:
        self._stop_serving(replica_id, now_s)
        self._device_of.pop(replica_id, None)
        self._owner_of.pop(replica_id, None)
        self._reclaims.leave(replica_id, now_s)

    def _demand(self, service: _ServiceState, number: int, now_s: float) -> None:
        self.num_demanded += 1
        service.missing[number] = (now_s, self._is_possible)

    def _close(
        self, service_id: WorkloadId, service: _ServiceState, number: int, now_s: float, *, is_met: bool
    ) -> None:
        found = service.missing.pop(number, None)
        if found is not None:
            since_s, was_possible = found
            self.shortages.append(
                Shortage(
                    service_id=service_id,
                    demanded_s=since_s,
                    until_s=now_s,
                    is_met=is_met,
                    was_possible=was_possible,
                )
            )

    def _update_feasibility(self) -> None:
        """While there are too few devices for all minimums, no missing replica counts against the policy."""
        needed = sum(service.minimum for service in self._services.values())
        self._is_possible = needed <= sum(self._num_alive.values())
        if not self._is_possible:
            for service in self._services.values():
                service.missing = {number: (since_s, False) for number, (since_s, _) in service.missing.items()}

    # --- figures -----------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """The figures, in seconds, device-seconds and counts; None where there is nothing to take one of."""
        waits_s = [s.waited_s for s in self.shortages if s.is_met and s.was_possible]
        figures: dict[str, Any] = {
            "minimums_demanded": self.num_demanded,
            "minimums_broken": self.num_broken,
            "minimums_impossible": num_episodes(self.impossible),
            "minimum_wait_p50_s": percentile(waits_s, 50),
            "minimum_wait_p95_s": percentile(waits_s, 95),
            "minimum_wait_max_s": max(waits_s, default=None),
            "minimum_short_device_s": sum(s.waited_s for s in self.shortages),
        }
        return figures | self._reclaims.summary() | self.loans.summary()


def minimums_for(arrivals: Sequence[tuple[float, TrainingJob]], times: Times) -> Minimums:
    """The watcher of a run. Its grace is the longest of all workloads that may hold a wanted device."""
    graces_s = [job.grace_s for _, job in arrivals] or [DEFAULT_GRACE_S]
    return Minimums(start_s=times.service_start_s, grace_s=max(times.service_stop_s, *graces_s))


def num_episodes(shortages: Sequence[Shortage]) -> int:
    """How many stretches of time these make, service by service: those that overlap are one."""
    count = 0
    ends_s: dict[WorkloadId, float] = {}
    for shortage in sorted(shortages, key=lambda s: s.demanded_s):
        end_s = ends_s.get(shortage.service_id)
        count += end_s is None or shortage.demanded_s > end_s
        ends_s[shortage.service_id] = max(shortage.until_s, end_s or 0.0)
    return count
