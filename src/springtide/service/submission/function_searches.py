"""From a request to the search for a job's workers and memory, with what earlier runs of its function have shown."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from springtide.core.errors import InvalidRequest
from springtide.core.function_search import MAX_MEASUREMENTS, FunctionMeasurement, FunctionSearch
from springtide.core.functions import FunctionMenu, FunctionOption, FunctionService, ModelProfile
from springtide.core.workload import Goal, TrainingJob
from springtide.service.lookup import runs_of_code
from springtide.service.ports import ViewLike
from springtide.service.submission.option_models import JobOptionsIn

# A pipeline replaces a search where its predicted cost (or time) is below this part: more than predictions are off.
CLEARLY_BETTER = 0.75
# The newest jobs of one function whose measurements are used, at most.
MAX_RUNS = 32


def wants_search(options: JobOptionsIn) -> bool:
    """Whether a job's configuration on functions is searched for: as the option says, or else where its goal needs it.

    A deadline, a budget and "fastest" do, and so do a batch schedule and a stream.
    """
    if options.search is not None:
        return options.search
    goals = options.deadline_s is not None or options.budget_usd is not None or options.is_fastest
    return goals or bool(options.batch_schedule) or bool(options.stream)


def search_of(
    view: ViewLike,
    options: JobOptionsIn,
    profile: ModelProfile,
    service: FunctionService,
    family: str,
    *,
    has_parameter_store: bool = False,
) -> FunctionSearch | None:
    """The search for a job's configuration; None where none is wanted, or no function holds the model.

    `profile` is as it was taken. Raises InvalidRequest where a search was requested and no function holds the model.
    """
    if not wants_search(options):
        return None
    # Imported only where it is needed.
    from springtide.perf.functions.workers.model import space_of, worker_model_of

    low, high = options.function_workers or (1, None)
    if low > service.concurrency:
        raise InvalidRequest(
            f"a search among {low} workers or more: {service.name} runs {service.concurrency} functions at a time; "
            f"use --workers 1..{service.concurrency} or fewer"
        )
    try:
        model = worker_model_of(profile, service)
        model = replace(model, base_bytes=max(model.base_bytes, service.base_bytes))
        space = replace(space_of(service, model, high), min_workers=low)
        search = FunctionSearch(model=model, space=space, has_parameter_store=has_parameter_store)
        _check_lifetimes(search, service, options)
    except InvalidRequest:
        if options.search:
            raise
        return None
    return replace(search, earlier=tuple(earlier_measurements(view, service, search, family)))


def _check_lifetimes(search: FunctionSearch, service: FunctionService, options: JobOptionsIn) -> None:
    """Raise InvalidRequest where some batch of the job has no configuration whose steps fit a function's lifetime."""
    from springtide.perf.functions.workers.surface import Surface, WorkSettings

    sizes = {phase.global_batch_size for phase in options.batch_schedule}
    if not any(phase.from_epoch == 0 for phase in options.batch_schedule):
        sizes.add(options.global_batch_size)
    for size in sorted(sizes):
        settings = WorkSettings(global_batch_size=size, has_parameter_store=search.has_parameter_store)
        surface = Surface(service, search.space, search.model, settings)
        if not surface.fits.any():
            raise InvalidRequest(
                f"a function of {service.name} lives {service.lifetime_s:.0f} s, in which no number of workers gets "
                f"through its start, a step and a half of {size} samples, and saving its state; take a smaller global "
                "batch, or a service with a longer lifetime"
            )


def earlier_measurements(
    view: ViewLike, service: FunctionService, search: FunctionSearch, family: str
) -> list[FunctionMeasurement]:
    """Measurements of earlier jobs of the same function at this service, converted to this model, the newest last.

    From a model of another size (a trial of a study) only the ratio of measured to predicted time is carried over. Of
    one configuration the newest measurement counts.
    """
    if not family:
        return []
    kept: list[FunctionMeasurement] = []
    num_runs = 0
    # A family ends with the digest of its code, and begins with the name of its first job.
    name, _, code = family.rpartition("-")
    for record in runs_of_code(view, code, name, MAX_RUNS):
        job = record.job
        if job.family != family or not record.learnt.measurements or not _is_comparable(job, service, search):
            continue
        assert job.search is not None
        for measured in reversed(record.learnt.measurements):
            converted = as_of(measured, job.search, search, service)
            if converted is not None and not any(converted.is_of_same(other) for other in kept):
                kept.append(converted)
        num_runs += 1
        if num_runs >= MAX_RUNS or len(kept) >= MAX_MEASUREMENTS:
            break
    return kept[:MAX_MEASUREMENTS][::-1]


def _is_comparable(job: TrainingJob, service: FunctionService, search: FunctionSearch) -> bool:
    return (
        job.search is not None
        and job.menu is not None
        and job.menu.service == service.name
        and job.search.has_parameter_store == search.has_parameter_store
    )


def as_of(
    measured: FunctionMeasurement, theirs: FunctionSearch, mine: FunctionSearch, service: FunctionService
) -> FunctionMeasurement | None:
    """A measurement converted to another model, by the ratio of measured to predicted time; None if impossible."""
    if theirs.model == mine.model:
        return measured
    from springtide.perf.functions.workers.belief import plan_model

    if theirs.model.parameter_bytes <= 0 or len(measured.plan.stages) != 1:
        return None
    plan, batch = measured.plan, measured.global_batch_size
    gradient = round(measured.gradient_bytes * mine.model.parameter_bytes / theirs.model.parameter_bytes)
    before = plan_model(service, theirs, plan, batch, measured.gradient_bytes)
    now = plan_model(service, mine, plan, batch, gradient)
    if before is None or now is None or before.step_s <= 0:
        return None
    compute_s = measured.compute_s * _ratio(now.compute_s, before.compute_s)
    sync_s = measured.sync_s * _ratio(now.sync_s, before.sync_s)
    parts_s = measured.compute_s + measured.sync_s
    factor = (compute_s + sync_s) / parts_s if parts_s > 0 else now.step_s / before.step_s
    return replace(
        measured,
        gradient_bytes=gradient,
        step_s=measured.step_s * factor,
        deviation_s=measured.deviation_s * factor,
        compute_s=compute_s,
        sync_s=sync_s,
        usd=measured.usd * factor,
    )


def _ratio(now: float, before: float) -> float:
    return now / before if before > 0 else 1.0


class Reach(msgspec.Struct, frozen=True, order=True):
    """How well a menu reaches a goal, less is better: whether it misses it, then dollars (or seconds)."""

    misses: bool
    objective: float


def reach(menu: FunctionMenu, goal: Goal, now_s: float, total_steps: int | None) -> Reach:
    """How well the best entry of a menu reaches a goal: dollars for a deadline, seconds for a budget or "fastest".

    Without a goal it is in dollars times seconds. An unknown length is taken as long, so that starting hardly counts.
    """
    num_steps = total_steps or 100_000

    def time_s(option: FunctionOption) -> float:
        return option.start_s + num_steps * option.step_s

    def cost_usd(option: FunctionOption) -> float:
        return option.start_usd + num_steps * option.step_usd

    affordable: Iterable[FunctionOption] = menu.options
    slack = 1.0 + menu.error_fraction
    if goal.budget_usd is not None and total_steps is not None:
        affordable = [option for option in menu.options if slack * cost_usd(option) <= goal.budget_usd]
    if goal.deadline_s is not None and total_steps is not None:
        left_s = goal.deadline_s - now_s
        costs = [cost_usd(option) for option in affordable if slack * time_s(option) <= left_s]
        return Reach(misses=not costs, objective=min(costs, default=math.inf))
    if goal.budget_usd is not None or goal.is_fastest:
        times = [time_s(option) for option in affordable]
        return Reach(misses=not times, objective=min(times, default=math.inf))
    return Reach(misses=False, objective=min(time_s(option) * cost_usd(option) for option in menu.options))


def is_clearly_better(
    pipeline: FunctionMenu, searched: FunctionMenu, goal: Goal, now_s: float, steps: int | None
) -> bool:
    """Whether a pipeline of stages is predicted to be better by more than predictions are off.

    It also is where only the pipeline is predicted to reach the goal.
    """
    cut, whole = reach(pipeline, goal, now_s, steps), reach(searched, goal, now_s, steps)
    if cut.misses or whole.misses:
        return whole.misses and not cut.misses
    return cut.objective < CLEARLY_BETTER * whole.objective
