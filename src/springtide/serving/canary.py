"""Whether a new revision's requests keep a limit on faults: a test that is valid however often one looks at it.

Each request is a fault or not. Under the limit p0 the likelihood of what was seen with a share of faults p1 instead,
divided by that with p0, has a mean of at most 1 at every moment, so that it reaches 100 with a probability of at most
1 % however long one looks (Ville's inequality). The mean over several p1 has the same property. With p1 above p0 it
speaks for more faults than allowed, with p1 below for fewer.
"""

from __future__ import annotations

import math
import re

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.quantities import parse_duration_s
from springtide.core.workload import WatchRule

ROLL_BACK_AT = 100.0
PROMOTE_AT = 20.0
_NUM_POINTS = 12
_LEAST_LIMIT, _LARGEST_LIMIT = 1e-5, 0.5
_MOST_RULES = 8
_ERRORS = re.compile(r"errors\s*<\s*([0-9.]+)\s*%")
_LATENCY = re.compile(r"p([0-9]{1,2}(?:\.[0-9]+)?)\s*<\s*(\S+)")


def parse_watch(text: str) -> tuple[WatchRule, ...]:
    """The rules of `p99<200ms,errors<1%`: at most 1 % take over 200 ms, at most 1 % are errors. Raises InvalidRequest.

    A request that fails also counts as one that takes too long.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not 1 <= len(parts) <= _MOST_RULES:
        raise InvalidRequest(f"a watch has 1 to {_MOST_RULES} rules, like p99<200ms,errors<1%, not {text!r:.80}")
    return tuple(_rule(part) for part in parts)


def _rule(part: str) -> WatchRule:
    errors, latency = _ERRORS.fullmatch(part), _LATENCY.fullmatch(part)
    try:
        if errors is not None:
            rule = WatchRule(text=part, limit=float(errors[1]) / 100)
        elif latency is not None:
            over_s = parse_duration_s(latency[2], "the watch's time")
            rule = WatchRule(text=part, limit=round(1 - float(latency[1]) / 100, 9), over_s=over_s)
        else:
            raise ValueError
    except ValueError:
        raise InvalidRequest(f"{part!r:.80} is no rule to watch; write p99<200ms or errors<1%") from None
    if not _LEAST_LIMIT <= rule.limit <= _LARGEST_LIMIT:
        raise InvalidRequest(f"{part!r:.80} allows {rule.limit:.3%} faults; 0.001 % to 50 % can be judged")
    return rule


class FaultTest:
    """Judges one rule from the number of requests that were faults and that were not."""

    def __init__(self, rule: WatchRule) -> None:
        self.rule = rule
        self.num_bad = self.num_good = 0
        p0 = rule.limit
        self._above = _ratios(p0, min(1.5 * p0, 0.9), 0.9)
        self._below = _ratios(p0, 0.01 * p0, 0.7 * p0)

    def add(self, latency_s: float, *, is_error: bool) -> None:
        """Count one request."""
        over_s = self.rule.over_s
        if is_error or (over_s is not None and latency_s > over_s):
            self.num_bad += 1
        else:
            self.num_good += 1

    @property
    def against(self) -> float:
        """The evidence that there are more faults than the limit allows: 100 is enough for one rule."""
        return self._mean(self._above)

    @property
    def favour(self) -> float:
        """The evidence that there are fewer: 20 is enough."""
        return self._mean(self._below)

    def _mean(self, ratios: list[tuple[float, float]]) -> float:
        exponents = [self.num_bad * bad + self.num_good * good for bad, good in ratios]
        # A factor of e^700 is beyond any threshold.
        return math.fsum(math.exp(min(exponent, 700.0)) for exponent in exponents) / len(exponents)

    def seen(self) -> str:
        """`3 of 140 were not`, about the rule."""
        total = self.num_bad + self.num_good
        return f"{self.rule.text}: {self.num_bad} of {total} requests broke it"


def _ratios(p0: float, low: float, high: float) -> list[tuple[float, float]]:
    """The logarithm of the likelihood's factor for a fault and for a request without, at points from low to high."""
    step = (high / low) ** (1 / (_NUM_POINTS - 1))
    points = [low * step**index for index in range(_NUM_POINTS)]
    return [(math.log(p1 / p0), math.log1p(-p1) - math.log1p(-p0)) for p1 in points]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a revision is to get all requests, and why; `is_proven` says that the test has shown it."""

    is_good: bool
    reason: str
    is_proven: bool = True


class CanaryJudge:
    """Judges all rules of one revision together, from the time at which its first request can come."""

    def __init__(self, rules: tuple[WatchRule, ...], watch_for_s: float, now_s: float) -> None:
        self.tests = [FaultTest(rule) for rule in rules]
        self._ends_at_s = now_s + watch_for_s if watch_for_s else math.inf

    def add(self, latency_s: float, *, is_error: bool) -> None:
        """Count one request."""
        for test in self.tests:
            test.add(latency_s, is_error=is_error)

    def verdict(self, now_s: float) -> Verdict | None:
        """What follows from the requests so far; None: not known yet.

        Any of several rules may raise a false alarm, so each needs as much more evidence.
        """
        broken = [test for test in self.tests if test.against >= ROLL_BACK_AT * len(self.tests)]
        if broken:
            return Verdict(is_good=False, reason="; ".join(test.seen() for test in broken))
        if self.tests and all(test.favour >= PROMOTE_AT for test in self.tests):
            return Verdict(is_good=True, reason="; ".join(test.seen() for test in self.tests))
        if now_s < self._ends_at_s:
            return None
        seen = "; ".join(test.seen() for test in self.tests) or "it was held to no rule"
        return Verdict(is_good=True, reason=f"not proven within its time: {seen}", is_proven=False)
