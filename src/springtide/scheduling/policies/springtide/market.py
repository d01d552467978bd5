"""Who gets the devices that no promise needs now: one choice over promised jobs above their floors and all others.

The value of a size is the job's weight times its speed there, less what the change costs. The weights are those that
minimise the sum of completion times (`solvers/share_dp.py`), so that promised and other jobs compete by the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from springtide.core.decision import Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.policies.springtide.rows import PromiseRow, num_held
from springtide.solvers.reservations.reservation_table import FILL_EFFORT, Entry, ReservationTable
from springtide.solvers.share_dp import best_shares, shares_along_hulls, work_weights_of_many

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# How many future jobs are counted beside the present ones.
COMPANY = 1.0
# A change is charged as if its job were changed again within so many seconds.
HORIZON_S = 300.0
# A job gets devices only if they stay free for so many times the cost of a change.
LASTING_CHANGES = 4.0
# A job that is about to end is valued as if it had so many seconds left.
LEAST_LEFT_S = 1.0
# Up to so many cells (sizes x devices) shares are exact; above, they follow the concave hulls.
MAX_CELLS = 200_000


class Bid(NamedTuple):
    """One job: `seconds[i]` to its end on `sizes[i]` devices, and `lost_s[i]` without progress for the change to them.

    It has `floor` devices in any case; all sizes are at least that many. `has` is what it has now: in the reservation
    table by its schedule, outside of it by what it holds.
    """

    job_id: WorkloadId
    sizes: Sequence[int]
    seconds: Sequence[float]
    lost_s: Sequence[float]
    floor: int
    has: int
    entry: Entry | None = None


class Market:
    """One choice of sizes in one decision. `share_reserved` comes first, `share_outside` gives out what is left.

    `rows` are the jobs outside the reservation table, `kept` maps jobs to a number of devices that they keep whatever
    was measured there. `num_surplus` devices are present that no promise may use.
    """

    def __init__(
        self,
        reservations: ReservationTable,
        rows: Sequence[PromiseRow],
        snapshot: Snapshot,
        num_surplus: int,
        kept: Mapping[WorkloadId, int],
    ) -> None:
        self._reservations, self._num_surplus = reservations, num_surplus
        self._now_s = reservations.now_s
        self._held = {row.job_id: num_held(snapshot, row) for row in rows}
        able = [row for row in rows if row.view.restarts.starts_at_s <= self._now_s or self._held[row.job_id]]
        # Jobs that hold devices first, then soft deadlines by date, then by arrival.
        able.sort(key=lambda row: (not self._held[row.job_id], row.deadline_s, row.view.submitted_at_s))
        self._rows = able
        free = reservations.profile.at(self._now_s) + num_surplus
        reserved = self._reserved_bids(kept)
        num_needed = sum(row.sizes[0] for row in able)
        if free + sum(bid.has - bid.floor for bid in reserved) < num_needed:
            # Jobs whose speed is being measured keep their devices, but not from jobs that could not run at all.
            reserved = self._reserved_bids(())
        self._spare = free + sum(bid.has - bid.floor for bid in reserved)
        self._wanted_floors = {row.job_id: floor for row in able if (floor := self._floor_of(row, kept))}
        floors = self._fit_floors(able, self._spare)
        outside = [self._bid_of_row(row, floors.get(row.job_id, 0)) for row in able if self._is_resizable(row)]
        self._bids = [*reserved, *[bid for bid in outside if bid is not None]]
        self._num_floors = sum(floors.values())
        self._capacity = self._spare + sum(bid.floor for bid in reserved)
        self._read_bids()

    def share_reserved(self, num_kept_idle: int) -> None:
        """Resize the jobs of the reservation table by what they win; `num_kept_idle` devices go to none of them."""
        reservations, now_s = self._reservations, self._now_s
        floors = [bid.floor for bid in self._bids]
        chosen = self._choose(range(len(floors)), floors, self._spare - num_kept_idle - self._num_floors)
        won = [(bid.entry, bid.has, count) for bid, count in zip(self._bids, chosen, strict=True) if bid.entry]
        for entry, has, count in won:
            if count < has:
                reservations.shrink(entry, count)
        min_effort = reservations.effort - FILL_EFFORT
        for entry, has, count in won:
            if count > has and reservations.profile.at(now_s) > 0 and reservations.effort > 0:
                reservations.enlarge(entry, count, min_effort)

    def share_outside(self, without: Container[WorkloadId], num_surplus: int) -> dict[WorkloadId, int]:
        """Return the number of devices of each job outside the table, less those in `without`.

        Devices that are free for a short while only are given to jobs up to their floors, and kept by those that hold
        them.
        """
        reservations, now_s = self._reservations, self._now_s
        rows = [row for row in self._rows if row.job_id not in without]
        left = reservations.profile.at(now_s) + num_surplus
        counts = self._fit_floors(rows, left)
        span_s = max(LASTING_CHANGES * reservations.costs.later[1], 1e-3)
        lasting = reservations.profile.least(now_s, now_s + span_s) + num_surplus
        mine = [i for i, bid in enumerate(self._bids) if bid.entry is None and bid.job_id not in without]
        floors = [counts.get(self._bids[i].job_id, 0) for i in mine]
        chosen = self._choose(mine, floors, min(left, lasting) - sum(counts.values()))
        counts |= {self._bids[i].job_id: count for i, count in zip(mine, chosen, strict=True) if count}
        left -= sum(counts.values())
        for row in rows:
            count, held = counts.get(row.job_id, 0), self._held[row.job_id]
            if 0 < count < held <= min(row.sizes[-1], count + left):
                counts[row.job_id] = held
                left -= held - count
        return counts

    # --- floors: what a job outside the table has in any case, if there is enough -------------------------------------

    def _is_resizable(self, row: PromiseRow) -> bool:
        return row.view.job.elastic or not self._held[row.job_id]

    def _floor_of(self, row: PromiseRow, kept: Mapping[WorkloadId, int]) -> int:
        """A job that cannot be resized keeps what it holds, one that is being measured its size. One with a soft
        deadline has the fewest devices that make it, any other the fewest on which it runs."""
        held = self._held[row.job_id]
        if not self._is_resizable(row):
            return held
        if row.job_id in kept:
            return min(held, kept[row.job_id])
        smallest = min(row.sizes[0], held or row.sizes[0])
        if row.deadline_s == math.inf:
            return smallest
        left_s, work, costs = row.deadline_s - self._now_s, row.steps_left(self._now_s, held), self._reservations.costs
        fitting = (n for n in row.sizes if (0.0 if n == held else costs.now(n)) + work / row.rates[n] <= left_s)
        return next(fitting, smallest)

    def _fit_floors(self, rows: Sequence[PromiseRow], left: int) -> dict[WorkloadId, int]:
        """The floors that fit into `left` devices, in the order of the rows."""
        floors: dict[WorkloadId, int] = {}
        for row in rows:
            wanted = self._wanted_floors.get(row.job_id, 0)
            floor = max([n for n in (*row.sizes, wanted) if n <= min(wanted, left)], default=0) if wanted else 0
            if floor:
                floors[row.job_id] = floor
                left -= floor
        return floors

    # --- bids ---------------------------------------------------------------------------------------------------------

    def _reserved_bids(self, kept: Container[str]) -> list[Bid]:
        now_s, reservations = self._now_s, self._reservations
        bids: list[Bid] = []
        for key, entry in reservations.entries.items():
            if entry.ready_s > now_s or entry.is_fixed or not entry.runs:
                continue
            has = entry.size_at(now_s)
            floor = has if key in kept or not has else reservations.least_size(entry)
            sizes = [n for n in entry.sizes if n >= floor]
            if not sizes:
                continue
            seconds, lost_s = self._times(sizes, entry.left, entry.rates, entry.held, entry.residual_s)
            bids.append(Bid(WorkloadId(key), sizes, seconds, lost_s, floor, has, entry))
        return bids

    def _bid_of_row(self, row: PromiseRow, floor: int) -> Bid | None:
        held = self._held[row.job_id]
        sizes = [n for n in row.sizes if floor <= n <= self._spare]
        if not sizes:
            return None
        seconds, lost_s = self._times(sizes, row.steps_left(self._now_s, held), row.rates, held, 0.0)
        return Bid(row.job_id, sizes, seconds, lost_s, floor, held)

    def _times(
        self, sizes: Sequence[int], work: float, rates: Sequence[float], held: int, residual_s: float
    ) -> tuple[list[float], list[float]]:
        cost_s = self._reservations.costs.now
        if held:
            lost_s = [residual_s if n == held else cost_s(n) for n in sizes]
            return [max(work / rates[n], LEAST_LEFT_S) for n in sizes], lost_s
        # It pays for a start in any case: that is work left, not a loss by this choice.
        return [max(work / rates[n] + cost_s(n), LEAST_LEFT_S) for n in sizes], [0.0] * len(sizes)

    def _read_bids(self) -> None:
        """The sizes of each bid, and what each is worth to the job alone. Shapes [bids, sizes], 0 beyond the last."""
        bids = self._bids
        width = max((len(bid.sizes) for bid in bids), default=1)
        shape = (len(bids), width)
        more = [width - len(bid.sizes) for bid in bids]
        pairs = list(zip(bids, more, strict=True))
        self._sizes: Ints = np.array([[*bid.sizes, *[0] * n] for bid, n in pairs], dtype=np.int64).reshape(shape)
        seconds = np.array([[*bid.seconds, *[math.inf] * n] for bid, n in pairs]).reshape(shape)
        lost_s = np.array([[*bid.lost_s, *[0.0] * n] for bid, n in pairs]).reshape(shape)
        reach_s = np.minimum(seconds, HORIZON_S)
        self._seconds = seconds
        self._worth: Floats = reach_s / (reach_s + lost_s) / seconds
        self._weights: Floats | None = None

    def _weighted(self) -> Floats:
        """What each size is worth beside all others. Shape [bids, sizes]."""
        if self._weights is None:
            # The last one to end comes first.
            order = np.argsort(-self._seconds.min(axis=1), kind="stable")
            self._weights = np.zeros(len(order))
            self._weights[order] = work_weights_of_many(
                self._sizes[order], 1.0 / self._seconds[order], self._capacity, COMPANY
            )
        return self._weights[:, None] * self._worth

    def _choose(self, which: Sequence[int], floors: Sequence[int], spare: int) -> list[int]:
        """The sizes of these bids with the largest sum of values within `spare` devices beyond the floors."""
        if not which:
            return []
        rows, at_least, spare = np.array(which), np.array(floors, dtype=np.int64), max(0, spare)
        sizes = self._sizes[rows]
        best = sizes[np.arange(len(rows)), np.argmax(self._worth[rows], axis=1)]
        if int((best - at_least).sum()) <= spare:
            # Each can have the size that is best for it.
            return [int(size) for size in best]
        values = self._weighted()[rows]
        at_floor = np.where(sizes == at_least[:, None], values, 0.0).max(axis=1)
        more = np.maximum(sizes - at_least[:, None], 0)
        gains = np.where(more > 0, values - at_floor[:, None], 0.0)
        if more.size * (spare + 1) <= MAX_CELLS:
            kept = more > 0
            choices = [(more[i][kept[i]], gains[i][kept[i]]) for i in range(len(rows))]
            found = best_shares([size for size, _ in choices], [gain for _, gain in choices], spare)
        else:
            found = shares_along_hulls(more, gains, spare).tolist()
        return [floor + count for floor, count in zip(floors, found, strict=True)]
