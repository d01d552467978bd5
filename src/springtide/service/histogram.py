"""An immutable histogram of durations with cumulative buckets, as Prometheus expects them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations in seconds: `up_to` counts those of at most each of `bounds_s`, `count` and `sum_s` cover all."""

    bounds_s: tuple[float, ...]
    up_to: tuple[int, ...] = ()
    count: int = 0
    sum_s: float = 0.0

    def plus(self, duration_s: float) -> Histogram:
        """Return the histogram with one more duration."""
        before = self.up_to or (0,) * len(self.bounds_s)
        up_to = tuple(n + (duration_s <= bound_s) for n, bound_s in zip(before, self.bounds_s, strict=True))
        return Histogram(self.bounds_s, up_to, self.count + 1, self.sum_s + duration_s)

    def buckets(self) -> list[tuple[str, float]]:
        """The label and cumulative count of each bucket, the last one without an upper bound."""
        up_to = self.up_to or (0,) * len(self.bounds_s)
        pairs = [(str(bound_s), float(n)) for bound_s, n in zip(self.bounds_s, up_to, strict=True)]
        return [*pairs, ("+Inf", float(self.count))]
