"""Schedules that change with the devices that jobs get: their speed there, and the next moments at which they fit."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from springtide.core.decision import EMPTY, PoolAllocation, Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.topology import Layout
from springtide.scheduling.policies.springtide.memory import (
    PAD_S,
    Devices,
    State,
    restore_speed,
    same_devices,
    slow_down,
)
from springtide.scheduling.policies.springtide.moves import Placed, delays, hurry, waits_anew
from springtide.solvers.reservations.fit import Costs, PlannedStretch, Runs
from springtide.solvers.reservations.reservation_table import Entry, ReservationTable

# On 2**3 times as many nodes as it needs a job is 2.17 times slower (ElasticFlow, Figure 2(b)).
SCATTERED_SLOWDOWN = 2.17
SCATTERED_DOUBLINGS = 3


def price_changes(
    state: State, layout: Layout, snapshot: Snapshot, placed: Placed, spare: Container[WorkloadId]
) -> list[str]:
    """Put the cost of every change into the schedules: the change itself, and the wait until other jobs have left the
    devices. Returns the jobs whose schedules do not fit with it. Jobs of `spare` that a promise cannot wait for are
    stopped first (`State.hurried`)."""
    reservations, now_s = state.reservations, state.reservations.now_s
    waits_s = delays(state, snapshot, placed) if snapshot.allocations else EMPTY
    broken: list[str] = []
    for key, entry in list(reservations.entries.items()):
        workload_id = WorkloadId(key)
        allocation = placed.get(workload_id)
        if allocation is None:
            continue
        is_same = same_devices(state.devices.get(workload_id), allocation.device_ids)
        first = entry.runs[0]
        if is_same and first.num_devices == entry.held:
            wait_s = waits_s.get(workload_id, 0.0)
            if wait_s and not can_wait(state, layout, snapshot, placed, workload_id, wait_s):
                hurry(state, snapshot, placed, spare, key)
            continue
        if key in state.slowed and placed_factor(layout, allocation.device_ids) == 1.0:
            restore_speed(state, entry)
        n = allocation.num_devices
        wait_s = waits_s.get(workload_id, 0.0)
        cost_s = _change_cost_s(state, layout, snapshot, WorkloadId(key), allocation) + wait_s
        if first.start_s >= now_s and first.overhead_s == cost_s:
            continue
        remaining = [run for run in entry.runs if run.end_s > now_s]
        runs = retime(remaining, entry.left, entry.rates, now_s, cost_s, reservations.costs)
        if not fits(reservations, entry, runs):
            runs = retime(remaining, entry.left, entry.rates, now_s, cost_s, reservations.costs.without_falls())
        is_held_up = wait_s and entry.is_promised and not fits(reservations, entry, runs)
        if is_held_up and hurry(state, snapshot, placed, spare, key):
            waits_s = delays(state, snapshot, placed)
            cost_s += waits_s.get(workload_id, 0.0) - wait_s
            runs = retime(remaining, entry.left, entry.rates, now_s, cost_s, reservations.costs.without_falls())
        if fits(reservations, entry, runs):
            reservations.change_runs(entry, runs)
            continue
        residual_s, entry.residual_s = entry.residual_s, cost_s
        if n != entry.held or not reservations.plan_anew(entry):
            entry.residual_s = residual_s
        broken.append(key)
    return broken


def can_wait(
    state: State, layout: Layout, snapshot: Snapshot, placed: Placed, workload_id: WorkloadId, wait_s: float
) -> bool:
    """Whether a job that others still hold the devices of makes its promised deadline if these take `wait_s` more: they
    begin to move anew, or were to have left by now. True as long as neither is so."""
    reservations = state.reservations
    entry = reservations.entries[workload_id]
    if not entry.is_promised or entry.is_late:
        return True
    first, cost_s = entry.runs[0], _change_cost_s(state, layout, snapshot, workload_id, placed[workload_id])
    is_behind = reservations.now_s + cost_s > first.start_s + first.overhead_s
    if not is_behind and not waits_anew(state, snapshot, placed, workload_id):
        return True
    costs = reservations.costs.without_falls()
    # It has done nothing of what its schedule says since then.
    runs = retime(entry.runs, entry.work, entry.rates, reservations.now_s, cost_s + wait_s, costs)
    return runs[-1].end_s <= entry.deadline_s


def accept_places(
    state: State, layout: Layout, snapshot: Snapshot, placed: Placed, spare: Container[WorkloadId]
) -> None:
    """Change the schedules to what their places cost, at the same sizes. A newcomer that would miss its deadline there
    is dropped; nothing has been promised to it yet."""
    reservations, now_s = state.reservations, state.reservations.now_s
    waits_s = delays(state, snapshot, placed) if snapshot.allocations else EMPTY
    for key, entry in list(reservations.entries.items()):
        allocation = placed.get(WorkloadId(key))
        if allocation is None or same_devices(state.devices.get(WorkloadId(key)), allocation.device_ids):
            continue
        restore_speed(state, entry)
        slow_down(state, entry, placed_factor(layout, allocation.device_ids))
        remaining = [run for run in entry.runs if run.end_s > now_s]
        wait_s = waits_s.get(WorkloadId(key), 0.0)
        cost_s = _change_cost_s(state, layout, snapshot, WorkloadId(key), allocation) + wait_s
        runs = retime(remaining, entry.left, entry.rates, now_s, cost_s, reservations.costs)
        is_held_up = wait_s and entry.is_promised and not fits(reservations, entry, runs)
        if is_held_up and hurry(state, snapshot, placed, spare, key):
            waits_s = delays(state, snapshot, placed)
            cost_s += waits_s.get(WorkloadId(key), 0.0) - wait_s
            runs = retime(remaining, entry.left, entry.rates, now_s, cost_s, reservations.costs)
        if fits(reservations, entry, runs):
            reservations.change_runs(entry, runs)
        elif key in state.newcomers:
            reservations.drop(key)
            del placed[WorkloadId(key)]
        elif not entry.is_late and runs[-1].end_s > entry.deadline_s:
            # No other sizes were found in the rounds before. It is late with these, and has to be told to be.
            entry.is_late = True
            if fits(reservations, entry, runs):
                reservations.change_runs(entry, runs)
            else:
                reservations.plan_anew(entry)


def scattered_jobs(state: State, layout: Layout, placed: Placed) -> list[str]:
    """The jobs that get other devices now, scattered over more nodes than necessary and slower than planned there."""
    found: list[str] = []
    for key in state.reservations.entries:
        allocation = placed.get(WorkloadId(key))
        if allocation is None or same_devices(state.devices.get(WorkloadId(key)), allocation.device_ids):
            continue
        if placed_factor(layout, allocation.device_ids) < state.slowed.get(key, 1.0):
            found.append(key)
    return found


def apply_slowdown(state: State, key: str, layout: Layout, placed: Placed) -> bool:
    """Plan a scattered job at its lower speed; returns whether its schedule was made anew, without what it waits for. A
    newcomer that would miss its deadline is dropped."""
    reservations = state.reservations
    entry = reservations.entries[key]
    factor = placed_factor(layout, placed[WorkloadId(key)].device_ids)
    if keep_at_lower_speed(state, entry, factor):
        return False
    if not reservations.plan_anew(entry):
        if key in state.newcomers:
            drop_newcomer(state, key)
            return True
        # It will be late. It keeps its devices: without them it would end even later.
        entry.is_late = True
        if not keep_at_lower_speed(state, entry, factor):
            reservations.plan_anew(entry)
    return True


def _change_cost_s(
    state: State, layout: Layout, snapshot: Snapshot, workload_id: WorkloadId, allocation: PoolAllocation
) -> float:
    """What a change to these devices costs; it is less on a block that a job has been on before. A job that moves
    with its only worker is stopped and starts again."""
    has_been_used = state.is_used(layout, allocation.device_ids)
    cost_s = state.change_s + PAD_S if has_been_used else state.reservations.costs.later[allocation.num_devices]
    held = snapshot.allocations.get(workload_id) if workload_id in state.lone else None
    return cost_s if held is None or set(allocation.device_ids) & set(held.device_ids) else 2.0 * cost_s


def drop_newcomer(state: State, key: str) -> None:
    restore_speed(state, state.reservations.entries[key])
    state.reservations.drop(key)


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
