"""What work is worth, against heSRPT's closed form and a search over everything; shares, against every combination."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from springtide.solvers import share_dp
from springtide.solvers.share_dp import (
    FEW_ROWS,
    best_shares,
    concave_hull,
    hull_segments,
    marginal_value,
    shares_along_hulls,
    work_weights,
    work_weights_of_many,
)


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


def drawn(rng: np.random.Generator, num_jobs: int) -> tuple[np.ndarray, np.ndarray]:
    """Sizes and speeds [J, S] of jobs whose speed grows with a power of the size; the last one to end comes first."""
    sizes = np.tile(np.array([1, 2, 4, 8, 16]), (num_jobs, 1))
    speeds = sizes ** rng.uniform(0.4, 0.95, (num_jobs, 1)) / rng.lognormal(7.0, 1.5, (num_jobs, 1))
    speeds[:, -1] *= rng.uniform(size=num_jobs) < 0.7
    return sizes, speeds[np.argsort(speeds.max(axis=1))]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_jobs", "capacity"), [(1, 8), (12, 16), (60, 64), (200, 512)])
def test_weights_in_blocks_share_as_well_as_exact_ones(num_jobs: int, capacity: int, seed: int) -> None:
    sizes, speeds = drawn(np.random.default_rng(seed), num_jobs)
    exact = work_weights(list(sizes), list(speeds), capacity, 1.0)
    values = work_weights_of_many(sizes, speeds, capacity, 1.0)[:, None] * speeds

    def worth(shares: Sequence[int]) -> float:
        speed_of = [dict(zip(sizes[job].tolist(), speeds[job].tolist(), strict=True)) for job in range(num_jobs)]
        return sum(float(exact[job]) * speed_of[job].get(share, 0.0) for job, share in enumerate(shares))

    best = worth(best_shares(list(sizes), list(exact[:, None] * speeds), capacity))
    assert worth(best_shares(list(sizes), list(values), capacity)) > 0.995 * best
    along = shares_along_hulls(sizes, values, capacity)
    assert along.sum() <= capacity
    assert worth(along.tolist()) > (0.97 if num_jobs > 12 else 0.7) * best


def test_segments_of_many_hulls_are_those_of_each() -> None:
    sizes, values = drawn(np.random.default_rng(5), 50)
    rows, slopes, widths = hull_segments(sizes, values)
    for job in range(50):
        corners = [0, *sizes[job][concave_hull(sizes[job], values[job])]]
        assert np.cumsum([0, *widths[rows == job]]).tolist() == corners
        assert (np.diff(slopes[rows == job]) <= 1e-12).all()
    assert [len(found) for found in hull_segments(sizes[:0], values[:0])] == [0, 0, 0]


def test_the_last_unit_is_worth_the_slope_that_it_lies_on() -> None:
    sizes, values = np.array([[1, 2, 4], [1, 3, 0]]), np.array([[3.0, 4.0, 5.0], [2.5, 6.5, 0.0]])
    # 3, then 2.5, then twice 2, then 1, then twice a half: seven units in all.
    slopes = [3.0, 3.0, 2.5, 2.0, 2.0, 1.0, 0.5, 0.5, 0.0]
    assert [marginal_value(sizes, values, capacity) for capacity in range(9)] == slopes


@pytest.mark.parametrize("seed", range(30))
def test_few_rows_have_the_segments_that_they_have_among_many(seed):
    rng = np.random.default_rng(seed)
    sizes = np.sort(rng.integers(0, 40, (FEW_ROWS, 7)), axis=1)
    # Few different values, so that slopes are equal now and then.
    values = rng.choice([0.0, 0.1, 0.2, 0.3, 0.7, 1.1, 1.3], (FEW_ROWS, 7)) * rng.choice([1.0, 1.0 / 3.0])
    none = np.zeros_like(values)
    few = hull_segments(sizes, values)
    many = hull_segments(np.concatenate([sizes, sizes]), np.concatenate([values, none]))
    for found, expected in zip(few, many, strict=True):
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()
