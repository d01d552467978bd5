"""TPDMP with a grid search: its cuts against every cut, and never below the exact optimum."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from kits.solvers.pipeline_data import WEIGHTS, drawn_problem
from springtide.solvers.pipeline.exact import solve
from springtide.solvers.pipeline.problem import stage_tables
from springtide_studies.rivals.solvers.tpdmp import fastest_cuts, stage_loads, tpdmp


def _slowest(loads, edges):
    return max(loads[first, end] for first, end in pairwise(edges))


@pytest.mark.parametrize("seed", range(8))
def test_each_cut_has_the_fastest_slowest_stage_of_all_cuts(seed):
    problem = drawn_problem(seed, 7, 3)
    num_checked = 0
    for degree in problem.degrees:
        loads = stage_loads(problem, stage_tables(problem, degree))
        for size in range(3):
            found = {len(stages): stages for stages in fastest_cuts(loads[:, :, size], size)}
            for num_stages in range(1, 8):
                edges = [(0, *cuts, 7) for cuts in combinations(range(1, 7), num_stages - 1)]
                best = min(_slowest(loads[:, :, size], one) for one in edges)
                if num_stages not in found:
                    assert best == np.inf
                    continue
                stages = found[num_stages]
                assert [stage[2] for stage in stages] == [size] * num_stages
                assert _slowest(loads[:, :, size], (0, *(end for _, end, _ in stages))) == best
                num_checked += 1
    assert num_checked > 0


def test_a_load_is_the_longest_of_computation_and_each_link():
    problem = drawn_problem(3, 4, 2)
    tables = stage_tables(problem, problem.degrees[0])
    loads = stage_loads(problem, tables)
    link = problem.bytes_per_s[1]
    latency_s = problem.latency_s
    up = problem.output_bytes[2] / link + problem.gradient_bytes[1] / link + 2 * latency_s
    down = problem.gradient_bytes[3] / link + problem.output_bytes[0] / link + 2 * latency_s
    computation = (problem.forward_s + problem.backward_s)[1:3, 1].sum()
    assert tables.fits[1, 3, 1]
    assert loads[1, 3, 1] == pytest.approx(max(up, down, computation))


@pytest.mark.parametrize("seed", range(12))
def test_it_is_never_better_than_the_optimum_and_sometimes_worse(seed):
    problem = drawn_problem(seed, 8, 4)
    for weights in WEIGHTS:
        ours, theirs = solve(problem, weights), tpdmp(problem, weights)
        if theirs is None:
            continue
        assert ours is not None
        assert theirs.value >= ours.value * (1 - 1e-9)
        step_s, memory_mb = stage_tables(problem, theirs.degree).score(theirs.stages)
        assert theirs.value == (weights[0] * memory_mb + weights[1]) * step_s


def test_where_nothing_fits_there_is_no_plan():
    problem = drawn_problem(3, 4, 2)
    problem.forward_s[1] = np.inf
    assert tpdmp(problem, (1.0, 0.0)) is None
