"""Which workloads hang: since when nothing was seen of them, how long that may last, and the event that says so.

All of it follows from records and the instant of a step. The controller adds the events to its step, so a replay has
them already and finds no others.
"""

from __future__ import annotations

from springtide.control.records import JobRecord, PlatformState
from springtide.core.events import Event, JobStalled
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


def hung_at_s(record: JobRecord, state: PlatformState) -> float | None:
    """When the job stalls unless a step comes; None where that cannot be told, or was told already.

    Scripts report no steps, and a job on a stream may wait for data. After its last step a function may do what it
    likes for any time, unless its owner has set one.
    """
    job, progress = record.job, record.progress
    is_training = record.state is JobState.RUNNING and record.lifecycle.outcome is None and not record.bounds.is_paused
    if not is_training or progress.stalled_since_s is not None or job.stream or job.entrypoint.kind == "script":
        return None
    is_done = progress.total_steps is not None and progress.step >= progress.total_steps
    if is_done and job.stall_timeout_s is None:
        return None
    return seen_at_s(record, state) + stall_timeout_s(record)


def hang_event(record: JobRecord, state: PlatformState) -> Event:
    """The event of a workload that hangs."""
    return JobStalled(
        job_id=record.workload_id,
        generation=record.group.generation,
        since_s=seen_at_s(record, state),
        timeout_s=stall_timeout_s(record),
    )
