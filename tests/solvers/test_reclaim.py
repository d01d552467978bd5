"""Choosing servers to take back: both examples of FaPES's Figure 6, and both greedy ways against the exact program."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide.solvers import highs
from springtide.solvers.reclaim import (
    Server,
    Victim,
    cost_of,
    reclaim_by_cost,
    reclaim_by_gain,
    reclaim_exactly,
)

needs_solver = pytest.mark.skipif(not highs.is_available(), reason="HiGHS comes with SciPy, which is not installed")
A, B, C = range(3)
EQUAL = [Victim() for _ in range(3)]


def servers(*jobs, size=8):
    """Servers of one size with these jobs, each on as many devices as fit."""
    return [Server(num_devices=size, jobs={job: size // len(mine) for job in mine} if mine else {}) for mine in jobs]


def test_figure_6_a_two_servers_with_the_same_two_jobs_go_together():
    """Servers 1 and 2 both hold A and B: gain 2, cost 2; once they are suspended the second server costs nothing."""
    cluster = servers((A, B), (A, B), (C,))
    assert reclaim_by_gain(cluster, 16) == (0, 1)
    assert cost_of(cluster, EQUAL, (0, 1)) == 2
    assert reclaim_by_gain(cluster, 9) == (0, 1), "nine devices are two servers, too"


def test_figure_6_b_a_gain_beyond_what_is_needed_is_passed_over():
    """Read from the text: suspending all on server 1 would free three servers where two are needed, at a cost of 3."""
    cluster = servers((A, B, C), (A,), (B,))
    assert reclaim_by_gain(cluster, 16) == (1, 2)
    assert cost_of(cluster, EQUAL, (1, 2)) == 2
    assert cost_of(cluster, EQUAL, (0, 1)) == 3


def test_a_server_without_jobs_is_taken_first_and_the_last_one_may_bring_more():
    cluster = servers((A, B), (A, B), ())
    assert reclaim_by_gain(cluster, 8) == (2,)
    assert reclaim_by_gain(cluster, 9) == (0, 2)
    assert reclaim_by_cost(cluster, EQUAL, 8).servers == (2,)


def test_where_every_gain_is_too_large_the_least_cost_decides():
    cluster = servers((A, B), (A, B), (C,), (C,))
    assert reclaim_by_gain(cluster, 8) == (2,)


@pytest.mark.parametrize("choose", [reclaim_by_gain, lambda s, n: reclaim_by_cost(s, EQUAL, n).servers])
def test_too_few_servers_are_all_taken_and_none_where_nothing_is_needed(choose):
    cluster = servers((A,), (B,))
    assert choose(cluster, 99) == (0, 1)
    assert choose(cluster, 0) == ()
    assert choose([], 5) == ()


def test_uneven_servers_are_counted_by_their_devices():
    cluster = [Server(num_devices=2, jobs={A: 2}), Server(num_devices=8, jobs={B: 8}), Server(num_devices=4)]
    assert reclaim_by_cost(cluster, EQUAL, 5).servers == (0, 2)
    assert reclaim_by_cost(cluster, EQUAL, 7).servers == (1,)


def test_a_job_that_can_shrink_costs_less_until_its_spare_devices_are_gone():
    cluster = servers((A,), (A,), (B,))
    costs = [Victim(stop_cost=10.0, shrink_cost=1.0, num_spare=8), Victim(stop_cost=5.0)]
    assert reclaim_by_cost(cluster, costs, 8).cost == 1.0
    found = reclaim_by_cost(cluster, costs, 16)
    assert (found.servers, found.cost) == ((0, 2), 6.0)
    assert reclaim_by_cost(cluster, costs, 24).cost == 15.0


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


@needs_solver
@pytest.mark.parametrize("shrink_fraction", [0.0, 0.5])
def test_ours_is_within_a_tenth_of_the_exact_program_in_every_case(shrink_fraction):
    for seed in range(1000, 1060):
        cluster, victims, needed = draw(np.random.default_rng(seed), shrink_fraction)
        exact, ours = reclaim_exactly(cluster, victims, needed), reclaim_by_cost(cluster, victims, needed)
        assert sum(cluster[number].num_devices for number in ours.servers) >= needed
        assert ours.cost == pytest.approx(cost_of(cluster, victims, ours.servers))
        assert exact.cost - 1e-6 <= ours.cost <= 1.1 * exact.cost + 1e-6, f"seed {seed}"


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


def test_a_thousand_servers_are_chosen_from():
    rng = np.random.default_rng(3)
    cluster = [Server(num_devices=8, jobs={int(job): 4 for job in rng.integers(0, 600, 2)}) for _ in range(1000)]
    victims = [Victim(stop_cost=float(cost)) for cost in rng.uniform(1, 100, 600)]
    ours = reclaim_by_cost(cluster, victims, 1600)
    assert sum(cluster[number].num_devices for number in ours.servers) >= 1600
    assert ours.cost < cost_of(cluster, victims, reclaim_by_gain(cluster, 1600))
