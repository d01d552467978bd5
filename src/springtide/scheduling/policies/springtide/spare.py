"""Jobs outside the reservation table (best effort, soft deadlines), on devices that no promise uses now."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from springtide.core.decision import EMPTY, Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.policies.springtide.rows import PromiseRow
from springtide.solvers.reservations.reservation_table import ReservationTable

# A change has to save at least this many times its cost, and its devices have to be free for as long as that.
MIN_GAIN = 4.0


def devices_needed_outside(rows: Sequence[PromiseRow], snapshot: Snapshot) -> int:
    """How many devices jobs outside the table need to run at all."""
    return sum(
        row.sizes[0] for row in rows if row.view.restarts.runnable_at_s <= snapshot.now_s or _held(snapshot, row)
    )


def share_spare(
    reservations: ReservationTable,
    rows: Sequence[PromiseRow],
    snapshot: Snapshot,
    num_surplus: int = 0,
    kept: Mapping[WorkloadId, int] = EMPTY,
) -> dict[WorkloadId, int]:
    """Share the devices that no schedule uses now, and `num_surplus` that no promise may use, among the jobs in `rows`.

    1. Each job gets the fewest devices that it runs on: first jobs that hold devices, then soft deadlines by date,
       then by arrival.
    2. Each keeps what it holds, up to its largest size worth having; for jobs in `kept`, up to that number.
    3. The rest goes, one size at a time, where it saves most time for the GPU-time added, if that pays for the change
       and the devices stay free long enough.
    """
    now_s, left = reservations.now_s, reservations.profile.at(reservations.now_s) + num_surplus
    held = {row.job_id: _held(snapshot, row) for row in rows}
    waiting = [row for row in rows if row.view.restarts.runnable_at_s <= now_s or held[row.job_id]]
    order = sorted(
        range(len(waiting)),
        key=lambda index: (
            not held[waiting[index].job_id],
            waiting[index].deadline_s,
            waiting[index].view.submitted_at_s,
            index,
        ),
    )
    counts: dict[WorkloadId, int] = {}
    for index in order:
        row = waiting[index]
        smallest = min(row.sizes[0], held[row.job_id]) if held[row.job_id] else row.sizes[0]
        if smallest <= left:
            counts[row.job_id] = smallest
            left -= smallest
    for index in order:
        row = waiting[index]
        count, most = counts.get(row.job_id, 0), min(held[row.job_id], kept.get(row.job_id, row.sizes[-1]))
        if count and most > count:
            stays = max((n for n in (*row.sizes, most) if count <= n <= min(most, count + left)), default=count)
            counts[row.job_id] = stays
            left -= stays - count
    return _grow(reservations, [waiting[index] for index in order], held, counts, left, num_surplus)


def _grow(
    reservations: ReservationTable,
    rows: Sequence[PromiseRow],
    held: dict[WorkloadId, int],
    counts: dict[WorkloadId, int],
    left: int,
    num_surplus: int,
) -> dict[WorkloadId, int]:
    heap: list[tuple[float, int, int]] = []
    for index, row in enumerate(rows):
        offer = _offer(reservations, row, counts.get(row.job_id, 0), held[row.job_id])
        if offer is not None:
            heap.append((-offer[0], index, offer[1]))
    heapq.heapify(heap)
    used = reservations.profile.at(reservations.now_s) + num_surplus - left
    while heap and left > 0:
        _, index, wanted = heapq.heappop(heap)
        row = rows[index]
        more = wanted - counts[row.job_id]
        if more > left:
            continue
        span_s = MIN_GAIN * reservations.costs.later[wanted]
        if (
            reservations.profile.least(reservations.now_s, reservations.now_s + max(span_s, 1e-3)) + num_surplus
            < used + more
        ):
            continue
        counts[row.job_id] = wanted
        left -= more
        used += more
        offer = _offer(reservations, row, wanted, held[row.job_id])
        if offer is not None:
            heapq.heappush(heap, (-offer[0], index, offer[1]))
    return counts


def _offer(reservations: ReservationTable, row: PromiseRow, count: int, held: int) -> tuple[float, int] | None:
    """The seconds saved for each GPU-second added by the next larger size, and that size; None if it does not pay."""
    wanted = next((n for n in row.sizes if n > count), 0)
    if not count or not wanted:
        return None
    rates = row.rates
    work = row.steps_left(reservations.now_s, held)
    before_s, after_s = work / rates[count], work / rates[wanted]
    saved_s = before_s - after_s
    if held and wanted > held and saved_s < MIN_GAIN * reservations.costs.later[wanted]:
        return None
    if saved_s <= 0.0:
        return None
    added = wanted * after_s - count * before_s
    return (saved_s / added if added > 1e-9 else math.inf), wanted


def _held(snapshot: Snapshot, row: PromiseRow) -> int:
    allocation = snapshot.allocations.get(row.job_id)
    return allocation.num_devices if allocation is not None else 0
