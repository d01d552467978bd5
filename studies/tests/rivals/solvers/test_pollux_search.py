"""The genetic search: what it mends, what survives, and that it finds what is best where that can be counted out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from springtide_studies.rivals.solvers import pollux_search
from springtide_studies.rivals.solvers.pollux_search import AllocationProblem, search


def problem(num_jobs=3, capacities=(2, 2), *, most=4, held=None, exponents=None, restart=1.0, least=0, **more):
    width = -(-len(capacities) // 8) * 8
    total = sum(capacities)
    held_rows = np.zeros((num_jobs, width), dtype=np.int8)
    for row, counts in enumerate(held or ()):
        held_rows[row, : len(counts)] = counts
    speedups = np.zeros((num_jobs, 2, total + 1))
    workers = np.arange(1, total + 1)
    for job, exponent in enumerate(exponents or [0.8] * num_jobs):
        speedups[job, 0, 1:] = workers**exponent
        speedups[job, 1, 1:] = 0.9 * workers**exponent
    return AllocationProblem(
        capacities=np.pad(np.array(capacities), (0, width - len(capacities))),
        num_nodes=len(capacities),
        held=held_rows,
        least=np.full(num_jobs, least),
        most=np.full(num_jobs, most),
        max_nodes=more.pop("max_nodes", 16),
        speedups=speedups,
        restart_factors=np.full(num_jobs, restart),
        **more,
    )


def is_possible(given, state):
    workers, nodes = state.sum(axis=1), (state > 0).sum(axis=1)
    spread = (state > 0) & (nodes > 1)[:, None]
    return (
        (state.sum(axis=0) <= given.capacities).all()
        and (workers <= given.most).all()
        and ((workers == 0) | (workers >= given.least)).all()
        and (nodes <= given.max_nodes).all()
        and (spread.sum(axis=0) <= 1).all()
    )


def every_state(num_jobs, capacities):
    """All matrices within the nodes, padded to eight columns."""
    rows = list(itertools.product(*(range(capacity + 1) for capacity in capacities)))
    for state in itertools.product(rows, repeat=num_jobs):
        yield np.pad(np.array(state, dtype=np.int8), ((0, 0), (0, 8 - len(capacities))))


def test_it_finds_the_best_of_all_that_is_possible():
    given = problem(3, (2, 2), exponents=[0.5, 0.8, 1.0], held=[(1, 0), (0, 0), (0, 2)], restart=0.7)
    states = np.array([state for state in every_state(3, (2, 2)) if is_possible(given, state)])
    best = -pollux_search._evaluate(given, states)[:, 0].min()
    found = search(given, given.held[None], np.random.default_rng(1))
    assert found.mean_speedup == pytest.approx(best)
    assert is_possible(given, found.best)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_out_is_possible(seed):
    rng = np.random.default_rng(seed)
    num_jobs, capacities = int(rng.integers(1, 9)), tuple(rng.integers(1, 5, size=int(rng.integers(1, 10))).tolist())
    given = problem(
        num_jobs,
        capacities,
        most=int(rng.integers(2, 9)),
        least=int(rng.integers(0, 3)),
        max_nodes=int(rng.integers(1, 4)),
    )
    initial = rng.integers(0, 5, size=(20, *given.held.shape)).astype(np.int8)
    found = search(given, initial, rng, population=20, generations=10)
    assert all(is_possible(given, state) for state in (*found.front, found.best))


def test_the_same_draws_find_the_same():
    given = problem(5, (4, 4, 4), exponents=[0.4, 0.6, 0.8, 0.9, 1.0])
    one, two = (search(given, given.held[None], np.random.default_rng(3), generations=20) for _ in range(2))
    assert (one.best == two.best).all()
    assert (one.front == two.front).all()


def test_a_restart_is_not_worth_a_little():
    held = [(1, 0), (0, 2)]
    dear = search(
        problem(2, (2, 2), held=held, restart=0.5), problem(2, (2, 2), held=held).held[None], np.random.default_rng(0)
    )
    assert dear.best[:, :2].tolist() == [[1, 0], [0, 2]]
    cheap = search(problem(2, (2, 2), held=held), problem(2, (2, 2), held=held).held[None], np.random.default_rng(0))
    assert cheap.best[:, :2].tolist() == [[2, 0], [0, 2]]


def test_it_ends_when_nothing_is_new():
    given = problem(1, (1,), most=1)
    assert search(given, given.held[None], np.random.default_rng(0)).num_generations <= 3


def test_the_artifact_takes_everybody_off_a_node_with_a_second_distributed_job():
    state = np.zeros((1, 4, 8), dtype=np.int8)
    state[0, :, :3] = [[1, 1, 0], [1, 0, 1], [1, 0, 0], [0, 1, 0]]
    kept = pollux_search._repair(problem(4, (4, 4, 4)), state.copy(), np.random.default_rng(0))
    assert kept[0, :, :3].tolist() == [[1, 1, 0], [0, 0, 1], [0, 0, 0], [0, 1, 0]]
    spared = pollux_search._repair(problem(4, (4, 4, 4), spares_single=True), state, np.random.default_rng(0))
    assert spared[0, :, :3].tolist() == [[1, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]]


def test_fronts_and_distances_are_as_counted_one_by_one():
    rng = np.random.default_rng(5)
    values = rng.integers(0, 12, size=(60, 2)).astype(float)
    ranks, left, number = np.full(60, -1), set(range(60)), 0
    while left:
        front = {
            i for i in left if not any((values[j] <= values[i]).all() and (values[j] < values[i]).any() for j in left)
        }
        ranks[list(front)] = number
        left, number = left - front, number + 1
    assert pollux_search._ranks(values).tolist() == ranks.tolist()
    crowding = pollux_search._crowding(values, ranks)
    first = np.unique(values[ranks == 0], axis=0)
    inner = [i for i in range(60) if ranks[i] == 0 and 0.0 < crowding[i] < pollux_search._EXTREME]
    spans = first.max(axis=0) - first.min(axis=0)
    for index in inner:
        place = int(np.nonzero((first == values[index]).all(axis=1))[0][0])
        expected = (np.abs(first[place + 1] - first[place - 1]) / spans).sum() / 2
        assert crowding[index] == pytest.approx(expected)
