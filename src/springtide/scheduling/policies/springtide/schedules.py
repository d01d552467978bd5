"""Schedules that change with the devices that jobs get: their speed there, and the next moments at which they fit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from springtide.scheduling.placement.topology import Layout
from springtide.scheduling.policies.springtide.memory import Devices, State, restore_speed, slow_down
from springtide.solvers.reservations.fit import Costs, PlannedStretch, Runs
from springtide.solvers.reservations.reservation_table import Entry, ReservationTable

# On 2**3 times as many nodes as it needs a job is 2.17 times slower (ElasticFlow, Figure 2(b)).
SCATTERED_SLOWDOWN = 2.17
SCATTERED_DOUBLINGS = 3


def placed_factor(layout: Layout, devices: Devices) -> float:
    """The speed of a job on these devices as a fraction of its speed on as few nodes as possible."""
    return nodes_factor(layout, len(layout.nodes_of(layout.bitmap(devices))), len(devices))


def nodes_factor(layout: Layout, nodes: int, count: int) -> float:
    fewest = layout.nodes_needed(count)
    return float(SCATTERED_SLOWDOWN ** (-math.log2(nodes / fewest) / SCATTERED_DOUBLINGS))


def keep_at_lower_speed(state: State, entry: Entry, factor: float) -> bool:
    """Plan a scattered job at its lower speed with the sizes that it has; returns whether it is in time, or as late as
    it is known to be. Its speed is the lower one in any case."""
    reservations = state.reservations
    restore_speed(state, entry)
    slow_down(state, entry, factor)
    remaining = [run for run in entry.runs if run.end_s > reservations.now_s]
    first = remaining[0]
    overhead_s = first.overhead_s if first.start_s >= reservations.now_s else entry.residual_s
    runs = retime(remaining, entry.left, entry.rates, reservations.now_s, overhead_s, reservations.costs)
    is_fitting = fits(reservations, entry, runs)
    if is_fitting:
        reservations.change_runs(entry, runs)
    return is_fitting


def retime(
    runs: Sequence[PlannedStretch], left: float, rates: Sequence[float], now_s: float, overhead_s: float, costs: Costs
) -> Runs:
    """The runs from `now_s` on with `overhead_s` for the first one: sizes and starts stay the same, and the end moves
    with the work that is left. A larger overhead uses up the reserve first; the time for falls to come is kept."""
    result: list[PlannedStretch] = []
    last = len(runs) - 1
    bare = costs.without_reserve()
    for index, (start_s, end_s, n, planned_s) in enumerate(runs):
        begin_s = max(start_s, now_s)
        cost_s = overhead_s if index == 0 else planned_s
        done_s = begin_s + cost_s + left / rates[n]
        if done_s <= end_s or index == last:
            least_s = bare.end_s(n, begin_s, done_s)
            result.append(PlannedStretch(begin_s, max(least_s, min(end_s, costs.end_s(n, begin_s, done_s))), n, cost_s))
            break
        left -= max(0.0, end_s - begin_s - cost_s) * rates[n]
        result.append(PlannedStretch(begin_s, end_s, n, min(cost_s, end_s - begin_s)))
    return tuple(result)


def fits(reservations: ReservationTable, entry: Entry, runs: Runs) -> bool:
    """Whether the entry can have these runs in place of its own. The table is unchanged."""
    if not entry.is_late and runs[-1].end_s > entry.deadline_s:
        return False
    before = entry.runs
    reservations.change_runs(entry, ())
    is_free = all(
        reservations.profile.least(run.start_s, run.end_s) >= run.num_devices
        for run in runs
        if run.end_s > reservations.now_s
    )
    reservations.change_runs(entry, before)
    return is_free


def keep_until_next_change(reservations: ReservationTable, entry: Entry) -> bool:
    """Let the job keep its devices until the next moment at which devices are freed or taken and from which on it can
    be fitted anew; returns whether there is one among the next few."""
    now_s, left, held, ready_s, residual_s = reservations.now_s, entry.left, entry.held, entry.ready_s, entry.residual_s
    if held not in entry.sizes:
        return False
    before = entry.runs
    reservations.change_runs(entry, ())
    found: Runs = ()
    for until_s in reservations.profile.times[1:5]:
        first = PlannedStretch(now_s, until_s, held, min(residual_s, until_s - now_s))
        done = max(0.0, until_s - now_s - residual_s) * entry.rates[held]
        if done >= left or until_s - now_s < 1.0:
            continue
        if reservations.profile.least(now_s, until_s) < held:
            break
        entry.left, entry.ready_s, entry.held, entry.residual_s = left - done, until_s, 0, 0.0
        rest = reservations.fit_one(entry)
        entry.left, entry.ready_s, entry.held, entry.residual_s = left, ready_s, held, residual_s
        if rest:
            found = (first, *rest)
            break
    reservations.change_runs(entry, found or before)
    return bool(found)


def shrink_another(reservations: ReservationTable, entry: Entry, count: int) -> bool:
    """Shrink another job that frees a block of `count` devices by that and still makes its deadline; returns whether
    there is one."""
    now_s = reservations.now_s
    able: list[tuple[bool, int, str, Entry, Runs]] = []
    for key, other in reservations.entries.items():
        size = other.size_at(now_s)
        half = max((n for n in other.sizes if n <= size - count and n & (n - 1) == 0), default=0)
        if other is entry or other.is_fixed or not half or size & (size - 1):
            continue
        overhead_s = other.residual_s if half == other.held else reservations.costs.later[half]
        done_s = now_s + overhead_s + other.left / other.rates[half]
        run = PlannedStretch(now_s, reservations.costs.without_reserve().end_s(half, now_s, done_s), half, overhead_s)
        able.append((half != other.held, size, key, other, (run,)))
    for _, _, _, other, runs in sorted(able, key=lambda item: item[:3]):
        if fits(reservations, other, runs):
            reservations.change_runs(other, runs)
            return True
    return False


def start_later(reservations: ReservationTable, entry: Entry) -> bool:
    """Plan the job to start or go on at one of the next moments at which devices are freed or taken, replanning others
    if necessary; returns whether that worked."""
    ready_s = entry.ready_s
    for moment_s in [at_s for at_s in reservations.profile.times[1:4] if at_s > reservations.now_s]:
        entry.ready_s = moment_s
        is_planned = reservations.plan_anew(entry)
        entry.ready_s = ready_s
        if is_planned:
            return True
    return False
