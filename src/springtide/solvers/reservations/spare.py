"""Spare devices: which jobs run faster than their promises need, by the time saved for the GPU-time added."""

from __future__ import annotations

import heapq

from springtide.solvers.reservations.fit import PlannedStretch, Runs, fill
from springtide.solvers.reservations.reservation_table import Entry, ReservationTable

# A change has to save at least this many times its cost; otherwise the job keeps its size.
MIN_GAIN = 1.0
# How many intervals of time may be looked at for growth on devices that are free only for a while.
FILL_EFFORT = 20_000


def release_surplus(table: ReservationTable, num_needed: int) -> None:
    """Shrink jobs that hold more than their deadlines need, those with the largest surplus first, until `num_needed`
    devices are free now. No promise is broken, and no other job is planned anew.
    """
    now_s = table.now_s
    for entry in sorted(table.entries.values(), key=lambda entry: (-table.surplus(entry), entry.key)):
        if table.profile.at(now_s) >= num_needed or table.surplus(entry) <= 0 or table.effort <= 0:
            return
        if entry.is_fixed:
            continue
        before = entry.runs
        table.change_runs(entry, ())
        runs = table.fit_one(entry)
        is_smaller = bool(runs) and _size_at(runs, now_s) < _size_at(before, now_s)
        table.change_runs(entry, runs if is_smaller else before)


def use_spare(table: ReservationTable, num_kept_free: int = 0, num_needed: int = 0) -> None:
    """Give devices that no schedule uses now to jobs that end earlier with them.

    `num_needed` of them are left to jobs outside the table that cannot run at all without them, and `num_kept_free`
    more stay idle. First, a job that would shrink keeps what it holds if no other job needs it. Then devices go, one
    size at a time, to the job that saves most seconds for each GPU-second added (ElasticFlow, Algorithm 2, in the
    direction in which the paper states it). No work is planned later than before, so every promise is kept.
    """
    now_s = table.now_s
    entries = table.entries
    min_effort = table.effort - FILL_EFFORT
    for entry in entries.values():
        can_keep = entry.held and entry.runs and entry.ready_s <= now_s
        if not can_keep or entry.held not in entry.sizes or entry.size_at(now_s) >= entry.held:
            continue
        if not num_needed or table.profile.at(now_s) - entry.held + entry.size_at(now_s) >= num_needed:
            _enlarge(table, entry, entry.held, min_effort)
    num_kept_free += num_needed
    heap: list[tuple[float, int, str, int]] = []
    number = 0
    for entry in entries.values():
        offer = _offer(table, entry)
        if offer is not None:
            heap.append((-offer[0], number, entry.key, offer[1]))
            number += 1
    heapq.heapify(heap)
    while heap and table.profile.at(now_s) > num_kept_free and table.effort > 0:
        _, _, key, count = heapq.heappop(heap)
        entry = entries[key]
        if table.profile.at(now_s) - count + entry.size_at(now_s) < num_kept_free:
            continue
        if _enlarge(table, entry, count, min_effort):
            offer = _offer(table, entry)
            if offer is not None:
                heapq.heappush(heap, (-offer[0], number, key, offer[1]))
                number += 1


def _offer(table: ReservationTable, entry: Entry) -> tuple[float, int] | None:
    """The marginal return of the next larger size (seconds saved for each GPU-second added), and that size; None if it
    does not pay or has too few devices."""
    now_s = table.now_s
    if entry.ready_s > now_s or not entry.runs or entry.is_fixed:
        return None
    current = entry.size_at(now_s)
    spare = table.profile.at(now_s)
    if current >= entry.sizes[-1] or not spare:
        return None
    count = next(n for n in entry.sizes if n > current)
    if count - current > spare:
        return None
    overhead_s = entry.residual_s if count == entry.held else table.costs.now(count)
    duration_s = table.costs.end_s(count, now_s, now_s + overhead_s + entry.left / entry.rates[count]) - now_s
    saved_s = entry.runs[-1].end_s - now_s - duration_s
    if saved_s <= (MIN_GAIN * overhead_s if entry.held and count != entry.held and current == entry.held else 0.0):
        return None
    used = sum((run.end_s - max(now_s, run.start_s)) * run.num_devices for run in entry.runs if run.end_s > now_s)
    added = count * duration_s - used
    return (saved_s / added if added > 1e-9 else 1e18 + saved_s), count


def _enlarge(table: ReservationTable, entry: Entry, count: int, min_effort: int) -> bool:
    """Let the job hold `count` devices from now on, to its end or as long as they are free; returns whether it can.

    Once the effort left is down to `min_effort`, only a constant size is tried, and only where that is cheap.
    """
    now_s = table.now_s
    overhead_s = entry.residual_s if count == entry.held else table.costs.now(count)
    end_s = table.costs.end_s(count, now_s, now_s + overhead_s + entry.left / entry.rates[count])
    before = entry.runs
    table.effort -= 4
    in_time = end_s <= entry.deadline_s or entry.is_late
    first = before[0]
    if first.start_s <= now_s and first.end_s >= end_s:
        # It holds its present devices all that time: only the additional ones have to be free.
        is_free = in_time and table.profile.least(now_s, end_s) >= count - first.num_devices
        if not is_free and table.effort <= min_effort:
            return False
    elif table.effort <= min_effort and not in_time:
        return False
    table.change_runs(entry, ())
    runs: Runs = ()
    if in_time and table.profile.least(now_s, end_s) >= count:
        runs = (PlannedStretch(now_s, end_s, count, overhead_s),)
    elif table.effort > min_effort:
        limit_s = before[-1].end_s - MIN_GAIN * table.costs.later[count]
        sizes = [n for n in entry.sizes if n <= count]
        table.effort -= len(table.profile.times)
        filled = fill(table.profile, entry.task(), now_s, limit_s, table.costs, sizes)
        if filled and filled[0].start_s <= now_s and filled[0].num_devices > _size_at(before, now_s):
            runs = filled
    table.change_runs(entry, runs or before)
    return bool(runs)


def _size_at(runs: Runs, now_s: float) -> int:
    return next((run.num_devices for run in runs if run.start_s <= now_s < run.end_s), 0)
