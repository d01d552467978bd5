"""Choosing servers to take back: the exact program finds the least cost, and both greedy ways are held against it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide.solvers.reclaim import Server, Victim, cost_of, reclaim_by_cost, reclaim_by_gain
from springtide_studies.bounds import highs
from springtide_studies.bounds.reclaim_milp import reclaim_exactly

needs_solver = pytest.mark.skipif(not highs.is_available(), reason="HiGHS comes with SciPy, which is not installed")
A, B, C = range(3)
EQUAL = [Victim() for _ in range(3)]


def servers(*jobs, size=8):
    """Servers of one size with these jobs, each on as many devices as fit."""
    return [Server(num_devices=size, jobs={job: size // len(mine) for job in mine} if mine else {}) for mine in jobs]


def draw(rng, shrink_fraction=0.0, *, unit=False):
    """Servers of eight devices filled to about 85 % with jobs of 1 to 32 devices, costs within a factor of e."""
    count = int(rng.integers(4, 13))
    jobs, free, victims = [{} for _ in range(count)], [8] * count, []
    while sum(free) > count * 8 * 0.15:
        left = size = min(int(rng.choice([1, 2, 4, 8, 16, 32])), sum(free))
        most = 4 if rng.random() < 0.5 else 8
        for at in rng.permutation(count):
            taken = min(free[at], left, most)
            if taken:
                jobs[at][len(victims)] = taken
                free[at] -= taken
                left -= taken
        stop = 1.0 if unit else float(np.exp(rng.normal(3.0, 1.0)))
        spare = int((size - left) * rng.random()) if rng.random() < shrink_fraction else 0
        victims.append(Victim(stop_cost=stop, shrink_cost=stop / 10 if spare else 0.0, num_spare=spare))
    needed = int(rng.integers(1, count * 8 * 2 // 3))
    return [Server(num_devices=8, jobs=mine) for mine in jobs], victims, needed


def enumerated(cluster, victims, needed):
    """The least cost, by looking at every set of servers."""
    sets = itertools.chain.from_iterable(
        itertools.combinations(range(len(cluster)), size) for size in range(len(cluster) + 1)
    )
    return min(
        cost_of(cluster, victims, chosen)
        for chosen in sets
        if sum(cluster[number].num_devices for number in chosen) >= needed
    )


@needs_solver
@pytest.mark.parametrize("shrink_fraction", [0.0, 0.5])
def test_the_exact_program_finds_what_enumeration_finds(shrink_fraction):
    for seed in range(12):
        cluster, victims, needed = draw(np.random.default_rng(seed), shrink_fraction)
        found = reclaim_exactly(cluster, victims, needed)
        assert found.cost == pytest.approx(enumerated(cluster, victims, needed))
        assert sum(cluster[number].num_devices for number in found.servers) >= needed


@pytest.mark.slow
@needs_solver
@pytest.mark.parametrize("shrink_fraction", [0.0, 0.5])
def test_ours_is_within_a_tenth_of_the_exact_program_in_every_case(shrink_fraction):
    for seed in range(1000, 1060):
        cluster, victims, needed = draw(np.random.default_rng(seed), shrink_fraction)
        exact, ours = reclaim_exactly(cluster, victims, needed), reclaim_by_cost(cluster, victims, needed)
        assert sum(cluster[number].num_devices for number in ours.servers) >= needed
        assert ours.cost == pytest.approx(cost_of(cluster, victims, ours.servers))
        assert exact.cost - 1e-6 <= ours.cost <= 1.1 * exact.cost + 1e-6, f"seed {seed}"


@pytest.mark.slow
@needs_solver
def test_fapes_greedy_is_good_by_its_own_count_and_blind_to_what_jobs_lose():
    """By the number of jobs it stays near the least on average; by lost work it cannot, as it does not look at it."""
    gaps = {True: [], False: []}
    for unit, found in gaps.items():
        for seed in range(60):
            cluster, victims, needed = draw(np.random.default_rng(seed), unit=unit)
            exact = reclaim_exactly(cluster, victims, needed).cost
            greedy = cost_of(cluster, victims, reclaim_by_gain(cluster, needed))
            assert greedy >= exact - 1e-6
            if exact:
                found.append(greedy / exact - 1)
    assert np.mean(gaps[True]) < 0.25
    assert np.mean(gaps[False]) > 2 * np.mean(gaps[True])


@needs_solver
def test_the_exact_program_takes_all_where_they_do_not_suffice():
    cluster = servers((A,), (B,))
    assert reclaim_exactly(cluster, EQUAL, 99).servers == (0, 1)
    assert reclaim_exactly(cluster, EQUAL, 0).servers == ()


def test_without_the_solver_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(highs, "is_available", lambda: False)
    with pytest.raises(InvalidRequest, match="pip install"):
        reclaim_exactly(servers((A,)), EQUAL, 1)
