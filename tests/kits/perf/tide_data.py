"""Tides whose course is known: a day's curve with noise, weekends, surges, drift and days that are like no other."""

from __future__ import annotations

import numpy as np

from springtide.core.tide import Tide


def draw_needs(
    seed: int,
    *,
    num_days: int,
    bins_per_day: int = 96,
    base: float = 6.0,
    height: float = 40.0,
    noise: float = 0.06,
    weekend: float = 1.0,
    drift_per_day: float = 0.0,
    surges_per_day: float = 0.0,
    odd_days: tuple[int, ...] = (),
    persistence: float = 0.8,
) -> np.ndarray:
    """Devices needed in each bin. `weekend` is what is left of the height on days 5 and 6 of each week.

    The noise is a share of the height, from bin to bin it keeps `persistence` of itself; a surge takes a third of the
    height on top for up to two hours; an odd day has another curve altogether.
    """
    rng = np.random.default_rng(seed)
    phase = rng.uniform(-0.05, 0.05)
    at = np.arange(num_days * bins_per_day) / bins_per_day
    day = at.astype(int)
    hour = (at - day + phase) % 1.0
    # A morning and an evening peak, and a night in which little is asked.
    curve = np.exp(-((hour - 0.45) ** 2) / 0.012) + 0.9 * np.exp(-((hour - 0.82) ** 2) / 0.006)
    curve = np.clip(curve + 0.25 * np.sin(np.pi * hour), 0.0, None)
    share = np.where(day % 7 >= 5, weekend, 1.0) * (1.0 + drift_per_day * day)
    wave = np.zeros(at.size)
    shock = rng.normal(0.0, noise * np.sqrt(1 - persistence**2), at.size)
    for i in range(1, at.size):
        wave[i] = persistence * wave[i - 1] + shock[i]
    needs = base + height * share * (curve + wave * (0.3 + curve))
    for odd in odd_days:
        needs[day == odd] = base + height * rng.uniform(0.0, 1.2)
    for _ in range(rng.poisson(surges_per_day * num_days)):
        start = int(rng.integers(at.size))
        needs[start : start + int(rng.integers(2, max(3, bins_per_day // 12)))] += height / 3
    return np.maximum(0, np.round(needs)).astype(int)


def tide_of(needs: np.ndarray, *, day_s: float = 86_400.0, bins_per_day: int = 96) -> Tide:
    """The tide after all of these bins, the next one just open at the last level."""
    tide = Tide(day_s=day_s, bins_per_day=bins_per_day)
    for number, needed in enumerate(needs):
        tide = tide.noted(number * tide.bin_s, int(needed))
    return tide.noted(len(needs) * tide.bin_s, int(needs[-1]))
