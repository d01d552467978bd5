"""The co-optimisation of a pipeline of functions: the optimum is that of trying every plan."""

import dataclasses
import itertools

import numpy as np
import pytest

from kits.simulation.sweeps import part, sampled
from kits.solvers.pipeline_data import WEIGHTS, drawn_problem
from springtide.core.errors import InvalidRequest
from springtide.solvers.pipeline import exact as pipeline
from springtide.solvers.pipeline.bounds import FEW_SHARES, MANY_SHARES, Labels, bounds_of
from springtide.solvers.pipeline.exact import PipelineSolver, solve, undominated, unfit_layers
from springtide.solvers.pipeline.exhaustive import best_of, every_memory, num_plans, pareto_front
from springtide.solvers.pipeline.problem import TOLERANCE, stage_tables


def check_against_every_plan(problem):
    points = every_memory(problem)
    solver = PipelineSolver(problem, WEIGHTS)
    for weights in WEIGHTS:
        found = solver.best(weights)
        if not points:
            assert found is None
            continue
        value, _ = best_of(points, weights)
        assert found.value == pytest.approx(value, rel=1e-9)
        assert found.is_proved
        assert found.bound <= found.value


@pytest.mark.parametrize("seed", range(part(100, least=30)))
def test_the_optimum_is_that_of_every_plan_tried(seed):
    num_layers, num_sizes = [(5, 4), (6, 3), (4, 5), (7, 2), (3, 8)][seed % 5]
    check_against_every_plan(drawn_problem(seed, num_layers, num_sizes))


@pytest.mark.parametrize("seed", range(8))
def test_identical_layers_whose_orders_all_tie_are_solved_too(seed):
    check_against_every_plan(drawn_problem(seed, 6, 4, identical=True))


@pytest.mark.parametrize("seed", range(part(24, least=8)))
def test_a_limit_on_stages_holds_and_the_optimum_is_that_of_every_plan_within_it(seed):
    problem = drawn_problem(seed, 6, 4)
    degrees = tuple(dataclasses.replace(degree, max_stages=1 + seed % 4) for degree in problem.degrees)
    limited = dataclasses.replace(problem, degrees=degrees)
    check_against_every_plan(limited)
    found = solve(limited, (1.0, 2.0**22))
    assert found is None or len(found.stages) <= 1 + seed % 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(100, 400)))
def test_hundreds_more(seed):
    num_layers, num_sizes = [(7, 4), (6, 5), (5, 6), (8, 3), (4, 8)][seed % 5]
    check_against_every_plan(drawn_problem(seed, num_layers, num_sizes))


def test_a_solver_made_for_other_weights_finds_the_same():
    problem = drawn_problem(5, 6, 4)
    for weights in WEIGHTS:
        assert PipelineSolver(problem, [(1.0, 0.0)]).best(weights).value == pytest.approx(
            solve(problem, weights).value, rel=1e-12
        )


def test_a_solution_is_a_plan_that_scores_as_it_says():
    problem = drawn_problem(2, 12, 6)
    found = solve(problem, (1.0, 2.0**19))
    assert found.stages[0][0] == 0
    assert found.stages[-1][1] == 12
    assert [one[1] for one in found.stages[:-1]] == [other[0] for other in found.stages[1:]]
    step_s, memory_mb = stage_tables(problem, found.degree).score(found.stages)
    assert (step_s, memory_mb) == (found.step_s, found.memory_mb)
    assert found.value == pytest.approx((memory_mb + 2.0**19) * step_s)


def test_a_narrow_search_says_how_far_it_may_be_off():
    problem = drawn_problem(31, 30, 8)
    solver = PipelineSolver(problem, WEIGHTS)
    for weights in WEIGHTS:
        exact, narrow = solver.best(weights), solver.best(weights, max_labels=2)
        assert exact.is_proved
        assert narrow.bound <= exact.value * (1 + TOLERANCE)
        assert narrow.value >= exact.value * (1 - TOLERANCE)


def test_the_same_problem_gives_the_same_plan_to_the_bit():
    first, second = (solve(drawn_problem(9, 20, 8), (1.0, 2.0**16)) for _ in range(2))
    assert first == second


def test_bounds_hold_for_what_is_reached():
    problem = drawn_problem(4, 10, 5)
    for degree in problem.degrees:
        bounds = bounds_of(stage_tables(problem, degree), ((1.0, 2.0**19),))
        if bounds is None:
            continue
        zero, nothing = np.zeros(1), np.full(1, -1)
        root = Labels(zero, zero, zero, zero, zero, zero, np.array([10]), nothing, nothing, nothing + 1)
        low = bounds.of(10, root, (1.0, 2.0**19))[0]
        scores = [bounds.tables.score(plan) for plan in bounds.plans]
        assert scores
        assert all((memory + 2.0**19) * seconds >= low for seconds, memory in scores)


def test_a_label_stays_if_it_is_best_in_one_respect():
    columns = np.array([[1.0, 2.0, 1.0, 1.0], [1.0, 2.0, 3.0, 1.0]])
    labels = Labels(
        forward=columns[0],
        forward_lag=np.zeros(4),
        backward=columns[1],
        backward_lag=np.zeros(4),
        end=columns[1],
        memory=np.array([2.0, 1.0, 2.0, 2.0]),
        first=np.ones(4, dtype=np.int64),
        size=np.zeros(4, dtype=np.int64),
        parent=np.arange(4),
        num_stages=np.ones(4, dtype=np.int64),
    )
    assert sorted(labels.take(undominated(labels)).parent) == [0, 1]


def test_nothing_fits():
    problem = dataclasses.replace(drawn_problem(1, 4, 3), base_bytes=2.0**40)
    assert solve(problem, (1.0, 0.0)) is None
    assert [layer for layer, _ in unfit_layers(problem, problem.degrees[0])] == [0, 1, 2, 3]
    assert every_memory(problem) == []


def test_the_layer_that_fits_no_function_is_named():
    problem = drawn_problem(1, 4, 3)
    parameters = problem.parameter_bytes.copy()
    parameters[2] = 2.0**38
    larger = dataclasses.replace(problem, parameter_bytes=parameters)
    assert [layer for layer, _ in unfit_layers(larger, larger.degrees[0])] == [2]


def test_too_many_plans_are_not_tried():
    problem = drawn_problem(1, 12, 8)
    assert num_plans(problem) == 8 * 9**11
    with pytest.raises(InvalidRequest, match="too many"):
        every_memory(problem)


def test_every_weighted_optimum_is_on_the_front_of_every_plan():
    problem = drawn_problem(7, 5, 4)
    points = every_memory(problem)
    front = pareto_front(points)
    assert all(one[1] < other[1] and one[0] > other[0] for one, other in itertools.pairwise(front))
    for weights in WEIGHTS[:4]:
        found = solve(problem, weights)
        assert any(
            seconds == pytest.approx(found.step_s) and cost == pytest.approx(found.step_s * found.memory_mb)
            for seconds, cost in front
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(part(20, least=8)))
def test_sharper_bounds_find_the_same_and_are_sharper(seed, monkeypatch):
    problem = drawn_problem(seed, 6, 4)
    for degree in problem.degrees:
        tables = stage_tables(problem, degree)
        few, many = (bounds_of(tables, tuple(WEIGHTS), shares) for shares in (FEW_SHARES, MANY_SHARES))
        if few is not None:
            zero, nothing = np.zeros(1), np.full(1, -1)
            root = Labels(zero, zero, zero, zero, zero, zero, np.array([6]), nothing, nothing, nothing + 1)
            for weights in WEIGHTS:
                assert many.of(6, root, weights)[0] >= few.of(6, root, weights)[0] * (1 - 1e-12)
    monkeypatch.setattr(pipeline, "_PATIENCE", 0)
    monkeypatch.setattr(pipeline, "_BEAM", 1)
    check_against_every_plan(problem)
