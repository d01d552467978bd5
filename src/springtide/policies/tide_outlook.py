"""What services need now and in the time to come, and what of the pool training can count on meanwhile."""

from __future__ import annotations

import math

import msgspec

from springtide.core.decision import Capacity
from springtide.perf.tide import Forecast
from springtide.policies.pools import PoolState

# Until a forecast has bands, what is expected within so much of a day before and after may come at any time in it.
_ABOUT_FRACTION = 1 / 24


class Coming(msgspec.Struct, frozen=True, kw_only=True):
    """In `in_s` seconds services need `num_devices`, with the chance asked for no more; about `expected` of them."""

    in_s: float
    num_devices: int
    expected: int
    until_s: float


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """The needs of the time ahead, rising only: who is needed later is held until then. The first is now.

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


def _own(pools: PoolState) -> int:
    """The devices that do not belong to training: growth takes no more than that, wherever it is."""
    return sum(node.num_devices for node in pools.nodes if node.owner != "training")


def outlook_of(pools: PoolState, forecast: Forecast | None, span_s: float) -> Outlook:
    """Needs within `span_s`; without a forecast, those of now."""
    now_s = pools.now_s
    needed_at_once, most = needed_now(pools), max(pools.required, _own(pools))
    present = Coming(in_s=0.0, num_devices=needed_at_once, expected=needed_at_once, until_s=now_s)
    if forecast is None or not forecast.is_known:
        return Outlook(steps=(present,), is_known=False)
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
            # No day has shown yet how far off this is: a little earlier or later it may be as well.
            upper = max(forecast.expected[max(0, index - margin) : index + margin + 1])
        needed = max(highest, min(most, _whole(upper)))
        if needed > highest or not steps:
            highest = needed
            likely = max(needed_at_once, min(needed, _whole(expected)))
            steps.append(Coming(in_s=in_s, num_devices=needed, expected=likely, until_s=forecast.until_s(index)))
    return Outlook(steps=tuple(steps), is_known=True)


def returns_in_s(forecast: Forecast | None, needed: int, now_s: float) -> float:
    """Seconds until fewer than `needed` devices are expected to be needed; to the end of what is forecast if never."""
    if forecast is None or not forecast.is_known:
        return 0.0
    for index, expected in enumerate(forecast.expected):
        if _whole(expected) < needed:
            return max(0.0, forecast.until_s(index - 1) - now_s)
    return max(0.0, forecast.until_s(len(forecast.expected) - 1) - now_s)


def capacity_of(
    pools: PoolState, forecast: Forecast | None, num_now: int, granularity: int, lead_s: float
) -> tuple[Capacity, ...]:
    """What training can count on: what it has now, less what the highest days known would need of it from some time on.

    A server is set free `lead_s` before it is needed. Before two days are known nothing less than the services' maxima
    counts; after a day it is the least of all that is forecast, for good.
    """
    total = sum(node.num_devices for node in pools.nodes)
    now_s = pools.now_s

    def left(needed: float) -> int:
        whole = _whole(min(needed, float(max(pools.maximum, pools.wanted))))
        servers = -(-whole // granularity) * granularity
        return max(0, min(num_now, total - servers))

    found = [Capacity(from_s=now_s, num_devices=num_now)]
    if forecast is None or not forecast.is_known:
        found.append(Capacity(from_s=now_s, num_devices=left(math.inf)))
    else:
        for index, most in enumerate(forecast.most):
            begins_s = forecast.until_s(index - 1)
            # From so long before it on; what was needed a little earlier still is.
            found.append(Capacity(from_s=max(now_s, begins_s - lead_s), num_devices=left(most)))
    return _lowest(found, forecast, lead_s)


def _lowest(marks: list[Capacity], forecast: Forecast | None, lead_s: float) -> tuple[Capacity, ...]:
    """Each mark holds for its bin and the lead before it; where several hold, the least does. After all, the least."""
    if forecast is None or len(marks) <= 2:
        least = min(mark.num_devices for mark in marks)
        return (Capacity(from_s=marks[0].from_s, num_devices=least),)
    steps: list[Capacity] = []
    open_: list[tuple[float, int]] = []
    now_s = marks[0].from_s
    for index, mark in enumerate(marks[1:]):
        open_.append((forecast.until_s(index), mark.num_devices))
        open_ = [(until, count) for until, count in open_ if until > mark.from_s]
        count = min(count for _, count in open_)
        if steps and steps[-1].from_s >= mark.from_s:
            steps[-1] = Capacity(from_s=steps[-1].from_s, num_devices=min(count, steps[-1].num_devices))
        elif not steps or steps[-1].num_devices != count:
            steps.append(Capacity(from_s=mark.from_s, num_devices=count))
    least = min(mark.num_devices for mark in marks[1:])
    end_s = forecast.until_s(len(marks) - 2) - lead_s
    if steps[-1].num_devices > least:
        steps.append(Capacity(from_s=max(end_s, steps[-1].from_s + 1e-3, now_s), num_devices=least))
    return tuple(steps)


def _whole(devices: float) -> int:
    """The whole devices that are enough; a hair above a whole number is a rounding error."""
    return math.ceil(devices - 1e-6) if math.isfinite(devices) else 1_000_000_000
