"""Jobs outside the reservation table (best effort, soft deadlines), on devices that no promise uses now."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from springtide.core.decision import EMPTY, Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.policies.springtide.rows import PromiseRow
from springtide.solvers.reservations.reservation_table import ReservationTable

# A change has to save at least this many times what it costs, and its devices be free for that long.
MIN_GAIN = 4.0


def owed_to(rows: Sequence[PromiseRow], snapshot: Snapshot) -> int:
    """Devices that jobs outside the table need to run at all, before a promised job gets more than it needs."""
    return sum(
        row.sizes[0] for row in rows if row.view.restarts.runnable_at_s <= snapshot.now_s or _held(snapshot, row)
    )


def share_spare(
    book: ReservationTable,
    rows: Sequence[PromiseRow],
    snapshot: Snapshot,
    num_surplus: int = 0,
    kept: Mapping[WorkloadId, int] = EMPTY,
) -> dict[WorkloadId, int]:
    """Devices for each of `rows` out of those that no schedule uses now, and `num_surplus` that none may count on.

    First each job gets the least it runs on: holders of devices, then soft deadlines by date, then by arrival.
    Then each what it holds, as far as it runs the faster for it; `kept` says of some how much they may keep
    instead. What is left goes one size at a time where it saves most for the GPU-time it adds, if that pays for the
    change and the devices stay free long enough.
    """
    now_s, left = book.now_s, book.profile.at(book.now_s) + num_surplus
    held = {row.job_id: _held(snapshot, row) for row in rows}
    waiting = [row for row in rows if row.view.restarts.runnable_at_s <= now_s or held[row.job_id]]
    order = sorted(
        range(len(waiting)),
        key=lambda at: (not held[waiting[at].job_id], waiting[at].deadline_s, waiting[at].view.submitted_at_s, at),
    )
    counts: dict[WorkloadId, int] = {}
    for at in order:
        row = waiting[at]
        least = min(row.sizes[0], held[row.job_id]) if held[row.job_id] else row.sizes[0]
        if least <= left:
            counts[row.job_id] = least
            left -= least
    for at in order:
        row = waiting[at]
        count, most = counts.get(row.job_id, 0), min(held[row.job_id], kept.get(row.job_id, row.sizes[-1]))
        if count and most > count:
            stays = max((n for n in (*row.sizes, most) if count <= n <= min(most, count + left)), default=count)
            counts[row.job_id] = stays
            left -= stays - count
    return _grow(book, [waiting[at] for at in order], held, counts, left, num_surplus)


def _grow(
    book: ReservationTable,
    rows: Sequence[PromiseRow],
    held: dict[WorkloadId, int],
    counts: dict[WorkloadId, int],
    left: int,
    num_surplus: int,
) -> dict[WorkloadId, int]:
    heap: list[tuple[float, int, int]] = []
    for at, row in enumerate(rows):
        offer = _offer(book, row, counts.get(row.job_id, 0), held[row.job_id])
        if offer is not None:
            heap.append((-offer[0], at, offer[1]))
    heapq.heapify(heap)
    used = book.profile.at(book.now_s) + num_surplus - left
    while heap and left > 0:
        _, at, wanted = heapq.heappop(heap)
        row = rows[at]
        more = wanted - counts[row.job_id]
        if more > left:
            continue
        span_s = MIN_GAIN * book.costs.later[wanted]
        if book.profile.least(book.now_s, book.now_s + max(span_s, 1e-3)) + num_surplus < used + more:
            continue
        counts[row.job_id] = wanted
        left -= more
        used += more
        offer = _offer(book, row, wanted, held[row.job_id])
        if offer is not None:
            heapq.heappush(heap, (-offer[0], at, offer[1]))
    return counts


def _offer(book: ReservationTable, row: PromiseRow, count: int, held: int) -> tuple[float, int] | None:
    """The next larger size: seconds saved for GPU-seconds added, and the size."""
    wanted = next((n for n in row.sizes if n > count), 0)
    if not count or not wanted:
        return None
    rates = row.rates
    work = row.steps_left(book.now_s, held)
    before_s, after_s = work / rates[count], work / rates[wanted]
    saved_s = before_s - after_s
    if held and wanted > held and saved_s < MIN_GAIN * book.costs.later[wanted]:
        return None
    if saved_s <= 0.0:
        return None
    added = wanted * after_s - count * before_s
    return (saved_s / added if added > 1e-9 else math.inf), wanted


def _held(snapshot: Snapshot, row: PromiseRow) -> int:
    given = snapshot.allocations.get(row.job_id)
    return given.num_devices if given is not None else 0
