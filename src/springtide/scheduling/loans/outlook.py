"""How many devices services need now and later, and how many training can count on until then."""

from __future__ import annotations

import math

import msgspec

from springtide.core.decision import Capacity
from springtide.perf.tide import TideForecast
from springtide.scheduling.loans.pools import PoolState

# While a forecast has no bands, a need may come earlier or later than expected by this part of a day.
_ABOUT_FRACTION = 1 / 24


class Coming(msgspec.Struct, frozen=True, kw_only=True):
    """In `in_s` seconds services need at most `num_devices`, with the chance asked for; `expected` is the mean."""

    in_s: float
    num_devices: int
    expected: int
    until_s: float


class DemandOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """The needs ahead, the present one first. They only rise: a device that is needed later is kept until then.

    `is_known` is False without a forecast: then there is only the present need.
    """

    steps: tuple[Coming, ...]
    is_known: bool

    def within(self, span_s: float) -> int:
        """The most devices that are needed within so many seconds; none before the forecast begins."""
        return max((step.num_devices for step in self.steps if step.in_s <= span_s), default=0)


def needed_now(pools: PoolState) -> int:
    """The devices that services need now: their guaranteed minimums, and for their load as many as are their own.

    Replicas that a service only keeps in case its load comes back do not count: no job loses a server for them.
    """
    needed = 0
    for need in pools.needs:
        view = need.view
        grows = need.wanted > view.num_ready + view.num_starting
        needed += need.wanted if grows else min(need.wanted, max(need.minimum, view.needed_replicas))
    return max(pools.required, min(needed, _own(pools)))


def needed_lately(pools: PoolState) -> int:
    """The most devices needed in this bin of the tide and in the one before it, at most as many as services own."""
    tide = pools.snapshot.tide
    if tide.level is None:
        return 0
    lately = tide.peak if tide.bin_at(pools.now_s) <= tide.open_bin else tide.level
    if tide.peaks and tide.bin_at(pools.now_s) == tide.open_bin:
        lately = max(lately, tide.peaks[-1])
    return min(lately, max(pools.required, _own(pools)))


def _own(pools: PoolState) -> int:
    """The number of devices that training does not own: services grow up to that number, on any node."""
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
            # The error of the forecast is not known yet: the need may come a little earlier or later.
            upper = max(forecast.expected[max(0, index - margin) : index + margin + 1])
        needed = max(highest, min(most, _whole(upper)))
        if needed > highest or not steps:
            highest = needed
            likely = max(needed_at_once, min(needed, _whole(expected)))
            steps.append(Coming(in_s=in_s, num_devices=needed, expected=likely, until_s=forecast.until_s(index)))
    return DemandOutlook(steps=tuple(steps), is_known=True)


def returns_in_s(forecast: TideForecast | None, needed: int, now_s: float) -> float:
    """Seconds until fewer than `needed` devices are expected to be needed; up to the end of the forecast if never."""
    if forecast is None or not forecast.is_known:
        return 0.0
    for index, expected in enumerate(forecast.expected):
        if _whole(expected) < needed:
            return max(0.0, forecast.until_s(index - 1) - now_s)
    return max(0.0, forecast.until_s(len(forecast.expected) - 1) - now_s)


def capacity_of(
    pools: PoolState, forecast: TideForecast | None, num_now: int, granularity: int, lead_s: float
) -> tuple[Capacity, ...]:
    """The devices that training can count on over time: what it has now, less what services need on their highest days.

    A server may be freed `lead_s` before it is needed. Services grow only up to the devices that they own, also those
    deployed later. Before two days are known, they are left all devices that they own; after the end of the forecast,
    the smallest number of devices in it holds.
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
        # At each moment, the smallest value of the present bin and of those that begin within the lead.
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
    """Rounded up to whole devices; a tiny excess over a whole number is a rounding error."""
    return math.ceil(devices - 1e-6) if math.isfinite(devices) else 1_000_000_000
