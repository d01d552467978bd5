"""Edits of records that transitions and effects share: find a record, put it back, derive its state."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from springtide.control.records import (
    JobRecord,
    PlatformState,
    Record,
    ReplicaRecord,
    ReplicaState,
    ServiceRecord,
    ServiceState,
    StateReason,
    WorkloadRecord,
)
from springtide.core.actions import StartReplica
from springtide.core.events import JobEdited, JobStalled
from springtide.core.job_parts import DeadlinePromise, JobProgress
from springtide.core.quantities import format_duration
from springtide.core.workload import InferenceService, JobState, ReplicaId, WorkloadId

CRASH_WINDOW_S = 600.0
FIRST_BACK_OFF_S = 1.0
LONGEST_BACK_OFF_S = 60.0


def back_off_s(num_crashes: int) -> float:
    """How long a workload waits before its next start, in seconds, after this many with_recent crashes (at least 1)."""
    return float(min(LONGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2 ** (num_crashes - 1)))


def with_recent(moments_s: tuple[float, ...], now_s: float) -> tuple[float, ...]:
    """Those of the moments that lie within CRASH_WINDOW_S of `now_s`, and `now_s`."""
    return (*(at_s for at_s in moments_s if at_s > now_s - CRASH_WINDOW_S), now_s)


def times_text(count: int) -> str:
    """`once`, `2 times`."""
    return "once" if count == 1 else f"{count} times"


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


def with_replica(record: WorkloadRecord, changed: ReplicaRecord) -> WorkloadRecord:
    """The record with one replica changed."""
    replicas = tuple(changed if r.replica_id == changed.replica_id else r for r in record.replicas)
    if isinstance(record, JobRecord):
        return replace(record, replicas=replicas)
    return with_service_state(replace(record, replicas=replicas))


def without_replica(record: WorkloadRecord, gone: ReplicaRecord, now_s: float) -> WorkloadRecord:
    """The record without a replica that is gone, its device-seconds charged."""
    replicas = tuple(r for r in record.replicas if r.replica_id != gone.replica_id)
    service_s = record.finished_service_s + now_s - gone.started_at_s
    if isinstance(record, JobRecord):
        record = replace(
            record,
            replicas=replicas,
            spent=replace(record.spent, finished_service_s=service_s),
            group=record.group.without((gone.replica_id,)),
        )
        return settled(record)
    return with_service_state(replace(record, replicas=replicas, finished_service_s=service_s))


def all_lost(record: JobRecord, starts_at_s: float, reason: str) -> JobRecord:
    """The job after the loss of every worker that held its state: the remaining workers stop and it starts again."""
    return replace(
        record,
        lifecycle=replace(
            record.lifecycle,
            state=JobState.PREEMPTING if record.replicas else JobState.PENDING,
            reason=StateReason(reason),
        ),
        group=record.group.dissolved(),
        restarts=replace(record.restarts, starts_at_s=starts_at_s),
    )


def count_loss(record: JobRecord, reason: str, now_s: float, *, is_fault: bool) -> JobRecord:
    """The job after the loss of a worker. Survivors go on; without any, a fault counts against `max_restarts`."""
    if record.group.state_holders and record.job.elastic:
        losses = with_recent(record.restarts.losses_at_s, now_s)
        return replace(
            record,
            restarts=replace(record.restarts, losses_at_s=losses, grows_at_s=now_s + back_off_s(len(losses))),
            lifecycle=replace(record.lifecycle, reason=StateReason(reason)),
        )
    if not is_fault:
        reason = f"restarts from its checkpoint, no worker is left: {reason}"
        return all_lost(record, now_s + FIRST_BACK_OFF_S, reason)
    return crashed(record, reason, now_s)


def crashed(record: JobRecord, reason: str, now_s: float, *, num_hangs: int = 0) -> JobRecord:
    """The job after a fault that ends all its workers: it starts again from its checkpoint, or has failed too often.

    `num_hangs`: it has hung, this often without getting further.
    """
    crashes = with_recent(record.restarts.crashes_at_s, now_s)
    record = replace(
        record, restarts=replace(record.restarts, crashes_at_s=crashes, num_restarts=record.restarts.num_restarts + 1)
    )
    count, most = max(len(crashes), num_hangs), record.job.max_restarts
    if count > most:
        during = "in 10 minutes" if len(crashes) == count else "without a further step"
        record = ended(record, JobState.FAILED, f"crashed {times_text(count)} {during}: {reason}")
        return replace(record, group=replace(record.group, is_broken=False))
    wait_s = back_off_s(count)
    return all_lost(record, now_s + wait_s, f"restarting in {wait_s:.0f} s after a crash ({count} of {most}): {reason}")


def ended(record: JobRecord, outcome: JobState, reason: str) -> JobRecord:
    """The job when it is known how it ends."""
    return replace(record, lifecycle=replace(record.lifecycle, outcome=outcome, outcome_reason=reason))


def stalled(record: JobRecord, event: JobStalled, now_s: float) -> JobRecord:
    """The job when it has gone without a step for too long, and what its owner wants done then."""
    reason = f"no step for more than {format_duration(event.timeout_s)}, {last_step_text(record.progress)}"
    match record.job.on_stall:
        case "fail":
            return ended(record, JobState.FAILED, reason)
        case "restart":
            return hung(record, reason, now_s)
    return replace(
        record,
        progress=replace(record.progress, stalled_since_s=event.since_s),
        lifecycle=replace(record.lifecycle, reason=StateReason(reason)),
    )


def last_step_text(progress: JobProgress) -> str:
    """`the last was 480 of 1000`."""
    return f"the last was {progress.step}" + (f" of {progress.total_steps}" if progress.total_steps else "")


def hung(record: JobRecord, reason: str, now_s: float) -> JobRecord:
    """The job when it hung and is restarted. Hangs lie further apart than crashes: they count until it gets further."""
    restarts, step = record.restarts, record.progress.step
    is_further = restarts.num_hangs == 0 or step > restarts.hung_at_step
    restarts = replace(
        restarts,
        num_hangs=1 if is_further else restarts.num_hangs + 1,
        hung_at_step=step if is_further else restarts.hung_at_step,
    )
    return crashed(replace(record, restarts=restarts), reason, now_s, num_hangs=restarts.num_hangs)


def edited(record: JobRecord, event: JobEdited, now_s: float) -> JobRecord:
    """The job with its owner's changes. A promise ends with the deadline that it was made for."""
    job = record.job
    if event.max_restarts is not None:
        job = replace(job, max_restarts=event.max_restarts)
    if event.accepted and job.container is not None:
        job = replace(job, container=replace(job.container, accepted=event.accepted))
    if event.goal is None:
        return replace(record, job=job)
    record = replace(
        record, job=replace(job, goal=event.goal), bounds=replace(record.bounds, num_edits=record.bounds.num_edits + 1)
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
    """The job in its next state if its last replica is gone: PENDING, or PAUSED if it is to hold no device."""
    if record.replicas or record.state.is_terminal:
        return record
    if record.state in (JobState.PREEMPTING, JobState.STARTING):
        record = replace(record, lifecycle=replace(record.lifecycle, state=JobState.PENDING))
    if record.bounds.is_paused and record.state is JobState.PENDING:
        step = record.saved.checkpoint.step if record.saved.checkpoint else 0
        reason = record.bounds.pause_reason or f"paused by its owner at step {step}"
        record = replace(record, lifecycle=replace(record.lifecycle, state=JobState.PAUSED, reason=StateReason(reason)))
    return record


def with_service_state(record: ServiceRecord) -> ServiceRecord:
    """The service with the state and the reason that follow from its replicas."""
    num_ready = sum(r.state is ReplicaState.READY for r in record.replicas)
    num_starting = sum(r.state is ReplicaState.STARTING for r in record.replicas)
    if record.is_removed:
        reason = "removed by its owner" if not record.replicas else "draining before removal"
        return replace(record, state=ServiceState.REMOVED, reason=reason)
    if record.state is ServiceState.FAILED:
        return record
    if num_ready:
        return replace(record, state=ServiceState.READY, reason=f"{num_ready} of {record.max_replicas} replicas ready")
    if num_starting:
        return replace(record, state=ServiceState.STARTING, reason="the first replica is loading")
    return replace(record, state=ServiceState.IDLE, reason="no replica: scaled to zero until the next request")


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
        progress=replace(record.progress, step=first.restore.step if first.restore else 0, stalled_since_s=None),
        runs_as=replace(record.runs_as, plan=None),
    )
