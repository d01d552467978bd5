"""By how much predictions of a step's time and cost are off: the model alone, and after a run's own measurements."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from springtide.core.function_search import FunctionMeasurement
from springtide.core.functions import FunctionPlan, FunctionService
from springtide.core.workload import Goal
from springtide.perf.functions.workers.belief import Belief
from springtide.perf.functions.workers.surface import WorkSettings
from springtide_studies.goals.world.best import Expected
from springtide_studies.goals.world.cases import NUM_LAYERS, GoalCase, search_of
from springtide_studies.goals.world.function_pool import SimulatedFunctionPool, step_usd_of
from springtide_studies.goals.world.truth import Truth

# Of all configurations those are looked at that come closest to the goal: what a search has to tell apart.
NUM_NEAR = 100


class GoalErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Mean absolute errors as fractions: `main_*` of the configuration of most of its steps, `near_*` of the best ones.

    `*_before` is the model's, `*_after` that after what this run has measured.
    """

    main_time_before: float = math.nan
    main_time_after: float = math.nan
    main_cost_before: float = math.nan
    main_cost_after: float = math.nan
    near_time_before: float = math.nan
    near_time_after: float = math.nan
    near_cost_before: float = math.nan
    near_cost_after: float = math.nan


def measurements_of(crew: SimulatedFunctionPool) -> tuple[FunctionMeasurement, ...]:
    """The measurements of a run's steps."""
    return tuple(
        shown.measurement(plan, batch, gradient_bytes)
        for (plan, batch, gradient_bytes), shown in crew.run.shown.items()
        if shown.num_steps
    )


def errors_of(
    case: GoalCase,
    truth: Truth,
    service: FunctionService,
    crew: SimulatedFunctionPool,
    runs: Sequence[Expected],
    goal: Goal,
) -> GoalErrors:
    """Predictions of one run's world beside the truth."""
    settings = WorkSettings(global_batch_size=case.global_batch_size, num_layers=NUM_LAYERS)
    belief = Belief(service, search_of(case, service), measurements_of(crew))
    believed = belief.predict(settings)
    surface = believed.surface

    def off(plan: FunctionPlan) -> tuple[float, float, float, float] | None:
        place = surface.place(plan)
        if place is None:
            return None
        usual = truth.step(case.model, plan, case.global_batch_size, case.model.parameter_bytes)
        # Both predict a step without the saving of states, which is counted separately.
        usd = step_usd_of(service, truth, plan, usual, usual.step_s)
        return (
            abs(float(surface.step_s[place]) / usual.step_s - 1.0),
            abs(float(believed.step_s[place]) / usual.step_s - 1.0),
            abs(float(surface.step_usd[place]) / usd - 1.0),
            abs(float(believed.step_usd[place]) / usd - 1.0),
        )

    within = [run for run in runs if run.meets(goal)]
    near = sorted(within, key=lambda run: run.value(goal))[:NUM_NEAR]
    each = [found for run in near if (found := off(run.plan)) is not None]
    steps = Counter((told.num_workers, told.memory_mb) for told in crew.run.told)
    plans = {(plan.num_replicas, plan.stages[0].memory_mb): plan for plan, _, _ in crew.run.shown}
    final = off(plans[steps.most_common(1)[0][0]]) if plans else None
    values = dict.fromkeys(GoalErrors.__struct_fields__, math.nan)
    for number, name in enumerate(("time_before", "time_after", "cost_before", "cost_after")):
        if final is not None:
            values[f"main_{name}"] = final[number]
        if each:
            values[f"near_{name}"] = math.fsum(one[number] for one in each) / len(each)
    return GoalErrors(**values)


def mean_errors(errors: Sequence[GoalErrors]) -> dict[str, float | None]:
    """Means over runs, by name."""
    means: dict[str, float | None] = {}
    for name in GoalErrors.__struct_fields__:
        known = [value for one in errors if not math.isnan(value := getattr(one, name))]
        means[name] = math.fsum(known) / len(known) if known else None
    return means
