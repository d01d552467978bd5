"""Seeded arrivals: moments from 0 to a horizon, as steady, bursty or tidal as asked, each from its own streams."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest

MAX_ARRIVALS = 10_000_000
DAY_S = 86_400.0

Moments = NDArray[np.float64]


def draw_poisson(seed: int, *, rate_per_s: float, duration_s: float) -> Moments:
    """Independent arrivals at a steady rate: sorted moments in [0, duration_s). Raises InvalidRequest."""
    (rng,) = streams(seed, 1)
    return _poisson_within(rng, 0.0, _horizon(duration_s), _rate(rate_per_s))


def draw_gamma(seed: int, *, rate_per_s: float, duration_s: float, variation: float) -> Moments:
    """Gaps of a Gamma distribution with mean 1 / rate and coefficient of variation `variation` (deviation / mean).

    1 is Poisson, above 1 is bursty, towards 0 is regular. Sorted moments in [0, duration_s). Raises InvalidRequest.
    """
    (rng,) = streams(seed, 1)
    shape = 1.0 / _within("variation", variation, 0.01, 100.0) ** 2
    horizon_s, rate = _horizon(duration_s), _rate(rate_per_s)
    expected = _expect(rate * horizon_s)
    chunks: list[Moments] = [np.empty(0)]
    at_s, num_drawn = 0.0, 0
    while at_s < horizon_s:
        gaps = rng.gamma(shape, 1.0 / (shape * rate), size=min(65_536, max(64, math.ceil(expected))))
        moments = at_s + np.cumsum(gaps)
        at_s = float(moments[-1])
        num_drawn += len(moments)
        _expect(float(num_drawn))
        chunks.append(moments)
    moments = np.concatenate(chunks)
    return moments[moments < horizon_s]


def draw_bursts(
    seed: int,
    *,
    on_per_s: float,
    off_per_s: float = 0.0,
    mean_on_s: float,
    mean_off_s: float,
    duration_s: float,
) -> Moments:
    """Poisson arrivals whose rate is switched on and off for exponentially distributed spans; it begins off.

    Sorted moments in [0, duration_s). Raises InvalidRequest.
    """
    spans, calls = streams(seed, 2)
    horizon_s = _horizon(duration_s)
    rates = (_rate(off_per_s, lowest=0.0), _rate(on_per_s))
    means_s = (_within("mean_off_s", mean_off_s, 1e-6, 1e11), _within("mean_on_s", mean_on_s, 1e-6, 1e11))
    _expect(2.0 * horizon_s / sum(means_s))
    _expect(horizon_s * sum(rate * mean for rate, mean in zip(rates, means_s, strict=True)) / sum(means_s))
    chunks: list[Moments] = [np.empty(0)]
    at_s, is_on, num_drawn = 0.0, 0, 0
    while at_s < horizon_s:
        end_s = min(horizon_s, at_s + float(spans.exponential(means_s[is_on])))
        chunks.append(_poisson_within(calls, at_s, end_s, rates[is_on]))
        num_drawn += 1 + len(chunks[-1])
        _expect(float(num_drawn))
        at_s, is_on = end_s, 1 - is_on
    return np.concatenate(chunks)


def draw_periodic(seed: int, *, period_s: float, duration_s: float, jitter_fraction: float = 0.0) -> Moments:
    """One arrival a period, as from a timer, in the middle of the period up to half of `jitter_fraction` of it off.

    Sorted moments in [0, duration_s). Raises InvalidRequest.
    """
    (rng,) = streams(seed, 1)
    period = _within("period_s", period_s, 1e-6, 1e11)
    jitter = _within("jitter_fraction", jitter_fraction, 0.0, 1.0)
    horizon_s = _horizon(duration_s)
    count = math.ceil(_expect(horizon_s / period))
    offsets = 0.5 + jitter * (rng.random(count) - 0.5)
    moments = (np.arange(count) + offsets) * period
    return np.sort(moments[moments < horizon_s])


def draw_sporadic(
    seed: int, *, mean_gap_s: float, duration_s: float, mean_calls: float = 1.0, spread_s: float = 1.0
) -> Moments:
    """Rare visits, Poisson with a mean gap, of `mean_calls` arrivals each (geometric), within `spread_s` seconds.

    Sorted moments in [0, duration_s). Raises InvalidRequest.
    """
    visits, sizes, spread = streams(seed, 3)
    gap_s = _within("mean_gap_s", mean_gap_s, 1e-6, 1e11)
    mean = _within("mean_calls", mean_calls, 1.0, 1e6)
    horizon_s = _horizon(duration_s)
    _expect(horizon_s / gap_s * mean)
    begins = _poisson_within(visits, 0.0, horizon_s, 1.0 / gap_s)
    counts = sizes.geometric(1.0 / mean, size=len(begins))
    _expect(float(counts.sum()))
    moments = np.repeat(begins, counts)
    moments = moments + spread.random(len(moments)) * _within("spread_s", spread_s, 0.0, 1e11)
    return np.sort(moments[moments < horizon_s])


def draw_tide(
    seed: int,
    *,
    mean_per_s: float,
    duration_s: float,
    depth_fraction: float = 0.8,
    period_s: float = DAY_S,
    peak_s: float = DAY_S / 2,
) -> Moments:
    """Poisson arrivals on a day curve: rate mean * (1 + depth * cos(2 pi (t - peak) / period)), by thinning.

    Sorted moments in [0, duration_s). Raises InvalidRequest.
    """
    arrivals, thinning = streams(seed, 2)
    mean = _rate(mean_per_s)
    depth = _within("depth_fraction", depth_fraction, 0.0, 1.0)
    period = _within("period_s", period_s, 1e-6, 1e11)
    peak = _within("peak_s", peak_s, 0.0, 1e11)
    moments = _poisson_within(arrivals, 0.0, _horizon(duration_s), mean * (1.0 + depth))
    share = (1.0 + depth * np.cos(2.0 * np.pi * (moments - peak) / period)) / (1.0 + depth)
    return moments[thinning.random(len(moments)) < share]


def streams(seed: int, count: int) -> list[np.random.Generator]:
    if seed < 0:
        raise InvalidRequest(f"seed {seed} is negative; give 0 or more")
    return [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(count)]


def _poisson_within(rng: np.random.Generator, begin_s: float, end_s: float, rate_per_s: float) -> Moments:
    """Given their number, the moments of a Poisson process are uniform."""
    expected = _expect(rate_per_s * (end_s - begin_s))
    count = int(_expect(float(rng.poisson(expected))))
    moments = begin_s + np.sort(rng.random(count)) * (end_s - begin_s)
    # Rounding may bring the last of them up to the end itself.
    return moments[moments < end_s]


def _within(name: str, value: float, lowest: float, highest: float) -> float:
    if not math.isfinite(value) or not lowest <= value <= highest:
        raise InvalidRequest(f"{name} {value!r} must be from {lowest:g} to {highest:g}")
    return value


def _horizon(duration_s: float) -> float:
    return _within("duration_s", duration_s, 0.0, 1e11)


def _rate(rate_per_s: float, *, lowest: float = 1e-12) -> float:
    return _within("the rate per second", rate_per_s, lowest, 1e9)


def _expect(count: float) -> float:
    if count > MAX_ARRIVALS:
        raise InvalidRequest(f"over {MAX_ARRIVALS:,} arrivals; lower the rate or the duration")
    return count
