from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.core.errors import InvalidRequest
from springtide_studies.workloads.generators import (
    DAY_S,
    MAX_ARRIVALS,
    Moments,
    draw_bursts,
    draw_gamma,
    draw_periodic,
    draw_poisson,
    draw_sporadic,
    draw_tide,
)

SEEDS = st.integers(0, 2**32)
RATES = st.floats(1e-3, 20.0)
SPANS = st.floats(0.0, 500.0)
Draw = Callable[[int], Moments]


@st.composite
def draws(draw: st.DrawFn) -> tuple[Draw, float]:
    """Some generator with parameters of its own, and its horizon."""
    rate, span = draw(RATES), draw(SPANS)
    part = draw(st.floats(0.0, 1.0))
    kinds: list[Draw] = [
        lambda seed: draw_poisson(seed, rate_per_s=rate, duration_s=span),
        lambda seed: draw_gamma(seed, rate_per_s=rate, duration_s=span, variation=0.1 + 4 * part),
        lambda seed: draw_bursts(
            seed, on_per_s=rate, off_per_s=rate * part, mean_on_s=1 + part, mean_off_s=5.0, duration_s=span
        ),
        lambda seed: draw_periodic(seed, period_s=1 / rate, duration_s=span, jitter_fraction=part),
        lambda seed: draw_sporadic(seed, mean_gap_s=1 / rate, duration_s=span, mean_calls=1 + part, spread_s=part),
        lambda seed: draw_tide(seed, mean_per_s=rate, duration_s=span, depth_fraction=part, period_s=100.0),
    ]
    return draw(st.sampled_from(kinds)), span


@settings(max_examples=200)
@given(kind=draws(), seed=SEEDS)
def test_moments_are_sorted_within_the_horizon_and_follow_from_the_seed(kind: tuple[Draw, float], seed: int) -> None:
    draw, span_s = kind
    moments_s = draw(seed)
    assert moments_s.dtype == np.float64
    assert moments_s.ndim == 1
    assert (np.diff(moments_s) >= 0).all()
    assert ((moments_s >= 0) & (moments_s < span_s)).all()
    assert np.array_equal(moments_s, draw(seed))


def test_another_seed_gives_other_moments() -> None:
    first, second = (draw_poisson(seed, rate_per_s=1.0, duration_s=50.0) for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_the_steady_rates_are_met() -> None:
    assert len(draw_poisson(0, rate_per_s=10.0, duration_s=2_000.0)) == pytest.approx(20_000, rel=0.03)
    assert len(draw_periodic(0, period_s=0.1, duration_s=2_000.0)) == 20_000
    assert len(draw_tide(0, mean_per_s=10.0, duration_s=2_000.0, period_s=500.0)) == pytest.approx(20_000, rel=0.03)
    sporadic = draw_sporadic(0, mean_gap_s=10.0, duration_s=100_000.0, mean_calls=3.0)
    assert len(sporadic) == pytest.approx(30_000, rel=0.05)
    bursts = draw_bursts(0, on_per_s=20.0, off_per_s=2.0, mean_on_s=1.0, mean_off_s=3.0, duration_s=4_000.0)
    assert len(bursts) == pytest.approx(4_000 * (20 + 3 * 2) / 4, rel=0.05)


@pytest.mark.parametrize("variation", [0.2, 1.0, 3.0])
def test_gamma_gaps_have_the_variation_asked_for(variation: float) -> None:
    gaps_s = np.diff(draw_gamma(0, rate_per_s=10.0, duration_s=5_000.0, variation=variation))
    assert gaps_s.mean() == pytest.approx(0.1, rel=0.06)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(variation, rel=0.06)


def test_bursts_vary_more_than_poisson() -> None:
    bursts = draw_bursts(0, on_per_s=50.0, mean_on_s=2.0, mean_off_s=8.0, duration_s=2_000.0)
    steady = draw_poisson(0, rate_per_s=10.0, duration_s=2_000.0)
    spread = [np.histogram(moments, bins=2_000)[0].var() for moments in (bursts, steady)]
    assert spread[0] > 5 * spread[1]


def test_the_tide_is_high_at_its_peak() -> None:
    moments_s = draw_tide(0, mean_per_s=0.5, duration_s=10 * DAY_S, depth_fraction=0.8, peak_s=14 * 3600.0)
    by_hour = np.histogram(moments_s % DAY_S, bins=24, range=(0, DAY_S))[0]
    assert abs(int(by_hour.argmax()) - 14) <= 2
    assert by_hour.max() / by_hour.min() == pytest.approx(1.8 / 0.2, rel=0.25)


def test_a_timer_keeps_its_period() -> None:
    assert np.diff(draw_periodic(0, period_s=10.0, duration_s=100.0)).tolist() == [10.0] * 9
    loose = draw_periodic(0, period_s=10.0, duration_s=1_000.0, jitter_fraction=0.5)
    assert np.abs(loose - (np.arange(100) + 0.5) * 10.0).max() <= 2.5


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: draw_poisson(-1, rate_per_s=1.0, duration_s=1.0),
        lambda: draw_poisson(0, rate_per_s=0.0, duration_s=1.0),
        lambda: draw_poisson(0, rate_per_s=float("nan"), duration_s=1.0),
        lambda: draw_poisson(0, rate_per_s=1.0, duration_s=-1.0),
        lambda: draw_poisson(0, rate_per_s=1.0, duration_s=float("inf")),
        lambda: draw_poisson(0, rate_per_s=2.0, duration_s=float(MAX_ARRIVALS)),
        lambda: draw_gamma(0, rate_per_s=1.0, duration_s=1.0, variation=0.0),
        lambda: draw_gamma(0, rate_per_s=1e9, duration_s=1e9, variation=1.0),
        lambda: draw_bursts(0, on_per_s=1.0, mean_on_s=0.0, mean_off_s=1.0, duration_s=1.0),
        lambda: draw_bursts(0, on_per_s=1.0, mean_on_s=1e-6, mean_off_s=1e-6, duration_s=1e6),
        lambda: draw_periodic(0, period_s=1e-6, duration_s=1e6),
        lambda: draw_periodic(0, period_s=1.0, duration_s=1.0, jitter_fraction=1.5),
        lambda: draw_sporadic(0, mean_gap_s=1.0, duration_s=1.0, mean_calls=0.5),
        lambda: draw_sporadic(0, mean_gap_s=1.0, duration_s=1e5, mean_calls=1e6),
        lambda: draw_tide(0, mean_per_s=1.0, duration_s=1.0, depth_fraction=-0.1),
    ],
)
def test_what_cannot_be_drawn_is_refused(wrong: Callable[[], Moments]) -> None:
    with pytest.raises(InvalidRequest):
        wrong()


def test_moments_do_not_depend_on_the_process() -> None:
    program = (
        "import hashlib; from springtide_studies.workloads import generators as g;"
        "print(hashlib.sha256(g.draw_bursts(7, on_per_s=5.0, mean_on_s=2.0, mean_off_s=3.0, duration_s=90.0)"
        ".tobytes() + g.draw_gamma(7, rate_per_s=1.0, duration_s=90.0, variation=2.0).tobytes()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1
