"""Traces of requests to functions: how often each was called in each interval, and seeded moments within them."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest
from springtide_studies.workloads.generators import MAX_ARRIVALS


class FunctionCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one function: `counts[k]` of them in interval `intervals[k]` (from 0); silent ones are left out."""

    function: str
    app: str
    owner: str
    trigger: str
    intervals: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def num_calls(self) -> int:
        return sum(self.counts)


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The functions of one file in its order, counted over `num_intervals` of `interval_s` seconds from 0."""

    name: str
    functions: tuple[FunctionCalls, ...]
    interval_s: float
    num_intervals: int
    skipped: dict[str, int] = {}

    def rates_per_s(self, index: int) -> NDArray[np.float64]:
        """Calls a second of function `index` in each interval: shape (num_intervals,)."""
        calls = self.functions[index]
        rates = np.zeros(self.num_intervals)
        rates[list(calls.intervals)] = np.asarray(calls.counts, dtype=np.float64) / self.interval_s
        return rates

    def arrivals_s(self, index: int, seed: int) -> NDArray[np.float64]:
        """Sorted moments of the calls of function `index`, uniform within each interval as a Poisson stream of that
        count would be: shape (num_calls,). The trace only counts; the seed decides. Raises InvalidRequest.
        """
        calls = self.functions[index]
        if calls.num_calls > MAX_ARRIVALS:
            raise InvalidRequest(
                f"function {calls.function!r:.40} has {calls.num_calls:,} calls; moments are drawn for at most "
                f"{MAX_ARRIVALS:,}; choose a quieter function or use its rates"
            )
        rng = np.random.default_rng(np.random.SeedSequence([seed, index]))
        begins = np.repeat(np.asarray(calls.intervals, dtype=np.float64), calls.counts)
        return np.sort((begins + rng.random(calls.num_calls)) * self.interval_s)
