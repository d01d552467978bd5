"""What work is worth, against heSRPT's closed form and a search over everything; shares, against every combination."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from springtide.solvers import share_dp
from springtide.solvers.share_dp import best_shares, concave_hull, work_weights


def test_equal_jobs_weigh_what_hesrpt_says():
    power, capacity, num = 0.5, 4096, 5
    sizes = np.arange(1, capacity + 1)
    speeds = sizes.astype(float) ** power
    weights = work_weights([sizes] * num, [speeds] * num, capacity, 0.0)
    exponent = 1.0 / (1.0 - power)
    rank = np.arange(1, num + 1)
    known = (rank**exponent - (rank - 1) ** exponent) ** (1.0 - power) / capacity**power
    assert weights == pytest.approx(known, rel=0.02)


def test_the_best_shares_of_all_jobs_are_worth_their_number():
    sizes = [np.array([1, 2, 3, 4, 6, 8])] * 3
    speeds = [np.array([1, 1.8, 2.5, 3.0, 3.5, 3.8]) / work for work in (900.0, 300.0, 20.0)]
    for company in (0.0, 3.0):
        weights = work_weights(sizes, speeds, 8, company)
        most = max(
            sum(
                weight * (np.interp(share, np.r_[0, own], np.r_[0.0, speed]))
                for weight, own, speed, share in zip(weights, sizes, speeds, shares, strict=True)
            )
            for shares in itertools.product(np.linspace(0, 8, 33), repeat=3)
            if sum(shares) <= 8
        )
        assert most == pytest.approx(3 + company, rel=0.01)


def test_who_cannot_run_weighs_nothing():
    assert work_weights([np.array([8]), np.array([1])], [np.array([1.0]), np.array([0.5])], 4, 0.0).tolist() == [0, 2]


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_the_best_of_all_combinations(seed):
    rng = np.random.default_rng(seed)
    sizes = [np.array(sorted(rng.choice(np.arange(1, 9), size=3, replace=False))) for _ in range(4)]
    values = [rng.uniform(0.0, 5.0, size=3) for _ in range(4)]
    shares = best_shares(sizes, values, 10)

    def worth(chosen):
        worths = [
            dict(zip(own.tolist(), value.tolist(), strict=True)) for own, value in zip(sizes, values, strict=True)
        ]
        return sum(worth[size] for worth, size in zip(worths, chosen, strict=True) if size)

    every = itertools.product(*[[0, *own.tolist()] for own in sizes])
    assert sum(shares) <= 10
    assert worth(shares) == pytest.approx(max(worth(chosen) for chosen in every if sum(chosen) <= 10))


def test_large_problems_go_along_the_hulls_and_lose_little(monkeypatch):
    rng = np.random.default_rng(0)
    sizes = [np.array([1, 2, 4, 8, 16])] * 40
    values = [rng.uniform(1.0, 9.0) * sizes[0] ** rng.uniform(0.3, 0.9) for _ in range(40)]

    def worth(shares):
        return sum(float(value[list(own).index(n)]) for own, value, n in zip(sizes, values, shares, strict=True) if n)

    exact = best_shares(sizes, values, 100)
    monkeypatch.setattr(share_dp, "MAX_CELLS", 0)
    greedy = best_shares(sizes, values, 100)
    assert sum(greedy) <= 100
    assert worth(greedy) >= 0.98 * worth(exact)


def test_nobody_and_nothing():
    assert best_shares([], [], 4) == []
    assert best_shares([np.array([1])], [np.array([1.0])], 0) == [0]
    assert best_shares([np.zeros(0, dtype=int)], [np.zeros(0)], 4) == [0]
    assert concave_hull(np.array([1, 2, 3]), np.array([2.0, 1.0, 2.5])) == [0, 2]
