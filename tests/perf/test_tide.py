"""The forecast of the tide: against the last value and yesterday's, and whether its bands hold what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kits.perf.tide_data import draw_needs, tide_of
from kits.simulation.sweeps import sampled
from springtide.core.tide import Tide
from springtide.perf.tide import Forecaster, forecast

DAY_S = 86_400.0
AHEAD = (1, 4, 16, 48)


def known_up_to(needs, bin_number, *, day_s=DAY_S, bins_per_day=96):
    """The tide at the begin of a bin, with nothing seen of it."""
    first = max(0, bin_number - 28 * bins_per_day)
    peaks = tuple(int(x) for x in needs[first:bin_number])
    return Tide(day_s=day_s, bins_per_day=bins_per_day, first_bin=first, peaks=peaks, peak=0, level=0)


def judge(seeds, *, warm_days, quantile=0.9, day_s=DAY_S, weekly=True, every=7, **course):
    """Mean errors of ours, of the last value and of yesterday's, and the shares of needs within each band."""
    errors = np.zeros(3)
    within = []
    for seed in seeds:
        needs = draw_needs(seed, **course)
        caster = Forecaster(quantile, weekly=weekly)
        for now in range(int(warm_days * 96), len(needs) - max(AHEAD), every):
            tide = known_up_to(needs, now, day_s=day_s)
            found = caster.forecast(tide, now * tide.bin_s * (1 + 1e-12), day_s / 2, 1000.0)
            for ahead in AHEAD:
                true = needs[now + ahead - 1]
                others = (found.expected[ahead - 1], needs[now - 1], needs[now + ahead - 1 - 96])
                errors += [abs(other - true) for other in others]
                within.append(
                    (true <= found.upper[ahead - 1], true >= found.lower[ahead - 1], true <= found.most[ahead - 1])
                )
    return errors / errors[0], np.mean(within, axis=0)


COURSES = {
    "a plain week": {"num_days": 8, "warm_days": 4},
    "a minute for a day": {"num_days": 8, "warm_days": 4, "day_s": 60.0},
    "noise that lasts": {"num_days": 8, "warm_days": 4, "persistence": 0.95},
    "surges": {"num_days": 10, "warm_days": 4, "surges_per_day": 1.5},
    "weekends": {"num_days": 23, "warm_days": 15, "weekend": 0.4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COURSES)
def test_it_misses_by_less_than_the_last_value_and_than_yesterday(name):
    (_, last, yesterday), _ = judge(range(3), **COURSES[name])
    assert last > 2.0
    assert yesterday > 1.15


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(COURSES))
def test_a_band_holds_what_it_says(name):
    for quantile in (0.8, 0.9, 0.95):
        _, (upper, lower, most) = judge(range(40, 70), quantile=quantile, every=5, **COURSES[name])
        assert upper == pytest.approx(quantile, abs=0.05)
        assert lower == pytest.approx(quantile, abs=0.05)
        assert most > 0.99


@pytest.mark.slow
def test_the_week_is_used_once_two_are_known():
    weekends = COURSES["weekends"]
    (_, _, with_week), _ = judge(range(2), **weekends)
    (_, _, without), _ = judge(range(2), weekly=False, **weekends)
    assert with_week > 1.3 * without


def test_before_a_day_is_known_it_is_the_reserve():
    tide = tide_of(draw_needs(1, num_days=1)[:90])
    found = forecast(tide, 90 * tide.bin_s, 3600.0, reserve=70)
    assert not found.is_known
    assert set(found.upper) == set(found.most) == {70.0}
    assert set(found.lower) == {0.0}
    assert math.isinf(forecast(tide, 90 * tide.bin_s, 3600.0).highest(0.0, 1e6))


def test_a_tide_of_which_nothing_is_known_is_the_reserve_too():
    found = forecast(Tide(), 1000.0, 3600.0, reserve=8)
    assert not found.is_known
    assert found.upper == (8.0,) * 5


def test_a_day_like_no_other_moves_the_season_little():
    needs = draw_needs(5, num_days=8)
    odd = needs.copy()
    odd[5 * 96 : 6 * 96] = 60
    usual = forecast(known_up_to(needs, 7 * 96), 7 * DAY_S, DAY_S, reserve=99)
    after = forecast(known_up_to(odd, 7 * 96), 7 * DAY_S, DAY_S, reserve=99)
    moved = np.abs(np.array(usual.expected) - np.array(after.expected)).mean()
    assert moved < 2.0
    assert min(after.most) >= 60.0


def test_today_running_higher_lifts_what_comes_and_less_so_far_ahead():
    needs = draw_needs(6, num_days=8, noise=0.1, persistence=0.95)
    now = 7 * 96 + 40
    higher = needs.copy()
    higher[now - 8 : now] += 15
    usual = forecast(known_up_to(needs, now), now * 900.0, DAY_S)
    lifted = forecast(known_up_to(higher, now), now * 900.0, DAY_S)
    rise = np.array(lifted.expected) - np.array(usual.expected)
    assert rise[1] > 5.0
    assert rise[60] < 0.5 * rise[1]


def test_what_is_needed_now_is_never_forecast_away():
    needs = draw_needs(7, num_days=5)
    tide = tide_of(needs).noted(len(needs) * 900.0 + 1.0, 400)
    found = forecast(tide, len(needs) * 900.0 + 2.0, 3600.0, reserve=400)
    assert found.upper[0] == found.expected[0] == found.most[0] == 400.0
    assert found.upper[1] > forecast(tide_of(needs), len(needs) * 900.0 + 2.0, 3600.0).upper[1]


def test_a_tide_without_updates_for_a_while_keeps_its_last_level():
    needs = draw_needs(8, num_days=3)
    tide = tide_of(needs)
    late = forecast(tide, (len(needs) + 5) * 900.0, 3600.0)
    assert late.first_bin == len(needs) + 5
    assert late == forecast(tide.noted((len(needs) + 5) * 900.0, tide.level), (len(needs) + 5) * 900.0, 3600.0)


def test_one_that_remembers_says_the_same_as_one_that_does_not():
    caster = Forecaster(0.9)
    for seed in (1, 2):
        needs = draw_needs(seed, num_days=30)
        for now in (97, 300, 301, 302, 2000, 2700, 2701, 2703, 2705):
            tide = known_up_to(needs, now)
            for _ in range(2):
                remembered = caster.forecast(tide, now * 900.0, DAY_S, 80)
                assert remembered == forecast(tide, now * 900.0, DAY_S, quantile=0.9, reserve=80)


def test_a_flat_tide_is_forecast_flat():
    tide = tide_of(np.full(96 * 4, 8))
    found = forecast(tide, 96 * 4 * 900.0, DAY_S, reserve=64)
    assert set(np.round(found.expected, 6)) == {8.0}
    assert max(found.upper) == pytest.approx(8.0)
    assert max(found.most) == 8.0
    assert found.highest(0.0, 1e9) == pytest.approx(8.0)
    assert found.until_s(0) == (96 * 4 + 1) * 900.0


def main():
    """Print what docs/tide.md tells: `python tests/perf/test_tide.py`."""
    for name, course in COURSES.items():
        (_, last, yesterday), (upper, lower, most) = judge(range(200, 210), quantile=0.95, every=5, **course)
        errors = f"error against the last value {1 / last:.2f}, against yesterday {1 / yesterday:.2f}"
        print(f"{name}: {errors}; within upper {upper:.3f}, lower {lower:.3f}, most {most:.3f}")


if __name__ == "__main__":
    main()
