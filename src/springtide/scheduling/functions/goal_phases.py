"""The work left of a job on functions, as phases with one batch size each, and the limits and the aim of its goal."""

from __future__ import annotations

import math

import msgspec

from springtide.core.decision import JobView
from springtide.core.function_search import FunctionSearch, batch_at, steps_of
from springtide.solvers.search.phase_choice import CHEAPEST, FASTEST, Aim, GoalLimits

# An open stream is planned so far ahead.
STREAM_HORIZON_S = 3600.0
# Steps have to be so many times as fast as samples arrive, so that a backlog is worked off.
STREAM_HEADROOM = 1.2
# A job of unknown length is planned over so many steps.
_UNKNOWN_STEPS = 1000.0
# This part of every limit is kept in reserve: a run takes a moment to end, and its cost is known a moment late.
_RESERVE_FRACTION = 0.005
_RESERVE_S = 1.0


class PhaseStretch(msgspec.Struct, frozen=True, kw_only=True):
    """So many steps of one batch size."""

    global_batch_size: int
    num_steps: float


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """The work left: its stretches, the present one first, and whether they are known or only assumed."""

    stretches: tuple[PhaseStretch, ...]
    is_known: bool = True
    keeps_up_s: float | None = None

    @property
    def num_steps(self) -> float:
        """The steps of all stretches."""
        return sum(stretch.num_steps for stretch in self.stretches)


def rest_of(view: JobView) -> Rest:
    """The work that is left for a job; at least one step."""
    job = view.job
    batch = view.global_batch_size or job.global_batch_size
    if job.stream:
        return _rest_of_stream(view, batch)
    total = view.total_steps if view.total_steps is not None else job.total_steps
    if job.batch_schedule:
        num_samples = job.num_samples or _samples_of(view, total)
        if num_samples is not None:
            return Rest(stretches=_stretches(view, num_samples))
    elif total is None and job.num_samples:
        total = steps_of((), job.num_samples, job.num_epochs, batch)
    if total is None:
        return Rest(stretches=(PhaseStretch(global_batch_size=batch, num_steps=_UNKNOWN_STEPS),), is_known=False)
    return Rest(stretches=(PhaseStretch(global_batch_size=batch, num_steps=float(max(1, total - view.progress.step))),))


def limits_of(view: JobView, rest: Rest, now_s: float, end_s: float, end_usd: float) -> GoalLimits:
    """Time and money left, less what the end of the run takes; an open stream has to keep up with samples instead."""
    goal = view.job.goal
    left_s, left_usd = math.inf, math.inf
    if goal.deadline_s is not None:
        reserve_s = _RESERVE_FRACTION * max(0.0, goal.deadline_s - view.submitted_at_s) + _RESERVE_S
        left_s = goal.deadline_s - now_s - reserve_s - end_s
    if goal.budget_usd is not None:
        left_usd = goal.budget_usd * (1.0 - _RESERVE_FRACTION) - view.spent_usd - end_usd
    if rest.keeps_up_s is not None:
        left_s = min(left_s, rest.keeps_up_s)
    if not rest.is_known:
        left_s = left_usd = math.inf
    return GoalLimits(left_s=left_s, left_usd=left_usd)


def aim_of(view: JobView, rest: Rest, second_usd: float) -> Aim:
    """What to minimise: dollars within a deadline or at a stream's pace, seconds within a budget or at any price.

    Without a goal both count, a second as much as `second_usd`.
    """
    goal = view.job.goal
    if rest.is_known and goal.is_fastest:
        return FASTEST
    if rest.keeps_up_s is not None or (rest.is_known and goal.deadline_s is not None):
        return CHEAPEST
    if rest.is_known and goal.budget_usd is not None:
        return FASTEST
    return Aim(usd_weight=1.0, second_weight=second_usd)


def present_factor(view: JobView, search: FunctionSearch) -> float:
    """How large the model is now over how large it was profiled, as last measured."""
    for measured in reversed(view.learnt.measurements):
        if measured.gradient_bytes > 0 and search.model.parameter_bytes > 0:
            return measured.gradient_bytes / search.model.parameter_bytes
    return 1.0


def _rest_of_stream(view: JobView, batch: int) -> Rest:
    stream = view.progress.stream
    if stream is not None and stream.is_closed:
        left = max(1.0, stream.num_samples / batch - view.progress.step)
        return Rest(stretches=(PhaseStretch(global_batch_size=batch, num_steps=float(math.ceil(left))),))
    if stream is None or stream.arrivals_per_s <= 0:
        return Rest(stretches=(PhaseStretch(global_batch_size=batch, num_steps=_UNKNOWN_STEPS),), is_known=False)
    num_steps = max(1.0, stream.arrivals_per_s * STREAM_HORIZON_S / batch)
    keeps_up_s = num_steps * batch / (STREAM_HEADROOM * stream.arrivals_per_s)
    return Rest(stretches=(PhaseStretch(global_batch_size=batch, num_steps=num_steps),), keeps_up_s=keeps_up_s)


def _stretches(view: JobView, num_samples: int) -> tuple[PhaseStretch, ...]:
    """The epochs that are left, neighbours of one batch size together; the present one from its next step on."""
    job = view.job
    found: list[list[float]] = []
    behind = 0
    for epoch in range(job.num_epochs):
        batch = batch_at(job.batch_schedule, epoch, job.global_batch_size)
        steps = -(-num_samples // batch)
        left = min(steps, behind + steps - view.progress.step)
        behind += steps
        if left <= 0:
            continue
        if found and found[-1][0] == batch:
            found[-1][1] += left
        else:
            found.append([batch, left])
    if not found:
        found.append([batch_at(job.batch_schedule, job.num_epochs - 1, job.global_batch_size), 1])
    return tuple(PhaseStretch(global_batch_size=int(batch), num_steps=float(left)) for batch, left in found)


def _samples_of(view: JobView, total_steps: int | None) -> int | None:
    """The fewest samples with which all epochs have so many steps."""
    if total_steps is None:
        return None
    job = view.job
    low, high = 1, total_steps * max(job.global_batch_size, *(p.global_batch_size for p in job.batch_schedule))
    while low < high:
        middle = (low + high) // 2
        if steps_of(job.batch_schedule, middle, job.num_epochs, job.global_batch_size) < total_steps:
            low = middle + 1
        else:
            high = middle
    return low
