"""The published baseline that takes the plan for a black box: Bayesian optimisation with a Gaussian process and the
expected improvement (Brochu and others 2010; CherryPick, NSDI 2017; FuncPipe, section 5.1).
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from springtide.solvers.pipeline.problem import (
    Floats,
    PipelineProblem,
    PipelineSolution,
    Stage,
    StageTables,
    stage_tables,
)
from springtide.solvers.search.gaussian_process import Fit, squared_exponential
from springtide_studies.rivals.solvers.improvement import distances, expected_improvement

NUM_ROUNDS = 100
_NUM_FIRST = 20
_NUM_CANDIDATES = 1000
# A plan that does not fit counts as this much more expensive than the worst that fits, in powers of e.
_PENALTY = 1.0
_NOISE = 1e-6


class _Space:
    """Plans as points of the unit cube: degree, number of stages, where to cut (L - 1) and memory by layer (L)."""

    def __init__(self, problem: PipelineProblem) -> None:
        self.num_layers, self.num_sizes = problem.forward_s.shape
        self.num_degrees = len(problem.degrees)
        self.num_coordinates = 2 * self.num_layers + 1

    def plan(self, point: Floats) -> tuple[int, tuple[Stage, ...]]:
        """The index of its degree and its stages: cut where the coordinates are largest; a stage has the memory that
        its first layer says.
        """
        degree = min(int(point[0] * self.num_degrees), self.num_degrees - 1)
        num_stages = 1 + min(int(point[1] * self.num_layers), self.num_layers - 1)
        wishes, memory = point[2 : self.num_layers + 1], point[self.num_layers + 1 :]
        cuts = sorted(int(place) + 1 for place in np.argsort(-wishes, kind="stable")[: num_stages - 1])
        edges = [0, *cuts, self.num_layers]
        sizes = np.minimum((memory * self.num_sizes).astype(np.int64), self.num_sizes - 1)
        return degree, tuple((first, end, int(sizes[first])) for first, end in pairwise(edges))


def bayes(
    problem: PipelineProblem, weights: tuple[float, float], *, seed: int = 0, num_rounds: int = NUM_ROUNDS
) -> PipelineSolution | None:
    """The best plan that `num_rounds` evaluations come upon, under equation 3a; None where none of them fits.

    Values are modelled as logarithms; what does not fit counts as dearer than all that did. `bound` is the value
    itself: nothing is proved. The same seed finds the same plan.
    """
    generator = np.random.default_rng(seed)
    space = _Space(problem)
    tables = [stage_tables(problem, degree) for degree in problem.degrees]
    points = generator.random((min(_NUM_FIRST, num_rounds), space.num_coordinates))
    found = [_evaluate(tables, space, point, weights) for point in points]
    while len(found) < num_rounds:
        point = _next_point(points, _targets(found), generator)
        points = np.concatenate([points, point[None]])
        found.append(_evaluate(tables, space, point, weights))
    feasible = [solution for solution in found if solution is not None]
    return min(feasible, key=lambda solution: solution.value, default=None)


def _evaluate(
    tables: list[StageTables], space: _Space, point: Floats, weights: tuple[float, float]
) -> PipelineSolution | None:
    degree, stages = space.plan(point)
    table = tables[degree]
    if not all(table.fits[stage] for stage in stages):
        return None
    step_s, memory_mb = table.score(stages)
    value = (weights[0] * memory_mb + weights[1]) * step_s
    return PipelineSolution(
        stages=stages, degree=table.degree, value=value, step_s=step_s, memory_mb=memory_mb, bound=value
    )


def _targets(found: list[PipelineSolution | None]) -> Floats:
    """What the process is fitted to: logarithms of the values."""
    known = [math.log(max(solution.value, 1e-300)) for solution in found if solution is not None]
    worst = max(known, default=0.0) + _PENALTY
    return np.array([worst if one is None else math.log(max(one.value, 1e-300)) for one in found])


def _next_point(points: Floats, targets: Floats, generator: np.random.Generator) -> Floats:
    """The candidate with the largest expected improvement; candidates are drawn anew and around the best points."""
    num_coordinates = points.shape[1]
    anywhere = generator.random((_NUM_CANDIDATES, num_coordinates))
    best = points[np.argsort(targets, kind="stable")[:5]]
    near = best[generator.integers(len(best), size=_NUM_CANDIDATES)]
    moved = generator.random(near.shape) < 3.0 / num_coordinates
    near = np.where(moved, generator.random(near.shape), near)
    candidates = np.concatenate([anywhere, near])
    mean, deviation = _posterior(points, targets, candidates)
    improvement = expected_improvement(mean, deviation, float(targets.min()))
    return np.asarray(candidates[int(np.argmax(improvement))])


def _posterior(points: Floats, targets: Floats, candidates: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation of a Gaussian process with a squared-exponential kernel at the candidates."""
    center, scale = float(targets.mean()), max(float(targets.std()), 1e-9)
    # The usual distance of two points of the cube: with more coordinates everything is further apart.
    length = math.sqrt(points.shape[1] / 6.0)
    among = squared_exponential(distances(points, points) / length)
    fit = Fit(among, (targets - center) / scale, np.full(len(points), math.sqrt(_NOISE)))
    mean, deviation = fit.posterior(squared_exponential(distances(candidates, points) / length), 1.0)
    return center + scale * mean, scale * deviation
