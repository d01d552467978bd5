"""What services need now and in the time to come, and what of the pool training can count on meanwhile."""

from __future__ import annotations

import math

import msgspec

from springtide.core.decision import Capacity
from springtide.perf.tide import TideForecast
from springtide.scheduling.loans.pools import PoolState

# Until a forecast has bands, what is expected within so much of a day before and after may come at any time in it.
_ABOUT_FRACTION = 1 / 24


class Coming(msgspec.Struct, frozen=True, kw_only=True):
    """In `in_s` seconds services need `num_devices`, with the chance asked for no more; about `expected` of them."""

    in_s: float
    num_devices: int
    expected: int
    until_s: float


class DemandOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """The needs of the time ahead, rising only: a device that is needed later is held until then. The first is now.

    `is_known` is false where nothing is forecast: then only what is needed now counts.
    """

    steps: tuple[Coming, ...]
    is_known: bool

    def within(self, span_s: float) -> int:
        """The most that is needed within so many seconds, in devices."""
        return max(step.num_devices for step in self.steps if step.in_s <= span_s)


def needed_now(pools: PoolState) -> int:
    """What services cannot do without now: the guaranteed minimums, and what their load asks for of what is theirs.

    Replicas that a service only keeps in case its load comes back are no reason to take a server from a job.
    """
    needed = 0
    for need in pools.needs:
        view = need.view
        grows = need.wanted > view.num_ready + view.num_starting
        needed += need.wanted if grows else min(need.wanted, max(need.minimum, view.needed_replicas))
    return max(pools.required, min(needed, _own(pools)))


def needed_lately(pools: PoolState) -> int:
    """The most that was needed in this bin of the tide and in the one before it, of what is services' own."""
    tide = pools.snapshot.tide
    if tide.level is None:
        return 0
    lately = tide.peak if tide.bin_at(pools.now_s) <= tide.open_bin else tide.level
    if tide.peaks and tide.bin_at(pools.now_s) == tide.open_bin:
        lately = max(lately, tide.peaks[-1])
    return min(lately, max(pools.required, _own(pools)))


def _own(pools: PoolState) -> int:
    """The devices that do not belong to training: growth takes no more than that, wherever it is."""
    return sum(node.num_devices for node in pools.nodes if node.owner != "training")


def outlook_of(pools: PoolState, forecast: TideForecast | None, span_s: float) -> DemandOutlook:
    """Needs within `span_s`; without a forecast, those of now."""
    now_s = pools.now_s
    needed_at_once, most = needed_now(pools), max(pools.required, _own(pools))
    present = Coming(in_s=0.0, num_devices=needed_at_once, expected=needed_at_once, until_s=now_s)
    if forecast is None or not forecast.is_known:
        return DemandOutlook(steps=(present,), is_known=False)
    steps: list[Coming] = []
    highest = needed_at_once
    margin = max(1, round(len(forecast.expected) * _ABOUT_FRACTION))
    for index, expected in enumerate(forecast.expected):
        in_s = max(0.0, forecast.until_s(index - 1) - now_s)
        if in_s > span_s and steps:
            break
        if forecast.has_bands:
            upper = min(forecast.upper[index], forecast.most[index])
        else:
            # No past day shows the error of this forecast yet: the need may come a little earlier or later.
            upper = max(forecast.expected[max(0, index - margin) : index + margin + 1])
        needed = max(highest, min(most, _whole(upper)))
        if needed > highest or not steps:
            highest = needed
            likely = max(needed_at_once, min(needed, _whole(expected)))
            steps.append(Coming(in_s=in_s, num_devices=needed, expected=likely, until_s=forecast.until_s(index)))
    return DemandOutlook(steps=tuple(steps), is_known=True)


def returns_in_s(forecast: TideForecast | None, needed: int, now_s: float) -> float:
    """Seconds until fewer than `needed` devices are expected to be needed; to the end of what is forecast if never."""
    if forecast is None or not forecast.is_known:
        return 0.0
    for index, expected in enumerate(forecast.expected):
        if _whole(expected) < needed:
            return max(0.0, forecast.until_s(index - 1) - now_s)
    return max(0.0, forecast.until_s(len(forecast.expected) - 1) - now_s)


def capacity_of(
    pools: PoolState, forecast: TideForecast | None, num_now: int, granularity: int, lead_s: float
) -> tuple[Capacity, ...]:
    """What training can count on: what it has now, less what the highest days known would need of it from some time on.

    A server may be set free `lead_s` before it is needed. Growth takes no more than what is services' own, and what is
    deployed now says nothing of what will be. Before two days are known all that is their own is left to them; after
    what is forecast the least of it holds from then on.
    """
    total = sum(node.num_devices for node in pools.nodes)
    own = max(pools.required, _own(pools))

    def left(needed: float) -> int:
        servers = min(-(-_whole(min(needed, float(own))) // granularity) * granularity, own)
        return max(0, min(num_now, total - servers))

    now_s = pools.now_s
    if forecast is None or not forecast.has_bands:
        return (Capacity(from_s=now_s, num_devices=left(float(own))),)
    counts = [left(most) for most in forecast.most]
    begins = [max(now_s, forecast.until_s(index - 1)) for index in range(len(counts))]
    steps: list[Capacity] = []
    first = 0
    for index, begin_s in enumerate(begins):
        # From a moment on the least of all bins that begin within the lead, the present one with them.
        first = max(first, index)
        while first + 1 < len(begins) and begins[first + 1] <= begin_s + lead_s + forecast.bin_s:
            first += 1
        count = min(counts[index : first + 1])
        if not steps or (steps[-1].num_devices != count and begin_s > steps[-1].from_s):
            steps.append(Capacity(from_s=begin_s, num_devices=count))
    least = min(counts)
    if steps[-1].num_devices > least:
        steps.append(Capacity(from_s=max(begins[-1], steps[-1].from_s + forecast.bin_s), num_devices=least))
    return tuple(steps)


def _whole(devices: float) -> int:
    """The whole devices that are enough; a tiny excess over a whole number is a rounding error."""
    return math.ceil(devices - 1e-6) if math.isfinite(devices) else 1_000_000_000
