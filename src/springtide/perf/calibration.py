"""How far the time of a run may lie from what was expected of it: a distribution learnt from how earlier runs came out.

A run takes its expected time x exp(e), and what failures of devices cost it. The error e has a Student t around a level
of its family, which is drawn towards that of all families; how often outcomes really fell below each of its quantiles
corrects it afterwards. Pure: the same outcomes give the same distribution.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist, median

import numpy as np

from springtide.core.job_parts import JobOutcome
from springtide.core.workload import SpeedBasis

# Degrees of freedom of the t: runs on a shared machine have heavy tails. What is learnt corrects the rest.
FREEDOM = 5.0
# The spread of runs of one family, and of families, before anything is known (of the logarithm); each counts as so many
# outcomes. Together they are the ten per cent either way (thirty from a fitted curve) that quotes assume at first.
_PRIOR_SPREAD: dict[SpeedBasis, float] = {"declared": 0.046, "measured": 0.046, "fitted": 0.126}
_PRIOR_OUTCOMES = 5.0
# The level of a family follows about this many of its newest runs.
_MOST_REMEMBERED = 30.0
# How many of the newest outcomes correct the distribution, and as how many of them the t itself counts.
WINDOW = 500
_T_COUNTS_AS = 10.0
# A cumulative sum of the scores beyond `_SLACK` each that reaches `_ALARM` is a change of all speeds: at a shift of one
# and a half standard deviations after some eight runs, without any shift once in some ten thousand.
_SLACK, _ALARM, _MOST_SCORE = 0.5, 8.0, 3.0
# Failures before any were seen: one in so many device-hours, which counts as much as one failure seen.
_PRIOR_DEVICE_HOURS = 1000.0
_NORMAL = NormalDist()
_W = (8 * FREEDOM + 1) / (8 * FREEDOM + 3)
_TINY = 1e-12
# The weight of a new score in the mean square of scores.
_USUAL_FRACTION = 0.02


def normal_score(value: float) -> float:
    """The standard normal value at the same probability as this one of the t (Wallace 1959: within 0.002)."""
    return math.copysign(_W * math.sqrt(FREEDOM * math.log1p(value * value / FREEDOM)), value)


def t_value(score: float) -> float:
    """The inverse of `normal_score`."""
    return math.copysign(math.sqrt(FREEDOM * math.expm1((score / _W) ** 2 / FREEDOM)), score)


@dataclass(frozen=True, kw_only=True)
class ErrorDistribution:
    """The distribution of e for one job. `scores` are the normal scores that earlier outcomes had in theirs."""

    location: float
    scale: float
    scores: tuple[float, ...] = ()

    @cached_property
    def _knots(self) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities of the t, and those that outcomes realised there; the t itself counts as some outcomes."""
        num = len(self.scores)
        said = np.array([0.0, *(_NORMAL.cdf(score) for score in sorted(self.scores)), 1.0])
        share = num / (num + _T_COUNTS_AS)
        return said, (1.0 - share) * said + share * np.linspace(0.0, 1.0, num + 2)

    def probability(self, error: float) -> float:
        """How probable it is that e is at most this."""
        if math.isinf(error):
            return float(error > 0)
        said, realised = self._knots
        return float(np.interp(_NORMAL.cdf(normal_score((error - self.location) / self.scale)), said, realised))

    def quantile(self, probability: float) -> float:
        """The e that is not exceeded with this probability (above 0, below 1)."""
        said, realised = self._knots
        at = min(max(float(np.interp(probability, realised, said)), _TINY), 1.0 - _TINY)
        return self.location + self.scale * t_value(_NORMAL.inv_cdf(at))


@dataclass(frozen=True, kw_only=True)
class FailureRate:
    """Failures by device-hour, with a gamma distribution: `failures` seen in `device_hours`, the prior included."""

    failures: float = 1.0
    device_hours: float = _PRIOR_DEVICE_HOURS

    def counts(self, device_hours: float) -> Iterator[tuple[int, float]]:
        """(k, the probability of k failures in so many device-hours), until hardly any is left."""
        none = self.device_hours / (self.device_hours + device_hours)
        found, left, count = none**self.failures, 1.0, 0
        while left > 1e-6 and count < 1000:
            yield count, found
            left -= found
            found *= (self.failures + count) / (count + 1) * (1.0 - none)
            count += 1


@dataclass(frozen=True, kw_only=True)
class FinishRisk:
    """What may make a run late: its error, and failures that cost it `lost_s` each."""

    error: ErrorDistribution
    failures: FailureRate = FailureRate()
    lost_s: float = 0.0

    def kept(self, expected_s: float, left_s: float, num_devices: int, allowed: float = 0.0) -> float:
        """How probable it is that a run with this expected time on so many devices ends within `left_s`.

        `allowed` is by what factor it may be slower without failures, if that is more than `left_s` itself says.
        """
        allowed = max(allowed, left_s / expected_s if expected_s > 0 else math.inf)
        found = 0.0
        for count, probability in self.failures.counts(expected_s * num_devices / 3600.0):
            rest = 1.0 - count * self.lost_s / left_s if left_s > 0 else 0.0
            if rest <= 0.0 or allowed <= 0.0:
                break
            found += probability * self.error.probability(math.log(allowed * rest))
        return found

    def slow_factor(self, level: float, expected_s: float, num_devices: int) -> float:
        """The factor of its expected time within which the run ends with the probability `level`."""
        low = high = math.exp(self.error.quantile(level))
        while self.kept(expected_s, expected_s * high, num_devices) < level and high < 1e6:
            low, high = high, high * 1.25
        for _ in range(30 if high > low else 0):
            middle = (low + high) / 2
            if self.kept(expected_s, expected_s * middle, num_devices) < level:
                low = middle
            else:
                high = middle
        return high


@dataclass(slots=True)
class _Family:
    """Its newest runs: as how many they count, and the mean of their errors."""

    weight: float = 0.0
    mean: float = 0.0


@dataclass(slots=True)
class _Suspect:
    """A cumulative sum of scores in one direction, and the outcomes since it was last zero.

    These are (family, error less its location, scale, weight).
    """

    sign: float
    total: float = 0.0
    since: list[tuple[str, float, float, float]] = field(default_factory=list)


class _Errors:
    """What is known of the errors where speeds rest on one basis."""

    def __init__(self, basis: SpeedBasis) -> None:
        self._prior = _PRIOR_SPREAD[basis] ** 2
        self._families: dict[str, _Family] = {}
        self._within = self._num_within = 0.0
        self._between = self._num_families = self._mean = 0.0
        # Scores of the first runs of families, and of the others; they err in different ways.
        self._first: deque[float] = deque(maxlen=WINDOW)
        self._known: deque[float] = deque(maxlen=WINDOW)
        self._usual = 1.0
        self._suspects = (_Suspect(1.0), _Suspect(-1.0))
        self.num_outcomes = 0

    def _level(self, family: str) -> tuple[float, float]:
        """Location and scale for the next run of a family."""
        within = (_PRIOR_OUTCOMES * self._prior + self._within) / (_PRIOR_OUTCOMES + self._num_within)
        first = (_PRIOR_OUTCOMES * (self._prior + within) + self._between) / (_PRIOR_OUTCOMES + self._num_families)
        between = max(first - within, 1e-6)
        known = self._families.get(family)
        if known is None:
            return self._mean, math.sqrt((within + between) * (1.0 + 1.0 / (1.0 + self._num_families)))
        precision = 1.0 / between + known.weight / within
        location = (self._mean / between + known.mean * known.weight / within) / precision
        return location, math.sqrt(within + 1.0 / precision)

    def expected(self, family: str) -> ErrorDistribution:
        """The error of the next run of a family."""
        location, scale = self._level(family)
        scores = self._known if family in self._families else self._first
        return ErrorDistribution(location=location, scale=scale, scores=tuple(scores))

    def learn(self, family: str, error: float) -> None:
        """Take in how a run came out."""
        location, scale = self._level(family)
        value = (error - location) / scale
        score = normal_score(value)
        # Outliers count less, as the t says: a step of expectation and maximisation for each outcome.
        weight = (FREEDOM + 1.0) / (FREEDOM + value * value)
        self.num_outcomes += 1
        known = self._families.get(family)
        if known is None:
            self._between += weight * (error - self._mean) ** 2
            self._num_families += 1.0
            self._mean += weight * (error - self._mean) / (1.0 + self._num_families)
            self._first.append(score)
            self._families[family] = _Family(weight=weight, mean=error)
            return
        self._within += weight * (error - known.mean) ** 2 * known.weight / (known.weight + 1.0)
        self._num_within += 1.0
        known.weight = min(known.weight, _MOST_REMEMBERED) + weight
        known.mean += weight * (error - known.mean) / known.weight
        self._known.append(score)
        self._usual += _USUAL_FRACTION * (score * score - self._usual)
        self._suspect((family, error - location, scale, weight), score)

    def _suspect(self, outcome: tuple[str, float, float, float], score: float) -> None:
        """Look for a change of all speeds; where there was one, move what was known before it."""
        score = max(-_MOST_SCORE, min(_MOST_SCORE, score / max(1.0, math.sqrt(self._usual))))
        for suspect in self._suspects:
            suspect.total = max(0.0, suspect.total + suspect.sign * score - _SLACK)
            if not suspect.total:
                suspect.since.clear()
                continue
            suspect.since.append(outcome)
            if suspect.total >= _ALARM:
                self._move(suspect.since)
                for each in self._suspects:
                    each.total = 0.0
                    each.since.clear()
                return

    def _move(self, since: list[tuple[str, float, float, float]]) -> None:
        """The runs `since` tell of a change: by their median error."""
        by = median(residual for _, residual, _, _ in since)
        seen: dict[str, float] = {}
        for name, _, _, weight in since:
            seen[name] = seen.get(name, 0.0) + weight
        self._mean += by
        for name, family in self._families.items():
            family.mean += by * max(0.0, 1.0 - seen.get(name, 0.0) / family.weight)
        for _ in since:
            self._known.pop()
        self._known.extend(normal_score((residual - by) / scale) for _, residual, scale, _ in since)


class SpeedErrors:
    """How speeds erred, by what they rested on, and how often devices failed: learnt outcome by outcome."""

    def __init__(self, outcomes: Iterable[JobOutcome] = ()) -> None:
        self._errors: dict[SpeedBasis, _Errors] = {basis: _Errors(basis) for basis in _PRIOR_SPREAD}
        self.failures = FailureRate()
        for outcome in outcomes:
            self.learn(outcome)

    def learn(self, outcome: JobOutcome) -> None:
        """Take in how a job came out."""
        self._errors[outcome.basis].learn(outcome.family, outcome.error)
        self.failures = FailureRate(
            failures=self.failures.failures + outcome.num_failures,
            device_hours=self.failures.device_hours + outcome.device_hours,
        )

    def expected(self, family: str, basis: SpeedBasis) -> ErrorDistribution:
        """The error of the next job of a family whose speed rests on `basis`."""
        return self._errors[basis].expected(family)

    def num_outcomes(self, basis: SpeedBasis) -> int:
        """How many jobs have shown how far off speeds on this basis are."""
        return self._errors[basis].num_outcomes
