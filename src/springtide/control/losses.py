"""What becomes of a workload when its workers are lost, crash or hang: pauses, restarts from a checkpoint, and ends."""

from __future__ import annotations

from msgspec.structs import replace

from springtide.control.edits import ended, find, put, settled, with_replica, without_replica
from springtide.control.records import (
    JobRecord,
    PlatformState,
    ReplicaRecord,
    ReplicaState,
    ServiceRecord,
    ServiceState,
    StateReason,
    WorkloadRecord,
)
from springtide.control.releases.parts import Release
from springtide.control.releases.steps import given_up, is_left, with_lost_start
from springtide.core.events import JobFailed, JobStalled
from springtide.core.job_parts import JobProgress, LearntSpeed, NodeRefusal
from springtide.core.quantities import format_duration
from springtide.core.resources import NodeId
from springtide.core.workload import JobState, ReplicaId, WorkloadId

CRASH_WINDOW_S = 600.0
FIRST_BACK_OFF_S = 1.0
LONGEST_BACK_OFF_S = 60.0
# With a checkpoint of more steps a job has trained for too long to be begun anew by itself.
_FIRST_STEPS = 10
# So many crashes of a version of a service of which no replica was ever ready, and it is given up.
MAX_CRASHES = 4


def back_off_s(num_crashes: int) -> float:
    """How long a workload waits before its next start, in seconds, after this many with_recent crashes (at least 1)."""
    return float(min(LONGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2 ** (num_crashes - 1)))


def with_recent(moments_s: tuple[float, ...], now_s: float) -> tuple[float, ...]:
    """Those of the moments that lie within CRASH_WINDOW_S of `now_s`, and `now_s`."""
    return (*(at_s for at_s in moments_s if at_s > now_s - CRASH_WINDOW_S), now_s)


def times_text(count: int) -> str:
    """`once`, `2 times`."""
    return "once" if count == 1 else f"{count} times"


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


def failed(record: JobRecord, event: JobFailed, now_s: float) -> JobRecord:
    """The job when its code has raised; or a plain script with one worker, if its library cannot be resized in place.

    That is begun anew, which only a job is whose checkpoint has at most its first steps: a plain script cannot load it.
    No crash is charged.
    """
    if not event.is_fixed_size:
        return ended(record, JobState.FAILED, event.error)
    if record.bounds.fixed_reason:
        # Another of the workers that are stopped says the same.
        return record
    checkpoint = record.saved.checkpoint
    if checkpoint is not None and checkpoint.step > _FIRST_STEPS:
        told = f"{event.error}; it has trained for long, so give a new job one number of workers, as --workers 1"
        return ended(record, JobState.FAILED, told)
    entrypoint = replace(record.job.entrypoint, library="")
    job = replace(record.job, entrypoint=entrypoint, elastic=False, min_workers=1, max_workers=1)
    bounds = replace(record.bounds, min_workers=1, max_workers=1, fixed_reason=event.error)
    # Of what it has trained nothing counts any more, and its length is not known.
    saved = replace(record.saved, checkpoint=None)
    record = replace(record, job=job, bounds=bounds, saved=saved, progress=JobProgress(), learnt=LearntSpeed())
    return all_lost(record, now_s, "starts again as a plain script")


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


def with_refusal(
    refusals: tuple[NodeRefusal, ...], node_id: NodeId, reason: str, now_s: float
) -> tuple[NodeRefusal, ...]:
    """The refusals with one more, the last of them. Pods that were refused together count once."""
    known = next((r for r in refusals if r.node_id == node_id), None)
    if known is not None and now_s < known.until_s:
        return (*(r for r in refusals if r is not known), known)
    count = 1 if known is None or now_s > known.until_s + CRASH_WINDOW_S else known.count + 1
    pause_s = back_off_s(count)
    reason = f"{reason}; tried there again after {pause_s:.0f} s"
    refusal = NodeRefusal(node_id=node_id, count=count, until_s=now_s + pause_s, reason=reason)
    others = (r for r in refusals if r.node_id != node_id and now_s <= r.until_s + CRASH_WINDOW_S)
    return (*others, refusal)


def count_refusal(record: JobRecord, node_id: NodeId, reason: str, now_s: float) -> JobRecord:
    """The job after a node turned one of its workers away: it starts none there for a pause that grows.

    It goes on with its other workers if these suffice; otherwise it waits, and no crash is charged.
    """
    refusals = with_refusal(record.restarts.refusals, node_id, reason, now_s)
    reason = refusals[-1].reason
    record = replace(record, restarts=replace(record.restarts, refusals=refusals))
    living = [r for r in record.replicas if r.state is not ReplicaState.STOPPING]
    if record.group.state_holders or (record.job.elastic and len(living) >= record.bounds.min_workers):
        return replace(record, lifecycle=replace(record.lifecycle, reason=StateReason(reason)))
    return all_lost(record, now_s, reason)


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


def last_step_text(progress: JobProgress) -> str:
    """`the last was 480 of 1000`."""
    return f"the last was {progress.step}" + (f" of {progress.total_steps}" if progress.total_steps else "")


def service_crashed(record: ServiceRecord, lost: ReplicaRecord, reason: str, now_s: float) -> ServiceRecord:
    """The service after a fault of one of its replicas: a pause, and if none was ever ready the version is given up.

    One that has answered is not: what ends all of its replicas again and again may be trouble of the machine.
    """
    if record.release is not None and lost.revision == record.release.revision:
        return with_lost_start(record, lost, reason, now_s, back_off_s(record.release.num_crashes + 1))
    if is_left(record, lost):
        return record
    crashes = with_recent(record.crashes_at_s, now_s)
    count = max(len(crashes), record.num_hangs)
    record = replace(record, crashes_at_s=crashes, crash_reason=reason, starts_at_s=now_s + back_off_s(count))
    known, service = record.proven, record.service
    ready = {r.revision for r in record.replicas if r.state is ReplicaState.READY and r.replica_id != lost.replica_id}
    # A revision with a ready replica is not in a crash loop, however often others crash.
    if service.revision in ready:
        return record
    is_new = known is not None and known.revision != service.revision
    if known is not None and is_new and lost.revision == service.revision and (lost.is_hung or count >= MAX_CRASHES):
        left = Release(service=service, began_at_s=record.deployed_at_s)
        # What still answers is of the version before and stays.
        past = tuple(each for each in record.past if each.service.revision != known.revision)
        return replace(
            given_up(replace(record, past=past), reason, now_s, revision=left),
            service=known,
            min_replicas=known.min_replicas,
            max_replicas=known.max_replicas,
            crashes_at_s=(),
            num_hangs=0,
            crash_reason="",
            starts_at_s=now_s,
        )
    if count >= MAX_CRASHES and not ready and (known is None or is_new):
        return replace(record, state=ServiceState.FAILED, reason=f"crashed {times_text(count)}: {reason}")
    return record


def is_outside_groups(record: WorkloadRecord, replica: ReplicaRecord) -> bool:
    """Whether the loss of a stopping replica affects no group: it is in none that still trains."""
    if isinstance(record, ServiceRecord):
        return True
    return replica.replica_id not in (*record.group.members, *record.group.previous_members)


def is_expected_to_exit(record: WorkloadRecord, replica: ReplicaRecord) -> bool:
    """Whether the last ResizeJob took the replica out of the group, so that it is expected to exit."""
    if isinstance(record, ServiceRecord):
        return False
    return replica.replica_id in record.group.previous_members and replica.replica_id not in record.group.members


def drop_replica(
    state: PlatformState,
    workload_id: WorkloadId,
    replica: ReplicaRecord,
    now_s: float,
    reason: str = "",
    *,
    refused_by: NodeId | None = None,
) -> None:
    """Remove a service's replica that is gone through no fault of its own. `reason` is what a refusing node said."""
    record, _ = find(state, workload_id, replica.replica_id)
    assert isinstance(record, ServiceRecord)
    if refused_by is not None:
        record = replace(record, refusals=with_refusal(record.refusals, refused_by, reason, now_s))
    put(state, without_replica(record, replica, now_s))


def lose_replica(
    state: PlatformState,
    workload_id: WorkloadId,
    replica_id: ReplicaId,
    reason: str,
    now_s: float,
    *,
    is_fault: bool = True,
    refused_by: NodeId | None = None,
) -> None:
    """Remove a replica that is gone unexpectedly, and charge the loss to its workload, unless a node refused it."""
    record, replica = find(state, workload_id, replica_id)
    if record is None or replica is None:
        return
    if isinstance(record, ServiceRecord):
        put(state, without_replica(service_crashed(record, replica, reason, now_s), replica, now_s))
        return
    was_member = replica_id in (*record.group.members, *record.group.previous_members)
    record = replace(
        record,
        replicas=tuple(r for r in record.replicas if r.replica_id != replica_id),
        group=replace(record.group.without((replica_id,)), is_broken=record.group.is_broken or was_member),
        spent=replace(record.spent, finished_service_s=replica.charged(record.spent.finished_service_s, now_s)),
    )
    if not record.state.is_terminal and record.lifecycle.outcome is None and record.state is not JobState.PREEMPTING:
        if refused_by is not None:
            record = count_refusal(record, refused_by, reason, now_s)
        else:
            record = count_loss(record, reason, now_s, is_fault=is_fault)
    put(state, settled(record))


def start_timed_out(record: WorkloadRecord, late: ReplicaRecord, timeout_s: float, now_s: float) -> WorkloadRecord:
    """The workload when one of its replicas was not ready in time, or a job's first step has not come."""
    within = f"within {format_duration(timeout_s)}"
    if isinstance(record, JobRecord) and record.state is JobState.STARTING and late.is_stuck:
        # Another try would meet the same.
        return settled(ended(record, JobState.FAILED, f"could not start {within}: {late.held_up_by}"))
    if isinstance(record, JobRecord) and record.state is JobState.STARTING:
        return settled(hung(record, f"its first step has not come {within} of its start", now_s))
    late = replace(late, is_hung=True)
    if isinstance(record, JobRecord):
        losses = with_recent(record.restarts.losses_at_s, now_s)
        restarts = replace(record.restarts, losses_at_s=losses, grows_at_s=now_s + back_off_s(len(losses)))
        return with_replica(replace(record, restarts=restarts), late)
    if record.release is None or late.revision != record.release.revision:
        record = replace(record, num_hangs=record.num_hangs + 1)
    reason = f"{late.replica_id} was not ready {within}" + (f": {late.held_up_by}" if late.is_stuck else "")
    return with_replica(service_crashed(record, late, reason, now_s), late)


def diverged(record: JobRecord) -> JobRecord:
    """The job with its end, if its loss was not a finite number and its owner does not want it to go on then."""
    step = record.progress.diverged_at_step
    if step is None or record.job.on_nan != "fail" or record.lifecycle.outcome is not None:
        return record
    return ended(record, JobState.FAILED, f"its loss was not a finite number at step {step} (on_nan=fail)")
