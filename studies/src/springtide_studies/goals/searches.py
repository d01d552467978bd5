"""Searches of others in the world of goals: how near they come with how many profiling runs, and what those cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from springtide.core.workload import Goal
from springtide.perf.functions.workers.surface import Surface
from springtide.solvers.search.phase_choice import CHEAPEST, FASTEST, GoalLimits
from springtide_studies.goals.rivals import Profiler, RivalPlace, RivalResult, after_profiling
from springtide_studies.goals.world.cases import GoalCase, lambda_of_all_sizes, surface_of
from springtide_studies.goals.world.truth import draw_truth
from springtide_studies.rivals.solvers.search_rivals import ConfigurationProblem, run_search


class _Search(msgspec.Struct, frozen=True, kw_only=True):
    """A method of solvers/search_rivals, how often it may profile, and whether the steps of that count."""

    method: str
    max_runs: int
    keeps_work: bool = True


# One-shot search is what MLCD does: once, before the work, which begins anew after it.
_SEARCHES: Mapping[str, _Search] = MappingProxyType(
    {
        "random search": _Search(method="random", max_runs=12),
        "Bayes without a model": _Search(method="bayes", max_runs=12),
        "reinforcement learning": _Search(method="reinforcement-learning", max_runs=36),
        "one-shot search (MLCD-like)": _Search(method="bayes", max_runs=12, keeps_work=False),
    }
)
SEARCHES: tuple[str, ...] = tuple(_SEARCHES)
# Figure 4: which methods, looked at after how many profiling runs.
COMPARED = ("random", "reinforcement-learning", "bayes", "springtide")
AFTER = (1, 3, 6, 12, 24)
NEAR = 0.9
TOLERANCE = 1.05


def problem_of(surface: Surface, goal: Goal, num_steps: int) -> ConfigurationProblem:
    """The whole surface as candidates, in row order."""
    shape = surface.shape
    workers, memory_mb = surface.workers.astype(float)[:, None], surface.memory_mb[None]
    return ConfigurationProblem(
        num_workers=(workers + 0.0 * memory_mb).ravel(),
        memory_mb=(memory_mb + 0.0 * workers).ravel(),
        prior_step_s=surface.step_s.ravel(),
        base_usd=surface.step_base_usd.reshape(shape).ravel(),
        usd_per_s=surface.usd_per_s.reshape(shape).ravel(),
        fits=surface.fits.ravel(),
        num_steps=float(num_steps),
        limits=GoalLimits(
            left_s=goal.deadline_s if goal.deadline_s is not None else math.inf,
            left_usd=goal.budget_usd if goal.budget_usd is not None else math.inf,
        ),
        aim=FASTEST if goal.is_fastest else CHEAPEST,
    )


def searched(place: RivalPlace, name: str) -> RivalResult | None:
    """What a method's search and the run after it made of a place; None where it found nothing that runs."""
    search, surface = _SEARCHES[name], place.surface
    profiler = Profiler(place)
    columns = surface.shape[1]
    trace = run_search(
        search.method,
        problem_of(surface, place.goal, place.case.num_steps),
        lambda index: profiler.measure(surface.plan(*divmod(index, columns))),
        max_runs=search.max_runs,
        seed=place.seed,
    )
    chosen = trace.choices[-1]
    if chosen is None:
        return None
    return after_profiling(place, profiler, surface.plan(*divmod(chosen, columns)), keeps_work=search.keeps_work)


def accuracy_rows(case: GoalCase, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """For each method its accuracy after so many profiling runs, and what twelve of them took, over all seeds.

    Accuracy is the best value of all candidates over that of the choice (SMLT, figure 4), both of steps alone, as the
    searches are posed; 0 where there is no choice yet, or one that is off its deadline by more than TOLERANCE.
    """
    service = lambda_of_all_sizes()
    surface, goal = surface_of(case, service), case.goal("cheapest")
    columns = surface.shape[1]
    problem = problem_of(surface, goal, case.num_steps)
    candidates = [index for index, fits in enumerate(problem.fits) if fits]
    found: dict[str, list[list[float]]] = {method: [] for method in COMPARED}
    spent: dict[str, list[tuple[float, float]]] = {method: [] for method in COMPARED}
    for seed in seeds:
        truth = draw_truth(seed, service)
        totals = {}
        for index in candidates:
            plan = surface.plan(*divmod(index, columns))
            usual = truth.step(case.model, plan, case.global_batch_size, case.model.parameter_bytes)
            totals[index] = problem.totals(index, usual.step_s)
        best_usd = min((usd for took_s, usd in totals.values() if took_s <= problem.limits.left_s), default=None)
        if best_usd is None:
            continue
        place = RivalPlace(case=case, truth=truth, service=service, surface=surface, goal=goal, seed=seed)
        for method in COMPARED:
            profiler = Profiler(place)
            trace = run_search(
                method,
                problem,
                lambda index, profiler=profiler: profiler.measure(surface.plan(*divmod(index, columns))),  # type: ignore[misc]
                max_runs=AFTER[-1],
                seed=seed,
            )
            accuracy = []
            for chosen in trace.choices:
                took_s, usd = (math.inf, math.inf) if chosen is None else totals[chosen]
                accuracy.append(best_usd / usd if took_s <= problem.limits.left_s * TOLERANCE else 0.0)
            # A search that has stopped keeps its choice.
            accuracy += [accuracy[-1]] * (AFTER[-1] + 1 - len(accuracy))
            found[method].append([min(1.0, one) for one in accuracy])
            some = profiler.runs[:12]
            spent[method].append((math.fsum(run.took_s for run in some), math.fsum(run.usd for run in some)))
    return [_accuracy_row(case, method, found[method], spent[method]) for method in COMPARED if found[method]]


def _accuracy_row(
    case: GoalCase, method: str, accuracy: Sequence[Sequence[float]], spent: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    means = [math.fsum(one[number] for one in accuracy) / len(accuracy) for number in range(AFTER[-1] + 1)]
    near = next((number for number, mean in enumerate(means) if mean >= NEAR), None)
    return {
        "case": case.name,
        "method": method,
        **{f"after_{number}": means[number] for number in AFTER},
        f"runs_to_{NEAR:g}": near,
        "profiling_s_of_12": math.fsum(took_s for took_s, _ in spent) / len(spent),
        "profiling_usd_of_12": math.fsum(usd for _, usd in spent) / len(spent),
    }
