"""Whether a plan is the best one, by another method than the one that found it: trying every plan, or HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from springtide.solvers.pipeline.exhaustive import best_of, every_memory, num_plans
from springtide.solvers.pipeline.problem import PipelineProblem
from springtide_studies.bounds import highs
from springtide_studies.bounds.pipeline_milp import solve_milp

# Up to so many plans a degree are tried each; to HiGHS go models of so many layers.
MAX_TRIED = 5_000_000
MAX_MILP_LAYERS = 14
_AGREEMENT = 1e-5


def checks_of(
    problem: PipelineProblem, weights: Sequence[tuple[float, float]], values: Sequence[float]
) -> list[dict[str, Any]]:
    """For each pair of weights and the value found: `method`, its `value` and `bound`, `agrees` (None: cannot tell).

    A check that proves no optimum agrees only as far as it found nothing better; `proved` says which it is.
    """
    if num_plans(problem) <= MAX_TRIED:
        points = every_memory(problem)
        return [_tried(best_of(points, pair)[0], value) for pair, value in zip(weights, values, strict=True)]
    if not highs.is_available():
        return [_unchecked("HiGHS is not installed: pip install 'springtide[solvers]'") for _ in values]
    if problem.forward_s.shape[0] > MAX_MILP_LAYERS:
        words = f"not checked: too many plans to try, and more than {MAX_MILP_LAYERS} layers take HiGHS too long"
        return [_unchecked(words) for _ in values]
    return [_solved(problem, pair, value) for pair, value in zip(weights, values, strict=True)]


def _tried(best: float, value: float) -> dict[str, Any]:
    agrees = abs(best - value) <= 1e-9 * value
    words = "the best of all plans, each tried" if agrees else f"trying every plan finds {best:.10g}"
    return {"method": "every plan", "value": best, "bound": best, "proved": True, "agrees": agrees, "words": words}


def _solved(problem: PipelineProblem, weights: tuple[float, float], value: float) -> dict[str, Any]:
    found = solve_milp(problem, weights)
    agrees = found.value >= value * (1.0 - _AGREEMENT) and found.bound <= value * (1.0 + _AGREEMENT)
    if found.is_proved:
        agrees = agrees and found.value <= value * (1.0 + _AGREEMENT)
    if not agrees:
        words = f"HiGHS finds {found.value:.10g} and proves {found.bound:.10g}"
    elif found.is_proved:
        words = "HiGHS proves the same optimum"
    else:
        words = f"HiGHS finds nothing better, and proves that nothing is better by {1 - found.bound / value:.1%}"
    return {
        "method": "HiGHS",
        "value": found.value,
        "bound": found.bound,
        "proved": found.is_proved,
        "agrees": agrees,
        "words": words,
    }


def _unchecked(words: str) -> dict[str, Any]:
    return {"method": "none", "value": None, "bound": None, "proved": False, "agrees": None, "words": words}
