"""Step functions of time: how many devices there are for promises at every moment to come."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

# (from when in seconds, how many devices), ascending; the first moment is always 0.0, the beginning of time.
Steps = tuple[tuple[float, int], ...]


def constant(num_devices: int) -> Steps:
    """The function with this value at every moment."""
    return ((0.0, num_devices),)


def trimmed(steps: Iterable[tuple[float, int]], now_s: float) -> Steps:
    """The same function from `now_s` on, without past steps and without steps that repeat the one before.

    Two functions that are equal from `now_s` on give the same result. `steps` must not be empty.
    """
    result: list[tuple[float, int]] = []
    for from_s, count in steps:
        if from_s <= now_s or not result:
            result = [(0.0, count)]
        elif count != result[-1][1]:
            result.append((from_s, count))
    return tuple(result)


def devices_at(steps: Steps, moment_s: float) -> int:
    return steps[max(0, bisect_right(steps, (moment_s, math.inf)) - 1)][1]


def largest(steps: Steps) -> int:
    return max([count for _, count in steps])


def mapped(steps: Steps, change: Callable[[int], int]) -> Steps:
    """The function with `change` applied to every count."""
    return trimmed([(from_s, change(count)) for from_s, count in steps], 0.0)


def compare(one: Steps, other: Steps, now_s: float) -> Iterator[tuple[float, float, int, int]]:
    """The stretches from `now_s` on (from, until, devices in `one`, in `other`), the last without an end."""
    moments = sorted({now_s, *(from_s for steps in (one, other) for from_s, _ in steps if from_s > now_s)})
    for index, from_s in enumerate(moments):
        until_s = moments[index + 1] if index + 1 < len(moments) else math.inf
        yield from_s, until_s, devices_at(one, from_s), devices_at(other, from_s)


def pointwise_max(one: Steps, other: Steps, now_s: float) -> Steps:
    """The larger of both at every moment from `now_s` on."""
    return tuple([(from_s, max(first, second)) for from_s, _, first, second in compare(one, other, now_s)])


def falls_of(steps: Steps, now_s: float, unit: int) -> tuple[float, ...]:
    """The moments after `now_s` at which there are fewer devices than just before, ascending.

    A moment is repeated for every `unit` devices that go then: these may go one after the other, and a job that is
    moved off one unit may land on the next.
    """
    falls: list[float] = []
    for (_, before), (from_s, after) in pairwise(steps):
        if after < before and from_s > now_s:
            falls += [from_s] * -(-(before - after) // max(1, unit))
    return tuple(falls)
