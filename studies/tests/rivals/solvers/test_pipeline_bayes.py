"""Bayesian optimisation of plans: seeded, never better than the optimum, better than drawing at random."""

from itertools import pairwise

import numpy as np
import pytest

from kits.solvers.pipeline_data import drawn_problem
from springtide.solvers.pipeline.exact import solve
from springtide.solvers.pipeline.problem import stage_tables
from springtide_studies.rivals.solvers.pipeline_bayes import _posterior, _Space, bayes

WEIGHTS = (1.0, 2.0**16)


def test_every_point_is_a_whole_plan():
    problem = drawn_problem(1, 9, 4)
    space = _Space(problem)
    rng = np.random.default_rng(0)
    lengths = set()
    for point in rng.random((200, space.num_coordinates)):
        degree, stages = space.plan(point)
        assert 0 <= degree < len(problem.degrees)
        assert (stages[0][0], stages[-1][1]) == (0, 9)
        assert all(one[1] == other[0] for one, other in pairwise(stages))
        assert all(first < end and 0 <= size < 4 for first, end, size in stages)
        lengths.add(len(stages))
    assert lengths == set(range(1, 10))


@pytest.mark.parametrize("seed", range(4))
def test_it_is_never_better_than_the_optimum_and_repeatable(seed):
    problem = drawn_problem(seed + 20, 6, 4)
    found = bayes(problem, WEIGHTS, seed=seed, num_rounds=40)
    assert found is not None
    optimum = solve(problem, WEIGHTS)
    assert found.value >= optimum.value * (1 - 1e-9)
    step_s, memory_mb = stage_tables(problem, found.degree).score(found.stages)
    assert found.value == (memory_mb + WEIGHTS[1]) * step_s
    assert found == bayes(problem, WEIGHTS, seed=seed, num_rounds=40)


@pytest.mark.slow
def test_more_rounds_find_no_worse_plan_and_guided_ones_better_than_drawn_ones():
    guided, drawn = [], []
    for seed in range(6):
        problem = drawn_problem(seed + 40, 10, 5)
        best = solve(problem, WEIGHTS).value
        guided.append(bayes(problem, WEIGHTS, seed=seed, num_rounds=70).value / best)
        # The first twenty rounds are drawn at random.
        drawn.append(bayes(problem, WEIGHTS, seed=seed, num_rounds=20).value / best)
    assert all(one <= other for one, other in zip(guided, drawn, strict=True))
    assert np.mean(guided) < np.mean(drawn)


def test_the_process_goes_through_what_it_was_shown():
    rng = np.random.default_rng(3)
    points = rng.random((12, 4))
    targets = np.sin(points.sum(axis=1))
    mean, deviation = _posterior(points, targets, points)
    assert mean == pytest.approx(targets, abs=1e-3)
    assert deviation.max() < 0.05
    _, away = _posterior(points, targets, points + 10.0)
    assert away == pytest.approx(np.full(12, targets.std()), rel=1e-3)


def test_where_nothing_fits_there_is_no_plan():
    problem = drawn_problem(3, 4, 2)
    problem.forward_s[1] = np.inf
    assert bayes(problem, WEIGHTS, num_rounds=25) is None
