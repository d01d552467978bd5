"""Edits of records that transitions and effects share, and what the actions of reconciling do."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from springtide.control.records import (
    JobRecord,
    PlatformState,
    Record,
    ReplicaRecord,
    ReplicaState,
    RunShape,
    ServiceRecord,
    ServiceState,
    StateReason,
    WorkloadRecord,
)
from springtide.control.releases.steps import release_text
from springtide.core.actions import StartReplica, StopReplica
from springtide.core.events import JobEdited, JobsArchived, MoveFailed, MoveRequested, ReplicaReady, ServicesArchived
from springtide.core.functions import Bill, Usage
from springtide.core.job_parts import DeadlinePromise, JobMove, LearntSpeed
from springtide.core.resources import NodeId
from springtide.core.workload import InferenceService, JobState, MachineRun, ReplicaId, WorkloadId

# How long the workers of an ended job may take to exit before they are killed. Nothing they hold is needed any more.
END_GRACE_S = 2.0
HUNG = "it was not ready in time"


def record_of(state: PlatformState, workload_id: WorkloadId) -> WorkloadRecord:
    """The record of a workload that exists."""
    job = state.jobs.get(workload_id)
    return job if job is not None else state.services[workload_id]


def find(
    state: PlatformState, workload_id: WorkloadId, replica_id: ReplicaId
) -> tuple[WorkloadRecord | None, ReplicaRecord | None]:
    """The workload's record and its replica; None for each that does not exist."""
    record = state.jobs.get(workload_id) or state.services.get(workload_id)
    if record is None:
        return None, None
    return record, next((r for r in record.replicas if r.replica_id == replica_id), None)


def put(state: PlatformState, record: WorkloadRecord) -> None:
    """Store a changed record."""
    if isinstance(record, JobRecord):
        state.jobs[record.workload_id] = record
    else:
        state.services[record.workload_id] = record


def node_of(state: PlatformState, replica: ReplicaRecord) -> NodeId:
    """The node of the replica's device; empty if it is not there any more."""
    return state.topology().node_of.get(replica.device_id, NodeId(""))


def with_replica(record: WorkloadRecord, changed: ReplicaRecord) -> WorkloadRecord:
    """The record with one replica changed."""
    replicas = tuple(changed if r.replica_id == changed.replica_id else r for r in record.replicas)
    if isinstance(record, JobRecord):
        return replace(record, replicas=replicas)
    return with_service_state(replace(record, replicas=replicas))


def with_hold(replica: ReplicaRecord, reason: str, now_s: float, *, is_stuck: bool = False) -> ReplicaRecord:
    """The replica when its start is held up, or (no reason) is not any more. Its time counts from then, or if stuck."""
    begins = not reason or (is_stuck and not replica.is_stuck)
    began_at_s = now_s if begins else replica.began_at_s
    return replace(replica, held_up_by=reason, is_stuck=is_stuck, began_at_s=began_at_s)


def with_readiness(replica: ReplicaRecord, event: ReplicaReady, now_s: float) -> ReplicaRecord:
    """The replica when it is warm. A hold is over then, also if no event has said so."""
    replica = with_hold(replica, "", now_s) if replica.held_up_by else replica
    return replace(
        replica,
        state=ReplicaState.READY,
        address=event.address,
        phases_s=event.phases_s,
        device_seen=event.device_seen,
    )


def without_replica(record: WorkloadRecord, gone: ReplicaRecord, now_s: float) -> WorkloadRecord:
    """The record without a replica that is gone, its device-seconds charged."""
    replicas = tuple(r for r in record.replicas if r.replica_id != gone.replica_id)
    service_s = gone.charged(record.finished_service_s, now_s)
    if isinstance(record, JobRecord):
        record = replace(
            record,
            replicas=replicas,
            spent=replace(record.spent, finished_service_s=service_s),
            group=record.group.without((gone.replica_id,)),
        )
        return settled(record)
    return with_service_state(replace(record, replicas=replicas, finished_service_s=service_s))


def ended(record: JobRecord, outcome: JobState, reason: str) -> JobRecord:
    """The job when it is known how it ends."""
    return replace(record, lifecycle=replace(record.lifecycle, outcome=outcome, outcome_reason=reason))


def edited(record: JobRecord, event: JobEdited, now_s: float) -> JobRecord:
    """The job with its owner's changes. A promise ends with the deadline that it was made for."""
    job = record.job
    if event.max_restarts is not None:
        job = replace(job, max_restarts=event.max_restarts)
    if event.accepted and job.container is not None:
        job = replace(job, container=replace(job.container, accepted=event.accepted))
    if event.goal is None:
        return replace(record, job=job)
    is_same = event.goal.is_hard and event.goal.deadline_s == job.goal.deadline_s
    record = replace(
        record,
        job=replace(job, goal=event.goal),
        bounds=replace(record.bounds, num_edits=record.bounds.num_edits + 1),
        lifecycle=record.lifecycle if is_same else replace(record.lifecycle, given_up_at_s=None),
    )
    if not event.goal.is_hard:
        return replace(record, promise=DeadlinePromise())
    if event.promised_finish_s is not None:
        admitted_at_s = now_s if record.promise.admitted_at_s is None else record.promise.admitted_at_s
        return replace(
            record,
            promise=DeadlinePromise(admitted_at_s=admitted_at_s, promised_finish_s=event.promised_finish_s),
        )
    return record


def differs_in_share(old: InferenceService, new: InferenceService) -> bool:
    """Whether the two differ only in their share and what follows from it; both need to have one."""
    if old.share is None or new.share is None:
        return False
    return old == replace(new, share=old.share, capacity_per_s=old.capacity_per_s, revision=old.revision)


def settled(record: JobRecord) -> JobRecord:
    """The job in its next state if its last replica is gone: PENDING, or PAUSED if it is to hold no device.

    One that is moving is on functions then.
    """
    if record.replicas or record.state.is_terminal:
        return record
    if record.move is not None and record.is_moving and record.lifecycle.outcome is None:
        record = moved(record)
    if record.state in (JobState.PREEMPTING, JobState.STARTING):
        record = replace(record, lifecycle=replace(record.lifecycle, state=JobState.PENDING))
    if record.bounds.is_paused and record.state is JobState.PENDING:
        step = record.saved.checkpoint.step if record.saved.checkpoint else 0
        reason = record.bounds.pause_reason or f"paused by its owner at step {step}"
        record = replace(record, lifecycle=replace(record.lifecycle, state=JobState.PAUSED, reason=StateReason(reason)))
    return record


def with_move(record: JobRecord, event: MoveRequested | MoveFailed) -> JobRecord | None:
    """The job when its move is asked for, or cannot be made; None if that does not concern it any more."""
    if record.lifecycle.outcome is not None or record.is_over:
        return None
    if isinstance(event, MoveRequested):
        move = JobMove(
            menu=event.menu,
            reason=event.reason,
            usd_per_device_hour=event.usd_per_device_hour,
            is_automatic=event.is_automatic,
        )
        return None if record.job.is_on_functions or record.is_moving else replace(record, move=move)
    is_newest = event.generation == record.group.generation
    return returned(record, event.error) if is_newest and record.job.machine_run is not None else None


def moved(record: JobRecord) -> JobRecord:
    """The job as one on functions. No worker is left, and what was learnt by number of workers says nothing there."""
    move, job, checkpoint = record.move, record.job, record.saved.checkpoint
    assert move is not None
    step = 0 if checkpoint is None else checkpoint.step
    cost_usd = record.spent.finished_service_s / 3600.0 * move.usd_per_device_hour
    told = f"moved to functions after step {step}: {move.reason}"
    on_functions = replace(
        job,
        menu=move.menu,
        min_workers=1,
        max_workers=1,
        profile_steps_per_s={},
        profiles={},
        belief=None,
        confidence=None,
        place_reason=told,
        machine_run=MachineRun(step=step, cost_usd=cost_usd),
    )
    bounds = record.bounds
    return replace(
        record,
        job=on_functions,
        bounds=replace(bounds, min_workers=1, max_workers=1),
        lifecycle=replace(record.lifecycle, reason=StateReason(told)),
        runs_as=RunShape(),
        # Functions count their steps alone.
        progress=replace(record.progress, equivalent_steps=None, total_equivalent_steps=None, exact_obstacle=""),
        learnt=LearntSpeed(),
        spent=replace(record.spent, usage=Usage(machines_usd=cost_usd), bill=Bill(machines_usd=cost_usd)),
        move=replace(move, state="done", before=job, bounds=bounds),
    )


def returned(record: JobRecord, error: str) -> JobRecord:
    """The job on machines again, since no function can start from its checkpoint; its coordinator is to stop."""
    move, job = record.move, record.job
    assert move is not None
    assert move.before is not None
    assert move.bounds is not None
    told = f"it stays on machines, for it could not move to functions: {error}"
    bounds = replace(record.bounds, min_workers=move.bounds.min_workers, max_workers=move.bounds.max_workers)
    return replace(
        record,
        job=replace(move.before, goal=job.goal, max_restarts=job.max_restarts, place_reason=told),
        bounds=bounds,
        lifecycle=replace(
            record.lifecycle,
            state=JobState.PREEMPTING if record.replicas else JobState.PENDING,
            reason=StateReason(told),
        ),
        group=record.group.dissolved(),
        runs_as=RunShape(),
        spent=replace(record.spent, usage=Usage(), bill=Bill()),
        move=replace(move, state="failed", before=None, bounds=None),
    )


def with_service_state(record: ServiceRecord) -> ServiceRecord:
    """The service with the state and the reason that follow from its replicas."""
    new = None if record.release is None else record.release.revision
    num_ready = sum(r.is_ready and r.revision != new for r in record.replicas)
    num_starting = sum(r.state is ReplicaState.STARTING and r.revision != new for r in record.replicas)
    if record.is_removed:
        reason = "removed by its owner" if not record.replicas else "draining before removal"
        return replace(record, state=ServiceState.REMOVED, reason=reason)
    if record.state is ServiceState.FAILED:
        return record
    state, reason = ServiceState.IDLE, _without_replica(record)
    if num_ready:
        # Of those that are there or are guaranteed: it may have more, and needs none of these now.
        num_due = max(record.min_replicas, num_ready + num_starting)
        state, reason = ServiceState.READY, f"{num_ready} of {num_due} replicas ready"
        if record.old_revision is not None:
            reason += f"; revision {record.service.revision} replaces the replicas of revision {record.old_revision}"
    elif num_starting:
        state, reason = ServiceState.STARTING, "the first replica is loading"
        if record.proven is not None and record.proven.revision < record.service.revision:
            reason += f" revision {record.service.revision}; nothing answers until then, requests wait"
    elif record.refusals:
        reason = f"no replica: {record.refusals[-1].reason}"
    elif record.crash_reason:
        reason = f"no replica: the last one crashed: {record.crash_reason}"
    told = [text for text in (reason, release_text(record), record.rolled_back) if text]
    return replace(record, state=state, reason="; ".join(told))


def _without_replica(record: ServiceRecord) -> str:
    """Why a service has no replica. Whether the next request would get one at once is for the policy to say."""
    if record.queued:
        return "no replica: requests wait for one"
    if record.min_replicas:
        return "no replica: its guaranteed minimum waits for devices"
    return "no replica: scaled to zero, and no request waits"


def with_new_replicas(record: Record, started: Sequence[StartReplica], now_s: float) -> Record:
    """The record with the replicas that these actions start at `now_s`."""
    replicas = tuple(
        ReplicaRecord(
            replica_id=action.replica_id,
            device_id=action.device_id,
            state=ReplicaState.STARTING,
            started_at_s=now_s,
            generation=action.generation,
            revision=action.workload.revision if isinstance(action.workload, InferenceService) else 0,
            restore=action.restore,
            share=action.share,
            more_devices=action.more_devices,
            why="" if action.change is None else action.change.why,
        )
        for action in started
    )
    return replace(record, replicas=record.replicas + replicas, next_replica=record.next_replica + len(started))


def with_new_workers(record: JobRecord, started: Sequence[StartReplica], now_s: float) -> JobRecord:
    """The job with the workers that these actions start, all of one generation. A newer generation is a fresh start."""
    first = started[0]
    is_fresh = first.generation > record.group.generation
    record = with_new_replicas(record, started, now_s)
    if not is_fresh:
        return record
    # From now on reports of older generations are stale.
    return replace(
        record,
        group=replace(
            record.group,
            generation=first.generation,
            oldest_generation=first.generation,
            is_broken=False,
            state_holders=(),
        ),
        lifecycle=replace(record.lifecycle, state=JobState.STARTING, reason=StateReason(first.reason, first.change)),
        progress=replace(
            record.progress,
            step=first.restore.step if first.restore else 0,
            stalled_since_s=None,
            diverged_at_step=None,
        ),
        runs_as=replace(record.runs_as, plan=None),
    )


def archive(state: PlatformState, event: JobsArchived | ServicesArchived) -> None:
    """Remove workloads from the state; one that is not over, or still holds a device, stays."""
    if isinstance(event, JobsArchived):
        for job_id in event.job_ids:
            if job_id in state.jobs and job_id not in state.jobs.live:
                del state.jobs[job_id]
    else:
        for service_id in event.service_ids:
            if service_id in state.services and service_id not in state.services.live:
                del state.services[service_id]


def charge_nothing(state: PlatformState, for_s: float, now_s: float) -> None:
    """Leave the last `for_s` seconds out of what is charged for the workers that there are: the machine was off."""
    for record in list(state.live_records()) if for_s > 0.0 else ():
        replicas = tuple(replace(r, started_at_s=min(now_s, r.started_at_s + for_s)) for r in record.replicas)
        if isinstance(record, JobRecord):
            state.jobs[record.workload_id] = replace(record, replicas=replicas)
        else:
            state.services[record.workload_id] = replace(record, replicas=replicas)


def stop_of(record: JobRecord | ServiceRecord, replica: ReplicaRecord, grace_s: float, reason: str) -> StopReplica:
    """The action that ends the replica, after `grace_s` seconds at the latest."""
    return StopReplica(
        workload_id=record.workload_id, replica_id=replica.replica_id, grace_s=grace_s, cause="plan", reason=reason
    )
