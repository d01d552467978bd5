"""Spare devices: which jobs run faster than their promises need, by the time saved for the GPU-time added."""

from __future__ import annotations

import heapq

from springtide.solvers.reservations.fit import PlannedStretch, Runs, fill
from springtide.solvers.reservations.reservation_table import Entry, ReservationTable

# A change has to save at least this many times what it costs, or the job is left alone.
MIN_GAIN = 1.0
# So many intervals of time are looked at for growing where devices are free only for a while.
FILL_EFFORT = 20_000


def make_way(book: ReservationTable, owed: int) -> None:
    """Let jobs that hold more than their deadlines ask for give some back, until `owed` devices are free now.

    The job with most to spare first; no promise is broken, and no other job is planned anew for it.
    """
    now_s = book.now_s
    for entry in sorted(book.entries.values(), key=lambda entry: (-book.surplus(entry), entry.key)):
        if book.profile.at(now_s) >= owed or book.surplus(entry) <= 0 or book.effort <= 0:
            return
        if entry.is_fixed:
            continue
        before = entry.runs
        book.change_runs(entry, ())
        runs = book.fit_one(entry)
        is_smaller = bool(runs) and _size_at(runs, now_s) < _size_at(before, now_s)
        book.change_runs(entry, runs if is_smaller else before)


def use_spare(book: ReservationTable, kept_free: int = 0, owed: int = 0) -> None:
    """Give devices that no schedule uses now to jobs that end earlier for it.

    `owed` of them are left to jobs outside the table, which could not run at all without; `kept_free` besides are
    left unused. First each job that would shrink although no other needs the devices keeps what it holds. Then the
    marginal return decides, one size at a time: seconds saved for GPU-seconds added (ElasticFlow, Algorithm 2, in the
    direction in which the paper states it). Planned work is pulled forward, never pushed back, so every promise stays
    kept.
    """
    now_s = book.now_s
    entries = book.entries
    fills_until = book.effort - FILL_EFFORT
    for entry in entries.values():
        is_here = entry.held and entry.runs and entry.ready_s <= now_s
        if not is_here or entry.held not in entry.sizes or entry.size_at(now_s) >= entry.held:
            continue
        if not owed or book.profile.at(now_s) - entry.held + entry.size_at(now_s) >= owed:
            _raise(book, entry, entry.held, fills_until)
    kept_free += owed
    heap: list[tuple[float, int, str, int]] = []
    number = 0
    for entry in entries.values():
        offer = _offer(book, entry)
        if offer is not None:
            heap.append((-offer[0], number, entry.key, offer[1]))
            number += 1
    heapq.heapify(heap)
    while heap and book.profile.at(now_s) > kept_free and book.effort > 0:
        _, _, key, count = heapq.heappop(heap)
        entry = entries[key]
        if book.profile.at(now_s) - count + entry.size_at(now_s) < kept_free:
            continue
        if _raise(book, entry, count, fills_until):
            offer = _offer(book, entry)
            if offer is not None:
                heapq.heappush(heap, (-offer[0], number, key, offer[1]))
                number += 1


def _offer(book: ReservationTable, entry: Entry) -> tuple[float, int] | None:
    """The next larger size for which there are devices now: its marginal return and the size."""
    now_s = book.now_s
    if entry.ready_s > now_s or not entry.runs or entry.is_fixed:
        return None
    current = entry.size_at(now_s)
    spare = book.profile.at(now_s)
    if current >= entry.sizes[-1] or not spare:
        return None
    count = next(n for n in entry.sizes if n > current)
    if count - current > spare:
        return None
    overhead_s = entry.residual_s if count == entry.held else book.costs.now(count)
    duration_s = book.costs.end_s(count, now_s, now_s + overhead_s + entry.left / entry.rates[count]) - now_s
    saved_s = entry.runs[-1].end_s - now_s - duration_s
    if saved_s <= (MIN_GAIN * overhead_s if entry.held and count != entry.held and current == entry.held else 0.0):
        return None
    used = sum((run.end_s - max(now_s, run.start_s)) * run.num_devices for run in entry.runs if run.end_s > now_s)
    added = count * duration_s - used
    return (saved_s / added if added > 1e-9 else 1e18 + saved_s), count


def _raise(book: ReservationTable, entry: Entry, count: int, fills_until: int) -> bool:
    """Let the job hold `count` devices from now on, to its end or as long as they are free."""
    now_s = book.now_s
    overhead_s = entry.residual_s if count == entry.held else book.costs.now(count)
    end_s = book.costs.end_s(count, now_s, now_s + overhead_s + entry.left / entry.rates[count])
    before = entry.runs
    book.effort -= 4
    in_time = end_s <= entry.deadline_s or entry.is_late
    first = before[0]
    if first.start_s <= now_s and first.end_s >= end_s:
        # It holds its own devices all that time, so the others' tell: nothing has to be tried.
        is_free = in_time and book.profile.least(now_s, end_s) >= count - first.num_devices
        if not is_free and book.effort <= fills_until:
            return False
    elif book.effort <= fills_until and not in_time:
        return False
    book.change_runs(entry, ())
    runs: Runs = ()
    if in_time and book.profile.least(now_s, end_s) >= count:
        runs = (PlannedStretch(now_s, end_s, count, overhead_s),)
    elif book.effort > fills_until:
        limit_s = before[-1].end_s - MIN_GAIN * book.costs.later[count]
        sizes = [n for n in entry.sizes if n <= count]
        book.effort -= len(book.profile.times)
        filled = fill(book.profile, entry.task(), now_s, limit_s, book.costs, sizes)
        if filled and filled[0].start_s <= now_s and filled[0].num_devices > _size_at(before, now_s):
            runs = filled
    book.change_runs(entry, runs or before)
    return bool(runs)


def _size_at(runs: Runs, now_s: float) -> int:
    return next((run.num_devices for run in runs if run.start_s <= now_s < run.end_s), 0)
