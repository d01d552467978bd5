"""The best configuration of a world by trying all of them, in expectation: no search can know it beforehand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from springtide.core.function_search import WorkerModel
from springtide.core.functions import FunctionPlan, FunctionService
from springtide.core.workload import Goal
from springtide.perf.functions.workers.surface import Surface
from springtide_studies.goals.world.function_pool import LEAVE_MARGIN_S, PARK_S
from springtide_studies.goals.world.runs import CostMeter
from springtide_studies.goals.world.truth import DETECTION_S, Truth

# The control plane's round before the first function is called.
_BEGIN_S = 0.2
# What one death costs differs itself: the mean of its square over the square of its mean.
_REDO_SPREAD = 1.15
# A goal that is to be met in 19 of 20 runs needs so many deviations of room.
NINETEEN_OF_TWENTY = 1.645


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole run as one plan takes and costs in expectation: starts, saving, hand-overs and deaths included.

    `deviation_s` and `deviation_usd` are by how much runs differ, which is because functions die more or less often.
    """

    plan: FunctionPlan
    step_s: float
    took_s: float
    usd: float
    deviation_s: float
    deviation_usd: float

    def meets(self, goal: Goal, deviations: float = 0.0) -> bool:
        """Whether that is within the goal's deadline and budget, counted from 0; so many deviations later or dearer."""
        in_time = goal.deadline_s is None or self.took_s + deviations * self.deviation_s <= goal.deadline_s
        return in_time and (goal.budget_usd is None or self.usd + deviations * self.deviation_usd <= goal.budget_usd)

    def value(self, goal: Goal) -> float:
        """The objective, to be minimised: time or money, as the goal says."""
        return self.took_s if goal.is_fastest else self.usd


def expected_run(
    truth: Truth, service: FunctionService, model: WorkerModel, plan: FunctionPlan, batches: Sequence[tuple[int, int]]
) -> Expected:
    """A run of so many steps of each batch (`batches`: batch, number of steps) as one plan from beginning to end.

    Noise, stragglers and deaths are at their means: no luck, good or bad.
    """
    n, memory_mb = plan.num_functions, plan.stages[0].memory_mb
    state_s, start_s = truth.state_s(model, memory_mb), truth.start_s(n)
    meter = CostMeter(service.prices, truth.has_parameter_store)
    meter.invoke(n)
    work_s = redo_s = requests_usd = step_s = variance = 0.0
    prices = service.prices
    for batch, num_steps in batches:
        usual = truth.step(model, plan, batch, model.parameter_bytes)
        step_s = usual.step_s
        whole_s = usual.step_s + usual.save_s / usual.save_every
        work_s += num_steps * whole_s
        asked_usd = usual.num_puts * prices.usd_per_put + usual.num_gets * prices.usd_per_get
        requests_usd += num_steps * asked_usd
        deaths = num_steps * whole_s * truth.deaths_per_s(n)
        # Half of the steps between two saved states, and half of the step in which it dies.
        lost_s = whole_s * (usual.save_every - 1) / 2.0 + whole_s / 2.0
        each_s = lost_s + DETECTION_S + truth.start_s(1) + state_s
        redo_s += deaths * each_s
        variance += deaths * each_s * each_s * _REDO_SPREAD
    lives = int((work_s + redo_s) / (service.lifetime_s - LEAVE_MARGIN_S))
    handed_s = lives * (2.0 * state_s + PARK_S)
    up_s = start_s + work_s + redo_s + handed_s + state_s
    meter.run(plan, up_s + lives * start_s)
    meter.hold_store(up_s)
    usd = meter.bill().total_usd + requests_usd
    deviation_s = math.sqrt(variance)
    return Expected(
        plan=plan,
        step_s=step_s,
        took_s=_BEGIN_S + up_s,
        usd=usd,
        deviation_s=deviation_s,
        deviation_usd=deviation_s * usd / up_s,
    )


def all_plans(surface: Surface, max_workers: int) -> Iterator[FunctionPlan]:
    """A plan for every number of workers and every size that holds the model: the whole grid, in order.

    Numbers that the surface leaves out take the exchange of the next smaller one that it has.
    """
    rows = [int(number) for number in surface.workers]
    micro_batch_size = surface.plan(0, 0).micro_batch_size
    for n in range(1, max_workers + 1):
        row = max(index for index, number in enumerate(rows) if number <= n)
        samples = -(-surface.settings.global_batch_size // n)
        for column in range(len(surface.sizes)):
            if surface.fits[row, column]:
                plan = surface.plan(row, column)
                passes = -(-samples // micro_batch_size)
                yield msgspec.structs.replace(plan, num_replicas=n, num_micro_batches=passes)


def all_runs(
    truth: Truth,
    service: FunctionService,
    model: WorkerModel,
    plans: Sequence[FunctionPlan],
    batches: Sequence[tuple[int, int]],
) -> list[Expected]:
    """Every one of the plans from beginning to end, in their order."""
    return [expected_run(truth, service, model, plan, batches) for plan in plans]


def best_of(runs: Sequence[Expected], goal: Goal, deviations: float = NINETEEN_OF_TWENTY) -> Expected | None:
    """The best of those that meet the goal with so much room; None if none does."""
    return min((run for run in runs if run.meets(goal, deviations)), key=lambda run: run.value(goal), default=None)
