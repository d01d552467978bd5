"""What a turn does not look at again: each class names the inputs of what it remembers and notices when one changes.

A controller that was restarted remembers nothing of this and decides the same (`loop.verify` with `is_cold`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from springtide.control.edits import record_of, with_service_state
from springtide.control.records import JobRecord, PlatformState, ServiceRecord
from springtide.control.watches import hang_events, hung_at_s
from springtide.core.decision import Drain, FunctionAllocation, Plan, PoolAllocation
from springtide.core.events import Event
from springtide.core.functions import FunctionPlan
from springtide.core.resources import NodeId, Topology
from springtide.core.workload import JobState, WorkloadId


class Worklist:
    """The workloads to check: all but those that hold what the plan gives them, until one of the inputs changes.

    What is decided for a workload that lacks no device depends on its record, on what the plan gives it and on the
    drains, since a node that is reclaimed does not wait for the workers that replace its own. Nothing else is read.
    """

    def __init__(self) -> None:
        self._wanted: dict[WorkloadId, PoolAllocation] = {}
        self._changed: dict[WorkloadId, None] = {}
        self._allocations: Mapping[WorkloadId, PoolAllocation] = {}
        self._drains: Mapping[NodeId, Drain] = {}

    def mark_changed(self, workload_ids: Iterable[WorkloadId]) -> None:
        """The records of these workloads have changed: check them again."""
        for workload_id in workload_ids:
            self._wanted.pop(workload_id, None)
            self._changed[workload_id] = None

    def mark_settled(self, workload_id: WorkloadId, wanted: PoolAllocation) -> None:
        """No action is needed for the workload as long as the plan gives it exactly this."""
        self._changed.pop(workload_id, None)
        self._wanted[workload_id] = wanted

    def forget(self, workload_id: WorkloadId) -> None:
        """The workload has ended."""
        self._changed.pop(workload_id, None)
        self._wanted.pop(workload_id, None)

    def pending(self, plan: Plan, drains: Mapping[NodeId, Drain]) -> set[WorkloadId]:
        """The workloads to check under this plan and these drains."""
        if drains is not self._drains:
            if drains != self._drains:
                self.mark_changed(list(self._wanted))
            self._drains = drains
        allocations = plan.allocations
        if allocations is not self._allocations:
            for workload_id, allocation in allocations.items():
                known = self._wanted.get(workload_id)
                if known is not None and known is not allocation and _differ(known, allocation):
                    self.mark_changed((workload_id,))
            for workload_id in self._allocations:
                if workload_id not in allocations and workload_id in self._wanted:
                    self.mark_changed((workload_id,))
            self._allocations = allocations
        return {*self._changed, *plan.rejected, *plan.admitted}


def _differ(one: PoolAllocation, other: PoolAllocation) -> bool:
    # Policies usually return the tuples of the snapshot, so comparing identities first saves most comparisons.
    if one.device_ids is not other.device_ids and one.device_ids != other.device_ids:
        return True
    if one.share != other.share:
        return True
    return one.global_batch_size != other.global_batch_size or function_plan(one) != function_plan(other)


def function_plan(allocation: PoolAllocation) -> FunctionPlan | None:
    """The plan of functions in an allocation; None for one on machines."""
    return allocation.plan if isinstance(allocation, FunctionAllocation) else None


class WaitingReasons:
    """The reasons that differ from the recorded ones, looked for only where an input has changed.

    A reason depends on the record of its workload, on the plan's reasons and its words on room, and on the topology.
    """

    def __init__(self) -> None:
        self._reasons: Mapping[WorkloadId, str] | None = None
        self._no_room: Mapping[WorkloadId, str] | None = None
        self._topology: Topology | None = None
        self._changed: dict[WorkloadId, None] = {}

    def mark_changed(self, workload_ids: Iterable[WorkloadId]) -> None:
        """The records of these workloads have changed."""
        self._changed.update(dict.fromkeys(workload_ids))

    def news(self, state: PlatformState, plan: Plan) -> tuple[dict[str, str], dict[str, bool]]:
        """The reasons of waiting jobs, of idle services, and of jobs whose promise is given up, where they differ from
        the recorded ones; and the jobs whose promise is given up from now on (False), or is kept again (True)."""
        topology = state.topology()
        is_known = plan.reasons is self._reasons and plan.no_room == self._no_room and topology is self._topology
        workload_ids: Iterable[WorkloadId] = (*state.jobs.live, *state.services.live)
        if is_known:
            # One that has changed may have left the state since.
            changed = [workload_id for workload_id in self._changed if state.is_known(workload_id)]
            workload_ids = sorted(changed, key=state.place_of)
        self._reasons, self._no_room = plan.reasons, plan.no_room
        self._topology, self._changed = topology, {}
        found: dict[str, str] = {}
        promises: dict[str, bool] = {}
        for workload_id in workload_ids:
            job, service = state.jobs.live.get(workload_id), state.services.live.get(workload_id)
            if job is not None:
                reason = _of_job(job, plan, topology)
                if reason and reason != job.lifecycle.reason.text:
                    found[workload_id] = reason
                if (is_kept := _is_kept(job, plan)) is not (job.lifecycle.given_up_at_s is None):
                    promises[workload_id] = is_kept
            elif service is not None:
                reason = _of_service(service, plan)
                if reason and reason != service.reason:
                    found[workload_id] = reason
        return found, promises


def _is_kept(record: JobRecord, plan: Plan) -> bool:
    """Whether the job's promise, if it has one, is kept by this plan; as before if the policy is not asked about it."""
    if record.bounds.is_paused or record.lifecycle.outcome is not None:
        return record.lifecycle.given_up_at_s is None
    claim = plan.claims.get(record.job.job_id)
    return record.promise.admitted_at_s is None or claim is None or claim.code != "given_up"


def _of_job(record: JobRecord, plan: Plan, topology: Topology) -> str:
    if record.lifecycle.state.is_terminal:
        return ""
    claim = plan.claims.get(record.workload_id)
    if claim is not None and (
        claim.code == "given_up" or (claim.code == "kept_in_time" and _is_untouched(record, plan))
    ):
        return plan.reasons.get(record.workload_id, "")
    if record.replicas:
        return ""
    least = record.bounds.min_workers * record.job.devices_each
    if record.lifecycle.state is JobState.PENDING and not record.job.is_on_functions:
        num_devices = len(topology.machines.device_ids())
        # Of several devices each it matters more that no node has so many.
        is_told = record.job.devices_each > 1 and record.workload_id in plan.no_room
        if least > num_devices and not is_told:
            return f"needs at least {least} devices, and the platform has {num_devices}"
    return plan.no_room.get(record.workload_id) or plan.reasons.get(record.workload_id, "")


def _is_untouched(record: JobRecord, plan: Plan) -> bool:
    """Whether the job holds what it is to have, and its reason is not why its group was changed last: what the policy
    says of its time then replaces that its promise was given up."""
    wanted = plan.allocations.get(record.workload_id)
    if wanted is None or record.lifecycle.reason.change is not None:
        return False
    return wanted.num_devices == sum(len(replica.device_ids) for replica in record.replicas)


def _of_service(record: ServiceRecord, plan: Plan) -> str:
    if not record.is_served or record.replicas:
        return ""
    if record.workload_id in plan.no_room:
        return f"no replica: {plan.no_room[record.workload_id]}"
    if record.service.share is None and record.workload_id not in plan.claims:
        # Where it waited and is not asked any more it is idle again.
        return with_service_state(record).reason if record.load_at_s is not None and not record.queued else ""
    # It is scaled to zero or waits for room on a device: only the policy knows which.
    return plan.reasons.get(record.workload_id) or with_service_state(record).reason


class HangWatch:
    """`due_s`: when each watched workload would count as hung. It may be too early, never too late.

    It depends on the record and on when the control plane began to watch; the second is read when the time comes.
    """

    def __init__(self, state: PlatformState) -> None:
        self._state = state
        self.due_s: dict[WorkloadId, float] = {}

    def mark_changed(self, workload_ids: Iterable[WorkloadId]) -> None:
        """The records of these workloads have changed."""
        state = self._state
        for workload_id in workload_ids:
            record = state.jobs.get(workload_id) or state.services.get(workload_id)
            due_s = None if record is None or not _is_watched(record) else hung_at_s(record, state)
            if due_s is not None:
                self.due_s[workload_id] = due_s
            elif workload_id in self.due_s:
                del self.due_s[workload_id]

    def news(self, now_s: float) -> list[Event]:
        """An event for each workload that hangs at this instant and did not before."""
        passed = [workload_id for workload_id, due_s in self.due_s.items() if due_s <= now_s]
        self.mark_changed(passed)
        hung = [workload_id for workload_id in passed if self.due_s.get(workload_id, math.inf) <= now_s]
        return [
            event
            for workload_id in sorted(hung, key=self._state.place_of)
            for event in hang_events(record_of(self._state, workload_id), self._state, now_s)
        ]


def _is_watched(record: JobRecord | ServiceRecord) -> bool:
    """Whether there is a time after which it counts as hung."""
    if isinstance(record, ServiceRecord):
        return record.service.start_timeout_s > 0.0
    return record.job.start_timeout_s > 0.0 or record.job.stall_timeout_s != 0.0


def mark_changed(workload_ids: Collection[WorkloadId], *memories: Worklist | WaitingReasons | HangWatch) -> None:
    """Tell each of them that the records of these workloads have changed."""
    for memory in memories:
        memory.mark_changed(workload_ids)
