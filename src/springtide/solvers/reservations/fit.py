"""Fits one job into a free profile: the cheapest runs that make its deadline, the cost of every change included."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from springtide.solvers.reservations.profile import FreeProfile


class PlannedStretch(NamedTuple):
    """A stretch of time on a constant number of devices; its first `overhead_s` bring no progress."""

    start_s: float
    end_s: float
    num_devices: int
    overhead_s: float


Runs = tuple[PlannedStretch, ...]


class FitTask(NamedTuple):
    """The work to fit: `work` steps by `deadline_s` (infinite: as soon as possible), from `ready_s` on.

    `rates[n]` is steps/s on n devices; `sizes` are the numbers of devices worth having, ascending, each faster than
    every smaller one. Going on with the `held` devices costs no new overhead, only the `residual_s` that is left of the
    last change.
    """

    work: float
    deadline_s: float
    ready_s: float
    rates: Sequence[float]
    sizes: Sequence[int]
    held: int = 0
    residual_s: float = 0.0


class Costs(NamedTuple):
    """What a change to n devices costs in seconds: `now(n)` at this moment, `later[n]` at any later one.

    `reserve[n]` is added to the end of a job on n devices, so that it can be moved to make room for another. At each of
    the moments `falls` (ascending) devices go away; a job that runs through one may have to move then, and its
    schedule has time for that from the beginning.
    """

    now: Callable[[int], float]
    later: Sequence[float]
    reserve: Sequence[float]
    falls: Sequence[float] = ()

    def without_reserve(self) -> Costs:
        """The same without the reserve; time for the falls is kept."""
        return self._replace(reserve=[0.0] * len(self.later))

    def without_falls(self) -> Costs:
        """The same, as if no devices went away."""
        return self._replace(falls=()) if self.falls else self

    def end_s(self, num_devices: int, start_s: float, done_s: float) -> float:
        """When a run ends that begins at `start_s` and would have done its work at `done_s`: with the reserve, and one
        change for every fall before its end."""
        end_s = done_s + self.reserve[num_devices]
        falls = self.falls
        if falls:
            index = bisect_right(falls, start_s)
            while index < len(falls) and falls[index] < end_s:
                end_s += self.later[num_devices]
                index += 1
        return end_s


def start_now(profile: FreeProfile, task: FitTask, now_s: float, limit_s: float, costs: Costs) -> Runs:
    """The constant run from `now_s` that ends by `limit_s` with the least GPU-time; empty if none fits."""
    best: PlannedStretch | None = None
    best_use = math.inf
    if task.ready_s > now_s:
        return ()
    for n in task.sizes:
        overhead_s = task.residual_s if n == task.held else costs.now(n)
        end_s = costs.end_s(n, now_s, now_s + overhead_s + task.work / task.rates[n])
        use = n * (end_s - now_s)
        if end_s > limit_s or use >= best_use:
            continue
        if profile.least(now_s, end_s) >= n:
            best, best_use = PlannedStretch(now_s, end_s, n, overhead_s), use
    return (best,) if best is not None else ()


def start_later(profile: FreeProfile, task: FitTask, now_s: float, limit_s: float, costs: Costs) -> Runs:
    """The constant run from now on or later that ends first; empty if none ends by `limit_s`."""
    best: PlannedStretch | None = None
    best_end_s = math.inf
    first_s = max(now_s, task.ready_s)
    for n in task.sizes:
        bare_s = costs.later[n] + task.work / task.rates[n]
        from_s, duration_s = first_s, bare_s + costs.reserve[n]
        limit_now_s = min(limit_s, best_end_s)
        while from_s <= limit_now_s - duration_s:
            start_s = profile.earliest(n, duration_s, from_s, limit_now_s - duration_s)
            if start_s is None:
                break
            # The number of falls inside the run depends on its start: if there are more now, search for a longer gap.
            end_s = costs.end_s(n, start_s, start_s + bare_s)
            if end_s <= start_s + duration_s or profile.least(start_s, end_s) >= n:
                if end_s < best_end_s and end_s <= limit_s:
                    best, best_end_s = PlannedStretch(start_s, end_s, n, costs.later[n]), end_s
                break
            from_s, duration_s = start_s, end_s - start_s
    return (best,) if best is not None else ()


def fill(profile: FreeProfile, task: FitTask, now_s: float, limit_s: float, costs: Costs, sizes: Sequence[int]) -> Runs:
    """Runs of changing size, at most the largest of `sizes`: progressive filling that pays for every change.

    In every interval of the profile the task takes as many devices as are free there, unless the change costs more
    time than it saves until the interval ends. Empty if the work does not end by `limit_s`.
    """
    times, free, rates = profile.times, profile.free, task.rates
    num_intervals, top, left = len(times), sizes[-1], task.work
    at_s = max(now_s, task.ready_s)
    # During a change a job may hold a number of devices that is not one of its sizes; it cannot stay there.
    size = task.held if task.ready_s <= now_s and task.held in task.sizes else 0
    pending_s = overhead_s = task.residual_s if size else 0.0
    begun_s = at_s
    runs: list[PlannedStretch] = []
    index = max(0, bisect_right(times, at_s) - 1)
    falls = costs.falls
    num_falls = len(falls)
    fall = bisect_right(falls, at_s) if num_falls else 0
    while at_s < limit_s:
        until_s = times[index + 1] if index + 1 < num_intervals else math.inf
        room = free[index]
        wanted = top if room >= top else _largest(sizes, room)
        if wanted != size:
            cost_s = 0.0 if not wanted else costs.now(wanted) if at_s <= now_s else costs.later[wanted]
            span_s = (until_s if until_s < limit_s else limit_s) - at_s
            if size and size <= room:
                pays = (span_s - cost_s) * rates[wanted] > (span_s - min(pending_s, span_s)) * rates[size]
                wanted = wanted if pays else size
            elif span_s <= cost_s:
                wanted = 0
        if wanted != size:
            if size and at_s > begun_s:
                runs.append(PlannedStretch(begun_s, at_s, size, min(overhead_s, at_s - begun_s)))
            size, begun_s, overhead_s, pending_s = wanted, at_s, cost_s, cost_s
            fall = bisect_right(falls, at_s)
        if size:
            done_s = at_s + pending_s + left / rates[size]
            while fall < num_falls and falls[fall] < min(done_s, until_s):
                # The move at a fall counts as additional work.
                left += costs.later[size] * rates[size]
                done_s += costs.later[size]
                fall += 1
            if done_s <= until_s:
                # The reserve is added as far as these devices are free.
                end_s = done_s + costs.reserve[size]
                if end_s > limit_s:
                    return ()
                return (*runs, PlannedStretch(begun_s, min(end_s, until_s), size, overhead_s))
            span_s = until_s - at_s
            if pending_s > span_s:
                pending_s -= span_s
            else:
                left -= (span_s - pending_s) * rates[size]
                pending_s = 0.0
        index += 1
        at_s = until_s
    return ()


def _largest(sizes: Sequence[int], room: int) -> int:
    """The largest size of at most `room` devices; 0 if there is none."""
    index = bisect_right(sizes, room)
    return sizes[index - 1] if index else 0


def fit(profile: FreeProfile, task: FitTask, now_s: float, costs: Costs) -> Runs:
    """Fit the task by its deadline; empty if it does not fit. In this order: from now on at the cheapest constant size;
    with changing sizes, the largest as small as possible; later; from now on without a reserve. A later start needs the
    reserve, because it is not known yet which devices will be free then."""
    deadline_s, sizes = task.deadline_s, task.sizes
    if deadline_s == math.inf:
        return _soonest(profile, task, now_s, costs)
    runs = start_now(profile, task, now_s, deadline_s, costs)
    if runs:
        return runs
    if fill(profile, task, now_s, deadline_s, costs, sizes):
        for count in range(1, len(sizes) + 1):
            runs = fill(profile, task, now_s, deadline_s, costs, sizes[:count])
            if runs:
                return runs
    bare = costs.without_reserve()
    return start_later(profile, task, now_s, deadline_s, costs) or start_now(profile, task, now_s, deadline_s, bare)


def _soonest(profile: FreeProfile, task: FitTask, now_s: float, costs: Costs) -> Runs:
    """The runs that end first: of one size from now on or later, of changing size, or with the devices held now."""
    found = [
        start_later(profile, task, now_s, math.inf, costs),
        fill(profile, task, now_s, math.inf, costs, task.sizes),
    ]
    if task.held in task.sizes:
        found.append(start_now(profile, task._replace(sizes=(task.held,)), now_s, math.inf, costs))
    return min((runs for runs in found if runs), key=lambda runs: runs[-1].end_s, default=())


def work_done(runs: Sequence[PlannedStretch], rates: Sequence[float], until_s: float) -> float:
    """Steps that the runs do until `until_s`."""
    done = 0.0
    for start_s, end_s, n, overhead_s in runs:
        if start_s >= until_s:
            break
        done += max(0.0, min(end_s, until_s) - start_s - overhead_s) * rates[n]
    return done
