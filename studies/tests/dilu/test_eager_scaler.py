"""The rivals do what their papers say: follow the mean of ten seconds, or keep a replica warm for its silences."""

from __future__ import annotations

import pytest

from springtide_studies.dilu.eager_scaler import (
    EagerRules,
    EagerState,
    KeepAliveRules,
    KeepAliveState,
    keep_alive_of,
    scale_eagerly,
    scale_with_keep_alive,
)


def eager(rates, **rules):
    state, wanted = EagerState(wanted=1), []
    for rate in rates:
        state = scale_eagerly(EagerRules(throughput_per_s=50.0, max_replicas=9, **rules), state, rate)
        wanted.append(state.wanted)
    return wanted


def test_eager_follows_the_mean_both_ways_every_other_second():
    wanted = eager([40.0] * 10 + [240.0] * 10 + [40.0] * 10)
    assert wanted[9] == 1
    assert wanted[10] == 1, "not its second"
    assert wanted[11] == 2, "mean of 8 x 40 and 2 x 240: 80"
    assert wanted[19] == 5
    assert wanted[29] == 1


def test_eager_by_the_last_second_follows_it_at_once():
    assert eager([40.0, 140.0, 40.0], window=1, period=1) == [1, 3, 1]


def test_eager_keeps_its_bounds_and_wakes_from_zero():
    assert max(eager([5000.0] * 20)) == 9
    assert eager([0.0] * 20)[-1] == 1
    assert eager([0.0] * 20 + [10.0], min_replicas=0)[-2:] == [0, 1]


def test_keep_alive_holds_what_was_needed_lately():
    rules = KeepAliveRules(throughput_per_s=50.0, keep_alive_s=5, max_replicas=9)
    state, wanted = KeepAliveState(), []
    for rate in [10.0, 220.0, *[10.0] * 6, *[0.0] * 6]:
        state = scale_with_keep_alive(rules, state, rate)
        wanted.append(state.wanted)
    assert wanted[:7] == [1, 5, 5, 5, 5, 5, 1]
    assert wanted[-1] == 0


def test_the_keep_alive_is_the_tail_of_long_and_short_silences():
    rates = [1.0, *[0.0] * 4, 1.0, *[0.0] * 4, 1.0] + [1.0] * 200 + [0.0] * 10 + [1.0]
    long_tail, short_tail = 4 + 0.98 * 6, 4
    assert keep_alive_of(rates) == pytest.approx(0.5 * long_tail + 0.5 * short_tail, abs=1.0)
    assert keep_alive_of([1.0] * 50) == 60, "no silence teaches nothing"
    assert keep_alive_of([0.0] * 30) == 30
