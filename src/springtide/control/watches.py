"""Which workloads hang: since when nothing was seen of them, how long that may last, and the event that says so.

All of it follows from records and the instant of a step. The controller adds the events to its step, so a replay has
them already and finds no others.
"""

from __future__ import annotations

from springtide.control.records import (
    JobRecord,
    PlatformState,
    ReplicaRecord,
    ReplicaState,
    ServiceRecord,
    WorkloadRecord,
)
from springtide.control.releases.steps import version_of
from springtide.core.events import Event, JobStalled, StartTimedOut
from springtide.core.workload import JobState

# A job whose owner sets no time stalls after the longest of these: a fixed time, that many of its steps, and that many
# times the longest it has gone without a step before (an evaluation, a long checkpoint).
LEAST_STALL_S = 600.0
STALL_STEPS = 50
STALL_GAPS = 2.0


def stall_timeout_s(record: JobRecord) -> float:
    """How long the job may go without a step; 0: it is not watched."""
    set_s = record.job.stall_timeout_s
    if set_s is not None:
        return set_s
    step_s = max((measured.step_s for measured in record.learnt.step_times), default=0.0)
    speed = record.learnt.samples_per_s
    if speed:
        step_s = max(step_s, record.batch_size / speed)
    return max(LEAST_STALL_S, STALL_STEPS * step_s, STALL_GAPS * record.progress.longest_gap_s)


def seen_at_s(record: JobRecord, state: PlatformState) -> float:
    """When the job was last seen to progress, or last had a reason not to."""
    return max(record.progress.progress_at_s, record.changes.resizing_since_s, state.watched_from_s)


def hung_at_s(record: WorkloadRecord, state: PlatformState) -> float | None:
    """When the workload hangs unless something is seen of it; None where it is not watched."""
    moments = [moment_s for moment_s, _ in _hangs(record, state)]
    return min(moments, default=None)


def hang_events(record: WorkloadRecord, state: PlatformState, now_s: float) -> list[Event]:
    """What of the workload hangs at this instant and did not before."""
    return [event for moment_s, event in _hangs(record, state) if moment_s <= now_s]


def _hangs(record: WorkloadRecord, state: PlatformState) -> list[tuple[float, Event]]:
    """What of the workload may hang: from when on it does, and the event that says so."""
    if isinstance(record, ServiceRecord):
        return _late_starts(record, 0.0, state)
    if record.lifecycle.outcome is not None or record.bounds.is_paused:
        return []
    timeout_s = record.job.start_timeout_s
    if record.state is JobState.STARTING and record.replicas and timeout_s:
        if any(_is_held_up(replica) for replica in record.replicas):
            # Its first step needs all of them.
            return []
        last = max([r for r in record.replicas if r.is_stuck] or record.replicas, key=_began_at_s)
        event = StartTimedOut(workload_id=record.workload_id, replica_id=last.replica_id, timeout_s=timeout_s)
        return [(max(_began_at_s(last), state.watched_from_s) + timeout_s, event)]
    if record.state is JobState.RUNNING:
        return [*_stall(record, state), *_late_starts(record, timeout_s, state)]
    return []


def _late_starts(record: WorkloadRecord, timeout_s: float, state: PlatformState) -> list[tuple[float, Event]]:
    """The replicas that are not ready within this time, of a service within that of their revision."""
    found: list[tuple[float, Event]] = []
    for replica in record.replicas:
        within_s = timeout_s
        if isinstance(record, ServiceRecord):
            within_s = version_of(record, replica.revision).start_timeout_s
        if within_s and replica.state is ReplicaState.STARTING and not (replica.is_hung or _is_held_up(replica)):
            late = StartTimedOut(workload_id=record.workload_id, replica_id=replica.replica_id, timeout_s=within_s)
            found.append((max(_began_at_s(replica), state.watched_from_s) + within_s, late))
    return found


def _is_held_up(replica: ReplicaRecord) -> bool:
    """Whether its start waits for what comes without a person."""
    return bool(replica.held_up_by) and not replica.is_stuck


def _began_at_s(replica: ReplicaRecord) -> float:
    """From when on its start counts: not while the platform on which it is to run holds it up."""
    return replica.started_at_s if replica.began_at_s is None else replica.began_at_s


def _stall(record: JobRecord, state: PlatformState) -> list[tuple[float, Event]]:
    """When the job stalls unless a step comes; empty where that cannot be told, or was told already.

    A script that has reported no step may never do so, and a job on a stream may wait for data. After its last step a
    function may do what it likes for any time, unless its owner has set one.
    """
    job, progress = record.job, record.progress
    is_silent = job.stall_timeout_s == 0.0 or job.stream or (job.is_script and not progress.step)
    is_done = progress.total_steps is not None and progress.step >= progress.total_steps
    if is_silent or progress.stalled_since_s is not None or (is_done and job.stall_timeout_s is None):
        return []
    since_s, timeout_s = seen_at_s(record, state), stall_timeout_s(record)
    event = JobStalled(
        job_id=record.workload_id, generation=record.group.generation, since_s=since_s, timeout_s=timeout_s
    )
    return [(since_s + timeout_s, event)]
