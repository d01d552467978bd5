"""Choosing servers to take back: both examples of FaPES's Figure 6."""

from __future__ import annotations

import numpy as np
import pytest

from springtide.solvers.reclaim import (
    Server,
    Victim,
    cost_of,
    reclaim_by_cost,
    reclaim_by_gain,
)

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


def test_a_thousand_servers_are_chosen_from():
    rng = np.random.default_rng(3)
    cluster = [Server(num_devices=8, jobs={int(job): 4 for job in rng.integers(0, 600, 2)}) for _ in range(1000)]
    victims = [Victim(stop_cost=float(cost)) for cost in rng.uniform(1, 100, 600)]
    ours = reclaim_by_cost(cluster, victims, 1600)
    assert sum(cluster[number].num_devices for number in ours.servers) >= 1600
    assert ours.cost < cost_of(cluster, victims, reclaim_by_gain(cluster, 1600))
