"""The three workflows whose work changes, each played once in the world of a seed, and what others would have paid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from springtide.core.function_search import BatchPhase, FunctionMeasurement, batch_at
from springtide.core.functions import FunctionPlan, FunctionService
from springtide.core.workload import Goal, JobState
from springtide_studies.goals.errors import measurements_of
from springtide_studies.goals.rivals import FIXED_MB, FIXED_WORKERS, RivalResult
from springtide_studies.goals.world.best import all_plans, all_runs, expected_run
from springtide_studies.goals.world.cases import (
    CASES,
    GoalCase,
    fixed_job,
    lambda_of_all_sizes,
    search_job,
    search_of,
    surface_of,
)
from springtide_studies.goals.world.executor import JobArrival
from springtide_studies.goals.world.function_pool import SimulatedFunctionPool
from springtide_studies.goals.world.play import outcome_of, play_world
from springtide_studies.goals.world.streams import DAY_S, daily_arrivals
from springtide_studies.goals.world.truth import Truth, draw_truth
from springtide_studies.rivals.vm_costs import BOOT_S, EC2_C5, VmKind, all_vm_runs, charged_usd, vm_run, vm_step_s

# The global batch by epoch: it grows as training settles, and is small again for the last epochs.
SCHEDULE = ((0, 128), (10, 256), (20, 512), (30, 1024), (40, 256))
SHRINKING = ((0, 1024), (10, 512), (20, 256), (30, 128))
BATCHING = replace(
    CASES["resnet50"], name="resnet50, batches that grow", global_batch_size=128, num_samples=8192, num_epochs=50
)
# Two samples a second arrive on average, at a day's end nearly four, at night few.
ONLINE = replace(CASES["resnet50"], name="resnet50, online", global_batch_size=256, max_workers=32)
MEAN_ARRIVALS_PER_S = 2.0
# Trials of an architecture search: the first is of usual size, others from an eighth to twice of it.
NUM_TRIALS, TRIAL_STEPS = 16, 60
SMALLEST, LARGEST = 0.125, 2.0
NAS = replace(CASES["resnet50"], name="resnet50, architecture search", num_samples=512 * TRIAL_STEPS, num_epochs=1)
# A fixed allocation is told what is best for the first of the work within so many times the least possible time.
HASTE = 1.25
# MLCD profiles machines before it begins: so many of them, for so many steps.
MLCD_PROFILES, MLCD_STEPS = 5, 10
_NUM_POINTS = 120
USUAL = f"usual allocation ({FIXED_WORKERS} x {FIXED_MB} MB)"


class PartResult(msgspec.Struct, frozen=True, kw_only=True):
    """One workflow in one world. `series` are points over time for a picture: (seconds, value) by name."""

    ours: RivalResult
    others: Mapping[str, RivalResult]
    is_done: bool
    num_changes: int
    num_deaths: int
    series: Mapping[str, Any]


def play_growing(seed: int) -> PartResult:
    """Batches that grow: the cheapest that is through when the fixed allocation is."""
    return play_batching(seed, SCHEDULE, BATCHING)


def play_shrinking(seed: int) -> PartResult:
    """The same batches the other way round, from the largest to the smallest, cheapest in the same time."""
    return play_batching(seed, SHRINKING, BATCHING)


def play_batching(seed: int, schedule: Sequence[tuple[int, int]], case: GoalCase) -> PartResult:
    """A schedule of batches (from which epoch, how many samples a step) for one case.

    The deadline is when the fixed allocation is through, which is the best for the first batch.
    """
    service = lambda_of_all_sizes()
    case = replace(case, global_batch_size=schedule[0][1])
    truth = draw_truth(seed, service)
    phases = tuple(BatchPhase(from_epoch=epoch, global_batch_size=batch) for epoch, batch in schedule)
    batches = _batches(case, phases)
    plan = _best_for_first(truth, service, case, case.num_steps)
    fixed = expected_run(truth, service, case.model, plan, batches)
    steps = sum(count for _, count in batches)
    goal = Goal(deadline_s=fixed.took_s, is_soft=True)
    job = search_job(case, service, goal, batch_schedule=phases, total_steps=steps)
    crew = play_world(truth, service, [JobArrival(job=job, model=case.model)], seed=seed).crews[job.job_id]
    lambda_ml = expected_run(truth, service, case.model, _as_lambda_ml(plan), batches)
    others = {
        "fixed allocation": RivalResult(took_s=fixed.took_s, usd=fixed.usd, plan=plan),
        "LambdaML": RivalResult(took_s=lambda_ml.took_s, usd=lambda_ml.usd),
        USUAL: _usual(truth, service, case, batches),
        "IaaS": _machines(truth, case, batches, fixed.took_s),
        "MLCD-like": _mlcd(truth, case, batches, fixed.took_s),
    }
    return _result(crew, others, crew.run.step == steps, _course(crew))


def play_online(seed: int) -> PartResult:
    """A day of arriving data: functions come when there is something to do."""
    service, case = lambda_of_all_sizes(), ONLINE
    truth = draw_truth(seed, service)
    stream = daily_arrivals(seed, MEAN_ARRIVALS_PER_S)
    count = stream.count(DAY_S)
    job = search_job(
        case, service, Goal(), stream="clicks", total_steps=None, num_samples=None, checkpoint_interval_s=600.0
    )
    arrivals = [JobArrival(job=job, model=case.model)]
    crew = play_world(truth, service, arrivals, seed=seed, streams={"clicks": stream}).crews[job.job_id]
    plan = _keeping_up(truth, service, case)
    lambda_ml = replace(plan, collective="lambdaml", num_chunks=1)
    waiting = [
        _played_stream(truth, service, case, each, seed, stream)
        for each in (plan, lambda_ml, usual_plan(case, service))
    ]
    always = _always_on(truth, service, case, plan)
    kind = _vm_keeping_up(truth, case)
    iaas = RivalResult(took_s=DAY_S, usd=charged_usd(kind, 1, DAY_S + BOOT_S))
    profiling = _mlcd_profiling(truth, case, case.global_batch_size)
    others = {
        "fixed allocation": waiting[0],
        "LambdaML": waiting[1],
        USUAL: waiting[2],
        "fixed allocation, always on": always,
        "IaaS": iaas,
        "MLCD-like": replace(iaas, usd=iaas.usd + profiling, profiled_usd=profiling),
    }
    series = _course(crew)
    series["arrived"] = [[at_s, stream.count(at_s)] for at_s in np.linspace(0.0, DAY_S, _NUM_POINTS).tolist()]
    return _result(crew, others, crew.run.num_taken == count, series)


def play_nas(seed: int) -> PartResult:
    """Trials one after the other, each of another size; what one has shown, those after it begin with."""
    service = lambda_of_all_sizes()
    truth = draw_truth(seed, service)
    rng = np.random.default_rng(np.random.SeedSequence([seed, 616]))
    sizes = [1.0, *(float(size) for size in np.exp(rng.uniform(math.log(SMALLEST), math.log(LARGEST), NUM_TRIALS - 1)))]
    plan = _best_for_first(truth, service, NAS, TRIAL_STEPS)
    # An allocation that cannot change takes memory enough for the largest that may come.
    plan = _holding(plan, _sized(NAS, LARGEST), service)
    batches = [(NAS.global_batch_size, TRIAL_STEPS)]
    earlier: tuple[FunctionMeasurement, ...] = ()
    ours, fixed, lambda_ml, usual = (RivalResult(took_s=0.0, usd=0.0) for _ in range(4))
    num_changes, num_deaths, is_done = 0, 0, True
    series: dict[str, list[list[float]]] = {"size": [], "workers": [], "throughput": [], "throughput of fixed": []}
    for number, size in enumerate(sizes):
        case = _sized(NAS, size)
        own = expected_run(truth, service, case.model, plan, batches)
        theirs = expected_run(truth, service, case.model, _as_lambda_ml(plan), batches)
        job = search_job(case, service, Goal(deadline_s=own.took_s, is_soft=True), earlier=earlier)
        arrival = JobArrival(job=job, model=case.model)
        crew = play_world(truth, service, [arrival], seed=100 * seed + number).crews[job.job_id]
        outcome = outcome_of(crew)
        begun_s = ours.took_s
        ours = _plus(ours, outcome.took_s, outcome.usd, outcome.off_usd)
        fixed, lambda_ml = _plus(fixed, own.took_s, own.usd), _plus(lambda_ml, theirs.took_s, theirs.usd)
        without = _usual(truth, service, case, batches)
        usual = _plus(usual, without.took_s, without.usd)
        num_changes, num_deaths = num_changes + outcome.num_changes, num_deaths + outcome.num_deaths
        is_done = is_done and outcome.state is JobState.SUCCEEDED and crew.run.step == TRIAL_STEPS
        earlier = (*earlier, *measurements_of(crew))[-48:]
        samples = float(TRIAL_STEPS * case.global_batch_size)
        for at_s in (begun_s, ours.took_s):
            series["size"].append([at_s, case.model.parameter_bytes / 1e6])
            series["workers"].append([at_s, float(outcome.plan.num_replicas if outcome.plan is not None else 0)])
            series["throughput"].append([at_s, samples / outcome.took_s])
            series["throughput of fixed"].append([at_s, samples / own.took_s])
    return PartResult(
        ours=ours,
        others={"fixed allocation": fixed, "LambdaML": lambda_ml, USUAL: usual},
        is_done=is_done,
        num_changes=num_changes,
        num_deaths=num_deaths,
        series=series,
    )


def _plus(total: RivalResult, took_s: float, usd: float, profiled_usd: float = 0.0) -> RivalResult:
    return RivalResult(
        took_s=total.took_s + took_s, usd=total.usd + usd, profiled_usd=total.profiled_usd + profiled_usd
    )


def _result(
    crew: SimulatedFunctionPool, others: Mapping[str, RivalResult], is_done: bool, series: dict[str, Any]
) -> PartResult:
    outcome = outcome_of(crew)
    return PartResult(
        ours=RivalResult(took_s=outcome.took_s, usd=outcome.usd, plan=outcome.plan),
        others=others,
        is_done=is_done and outcome.state is JobState.SUCCEEDED,
        num_changes=outcome.num_changes,
        num_deaths=outcome.num_deaths,
        series=series,
    )


def _batches(case: GoalCase, phases: tuple[BatchPhase, ...]) -> list[tuple[int, int]]:
    """Batch and number of steps, epoch by epoch."""
    sizes = [batch_at(phases, epoch, case.global_batch_size) for epoch in range(case.num_epochs)]
    return [(size, -(-case.num_samples // size)) for size in sizes]


def _as_lambda_ml(plan: FunctionPlan) -> FunctionPlan:
    return replace(plan, collective="lambdaml", num_chunks=1, num_shards=0)


def _best_for_first(truth: Truth, service: FunctionService, case: GoalCase, num_steps: int) -> FunctionPlan:
    """The cheapest configuration for the first of the work, in truth, within HASTE times the least possible time.

    More than a user would know: an allocation by hand is given the best for what comes first.
    """
    plans = list(all_plans(surface_of(case, service), case.max_workers))
    runs = all_runs(truth, service, case.model, plans, [(case.global_batch_size, num_steps)])
    limit_s = HASTE * min(run.took_s for run in runs)
    return min((run for run in runs if run.took_s <= limit_s), key=lambda run: run.usd).plan


def usual_plan(case: GoalCase, service: FunctionService) -> FunctionPlan:
    """What a user who does not search asks for, exchanging as we do."""
    surface = surface_of(case, service)
    row = min(int(np.searchsorted(surface.workers, FIXED_WORKERS)), len(surface.workers) - 1)
    column = min(range(len(surface.sizes)), key=lambda index: abs(surface.sizes[index].memory_mb - FIXED_MB))
    return surface.plan(row, column)


def _usual(truth: Truth, service: FunctionService, case: GoalCase, batches: Sequence[tuple[int, int]]) -> RivalResult:
    run = expected_run(truth, service, case.model, usual_plan(case, service), batches)
    return RivalResult(took_s=run.took_s, usd=run.usd, plan=run.plan)


def _sized(case: GoalCase, size: float) -> GoalCase:
    """A model that holds, computes and exchanges so many times as much."""
    model = case.model
    scaled = replace(
        model,
        parameter_bytes=round(model.parameter_bytes * size),
        sample_s=model.sample_s * size,
        sample_bytes=round(model.sample_bytes * size),
    )
    return replace(case, model=scaled)


def _holding(plan: FunctionPlan, case: GoalCase, service: FunctionService) -> FunctionPlan:
    least = search_of(case, service).space.sizes[0].memory_mb
    stage = plan.stages[0]
    return replace(plan, stages=(replace(stage, memory_mb=max(stage.memory_mb, least)),))


def _keeping_up(truth: Truth, service: FunctionService, case: GoalCase) -> FunctionPlan:
    """The cheapest a sample of those that keep up with the busiest hour, in truth."""
    busiest_per_s = 2.0 * MEAN_ARRIVALS_PER_S
    plans = list(all_plans(surface_of(case, service), case.max_workers))
    runs = all_runs(truth, service, case.model, plans, [(case.global_batch_size, 100)])
    keeping = [run for run in runs if case.global_batch_size / run.step_s >= busiest_per_s]
    return min(keeping, key=lambda run: run.usd).plan


def _played_stream(
    truth: Truth, service: FunctionService, case: GoalCase, plan: FunctionPlan, seed: int, stream: Any
) -> RivalResult:
    """A fixed plan whose functions, too, come only when there is something to do."""
    job = replace(fixed_job(case, service, plan), stream="clicks", total_steps=None, num_samples=None)
    arrival = JobArrival(job=job, model=case.model)
    crew = play_world(truth, service, [arrival], seed=seed, streams={"clicks": stream}).crews[job.job_id]
    outcome = outcome_of(crew)
    return RivalResult(took_s=outcome.took_s, usd=outcome.usd, plan=plan)


def _always_on(truth: Truth, service: FunctionService, case: GoalCase, plan: FunctionPlan) -> RivalResult:
    """The same functions all day long: what is charged for their time alone."""
    usual = truth.step(case.model, plan, case.global_batch_size, case.model.parameter_bytes)
    num_steps = math.ceil(DAY_S / usual.step_s)
    run = expected_run(truth, service, case.model, plan, [(case.global_batch_size, num_steps)])
    return RivalResult(took_s=DAY_S, usd=run.usd * DAY_S / run.took_s)


def _vm_keeping_up(truth: Truth, case: GoalCase) -> VmKind:
    """The cheapest machine that keeps up with the busiest hour."""
    for kind in EC2_C5:
        step_s = vm_step_s(case.model, kind, 1, case.global_batch_size, truth.speed)
        if case.global_batch_size / step_s >= 2.0 * MEAN_ARRIVALS_PER_S:
            return kind
    return EC2_C5[-1]


def _machines(truth: Truth, case: GoalCase, batches: Sequence[tuple[int, int]], limit_s: float) -> RivalResult:
    """The cheapest machines that are through in the same time, told how fast they are."""
    runs = all_vm_runs(case.model, batches, slowdown=truth.speed)
    within = [run for run in runs if run.took_s <= limit_s] or [min(runs, key=lambda run: run.took_s)]
    best = min(within, key=lambda run: run.usd)
    return RivalResult(took_s=best.took_s, usd=best.usd)


def _mlcd_profiling(truth: Truth, case: GoalCase, batch: int) -> float:
    """What profiling machines costs: a few kinds are booted for a few steps each."""
    kinds = EC2_C5[1 : 1 + MLCD_PROFILES]
    spent = 0.0
    for kind in kinds:
        step_s = vm_step_s(case.model, kind, 2, batch, truth.speed)
        spent += charged_usd(kind, 2, BOOT_S + MLCD_STEPS * step_s)
    return spent


def _mlcd(truth: Truth, case: GoalCase, batches: Sequence[tuple[int, int]], limit_s: float) -> RivalResult:
    """Machines profiled once before the first step, for the first batch; they stay what they are (MLCD)."""
    first, total = batches[0][0], sum(count for _, count in batches)
    runs = all_vm_runs(case.model, [(first, total)], slowdown=truth.speed)
    within = [run for run in runs if run.took_s <= limit_s] or [min(runs, key=lambda run: run.took_s)]
    chosen = min(within, key=lambda run: run.usd)
    run = vm_run(case.model, chosen.kind, chosen.count, batches, slowdown=truth.speed)
    profiling = _mlcd_profiling(truth, case, first)
    return RivalResult(took_s=run.took_s, usd=run.usd + profiling, profiled_usd=profiling)


def _course(crew: SimulatedFunctionPool) -> dict[str, Any]:
    """Batch, workers, memory and throughput over time, thinned."""
    told = crew.run.told
    every = max(1, len(told) // _NUM_POINTS)
    kept = told[::every]
    series: dict[str, Any] = {
        "batch": [[one.at_s, one.global_batch_size] for one in kept],
        "workers": [[one.at_s, one.num_workers] for one in kept],
        "memory_mb": [[one.at_s, one.memory_mb] for one in kept],
    }
    means = []
    for start in range(0, len(told), every):
        some = told[start : start + every]
        means.append([some[0].at_s, sum(one.global_batch_size for one in some) / math.fsum(one.step_s for one in some)])
    series["throughput"] = means
    return series
