"""What other methods achieve with the same job in the same world, each modelled as published."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
import numpy as np
from msgspec.structs import replace

from springtide.core.functions import Collective, FunctionPlan, FunctionService
from springtide.core.workload import Goal
from springtide.perf.functions.workers.surface import Surface
from springtide_studies.goals.world.best import Expected, best_of, expected_run
from springtide_studies.goals.world.cases import GoalCase
from springtide_studies.goals.world.runs import CostMeter
from springtide_studies.goals.world.truth import Truth
from springtide_studies.rivals.vm_costs import all_vm_runs

# What a user who does not search asks for: LambdaML's examples run on about that.
FIXED_WORKERS, FIXED_MB = 16, 3072
# A profiling run: its first step is left out, three are measured.
PROFILED_STEPS = 4
# The schedules of others, as they stand in collectives/.
COLLECTIVES: Mapping[str, Collective] = MappingProxyType(
    {"Siren-like": "all-to-all", "Cirrus-like": "parameter-server", "LambdaML": "lambdaml"}
)


class RivalResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a method on one run. `profiled_s` and `profiled_usd` are its part for finding the configuration."""

    took_s: float
    usd: float
    plan: FunctionPlan | None = None
    profiled_s: float = 0.0
    profiled_usd: float = 0.0
    num_profiled: int = 0

    def meets(self, goal: Goal) -> bool:
        """Whether it kept the goal."""
        in_time = goal.deadline_s is None or self.took_s <= goal.deadline_s
        return in_time and (goal.budget_usd is None or self.usd <= goal.budget_usd)

    def value(self, goal: Goal) -> float:
        """The objective, to be minimised."""
        return self.took_s if goal.is_fastest else self.usd


class RivalPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One case in one world, for which methods are compared."""

    case: GoalCase
    truth: Truth
    service: FunctionService
    surface: Surface
    goal: Goal
    seed: int

    def whole(self, plan: FunctionPlan, num_steps: int | None = None) -> Expected:
        """A run of so many steps (all) as one plan, in expectation."""
        steps = self.case.num_steps if num_steps is None else num_steps
        return expected_run(
            self.truth, self.service, self.case.model, plan, [(self.case.global_batch_size, max(0, steps))]
        )


def fixed_plan(place: RivalPlace, collective: Collective = "duplex") -> FunctionPlan:
    """The usual allocation, exchanging as the method does."""
    sizes = [size.memory_mb for size in place.surface.sizes]
    column = min(range(len(sizes)), key=lambda index: abs(sizes[index] - FIXED_MB))
    row = min(int(np.searchsorted(place.surface.workers, FIXED_WORKERS)), len(place.surface.workers) - 1)
    return replace(place.surface.plan(row, column), collective=collective, num_chunks=1, num_shards=0)


def fixed_allocation(place: RivalPlace, name: str) -> RivalResult:
    """No search: the usual allocation, or one of COLLECTIVES on it."""
    plan = fixed_plan(place, COLLECTIVES.get(name, "duplex"))
    run = place.whole(plan)
    return RivalResult(took_s=run.took_s, usd=run.usd, plan=plan)


def model_alone(place: RivalPlace) -> RivalResult:
    """What the model says is best, for the whole run: no measurement changes it."""
    surface, steps = place.surface, place.case.num_steps
    took_s = surface.start_s + steps * surface.step_s
    usd = surface.start_usd + steps * surface.step_usd
    fits = surface.fits.copy()
    if place.goal.deadline_s is not None:
        fits &= took_s <= place.goal.deadline_s
    if place.goal.budget_usd is not None:
        fits &= usd <= place.goal.budget_usd
    value = np.where(fits, took_s if place.goal.is_fastest else usd, math.inf)
    row, column = np.unravel_index(int(np.argmin(value)), value.shape)
    plan = surface.plan(int(row), int(column))
    run = place.whole(plan)
    return RivalResult(took_s=run.took_s, usd=run.usd, plan=plan)


def machines(place: RivalPlace) -> RivalResult | None:
    """The best of EC2's C5 for the goal, told beforehand how fast its cores are: nothing is profiled."""
    truth, case = place.truth, place.case
    runs = all_vm_runs(case.model, [(case.global_batch_size, case.num_steps)], slowdown=truth.speed)
    results = [RivalResult(took_s=run.took_s, usd=run.usd) for run in runs]
    keeping = [result for result in results if result.meets(place.goal)]
    return min(keeping, key=lambda result: result.value(place.goal), default=None)


class Profiled(msgspec.Struct, frozen=True, kw_only=True):
    """One profiling run: what was shown, and what it took."""

    plan: FunctionPlan
    step_s: float
    took_s: float
    usd: float


class Profiler:
    """Runs a few steps as a configuration in this world, and counts what that takes. Each is begun anew."""

    def __init__(self, place: RivalPlace) -> None:
        self._place = place
        self._rng = np.random.default_rng(np.random.SeedSequence([place.seed, 555]))
        self.runs: list[Profiled] = []

    @property
    def took_s(self) -> float:
        """All of them, one after the other."""
        return math.fsum(run.took_s for run in self.runs)

    @property
    def usd(self) -> float:
        """What they cost together."""
        return math.fsum(run.usd for run in self.runs)

    def measure(self, plan: FunctionPlan) -> float:
        """Seconds of a step, as a few steps show it."""
        place, truth = self._place, self._place.truth
        usual = truth.step(place.case.model, plan, place.case.global_batch_size, place.case.model.parameter_bytes)
        noise = truth.noise_sigma / math.sqrt(PROFILED_STEPS - 1)
        shown_s = usual.step_s * math.exp(noise * float(self._rng.standard_normal()))
        up_s = truth.start_s(plan.num_functions, self._rng) + PROFILED_STEPS * usual.step_s
        meter = CostMeter(place.service.prices, truth.has_parameter_store)
        meter.invoke(plan.num_functions)
        meter.run(plan, up_s)
        meter.hold_store(up_s)
        for _ in range(PROFILED_STEPS):
            meter.ask(usual, usual.step_s)
        self.runs.append(Profiled(plan=plan, step_s=shown_s, took_s=up_s, usd=meter.bill().total_usd))
        return shown_s


def after_profiling(place: RivalPlace, profiler: Profiler, plan: FunctionPlan, *, keeps_work: bool) -> RivalResult:
    """The rest of the run as what was found; steps of profiling runs are real ones where `keeps_work`."""
    done = PROFILED_STEPS * len(profiler.runs) if keeps_work else 0
    rest = place.whole(plan, place.case.num_steps - done)
    return RivalResult(
        took_s=profiler.took_s + rest.took_s,
        usd=profiler.usd + rest.usd,
        plan=plan,
        profiled_s=profiler.took_s,
        profiled_usd=profiler.usd,
        num_profiled=len(profiler.runs),
    )


def best_result(place: RivalPlace, runs: Sequence[Expected]) -> RivalResult | None:
    """The best of all configurations, as a result."""
    best = best_of(runs, place.goal)
    return None if best is None else RivalResult(took_s=best.took_s, usd=best.usd, plan=best.plan)
