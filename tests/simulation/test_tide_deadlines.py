"""Deadlines and tide together: no promise is broken by a server that goes, where speeds are what the profiles say."""

from __future__ import annotations

import pytest

from kits.simulation.sweeps import sampled
from kits.simulation.tide_deadlines import kept_of, play_by_hand, play_tide


@pytest.mark.parametrize("seed", [0, 2, 16])
def test_no_promise_breaks_when_servers_go_as_told(seed: int) -> None:
    # A policy made anew from its memory says the same at every decision; the book holds after each of them.
    assert kept_of(play_by_hand(seed, doubts=True)) > 10


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", sampled([100, 110, 120, 130]))
def test_no_promise_breaks_on_more_seeds(first: int) -> None:
    assert sum(kept_of(play_by_hand(seed)) for seed in range(first, first + 10)) > 150


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", sampled([0, 2, 3, 5, 8]))
def test_no_promise_breaks_under_the_strategy_of_the_tide(seed: int) -> None:
    played, minimums = play_tide(seed)
    assert kept_of(played) > 5
    assert minimums.num_demanded > 0
    assert minimums.num_broken == 0
