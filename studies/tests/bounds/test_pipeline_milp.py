"""The mixed-integer program of a pipeline: the same optimum as the exact method's, proved."""

import dataclasses

import pytest

from kits.simulation.sweeps import sampled
from kits.solvers.pipeline_data import WEIGHTS, drawn_problem
from springtide.solvers.pipeline.exact import PipelineSolver
from springtide.solvers.pipeline.problem import stage_tables
from springtide_studies.bounds.pipeline_check import checks_of
from springtide_studies.bounds.pipeline_milp import solve_milp

pytest.importorskip("scipy")


def check_against_highs(problem):
    solver = PipelineSolver(problem, WEIGHTS)
    for weights in WEIGHTS:
        ours, theirs = solver.best(weights), solve_milp(problem, weights)
        assert theirs.is_proved
        assert theirs.value == pytest.approx(ours.value, rel=3e-6)
        degree = next(one for one in problem.degrees if one.num_replicas == theirs.num_replicas)
        step_s, memory_mb = stage_tables(problem, degree).score(theirs.stages)
        assert (weights[0] * memory_mb + weights[1]) * step_s == pytest.approx(theirs.value)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 5, 6])
def test_highs_finds_and_proves_the_same_optimum(seed):
    check_against_highs(drawn_problem(seed, 5, 3))


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(10, 22)))
def test_medium_models_too(seed):
    check_against_highs(drawn_problem(seed, [8, 9, 10][seed % 3], [8, 6, 4][seed % 3]))


def test_nothing_fits():
    problem = dataclasses.replace(drawn_problem(1, 3, 3), base_bytes=2.0**40)
    assert solve_milp(problem, (1.0, 0.0)).value == float("inf")


def test_a_check_says_by_which_way_and_whether_it_agrees():
    small, medium, large = drawn_problem(3, 4, 3), drawn_problem(2, 9, 8), drawn_problem(2, 20, 8)
    best = PipelineSolver(small, WEIGHTS).best((1.0, 0.0)).value
    tried = checks_of(small, [(1.0, 0.0), (1.0, 0.0)], [best, best * 1.01])
    assert [one["agrees"] for one in tried] == [True, False]
    assert tried[0]["method"] == "every plan"
    best = PipelineSolver(medium, WEIGHTS).best((0.0, 1.0)).value
    solved = checks_of(medium, [(0.0, 1.0), (0.0, 1.0)], [best, best * 1.01])
    assert [one["agrees"] for one in solved] == [True, False]
    assert solved[0]["method"] == "HiGHS"
    assert "proves the same optimum" in solved[0]["words"]
    unchecked = checks_of(large, [(0.0, 1.0)], [1.0])[0]
    assert unchecked["agrees"] is None
    assert "too many plans" in unchecked["words"]
