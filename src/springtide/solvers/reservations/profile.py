"""Numbers of devices over time: how many promises may use (Steps), and how many no schedule uses (FreeProfile)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, compress, pairwise

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


class FreeProfile:
    """Free devices over time, as breakpoints `times` (seconds, ascending) and `free` (devices from there on).

    The last entry holds for ever. Neighbouring entries always differ, so that equal functions have equal lists: what is
    computed from a profile does not depend on the order in which devices were taken and given back.
    """

    __slots__ = ("free", "times")

    def __init__(self, capacity: int | Steps, start_s: float) -> None:
        if isinstance(capacity, int):
            self.times: list[float] = [start_s]
            self.free: list[int] = [capacity]
            return
        steps = trimmed(capacity, start_s)
        self.times = [start_s, *(from_s for from_s, _ in steps[1:])]
        self.free = [count for _, count in steps]

    def copy(self) -> FreeProfile:
        """An independent copy."""
        other = FreeProfile.__new__(FreeProfile)
        other.times = self.times.copy()
        other.free = self.free.copy()
        return other

    def forget_before(self, now_s: float) -> None:
        """Drop what lies before `now_s`; the profile starts there from now on."""
        index = bisect_right(self.times, now_s) - 1
        if index > 0:
            del self.times[:index]
            del self.free[:index]
        if index >= 0:
            self.times[0] = now_s

    def take(self, start_s: float, end_s: float, num_devices: int) -> None:
        """Use `num_devices` (negative: give them back) from `start_s` until `end_s`; time before the start of the
        profile is ignored."""
        times, free = self.times, self.free
        start_s = max(start_s, times[0])
        if end_s <= start_s or not num_devices:
            return
        first = self._cut(start_s)
        last = self._cut(end_s) if end_s < math.inf else len(times)
        if last == first + 1:
            free[first] -= num_devices
        else:
            free[first:last] = [count - num_devices for count in free[first:last]]
        if last < len(times) and free[last] == free[last - 1]:
            del times[last], free[last]
        if first and free[first] == free[first - 1]:
            del times[first], free[first]

    def take_all(self, stretches: Iterable[tuple[float, float, int]]) -> None:
        """Use devices as by `take` for each start, end and number, in one pass."""
        begins_s = self.times[0]
        changes: defaultdict[float, int] = defaultdict(int)
        for moment_s, (before, after) in zip(self.times, pairwise([0, *self.free]), strict=True):
            changes[moment_s] = after - before
        for start_s, end_s, num_devices in stretches:
            if end_s > max(start_s, begins_s):
                changes[max(start_s, begins_s)] -= num_devices
                changes[end_s] += num_devices
        changes.pop(math.inf, None)
        moments = sorted(changes)
        counts = list(accumulate(changes[moment_s] for moment_s in moments))
        kept = [index == 0 or counts[index] != counts[index - 1] for index in range(len(counts))]
        self.times, self.free = list(compress(moments, kept)), list(compress(counts, kept))

    def _cut(self, moment_s: float) -> int:
        """The index of the breakpoint at `moment_s`, made if there is none."""
        times = self.times
        index = bisect_left(times, moment_s)
        if index == len(times) or times[index] != moment_s:
            times.insert(index, moment_s)
            self.free.insert(index, self.free[index - 1])
        return index

    def least(self, start_s: float, end_s: float) -> int:
        """The smallest number of free devices in [start_s, end_s), which must not be empty or past."""
        first = max(0, bisect_right(self.times, start_s) - 1)
        last = bisect_left(self.times, end_s, first + 1)
        if last == first + 1:
            return self.free[first]
        return min(self.free[first:last])

    def at(self, moment_s: float) -> int:
        """How many devices are free at `moment_s`."""
        return self.free[bisect_right(self.times, moment_s) - 1]

    def earliest(self, num_devices: int, duration_s: float, not_before_s: float, latest_s: float) -> float | None:
        """The earliest start, at most `latest_s`, from which `num_devices` are free for `duration_s`."""
        times, free = self.times, self.free
        index = max(0, bisect_right(times, not_before_s) - 1)
        start_s = not_before_s
        is_free = False
        while True:
            if free[index] >= num_devices:
                if not is_free:
                    start_s = max(not_before_s, times[index])
                    is_free = True
                    if start_s > latest_s:
                        return None
                if index + 1 == len(times) or times[index + 1] >= start_s + duration_s:
                    return start_s
            else:
                is_free = False
                if index + 1 == len(times):
                    return None
            index += 1
