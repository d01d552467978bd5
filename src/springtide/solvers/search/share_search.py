"""Searches the share of a device and the batch size for an inference model by few trials.

The grid is that of Dilu's hybrid growth search (section 3.2): batch sizes double, shares grow by a tenth. Pure: `ask`
returns the next trial, `tell` takes its latency.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np

from springtide.core.errors import InvalidRequest
from springtide.solvers.search.gaussian_process import Floats, normal_cdf
from springtide.solvers.search.share_surface import LatencyModel, ShapeBelief

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
SHARES = tuple(tenth / 10 for tenth in range(1, 11))
# The search ends once no untried setting promises to raise the best efficacy by more than this fraction,
SEARCH_GAIN_FRACTION = 0.007
# after so many further trials of settings that promise at least the following, since surfaces are not always convex;
MAX_CHECKS = 2
CHECK_GAIN_FRACTION = 0.001
# in any case after so many trials.
MAX_TRIALS = 12
# If a setting misses the bound by more than this fraction, larger batches and smaller shares are taken to miss it, too.
MISS_FRACTION = 0.03
# While no trial has met the bound: if no setting has more than this chance to, the easiest one is tried, and decides.
_LEAST_CHANCE = 0.02
_ROOT_2_PI = math.sqrt(2.0 * math.pi)

# Seconds that a batch of so many takes on such a share of a device; infinite where it cannot run at all.
Measure = Callable[[int, float], float]


class ShareConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """A batch size and the share of a device it runs on (0 to 1)."""

    batch_size: int
    share: float


class ShareTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One setting that was run. `latency_s` is that of a batch (None: it could not run).

    `efficacy` is throughput for the whole of a device at this rate: batch size / (latency x share), in samples per
    second (Dilu, section 3.2: TE). `is_within`: the latency meets the bound.
    """

    batch_size: int
    share: float
    latency_s: float | None
    efficacy: float
    is_within: bool


class EfficacyOptimum(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search: the `best` of `trials`, None if none of them met `bound_s`.

    `num_checks` of the trials were checks after the search proper. `left_fraction` is how much better the most
    promising untried setting is expected to be, as a fraction of the best efficacy. `reason` is why the search ended:
    no promising setting is left, the bound is out of reach, or too many trials. `model` is the most likely shape of the
    measured latencies.
    """

    bound_s: float
    best: ShareTrial | None
    trials: tuple[ShareTrial, ...]
    num_checks: int
    left_fraction: float
    reason: Literal["settled", "out of reach", "most trials"]
    model: LatencyModel | None = None

    @property
    def smallest_latency_s(self) -> float | None:
        """The smallest latency of all trials; None if no setting could run."""
        return min((trial.latency_s for trial in self.trials if trial.latency_s is not None), default=None)


def make_trial(batch_size: int, share: float, latency_s: float, bound_s: float) -> ShareTrial:
    """A trial from its latency. Raises InvalidRequest if that is not a valid latency."""
    if math.isnan(latency_s) or latency_s <= 0.0:
        raise InvalidRequest(f"a batch of {batch_size} on {share:.0%} took {latency_s:g} s, which is no latency")
    can_run = math.isfinite(latency_s)
    return ShareTrial(
        batch_size=batch_size,
        share=share,
        latency_s=latency_s if can_run else None,
        efficacy=batch_size / (latency_s * share) if can_run else 0.0,
        is_within=latency_s <= bound_s,
    )


class EfficacySearch:
    """Searches the setting of the largest efficacy among those whose latency is at most `bound_s` (half of the SLO).

    Latencies are assumed to have the shape of an execution model (share_surface.py) up to smooth and rough deviations.
    `ask` returns the setting with the largest expected improvement, `tell` takes its latency. The result was always
    measured to meet the bound. It is the optimum of the grid unless an untried setting is better although its expected
    gain was small (SEARCH_GAIN_FRACTION, after MAX_CHECKS checks), or lies beyond a miss (MISS_FRACTION).
    """

    def __init__(
        self,
        bound_s: float,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        shares: Sequence[float] = SHARES,
        *,
        max_trials: int = MAX_TRIALS,
    ) -> None:
        _check_grid(bound_s, batch_sizes, shares, max_trials)
        self._bound_s = bound_s
        self._max_trials = max_trials
        self._settings = [ShareConfiguration(batch_size=size, share=share) for size in batch_sizes for share in shares]
        self._sizes = np.array([setting.batch_size for setting in self._settings], dtype=np.float64)
        self._shares = np.array([setting.share for setting in self._settings], dtype=np.float64)
        self._log_work: Floats = np.log(self._sizes / self._shares)
        self._belief = ShapeBelief(self._sizes, self._shares)
        self._easiest = int(np.lexsort((-self._shares, self._sizes))[0])
        self._is_open = np.ones(len(self._settings), dtype=bool)
        self._seen: list[tuple[int, float]] = []
        self._trials: list[ShareTrial] = []
        self._best: ShareTrial | None = None
        self._next: int | None = None
        self._num_checks = 0
        self._left_fraction = math.inf
        self._reason: Literal["settled", "out of reach", "most trials"] = "settled"
        self._choose()

    def ask(self) -> ShareConfiguration | None:
        """The setting to try next; None if the search has ended."""
        return None if self._next is None else self._settings[self._next]

    def tell(self, latency_s: float) -> None:
        """Record the latency of a batch in the setting of the last `ask`; infinite if it cannot run (out of memory)."""
        assert self._next is not None, "nothing was asked for"
        index, setting = self._next, self._settings[self._next]
        trial = make_trial(setting.batch_size, setting.share, latency_s, self._bound_s)
        self._trials.append(trial)
        self._is_open[index] = False
        if trial.latency_s is None:
            # Memory does not depend on the share.
            self._is_open &= self._sizes < setting.batch_size
        else:
            self._seen.append((index, math.log(latency_s / self._bound_s)))
            if latency_s > self._bound_s * (1.0 + MISS_FRACTION):
                self._is_open &= (self._sizes < setting.batch_size) | (self._shares > setting.share)
        if trial.is_within and (self._best is None or trial.efficacy > self._best.efficacy):
            self._best = trial
        self._choose()

    def result(self) -> EfficacyOptimum:
        return EfficacyOptimum(
            bound_s=self._bound_s,
            best=self._best,
            trials=tuple(self._trials),
            num_checks=self._num_checks,
            left_fraction=self._left_fraction,
            reason=self._reason,
            model=self._belief.most_likely(self._seen, self._bound_s) if self._seen else None,
        )

    def _choose(self) -> None:
        self._next = None
        if not self._is_open.any():
            self._end("settled" if self._best is not None else "out of reach", 0.0)
            return
        gain, chance = self._promises()
        first = int(np.argmax(np.where(self._is_open, gain, -1.0)))
        least = SEARCH_GAIN_FRACTION if self._num_checks == MAX_CHECKS else CHECK_GAIN_FRACTION
        if self._best is not None and gain[first] < least:
            self._end("settled", float(gain[first]))
        elif len(self._trials) >= self._max_trials:
            self._end("most trials", float(gain[first]))
        elif self._best is None and self._seen and chance[self._is_open].max() < _LEAST_CHANCE:
            if self._is_open[self._easiest]:
                self._next = self._easiest
            else:
                self._end("out of reach", 0.0)
        else:
            self._next = first
            self._num_checks += self._best is not None and bool(gain[first] < SEARCH_GAIN_FRACTION)

    def _end(self, reason: Literal["settled", "out of reach", "most trials"], left_fraction: float) -> None:
        self._reason, self._left_fraction = reason, left_fraction

    def _promises(self) -> tuple[Floats, Floats]:
        """Of every setting, the expected improvement of the logarithm of the efficacy, and the chance of one.

        An improvement counts only if the latency meets the bound. While no trial does, it is relative to the smallest
        possible efficacy: the smallest batch on the largest share, just within the bound.
        """
        least = math.log(self._sizes.min() / self._shares.max())
        best = least if self._best is None else math.log(self._best.efficacy * self._bound_s)
        mean, deviation, weight = self._belief.predict(self._seen)
        # The logarithms are of latencies over the bound: within it is at most 0.
        edge = np.minimum(0.0, self._log_work - best)
        ratio = (edge[None] - mean) / deviation[None]
        below = normal_cdf(ratio)
        gain = (self._log_work[None] - best - mean) * below + deviation[None] * np.exp(-0.5 * ratio**2) / _ROOT_2_PI
        return np.asarray(weight @ np.maximum(gain, 0.0)), np.asarray(weight @ below)


def search_efficacy(
    measure: Measure,
    bound_s: float,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    shares: Sequence[float] = SHARES,
    *,
    max_trials: int = MAX_TRIALS,
) -> EfficacyOptimum:
    """Run a whole search. `measure` gives the seconds of a batch. Raises InvalidRequest."""
    search = EfficacySearch(bound_s, batch_sizes, shares, max_trials=max_trials)
    while (setting := search.ask()) is not None:
        search.tell(measure(setting.batch_size, setting.share))
    return search.result()


def limit_of(request: float) -> float:
    """The limit of an inference function: twice its request, at most a whole device (Dilu, section 3.2)."""
    return min(1.0, 2.0 * request)


def _check_grid(bound_s: float, batch_sizes: Sequence[int], shares: Sequence[float], max_trials: int) -> None:
    if not (math.isfinite(bound_s) and bound_s > 0.0):
        raise InvalidRequest(f"the latency to be kept is a positive time, got {bound_s:g} s")
    if not batch_sizes or min(batch_sizes) < 1 or len(set(batch_sizes)) < len(batch_sizes):
        raise InvalidRequest(f"batch sizes are different whole numbers from 1, got {list(batch_sizes)}")
    if not shares or not all(0.0 < share <= 1.0 for share in shares) or len(set(shares)) < len(shares):
        raise InvalidRequest(f"shares are different fractions of a device above 0, got {list(shares)}")
    if max_trials < 1:
        raise InvalidRequest("a search takes at least one trial")
