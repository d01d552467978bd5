"""How many places and functions of a function service are claimed over time, and when more fit."""

from __future__ import annotations

import math

# A claim lasts at least so long, so that a job that ends now still counts when another one begins now.
MOMENT_S = 1e-3


class ServiceRoom:
    """The claims of jobs, running or planned, on one service's places and functions over time."""

    def __init__(self, now_s: float, functions: int, places: int) -> None:
        self._now_s = now_s
        self._functions = functions
        self._places = places
        self._claims: list[tuple[float, float, int]] = []

    def claim(self, start_s: float, end_s: float, functions: int) -> None:
        """One place and so many functions are taken from `start_s` to `end_s`."""
        self._claims.append((start_s, max(end_s, start_s + MOMENT_S), functions))

    def release(self, functions: int) -> None:
        """Take back the claim of a job that runs now as so many functions."""
        self._claims.remove(next(c for c in self._claims if c[0] == self._now_s and c[2] == functions))

    def free_now(self) -> int:
        """How many functions are unclaimed at this moment."""
        return self._functions - self._used(self._now_s)[0]

    def earliest_s(self, functions: int, duration_s: float) -> float:
        """The first moment from which so many functions and one place are free for so long; infinite: never."""
        if functions > self._functions or not self._places:
            return math.inf
        starts = sorted({self._now_s, *(end_s for _, end_s, _ in self._claims if end_s > self._now_s)})
        return next((at_s for at_s in starts if self._fits(at_s, at_s + duration_s, functions)), math.inf)

    def _fits(self, start_s: float, end_s: float, functions: int) -> bool:
        if math.isinf(start_s):
            return False
        moments = [start_s, *(claim[0] for claim in self._claims if start_s < claim[0] < end_s)]
        for at_s in moments:
            used, taken = self._used(at_s)
            if used + functions > self._functions or taken + 1 > self._places:
                return False
        return True

    def _used(self, at_s: float) -> tuple[int, int]:
        there = [claim[2] for claim in self._claims if claim[0] <= at_s < claim[1]]
        return sum(there), len(there)
