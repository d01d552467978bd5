"""What is known of a job before it runs: its length and speed, as declared or as measured on earlier runs here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np
from msgspec.structs import replace

from springtide.control.outcomes import average_rates, length_of
from springtide.control.quotes.quote import SpeedRange
from springtide.control.records import JobRecord
from springtide.core.function_search import BatchPhase, steps_of
from springtide.core.job_parts import EXACT_COST, JobOutcome
from springtide.core.workload import JobState, SpeedBelief, TrainingJob
from springtide.perf.curve import fit_scaling
from springtide.service.lookup import newest_jobs
from springtide.service.ports import ViewLike
from springtide.service.submission.option_models import JobOptionsIn
from springtide.service.submission.schemas import JobIn, adaptive_batch

# The newest runs of a function that are used, at most.
MAX_RUNS = 10
# The newest jobs of the same name whose source is compared with the request's, at most.
MAX_COMPARED = 100
# Runs of one function differ by the machine's other load, its temperature and its caches: ten per cent either way are
# assumed, and thirty where a number of workers was not measured but follows from the fitted curve.
MEASURED_SPREAD = 0.10
FITTED_SPREAD = 0.30
# From this number of runs on, the measured differences are used where they are larger: the slowest of up to ten runs is
# about the tenth percentile.
_ENOUGH_RUNS = 4


class Experience(msgspec.Struct, frozen=True, kw_only=True):
    """A job's length and speed as far as they are known, and how far a run's time may differ from them.

    `steps_per_s` is the slow end of what was measured, so that promises made with it hold in four of five runs or more;
    `belief` says by how much it is slower. `outcomes` are those that tell how far such speeds were off. `exact_cost` is
    what a step of an exact job was measured to cost beside a plain one, and on which job.
    """

    total_steps: int | None = None
    steps_per_s: Mapping[int, float] = {}
    spread: SpeedRange = SpeedRange(source="unknown")
    belief: SpeedBelief | None = None
    outcomes: tuple[JobOutcome, ...] = ()
    exact_cost: tuple[float, str] | None = None


def experience_of(view: ViewLike, request: JobIn, family: str, holds: Callable[[str, str], bool]) -> Experience:
    """Return what is known of the job: what the request declares, else what earlier runs of the same code measured.

    Runs count whose name, function, parameters and global batch size are the same, and whose code is: by their family,
    or by the source text. `holds(address, text)` says whether the source at an address is this text.
    """
    runs = _earlier_runs(view, request, family, holds)
    return replace(_speed_of(view, request, runs), exact_cost=_exact_cost(request, runs))


def _speed_of(view: ViewLike, request: JobIn, runs: list[JobRecord]) -> Experience:
    options = request.options
    total_steps = declared_steps(options)
    if total_steps is None:
        total_steps = next((_scaled(run, options.num_epochs) for run in runs if length_of(run)), None)
    if options.profile_steps_per_s:
        declared = {int(count): rate for count, rate in options.profile_steps_per_s.items()}
        curve = fit_scaling(declared)
        beyond = {n: curve.samples_per_s(n) for n in range(max(declared) + 1, options.max_workers + 1)}
        return Experience(
            total_steps=total_steps,
            steps_per_s={**declared, **beyond},
            spread=SpeedRange(source="profile"),
            belief=SpeedBelief(is_declared=True),
            outcomes=view.outcomes,
        )
    measured = _measured(runs)
    if not measured:
        return Experience(total_steps=total_steps)
    most = max(options.max_workers, *measured)
    slow = _slow_factors(runs, measured, most)
    batch = options.global_batch_size
    curve = fit_scaling(measured)
    rates = {
        count: (measured.get(count) or curve.samples_per_s(count)) / batch / slow[count] for count in range(1, most + 1)
    }
    # The plan uses the slow end, so the fast end is the whole width below it.
    fast = {count: 1.0 / (factor * factor) for count, factor in slow.items()}
    return Experience(
        total_steps=total_steps,
        steps_per_s=rates,
        spread=SpeedRange(
            fast=min(fast.values()),
            slow=1.0,
            fast_on=fast,
            source=f"history of {_runs(len(runs))}",
            measured_on=frozenset(measured),
        ),
        belief=SpeedBelief(slower={0: 1.0 + FITTED_SPREAD, **{count: slow[count] for count in measured}}),
        outcomes=view.outcomes,
    )


def _exact_cost(request: JobIn, runs: list[JobRecord]) -> tuple[float, str] | None:
    """What an exact step cost on the newest run with as many shards that has measured it."""
    for run in runs:
        cost = run.progress.metrics.get(EXACT_COST)
        if cost and _has_same_shards(run.job, request):
            return cost, run.job.job_id
    return None


def exact_evidence(request: JobIn, known: Experience) -> tuple[str, ...]:
    """What a quote says of the price of exact results, if the job asks for them."""
    num_shards = request.options.num_virtual_shards
    if num_shards is None:
        return ()
    if known.exact_cost is not None:
        cost, job_id = known.exact_cost
        return (f"exact={num_shards} costs {cost:g} of a plain step's processor time (measured on {job_id})",)
    return (
        f"what exact={num_shards} costs is not known before a run has measured it; usual figures: "
        "docs/results/2026-11-27-training.md",
    )


def declared_steps(options: JobOptionsIn) -> int | None:
    """The number of optimizer steps that the declared number of samples makes; None where none is declared."""
    if options.num_samples is None:
        return None
    return steps_of(phases_of(options), options.num_samples, options.num_epochs, options.global_batch_size)


def phases_of(options: JobOptionsIn) -> tuple[BatchPhase, ...]:
    """The batch schedule as a job carries it."""
    return tuple(BatchPhase(**phase.model_dump()) for phase in options.batch_schedule)


def _earlier_runs(view: ViewLike, request: JobIn, family: str, holds: Callable[[str, str], bool]) -> list[JobRecord]:
    """Earlier runs of the same code, the newest first."""
    found: list[JobRecord] = []
    num_compared = 0
    for record in newest_jobs(view, request.name, MAX_COMPARED):
        job = record.job
        is_alike = (
            job.entrypoint.object_name == request.source.object_name
            and job.entrypoint.kind == request.source.kind
            and (not job.has_own_batch or _is_same_call(job, request))
            and job.global_batch_size == request.options.global_batch_size
            and job.batch == adaptive_batch(request.options)
            and (request.options.num_virtual_shards is None or _has_same_shards(job, request))
            and job.length_unit == request.options.length_unit
            and job.params == request.options.params
            and bool(record.learnt.throughput_samples_per_s)
            # The speed of functions says nothing about the platform's machines.
            and not job.is_on_functions
        )
        if not is_alike:
            continue
        num_compared += 1
        is_of_family = bool(family) and job.family == family
        if is_of_family or holds(job.entrypoint.source_path, request.source.text):
            found.append(record)
        if len(found) == MAX_RUNS or num_compared == MAX_COMPARED:
            break
    return found


def _has_same_shards(job: TrainingJob, request: JobIn) -> bool:
    """Whether a run was exact with as many shards as are asked for."""
    return job.exact and job.num_virtual_shards == request.options.num_virtual_shards


def _is_same_call(job: TrainingJob, request: JobIn) -> bool:
    """Whether a script got the same arguments and workers: its steps, and what is in one, may follow from both.

    Where a library runs its loop, they do not follow from the workers.
    """
    is_same_size = bool(job.entrypoint.library) or job.max_workers == request.options.max_workers
    is_same_loop = job.entrypoint.library == request.source.library
    return job.entrypoint.args == request.source.args and is_same_size and is_same_loop


def _scaled(run: JobRecord, num_epochs: int) -> int:
    return -(-length_of(run) * num_epochs // run.job.num_epochs)


def _rates(run: JobRecord) -> dict[int, float]:
    succeeded = run.lifecycle.state is JobState.SUCCEEDED
    return average_rates(run, run.lifecycle.ended_at_s if succeeded else None)


def _measured(runs: list[JobRecord]) -> dict[int, float]:
    """Samples a second by number of workers: the median over the runs."""
    by_count: dict[int, list[float]] = {}
    for run in runs:
        for count, rate in _rates(run).items():
            by_count.setdefault(count, []).append(rate)
    return {count: float(np.median(rates)) for count, rates in sorted(by_count.items())}


def _slow_factors(runs: list[JobRecord], measured: Mapping[int, float], most: int) -> dict[int, float]:
    """By how much longer a slow run takes than the median one, for each number of workers."""
    factors = {}
    for count in range(1, most + 1):
        if count not in measured:
            factors[count] = 1.0 + FITTED_SPREAD
            continue
        rates = [r for run in runs if (r := _rates(run).get(count))]
        factors[count] = 1.0 + MEASURED_SPREAD
        if len(rates) >= _ENOUGH_RUNS:
            factors[count] = 1.0 + max(MEASURED_SPREAD, measured[count] / min(rates) - 1.0)
    return factors


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
