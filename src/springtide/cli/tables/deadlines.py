"""Deadlines as text: when they are, whether they are promised, whether they were met."""

from __future__ import annotations

from springtide.core.quantities import format_duration
from springtide.core.status.platform import JobStatus
from springtide.core.workload import JobState


def deadline_text(job: JobStatus, now_s: float | None = None) -> str:
    """For an ended job, whether it met its deadline and by how much; for others, when the deadline is."""
    if job.deadline_at_s is None:
        return ""
    if job.state == JobState.REJECTED:
        return f"{format_duration(job.deadline_at_s - job.submitted_at_s)} after it was submitted"
    if job.ended_at_s is not None:
        spare_s = job.deadline_at_s - job.ended_at_s
        if job.state == JobState.SUCCEEDED:
            kept = f"met with {format_duration(spare_s)} to spare"
            return kept if spare_s >= 0 else f"missed by {format_duration(-spare_s)}"
        # A job that was refused, cancelled or failed has neither met nor missed its deadline.
        return f"ended {format_duration(abs(spare_s))} {'before' if spare_s >= 0 else 'after'} it"
    if now_s is None:
        return ""
    left_s = job.deadline_at_s - now_s
    return f"in {format_duration(left_s)}" if left_s >= 0 else f"{format_duration(-left_s)} ago"


def promise_text(job: JobStatus, now_s: float) -> str:
    """What the deadline of a job that has not ended is; empty without one."""
    if job.deadline_at_s is None or JobState(job.state).is_terminal:
        return ""
    if job.given_up_at_s is not None:
        return f"(promised, but its plan misses it for {format_duration(max(0.0, now_s - job.given_up_at_s))})"
    return "(promised)" if job.is_promised else "(aimed at, not promised)"


def promise_line(job: JobStatus) -> str:
    """Whether the deadline of a job that was just submitted is promised, or what that waits for; empty without one."""
    if job.deadline_at_s is None:
        return ""
    if job.promised_if is not None:
        return f"  {job.promised_if.text()}"
    told = "promised" if job.is_promised else "aimed at, not promised"
    return f"  its deadline in {format_duration(job.deadline_at_s - job.submitted_at_s)} is {told}"
