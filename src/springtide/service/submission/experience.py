"""What is known of a job before it runs: its length and speed, as declared or as measured on earlier runs here."""

from __future__ import annotations

import os
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
from springtide.service.lookup import runs_of_code
from springtide.service.ports import ViewLike
from springtide.service.submission import sources
from springtide.service.submission.option_models import JobOptionsIn, packages_of
from springtide.service.submission.request_digest import digest
from springtide.service.submission.schemas import JobIn, adaptive_batch
from springtide.service.submission.shares import share_of, speed_text

# The newest runs of a function that are used, at most.
MAX_RUNS = 10
# The newest jobs of the same code, and of the same name, that are compared with the request, at most.
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
    what a step of an exact job was measured to cost beside a plain one, and on which job. `family` is that of the runs
    that learn from this one; `unlike` says why no earlier run tells its speed, empty where one does.
    """

    total_steps: int | None = None
    steps_per_s: Mapping[int, float] = {}
    spread: SpeedRange = SpeedRange(source="unknown")
    belief: SpeedBelief | None = None
    outcomes: tuple[JobOutcome, ...] = ()
    exact_cost: tuple[float, str] | None = None
    family: str = ""
    unlike: str = ""


def experience_of(view: ViewLike, request: JobIn, holds: Callable[[str, str], bool]) -> Experience:
    """Return what is known of the job: what the request declares, else what earlier runs of the same code measured.

    Runs count whose code, parameters and global batch size are the same; one of another name counts if its environment
    is the same, too. `holds(address, text)` says whether the source at an address is this text.

    Raises InvalidRequest, CapacityError as `code_of` does.
    """
    known = _earlier_runs(view, request, holds)
    speed = _speed_of(view, request, known.runs)
    exact_cost = _exact_cost(request, known.runs)
    return replace(speed, exact_cost=exact_cost, family=known.family, unlike=known.unlike)


def code_of(request: JobIn) -> str:
    """The digest of the code of a request, and of what of its workers' devices its speed depends on.

    The same code is a function or a script of the same syntax tree that reaches the same: no comment, no print, no name
    of the file, of the function or of the job and no other deadline makes it another one.
    """
    source = request.source
    code = sources.identity_of(source)
    if not code:
        files = "".join(f"\0{name}\0{text}" for name, text in sorted(source.files.items()))
        code = source.object_name + source.text + files
    if source.kind == "script":
        # The number of workers of a plain one cannot change, and often it cuts its batches and its steps by it.
        workers = source.library or str(request.options.max_workers)
        code += "".join(f"\0{argument}" for argument in (*source.args, workers))
    return digest(code + speed_text(request))[:12]


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


def unlike_evidence(known: Experience) -> tuple[str, ...]:
    """What a quote says where no earlier run tells the speed."""
    return (known.unlike,) if known.unlike and not known.steps_per_s else ()


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


class _EarlierRuns(msgspec.Struct, frozen=True):
    """The runs that count, the newest first, the family that the request belongs to, and why none counts."""

    runs: list[JobRecord]
    family: str
    unlike: str


def _earlier_runs(view: ViewLike, request: JobIn, holds: Callable[[str, str], bool]) -> _EarlierRuns:
    """Earlier runs of the same code.

    The family is that of the newest one that does the same work, else of the newest one of that name, else a new one: a
    name tells apart only what the code is given, by parameters or by its environment.
    """
    code, found, unlike = code_of(request), [], ""
    families: dict[bool, str] = {}
    num_compared = 0
    for record in runs_of_code(view, code, request.name, MAX_COMPARED):
        job = record.job
        is_namesake, is_same_work = job.name == request.name, _is_same_work(job, request)
        is_same_code = job.code == code
        if is_same_code and (is_namesake or is_same_work):
            families.setdefault(is_same_work, job.family)
        difference = _difference(record, request, is_close=is_namesake or is_same_work)
        num_compared += not difference
        if not difference and (is_same_code or _is_same_text(job, request, holds)):
            found.append(record)
        elif not unlike:
            why = difference if is_same_code else "its code is another"
            unlike = f"{job.job_id} does not count as an earlier run: {why}"
        if len(found) == MAX_RUNS or num_compared == MAX_COMPARED:
            break
    family = families.get(True) or families.get(False) or f"{request.name}-{code}"
    nothing = f"no run of this code, and none named {request.name}, is known here"
    return _EarlierRuns(found, family, "" if found else unlike or nothing)


def _difference(record: JobRecord, request: JobIn, *, is_close: bool) -> str:
    """Why a run tells nothing of the speed of a request, apart from its code; empty if it does.

    `is_close` says whether its name is the same, or all that its code is given.
    """
    job, options = record.job, request.options
    checks = (
        (job.entrypoint.kind == request.source.kind, f"it is a {job.entrypoint.kind}"),
        (not job.has_own_batch or _is_same_call(job, request), "its arguments or its workers are others"),
        (job.params == options.params, f"it has other values of {_differing(job.params, options.params)}"),
        (is_close, "its environment, its packages or the folder that it imports from are others"),
        (job.global_batch_size == options.global_batch_size, f"its global batch is {job.global_batch_size}"),
        (job.batch == adaptive_batch(options), "the bounds of its batch are others"),
        (job.length_unit == options.length_unit, f"its length is counted by {job.length_unit}"),
        (
            options.num_virtual_shards is None or _has_same_shards(job, request),
            "it is not exact with as many shards",
        ),
        (
            job.batch is None or not job.exact or options.num_virtual_shards is not None,
            "it ran the parts of its batch one after another",
        ),
        # The speed of functions says nothing about the platform's machines.
        (not job.is_on_functions, "it runs on functions"),
        (bool(record.learnt.throughput_samples_per_s), "no speed was measured of it"),
    )
    return next((told for is_alike, told in checks if not is_alike), "")


def _differing(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    return ", ".join(sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name)))


def _is_same_work(job: TrainingJob, request: JobIn) -> bool:
    """Whether a run of the same code is given the same, so that it does the same whatever its name is."""
    options, entrypoint = request.options, job.entrypoint
    # Neighbours of the source that were sent with it are beside it, and in its code.
    is_own = entrypoint.import_root == os.path.dirname(entrypoint.source_path)
    return (
        job.params == options.params
        and job.env == options.env
        and job.packages == packages_of(options)
        and ("" if is_own else entrypoint.import_root) == request.source.import_root
    )


def _is_same_text(job: TrainingJob, request: JobIn, holds: Callable[[str, str], bool]) -> bool:
    """Whether a run has the same source under the same name, though digests of code were others when it came."""
    source, options = request.source, request.options
    return (
        job.name == request.name
        and job.entrypoint.object_name == source.object_name
        and not source.files
        and (job.share, job.devices_each) == (share_of(options.share), options.devices_each)
        and holds(job.entrypoint.source_path, source.text)
    )


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
