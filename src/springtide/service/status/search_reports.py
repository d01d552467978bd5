"""The status of a job's search and of its stream: what was tried, what is expected, what searching has cost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from springtide.control.records import JobRecord
from springtide.control.snapshot_views import view_job
from springtide.core.function_search import FunctionMeasurement, FunctionSearch
from springtide.core.functions import FunctionPlan, FunctionService
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.status.search import (
    ExpectedConfiguration,
    SearchPhase,
    SearchStatus,
    StreamStatus,
    TriedConfiguration,
)
from springtide.core.workload import Goal, JobState, TrainingJob, WorkloadId

# The map shows at most so many numbers of workers and memory sizes, evenly spread, beside those that were tried.
MOST_COLUMNS = 16
MOST_ROWS = 12
# Jobs whose status is kept: several readers ask four times a second.
_MAX_KEPT = 64
# A kept status is computed anew after so long even without a measurement, because less work is left by then.
_STALE_S = 5.0


class _Kept(msgspec.Struct, frozen=True):
    record: JobRecord
    at_s: float
    has_map: bool
    status: SearchStatus


class SearchReports:
    """Returns the status of searches, and keeps each while nothing new is measured. Any thread may ask."""

    def __init__(self, service_of: Callable[[], FunctionService | None]) -> None:
        self._service_of = service_of
        self._lock = threading.Lock()
        self._kept: dict[WorkloadId, _Kept] = {}

    def status(self, record: JobRecord, now_s: float, *, with_map: bool = False) -> SearchStatus | None:
        """The search of a job at this instant; None for one that has none."""
        if record.job.search is None:
            return None
        with self._lock:
            kept = self._kept.get(record.workload_id)
        if kept is None or _is_stale(kept, record, now_s) or (with_map and not kept.has_map):
            status = search_status(record, self._service_of(), now_s, with_map=with_map)
            kept = _Kept(record, now_s, with_map, status)
            with self._lock:
                self._kept[record.workload_id] = kept
                while len(self._kept) > _MAX_KEPT:
                    del self._kept[next(iter(self._kept))]
        return kept.status if with_map else replace(kept.status, expected=())


def _is_stale(kept: _Kept, record: JobRecord, now_s: float) -> bool:
    known = kept.record
    is_same = (
        known.learnt.measurements is record.learnt.measurements
        and known.runs_as.plan == record.runs_as.plan
        and known.lifecycle.state is record.lifecycle.state
        and known.batch_size == record.batch_size
        and known.job is record.job
    )
    return not is_same or (known is not record and now_s - kept.at_s > _STALE_S)


def search_status(
    record: JobRecord, service: FunctionService | None, now_s: float, *, with_map: bool = False
) -> SearchStatus:
    """The status of a job's search, from its record and the policy's reasons.

    Without the `service` (the platform is no longer connected to it) only what was measured is known.
    """
    job = record.job
    search, menu = job.search, job.menu
    assert search is not None
    assert menu is not None
    plan = record.runs_as.plan or menu.options[menu.recommended].plan
    is_over = record.lifecycle.state.is_terminal
    goal, reason, has_settled = goal_words(job), record.lifecycle.reason.text, False
    cells: tuple[ExpectedConfiguration, ...] = ()
    error = None
    if service is not None and service.name == menu.service:
        from springtide.scheduling.functions.goal_search import search_step

        if not is_over:
            found = search_step(view_job(record), service, now_s, record.runs_as.plan)
            has_settled = found.has_settled
            if record.runs_as.plan is None and found.next is not None:
                plan = found.next.plan
            # Until its present plan is measured, the reason is why that was chosen; then it is why the search stays.
            is_new = record.runs_as.plan is None or not any(
                one.plan == record.runs_as.plan for one in record.learnt.measurements
            )
            reason = (decided_why(record, plan) if is_new else "") or found.why
        cells, error = expected_of(record, service, now_s, plan)
    tried = tried_of(record.learnt.measurements, search, service, plan if not is_over else None)
    excess_s, excess_usd = excess_of(record.learnt.measurements, job.goal)
    return SearchStatus(
        goal=goal,
        phase=_phase(record, has_settled=has_settled),
        reason=reason,
        num_workers=plan.num_replicas,
        memory_mb=plan.stages[0].memory_mb,
        max_workers=search.space.max_workers,
        sizes_mb=tuple(size.memory_mb for size in search.space.sizes),
        tried=tried,
        expected=cells if with_map else (),
        num_left=sum(one.is_left for one in tried),
        num_earlier=len(search.earlier),
        search_s=excess_s,
        search_usd=excess_usd,
        model_error_fraction=_model_error(tried),
        error_fraction=error,
    )


def decided_why(record: JobRecord, plan: FunctionPlan) -> str:
    """Why the policy chose a plan, if that is what the job's reason is about; else empty."""
    change = record.lifecycle.reason.change
    chosen = None if change is None else change.chosen
    return "" if chosen is None or chosen.plan != plan else chosen.why


def _phase(record: JobRecord, *, has_settled: bool) -> SearchPhase:
    if record.lifecycle.state.is_terminal:
        return "over"
    if not record.learnt.measurements:
        return "waiting" if record.lifecycle.state is not JobState.RUNNING else "searching"
    return "settled" if has_settled else "searching"


def goal_words(job: TrainingJob) -> str:
    """The goal of the search in words, with the owner's deadline and budget."""
    from springtide.scheduling.functions.reasons import goal_words as words

    return words(job.goal, bool(job.stream))


def tried_of(
    measurements: Sequence[FunctionMeasurement],
    search: FunctionSearch,
    service: FunctionService | None,
    running: FunctionPlan | None,
) -> tuple[TriedConfiguration, ...]:
    """Each measured configuration with the step time that the model alone predicts."""
    last_of = {_situation(measured): index for index, measured in enumerate(measurements)}
    tried = []
    for index, measured in enumerate(measurements):
        model_step_s = None
        if service is not None:
            from springtide.perf.functions.workers.belief import plan_model

            known = plan_model(service, search, measured.plan, measured.global_batch_size, measured.gradient_bytes)
            model_step_s = None if known is None else known.step_s
        is_last = last_of[_situation(measured)] == index
        is_running = running is not None and measured.plan == running and index == len(measurements) - 1
        tried.append(
            TriedConfiguration(
                num_workers=measured.plan.num_replicas,
                memory_mb=measured.plan.stages[0].memory_mb,
                global_batch_size=measured.global_batch_size,
                gradient_bytes=measured.gradient_bytes,
                num_steps=measured.num_steps,
                step_s=measured.step_s,
                step_usd=measured.usd,
                deviation_s=measured.deviation_s,
                compute_s=measured.compute_s,
                sync_s=measured.sync_s,
                collective=measured.plan.collective if measured.plan.num_replicas > 1 else "",
                model_step_s=model_step_s,
                is_running=is_running,
                is_left=not is_last or (running is not None and not is_running and index == len(measurements) - 1),
            )
        )
    return tuple(tried)


def _situation(measured: FunctionMeasurement) -> tuple[int, int]:
    """Configurations are compared only within the same batch and the same size of the model."""
    return measured.global_batch_size, measured.gradient_bytes


def excess_of(measurements: Sequence[FunctionMeasurement], goal: Goal) -> tuple[float, float]:
    """Seconds and dollars that the search has cost: what steps of given-up configurations took beyond the best one's.

    Configurations are compared within one batch and model, where the newest counts as kept. The best is the cheapest
    where there is a deadline, the fastest for a budget and for "fastest", and without a goal the one with the least
    product of both.
    """
    best: dict[tuple[int, int], FunctionMeasurement] = {}
    for measured in measurements:
        held = best.get(_situation(measured))
        if held is None or _worth(measured, goal) < _worth(held, goal):
            best[_situation(measured)] = measured
    kept = {_situation(measured): measured for measured in measurements}
    excess_s = excess_usd = 0.0
    for measured in measurements:
        least = best[_situation(measured)]
        if measured is not kept[_situation(measured)]:
            excess_s += measured.num_steps * max(0.0, measured.step_s - least.step_s)
            excess_usd += measured.num_steps * max(0.0, measured.usd - least.usd)
    return excess_s, excess_usd


def _worth(measured: FunctionMeasurement, goal: Goal) -> tuple[float, float]:
    if goal.is_fastest or (goal.deadline_s is None and goal.budget_usd is not None):
        return measured.step_s, measured.usd
    if goal.deadline_s is not None:
        return measured.usd, measured.step_s
    return measured.usd * measured.step_s, measured.usd


def _model_error(tried: Sequence[TriedConfiguration]) -> float | None:
    """The mean error of the model alone over the measurements."""
    errors = [abs(one.model_step_s / one.step_s - 1.0) for one in tried if one.model_step_s and one.step_s > 0]
    return sum(errors) / len(errors) if errors else None


def expected_of(
    record: JobRecord, service: FunctionService, now_s: float, plan: FunctionPlan
) -> tuple[tuple[ExpectedConfiguration, ...], float | None]:
    """The map of expected configurations at the present batch, thinned out, and the median of its errors."""
    from springtide.perf.functions.workers.belief import Belief
    from springtide.perf.functions.workers.surface import WorkSettings
    from springtide.scheduling.functions.goal_phases import present_factor

    job, search = record.job, record.job.search
    assert search is not None
    assert job.menu is not None
    tried = [(one.plan.num_replicas, one.plan.stages[0].memory_mb) for one in record.learnt.measurements]
    tried.append((plan.num_replicas, plan.stages[0].memory_mb))
    most = min(search.space.max_workers, service.concurrency, record.batch_size)
    workers = {number for number, _ in tried} | _thinned(range(1, most + 1), MOST_COLUMNS)
    settings = WorkSettings(
        global_batch_size=record.batch_size,
        num_layers=max(1, job.menu.num_layers),
        size_factor=present_factor(view_job(record), search),
        has_parameter_store=search.has_parameter_store,
        workers=tuple(sorted(workers)),
    )
    found = Belief(service, search, record.learnt.measurements).predict(settings)
    surface = found.surface
    sizes = {size for _, size in tried} | _thinned([size.memory_mb for size in surface.sizes], MOST_ROWS)
    step_s, step_usd, errors = found.step_s, found.step_usd, np.expm1(found.spread)
    cells = tuple(
        ExpectedConfiguration(
            num_workers=int(number),
            memory_mb=size.memory_mb,
            step_s=float(step_s[row, column]),
            step_usd=float(step_usd[row, column]),
            error_fraction=float(errors[row, column]),
            model_step_s=float(surface.step_s[row, column]),
            meets_goal=_meets_goal(record, float(step_s[row, column]), float(step_usd[row, column]), now_s),
        )
        for row, number in enumerate(surface.workers)
        for column, size in enumerate(surface.sizes)
        if size.memory_mb in sizes and surface.fits[row, column]
    )
    return cells, float(np.median(errors[surface.fits])) if surface.fits.any() else None


def _thinned(values: Sequence[int], most: int) -> set[int]:
    """At most `most` of the values, spaced evenly in their logarithms."""
    every = sorted(set(values))
    if len(every) <= most:
        return set(every)
    low, high = every[0], every[-1]
    wanted = [low * (high / low) ** (index / (most - 1)) for index in range(most)]
    return {min(every, key=lambda value: (abs(value - aim), value)) for aim in wanted}


def _meets_goal(record: JobRecord, step_s: float, step_usd: float, now_s: float) -> bool | None:
    """Whether a job that goes on in this configuration is expected to meet its goal; None where that is not known."""
    goal, total = record.job.goal, record.progress.total_steps or record.job.total_steps
    is_changing = any(phase.from_epoch > record.progress.epoch for phase in record.job.batch_schedule)
    if (goal.deadline_s is None and goal.budget_usd is None) or total is None or is_changing:
        return None
    left = max(0, total - record.progress.step)
    if goal.deadline_s is not None and now_s + left * step_s > goal.deadline_s:
        return False
    return goal.budget_usd is None or record.spent.bill.total_usd + left * step_usd <= goal.budget_usd


def stream_status(record: JobRecord, live: FunctionRunStatus | None) -> StreamStatus | None:
    """How far a job is behind its growing dataset; None for a job without one."""
    name = record.job.stream
    if not name:
        return None
    known = record.progress.stream
    num_used = record.progress.step * record.batch_size
    num_samples = max(num_used, 0 if known is None else known.num_samples)
    num_waiting = max(0, num_samples - num_used)
    is_closed = known is not None and known.is_closed
    is_idle = live is not None and bool(live.idle_reason)
    return StreamStatus(
        name=name,
        # The last step of a closed stream may have had fewer samples than a batch.
        num_samples=num_samples if not is_closed or known is None else known.num_samples,
        num_used=num_used if not is_closed or known is None else min(num_used, known.num_samples),
        num_waiting=num_waiting,
        arrivals_per_s=0.0 if known is None else known.arrivals_per_s,
        is_closed=is_closed,
        is_idle=is_idle,
    )
