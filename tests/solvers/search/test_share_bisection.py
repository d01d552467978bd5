"""Request and limit of a training function from its throughput by share: curves, noise and contradictions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from springtide.core.errors import InvalidRequest
from springtide.solvers.search.share_bisection import MAX_REPEATS, search_shares, smoothed

Curve = Callable[[float], float]
CURVES: dict[str, Curve] = {
    "linear": lambda share: share,
    "saturating": lambda share: min(1.0, share / 0.45),
    "concave": lambda share: 1.0 - math.exp(-4.0 * share),
    "slow at first": lambda share: 1.0 / (1.0 + math.exp(-12.0 * (share - 0.4))),
    "early": lambda share: min(1.0, share / 0.05),
}
MOST_TRIALS = 1 + 2 * math.ceil(math.log2(1 / 0.02))


@pytest.mark.parametrize("name", CURVES)
def test_the_request_keeps_80_and_the_limit_all_within_2_percent(name: str) -> None:
    curve = CURVES[name]
    found = search_shares(lambda share: 250.0 * curve(share))
    kept = curve(found.request) / curve(1.0)
    assert kept >= 0.78
    # Where the curve is steeper than the shares are told apart, the request is the next larger one.
    assert kept <= 0.82 + 1e-9 or curve(found.request - 0.02) / curve(1.0) < 0.78
    assert curve(found.limit) / curve(1.0) >= 0.98
    smaller = found.limit - 0.02
    assert smaller <= 0.0 or curve(smaller) / curve(1.0) < 0.98
    assert found.request <= found.limit <= 1.0
    assert found.num_trials <= MOST_TRIALS
    assert found.is_consistent


def test_a_share_that_changes_nothing_is_as_small_as_shares_are_told_apart() -> None:
    found = search_shares(lambda share: 10.0)
    assert found.request == found.limit <= 0.02
    assert found.request_per_s == found.whole_per_s == 10.0


@pytest.mark.parametrize("name", ["linear", "saturating", "concave"])
def test_noise_moves_the_answer_a_little_and_trials_stay_bounded(name: str) -> None:
    curve = CURVES[name]
    rng = random.Random(7)
    for _ in range(20):
        found = search_shares(lambda share: 100.0 * curve(share) * math.exp(rng.gauss(0.0, 0.01)))
        assert curve(found.request) / curve(1.0) > 0.75
        assert curve(found.limit) / curve(1.0) > 0.94
        assert found.num_trials <= MOST_TRIALS + 2 * MAX_REPEATS
        assert {found.request, found.limit} <= {trial.share for trial in found.trials}


def test_one_bad_measurement_is_repeated_and_averaged_away() -> None:
    asked: list[float] = []

    def measure(share: float) -> float:
        asked.append(share)
        # The very first one, of the whole device, is 30 % too low: something else was running.
        return (70.0 if len(asked) == 1 else 100.0) * min(1.0, share / 0.5)

    found = search_shares(measure)
    assert asked.count(1.0) > 1
    assert 0.35 <= found.request <= 0.5
    assert found.num_trials <= MOST_TRIALS + 2 * MAX_REPEATS


def test_what_contradicts_itself_to_the_end_is_told() -> None:
    found = search_shares(lambda share: 100.0 if share < 0.6 else 50.0)
    assert not found.is_consistent
    assert found.num_trials <= MOST_TRIALS + 2 * MAX_REPEATS


def test_smoothing_pools_what_falls() -> None:
    assert smoothed([1.0, 3.0, 2.0, 4.0], [1, 1, 1, 1]) == [1.0, 2.5, 2.5, 4.0]
    assert smoothed([1.0, 4.0, 1.0], [1, 1, 3]) == [1.0, 1.75, 1.75]
    assert smoothed([3.0, 2.0, 1.0], [1, 1, 1]) == [2.0, 2.0, 2.0]


def test_what_is_no_throughput_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="let each trial run for longer"):
        search_shares(lambda share: 0.0)
    with pytest.raises(InvalidRequest, match="which is none"):
        search_shares(lambda share: math.nan)
    with pytest.raises(InvalidRequest, match="rising fractions"):
        search_shares(lambda share: 1.0, request_fraction=1.2)
