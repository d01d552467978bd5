"""Counts of waits by upper bound, as Prometheus wants them: values that grow by one observation at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """Spans of time in seconds: how many were at most each of `bounds_s`, how many in all, and their sum."""

    bounds_s: tuple[float, ...]
    up_to: tuple[int, ...] = ()
    count: int = 0
    sum_s: float = 0.0

    def plus(self, span_s: float) -> Histogram:
        before = self.up_to or (0,) * len(self.bounds_s)
        up_to = tuple(n + (span_s <= bound_s) for n, bound_s in zip(before, self.bounds_s, strict=True))
        return Histogram(self.bounds_s, up_to, self.count + 1, self.sum_s + span_s)

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound with how many were at most that, the last one without a bound."""
        up_to = self.up_to or (0,) * len(self.bounds_s)
        pairs = [(str(bound_s), float(n)) for bound_s, n in zip(self.bounds_s, up_to, strict=True)]
        return [*pairs, ("+Inf", float(self.count))]
