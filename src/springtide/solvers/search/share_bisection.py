"""How much of a device a training function needs: its throughput by share, bisected for a request and a limit.

Dilu, section 3.2: the request keeps 80 % of the throughput on a whole device, the limit all of it. Pure: the caller
passes the function that measures the throughput of a share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import msgspec

from springtide.core.errors import InvalidRequest

REQUEST_FRACTION, LIMIT_FRACTION = 0.8, 1.0
# A throughput within this fraction of its target has reached it; the search ends once the bracket is no wider.
TOLERANCE = 0.02
# How often two trials that contradict each other (the smaller share was faster by more than the tolerance) are measured
# again; contradictions that remain are reported.
MAX_REPEATS = 4

# Samples (or steps) a second on such a share of a device.
MeasureThroughput = Callable[[float], float]


class ThroughputTrial(msgspec.Struct, frozen=True, kw_only=True):
    """A share that was run, and its throughput; the mean if it was run more than once."""

    share: float
    throughput_per_s: float
    num_runs: int = 1


class SharePair(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest measured shares that reach 80 % and 100 % of the whole device's throughput, within the tolerance.

    `whole_per_s`, `request_per_s` and `limit_per_s` are throughputs on a whole device, on the request and on the limit,
    smoothed over trials so that less of a device is never faster. `trials` go up by share. `is_consistent`: no two
    trials contradict each other by more than the tolerance.
    """

    request: float
    limit: float
    whole_per_s: float
    request_per_s: float
    limit_per_s: float
    trials: tuple[ThroughputTrial, ...]
    is_consistent: bool

    @property
    def num_trials(self) -> int:
        return sum(trial.num_runs for trial in self.trials)


def search_shares(
    measure: MeasureThroughput,
    *,
    request_fraction: float = REQUEST_FRACTION,
    limit_fraction: float = LIMIT_FRACTION,
    tolerance: float = TOLERANCE,
) -> SharePair:
    """Bisect for the limit, then, with all that is known, for the request.

    At most 1 + 2 x ceil(log2(1 / tolerance)) trials, and MAX_REPEATS more where measurements contradict each other.
    Every share in the result was measured. Throughput is assumed to grow with the share; trials that contradict this
    are repeated and averaged, and contradictions that remain are reported. Raises InvalidRequest.
    """
    if not 0.0 < tolerance < request_fraction <= limit_fraction <= 1.0:
        raise InvalidRequest(
            f"a request ({request_fraction:g}) and a limit ({limit_fraction:g}) are rising fractions of the whole "
            f"throughput, and the tolerance ({tolerance:g}) is smaller than both"
        )
    runs: dict[float, list[float]] = {}
    _run(measure, runs, 1.0)
    for fraction in (limit_fraction, request_fraction):
        _bisect(measure, runs, fraction, tolerance)
    for _ in range(MAX_REPEATS):
        pair = _contradiction(_means(runs), tolerance)
        if pair is None:
            break
        for share in pair:
            _run(measure, runs, share)
    return _answer(runs, request_fraction, limit_fraction, tolerance)


def _bisect(measure: MeasureThroughput, runs: dict[float, list[float]], fraction: float, tolerance: float) -> None:
    """Halve the bracket of the target until it is narrow, or the request's throughput is as near as the tolerance."""
    while True:
        known = _means(runs)
        rates = smoothed(list(known.values()), [len(values) for _, values in sorted(runs.items())])
        target = fraction * rates[-1]
        least = target - tolerance * rates[-1]
        high_at = next(index for index, rate in enumerate(rates) if rate >= least)
        shares = list(known)
        low, high = (shares[high_at - 1] if high_at else 0.0), shares[high_at]
        # No throughput is above 100 %, so every share within the tolerance would do; the smallest is searched for.
        is_near = fraction < 1.0 and rates[high_at] <= target + tolerance * rates[-1]
        if is_near or high - low <= tolerance:
            return
        _run(measure, runs, (low + high) / 2.0)


def _run(measure: MeasureThroughput, runs: dict[float, list[float]], share: float) -> None:
    rate = measure(share)
    if not (math.isfinite(rate) and rate >= 0.0):
        raise InvalidRequest(f"on {share:.0%} of a device the throughput was {rate:g}, which is none")
    if share == 1.0 and rate <= 0.0:
        raise InvalidRequest("on a whole device nothing was done; let each trial run for longer")
    runs.setdefault(share, []).append(rate)


def _means(runs: dict[float, list[float]]) -> dict[float, float]:
    return {share: math.fsum(values) / len(values) for share, values in sorted(runs.items())}


def _contradiction(known: dict[float, float], tolerance: float) -> tuple[float, float] | None:
    """The two neighbouring shares of which the smaller one was faster by the most, if by more than the tolerance."""
    shares = list(known)
    worst, found = tolerance * max(known.values()), None
    for low, high in itertools.pairwise(shares):
        if known[low] - known[high] > worst:
            worst, found = known[low] - known[high], (low, high)
    return found


def smoothed(rates: Sequence[float], weights: Sequence[int]) -> list[float]:
    """The nearest rates (least squares) that never fall: neighbours that do are pooled (isotonic regression)."""
    pools: list[tuple[float, int, int]] = []
    for rate, weight in zip(rates, weights, strict=True):
        total, heavy, count = rate * weight, weight, 1
        while pools and pools[-1][0] / pools[-1][1] >= total / heavy:
            before = pools.pop()
            total, heavy, count = total + before[0], heavy + before[1], count + before[2]
        pools.append((total, heavy, count))
    return [total / heavy for total, heavy, count in pools for _ in range(count)]


def _answer(
    runs: dict[float, list[float]], request_fraction: float, limit_fraction: float, tolerance: float
) -> SharePair:
    known = _means(runs)
    shares, counts = list(known), [len(runs[share]) for share in known]
    rates = smoothed(list(known.values()), counts)
    at = [
        next(index for index, rate in enumerate(rates) if rate >= (fraction - tolerance) * rates[-1])
        for fraction in (request_fraction, limit_fraction)
    ]
    return SharePair(
        request=shares[at[0]],
        limit=shares[at[1]],
        whole_per_s=rates[-1],
        request_per_s=rates[at[0]],
        limit_per_s=rates[at[1]],
        trials=tuple(
            ThroughputTrial(share=share, throughput_per_s=known[share], num_runs=count)
            for share, count in zip(shares, counts, strict=True)
        ),
        is_consistent=_contradiction(known, tolerance) is None,
    )
