"""Data that arrives over hours in the world of goals: a rate that follows the day, and where it stands when."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

DAY_S = 86_400.0


class Arrivals:
    """The moments at which samples arrive, ascending; the stream is closed at `closes_s`."""

    def __init__(self, moments_s: Sequence[float], closes_s: float) -> None:
        self._moments_s = list(moments_s)
        self.closes_s = closes_s

    def count(self, now_s: float) -> int:
        """How many samples have arrived."""
        return bisect_right(self._moments_s, now_s)

    def when(self, count: int) -> float:
        """When so many have arrived; when it closes if that never happens."""
        return self._moments_s[count - 1] if 0 < count <= len(self._moments_s) else self.closes_s

    def rate(self, now_s: float, window_s: float = 600.0) -> float:
        """Samples a second over the last minutes."""
        since_s = max(0.0, now_s - window_s)
        return (self.count(now_s) - bisect_left(self._moments_s, since_s)) / max(1.0, now_s - since_s)

    def is_closed(self, now_s: float) -> bool:
        """Whether that is all."""
        return now_s >= self.closes_s


def daily_arrivals(
    seed: int, mean_per_s: float, *, duration_s: float = DAY_S, swing: float = 0.9, burst_sigma: float = 0.3
) -> Arrivals:
    """A day of them: most in the afternoon, few at night (1 - swing of the mean), each ten minutes a bit different."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 4242]))
    moments: list[float] = []
    step_s = 600.0
    for number in range(math.ceil(duration_s / step_s)):
        middle_s = (number + 0.5) * step_s
        shape = 1.0 + swing * math.sin(2.0 * math.pi * (middle_s / DAY_S - 0.375))
        burst = math.exp(burst_sigma * float(rng.standard_normal()) - 0.5 * burst_sigma**2)
        count = int(rng.poisson(mean_per_s * shape * burst * step_s))
        moments += sorted(number * step_s + step_s * float(place) for place in rng.random(count))
    return Arrivals(moments, duration_s)
