"""When a job is expected to start and end: as its policy plans, or else by playing the policy forward."""

from __future__ import annotations

import msgspec

from springtide.control.quotes.forecast import roll_forward
from springtide.control.quotes.inquiry import known_curve
from springtide.control.records import JobRecord
from springtide.core.decision import Schedule
from springtide.core.workload import JobState
from springtide.service.ports import PlatformLike

_WAITING = frozenset({JobState.PENDING, JobState.PREEMPTING})


class JobForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Moments on the platform's clock, None where not known; `unknown` names jobs whose end is not known.

    `is_planned` says that the policy plans so far ahead itself; otherwise its present plan was played forward.
    """

    start_at_s: float | None = None
    finish_at_s: float | None = None
    is_planned: bool = False
    unknown: tuple[str, ...] = ()


def outlook_of(record: JobRecord, platform: PlatformLike) -> JobForecast | None:
    """Return what is expected of an unfinished job; None for one that has ended or is paused."""
    if record.lifecycle.state.is_terminal or record.bounds.is_paused:
        return None
    snapshot = platform.snapshot()
    mine = next((view for view in snapshot.jobs if view.job.job_id == record.workload_id), None)
    is_known = mine is not None and known_curve(mine) is not None
    planned = platform.view().future.get(record.workload_id)
    if planned and is_known:
        return JobForecast(start_at_s=_start(planned), finish_at_s=planned[-1].end_s, is_planned=True)
    if record.lifecycle.state not in _WAITING:
        return None
    forecast = roll_forward(snapshot, platform.make_policy(), until=record.workload_id)
    start_s = _start(forecast.schedules.get(record.workload_id, ()))
    holders = [view for view in snapshot.jobs if view.job.job_id in snapshot.allocations]
    return JobForecast(
        start_at_s=start_s,
        finish_at_s=forecast.finishes_s.get(record.workload_id),
        unknown=tuple(view.job.name for view in holders if known_curve(view) is None),
    )


def _start(schedule: Schedule) -> float | None:
    return next((run.start_s for run in schedule if run.num_devices), None)
