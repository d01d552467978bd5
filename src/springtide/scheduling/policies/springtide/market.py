"""Who gets the devices that no promise needs now: one choice over promised jobs above their floors and all others.

The value of a size is the job's weight times its speed there, less what the change costs. The weights are those that
minimise the sum of completion times (`solvers/share_dp.py`), so that promised and other jobs compete by the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from springtide.core.decision import EMPTY, DeviceTrade, PoolAllocation, Snapshot
from springtide.core.resources import DeviceId
from springtide.core.workload import WorkloadId
from springtide.perf.curve import curve_of
from springtide.scheduling.families.candidates import JobCandidates
from springtide.scheduling.policies.springtide.rows import PromiseRow, kept_devices
from springtide.solvers.reservations.reservation_table import FILL_EFFORT, Entry, ReservationTable
from springtide.solvers.share_dp import best_shares, marginal_value, shares_along_hulls, work_weights_of_many

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# How many future jobs are counted beside the present ones.
COMPANY = 1.0
# A change is charged as if its job were changed again within so many seconds.
HORIZON_S = 300.0
# A job gets devices only if they stay free for so many times the cost of a change.
LASTING_CHANGES = 4.0
# A job keeps devices that bring so much less than they must bring to be given to it: speeds vary.
KEPT_FRACTION = 0.9
# It keeps them, too, while its time and the price of its devices are, times this, no more than on the best size.
KEPT_SUM_FRACTION = 0.97
# Where a device has to bring all that one brings, the price counts as if it had to bring half of this less.
LEAST_LOSS = 1e-6
# A job that is about to end is valued as if it had so many seconds left.
LEAST_LEFT_S = 1.0
# Up to so many cells (sizes x devices) shares are exact; above, they follow the concave hulls.
MAX_CELLS = 200_000


class Bid(NamedTuple):
    """One job: `seconds[i]` to its end on `sizes[i]` devices, and `lost_s[i]` without progress for the change to them.

    It has `floor` devices in any case; all sizes are at least that many. `has` is what it has now: in the reservation
    table by its schedule, outside of it by what it holds. The first `num_open` sizes may be chosen. What the others
    would be worth only makes the price: there are too few devices for them, or a promise does not count on them.
    """

    job_id: WorkloadId
    sizes: Sequence[int]
    seconds: Sequence[float]
    lost_s: Sequence[float]
    floor: int
    has: int
    num_open: int
    entry: Entry | None = None


class OutsideJob:
    """One job outside the reservation table: `sizes` that it can have, and the seconds to its end on each of them.

    `candidates` are its sizes at the best batch for each, if it may choose its batch. It `is_pursued` if it has a hard
    deadline, which the table has no schedule for.
    """

    __slots__ = (
        "_row",
        "_seconds",
        "candidates",
        "deadline_s",
        "held",
        "is_pursued",
        "is_resizable",
        "job_id",
        "sizes",
        "view",
    )

    def __init__(self, row: PromiseRow, held: int, candidates: JobCandidates | None) -> None:
        self._row, self.held, self.candidates = row, held, candidates
        self.job_id, self.view, self.deadline_s = row.job_id, row.view, row.deadline_s
        self.is_resizable, self.is_pursued = row.view.job.elastic or not held, row.attempts_deadline
        self.sizes: Sequence[int] = row.sizes if candidates is None else candidates.sizes.tolist()
        self._seconds: Mapping[int, float] | None = None
        if candidates is not None:
            self._seconds = dict(zip(self.sizes, candidates.seconds.tolist(), strict=True))

    def seconds(self, sizes: Sequence[int], now_s: float) -> list[float]:
        """Seconds to its end on each of these of its sizes, changes excluded."""
        if self._seconds is not None:
            return [self._seconds[n] for n in sizes]
        work = self._row.steps_left(now_s, self.held)
        return [work / self._row.rates[n] for n in sizes]


class Market:
    """One choice of sizes in one decision. `share_reserved` comes first, `share_outside` gives out what is left.

    `rows` are the jobs outside the reservation table, `by_id` all of them, `candidates` those whose batch may change,
    `kept` maps jobs to a number of devices that they keep whatever was measured there, `decided` to those of the last
    plan. `num_surplus` devices are present that no promise may use. `price_s` is what the last device given out is
    worth (`Plan.price_s`).

    A job gets more devices only up to a size on which each brings on average `efficiency` of what one brings on the
    size that needs the fewest device-seconds, and of these sizes up to the one on which its time and the price of its
    device-seconds are least together: the price at which a second device of just this efficiency would pay. What it
    would gain by more counts in the price of the market; with 0 a job gets as many as it is faster on.
    """

    def __init__(
        self,
        reservations: ReservationTable,
        rows: Sequence[PromiseRow],
        by_id: Mapping[WorkloadId, PromiseRow],
        snapshot: Snapshot,
        num_surplus: int,
        kept: Mapping[WorkloadId, int],
        decided: Mapping[WorkloadId, Sequence[DeviceId]],
        candidates: Mapping[WorkloadId, JobCandidates] = EMPTY,
        efficiency: float = 0.0,
    ) -> None:
        self._reservations, self._num_surplus, self._efficiency = reservations, num_surplus, efficiency
        self._by_id, self._candidates = by_id, candidates
        self._num_devices = len(snapshot.cluster.device_ids())
        # In seconds: at this price of a device-second, two devices of this efficiency are as good as one.
        self._device_s_price = max(0.0, 2.0 * efficiency - 1.0) / max(2.0 - 2.0 * efficiency, LEAST_LOSS)
        self.price_s = 0.0
        self._now_s = reservations.now_s
        held = {
            row.job_id: len(kept_devices(given.device_ids, decided.get(row.job_id)))
            for row in rows
            if (given := snapshot.allocations.get(row.job_id)) is not None
        }
        jobs = [OutsideJob(row, held.get(row.job_id, 0), candidates.get(row.job_id)) for row in rows]
        able = [job for job in jobs if job.view.restarts.starts_at_s <= self._now_s or job.held]
        # Jobs that hold devices first, then soft deadlines by date, then by arrival.
        able.sort(key=lambda job: (not job.held, job.deadline_s, job.view.submitted_at_s))
        self._jobs = able
        free = reservations.profile.at(self._now_s) + num_surplus
        reserved = self._reserved_bids(kept)
        num_needed = sum(job.sizes[0] for job in able)
        if free + sum(bid.has - bid.floor for bid in reserved) < num_needed:
            # Jobs whose speed is being measured keep their devices, but not from jobs that could not run at all.
            reserved = self._reserved_bids(())
        self._spare = free + sum(bid.has - bid.floor for bid in reserved)
        self._wanted_floors = {job.job_id: floor for job in able if (floor := self._floor_of(job))}
        self._kept_floors = {job.job_id: size for job in able if job.is_resizable and (size := _kept_size(job, kept))}
        floors = self._fit_floors(able, self._spare)
        outside = [self._outside_bid(job, floors.get(job.job_id, 0)) for job in able if job.is_resizable]
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
        jobs = [job for job in self._jobs if job.job_id not in without]
        left = reservations.profile.at(now_s) + num_surplus
        counts = self._fit_floors(jobs, left)
        span_s = max(LASTING_CHANGES * reservations.costs.later[1], 1e-3)
        lasting = reservations.profile.least(now_s, now_s + span_s) + num_surplus
        mine = [i for i, bid in enumerate(self._bids) if bid.entry is None and bid.job_id not in without]
        floors = [counts.get(self._bids[i].job_id, 0) for i in mine]
        chosen = self._choose(mine, floors, min(left, lasting) - sum(counts.values()))
        counts |= {self._bids[i].job_id: count for i, count in zip(mine, chosen, strict=True) if count}
        left -= sum(counts.values())
        most = {bid.job_id: bid.sizes[bid.num_open - 1] for bid in self._bids if bid.num_open and self._efficiency}
        for job in jobs:
            count = counts.get(job.job_id, 0)
            if 0 < count < job.held <= min(most.get(job.job_id, job.sizes[-1]), count + left):
                counts[job.job_id] = job.held
                left -= job.held - count
        return counts

    # --- what changes are worth ---------------------------------------------------------------------------------------

    def trades(self, snapshot: Snapshot, placed: Mapping[WorkloadId, PoolAllocation]) -> dict[WorkloadId, DeviceTrade]:
        """Every change of the number of devices that a workload holds, and who has these devices instead."""
        before = {who: given.num_devices for who, given in snapshot.allocations.items()}
        after = {who: given.num_devices for who, given in placed.items()}
        more = {who: n for who in after | before if (n := after.get(who, 0) - before.get(who, 0))}
        takers = sorted([who for who, n in more.items() if n > 0], key=lambda who: (-more[who], who))
        saved = {who: self._saved_s(who, before.get(who, 0), after.get(who, 0)) for who in more}
        # Who gets no more than its floor has a claim to it.
        claims = tuple([who for who in takers if who not in self._index or after[who] <= self._bid(who).floor])
        gained = [value for who in takers if (value := saved[who]) is not None]
        there_s = sum(gained) / sum(more[who] for who in takers) if gained and not claims else None
        to = claims or tuple(takers)
        given = DeviceTrade(num_devices=0, to=to, num_to=sum(more[who] for who in to), there_s=there_s)
        trades: dict[WorkloadId, DeviceTrade] = {}
        for who, count in more.items():
            value = None if who in claims else saved[who]
            here_s = None if value is None else value / count
            if count < 0:
                trades[who] = replace(given, num_devices=count, here_s=here_s)
            elif before.get(who):
                trades[who] = DeviceTrade(num_devices=count, here_s=here_s)
        return trades

    def _bid(self, job_id: WorkloadId) -> Bid:
        return self._bids[self._index[job_id]]

    def _saved_s(self, job_id: WorkloadId, before: int, after: int) -> float | None:
        """How many seconds all jobs save in a second by this change; None if it was not weighed against others."""
        if not self._is_weighed or job_id not in self._index:
            return None
        index = self._index[job_id]
        values, sizes = self._weigh()[index] * self._worth[index], self._sizes[index]
        held, given = (float(np.where((sizes > 0) & (sizes <= n), values, 0.0).max()) for n in (before, after))
        return given - held

    # --- floors: what a job outside the table has in any case, if there is enough -------------------------------------

    def _floor_of(self, job: OutsideJob) -> int:
        """A job that cannot be resized keeps what it holds. One with a soft deadline has the fewest devices that make
        it, any other the fewest on which it runs."""
        held = job.held
        if not job.is_resizable:
            return held
        smallest = min(job.sizes[0], held or job.sizes[0])
        if job.deadline_s == math.inf:
            return smallest
        left_s, cost_s = job.deadline_s - self._now_s, self._reservations.costs.now
        pairs = zip(job.sizes, job.seconds(job.sizes, self._now_s), strict=True)
        return next((n for n, needs_s in pairs if (0.0 if n == held else cost_s(n)) + needs_s <= left_s), smallest)

    def _fit_floors(self, jobs: Sequence[OutsideJob], left: int) -> dict[WorkloadId, int]:
        """The floors that fit into `left` devices, in the order of the jobs. Jobs whose speed is being measured, and
        those whose deadline is pursued in vain, keep their size, but not from jobs that could not run at all."""
        floors: dict[WorkloadId, int] = {}
        for job in jobs:
            wanted = self._wanted_floors.get(job.job_id, 0)
            wanted = min(wanted, self._kept_floors.get(job.job_id, wanted))
            most = min(wanted, left)
            floor = max([n for n in (*job.sizes, wanted) if n <= most], default=0) if wanted else 0
            if floor:
                floors[job.job_id] = floor
                left -= floor
        for job in jobs:
            more = self._kept_floors.get(job.job_id, 0) - (had := floors.get(job.job_id, 0))
            if had and more > 0:
                floors[job.job_id] = max([n for n in (*job.sizes, had, had + more) if n <= had + min(more, left)])
                left -= floors[job.job_id] - had
        return floors

    # --- bids ---------------------------------------------------------------------------------------------------------

    def _reserved_bids(self, kept: Container[str]) -> list[Bid]:
        now_s, reservations = self._now_s, self._reservations
        bids: list[Bid] = []
        for key, entry in reservations.entries.items():
            if entry.ready_s > now_s or entry.is_fixed:
                continue
            has = entry.size_at(now_s)
            floor = has if key in kept or not has else reservations.least_size(entry)
            sizes = [n for n in entry.sizes if n >= floor]
            if not sizes:
                continue
            # One that no schedule could be made for counts in the price alone.
            needs_s, num_open = [entry.left / entry.rates[n] for n in sizes], len(sizes) if entry.runs else 0
            last_s = needs_s[-1]
            for n, factor in self._beyond(WorkloadId(key), sizes[-1]):
                sizes.append(n)
                needs_s.append(last_s * factor)
            if self._efficiency:
                num_open = min(num_open, self._num_efficient(sizes, needs_s, max(has, entry.held)))
            seconds, lost_s = self._times(sizes, needs_s, entry.held, entry.residual_s)
            bids.append(Bid(WorkloadId(key), sizes, seconds, lost_s, floor, has, num_open, entry))
        return bids

    def _beyond(self, job_id: WorkloadId, most: int) -> list[tuple[int, float]]:
        """The sizes above the largest one that a promise counts on at which the job is believed to be faster, and the
        part of the time that it would take there."""
        known, row = self._candidates.get(job_id), self._by_id[job_id]
        if known is not None:
            if most not in known.sizes:
                return []
            seconds = known.seconds_on(most)
            return [(n, known.seconds_on(n) / seconds) for n in known.sizes.tolist() if n > most]
        if row.curve_sizes[-1] <= most:
            return []
        curve = curve_of(row.view)
        return [(n, curve.rate(most) / curve.rate(n)) for n in row.curve_sizes if n > most]

    def _outside_bid(self, job: OutsideJob, floor: int) -> Bid | None:
        sizes = [n for n in job.sizes if n >= floor]
        if not sizes:
            return None
        stall_s = 0.0 if job.candidates is None else job.candidates.stall_s
        needs_s = job.seconds(sizes, self._now_s)
        seconds, lost_s = self._times(sizes, needs_s, job.held, stall_s)
        num_open = sum(n <= self._spare for n in sizes)
        if self._efficiency:
            num_open = min(num_open, self._num_efficient(sizes, needs_s, job.held))
        return Bid(job.job_id, sizes, seconds, lost_s, floor, job.held, num_open)

    def _times(
        self, sizes: Sequence[int], needs_s: Sequence[float], held: int, residual_s: float
    ) -> tuple[list[float], list[float]]:
        cost_s = self._reservations.costs.now
        if held:
            lost_s = [residual_s if n == held else cost_s(n) for n in sizes]
            return [max(seconds, LEAST_LEFT_S) for seconds in needs_s], lost_s
        # It pays for a start in any case: that is work left, not a loss by this choice.
        pairs = zip(sizes, needs_s, strict=True)
        return [max(seconds + cost_s(n), LEAST_LEFT_S) for n, seconds in pairs], [0.0] * len(sizes)

    def _num_efficient(self, sizes: Sequence[int], needs_s: Sequence[float], held: int) -> int:
        """How many of these sizes, the smallest at least, bring enough for each of their devices."""
        costs = [n * seconds for n, seconds in zip(sizes, needs_s, strict=True)]
        most = min(costs) / self._efficiency
        # The sizes on which devices bring enough on average, each with the sum of time and price.
        sums = {
            index: seconds + self._device_s_price * cost
            for index, (n, seconds, cost) in enumerate(zip(sizes, needs_s, costs, strict=True))
            if cost * (KEPT_FRACTION if n == held else 1.0) <= most or index == 0
        }
        best = min(sums, key=lambda index: (sums[index], index))
        is_kept = [
            n == held and sums.get(index, math.inf) * KEPT_SUM_FRACTION <= sums[best] for index, n in enumerate(sizes)
        ]
        return 1 + max(index for index, kept in enumerate(is_kept) if kept or index == best)

    def _read_bids(self) -> None:
        """The sizes of each bid, and what each is worth to the job alone. Shapes [bids, sizes], 0 beyond the last."""
        bids = self._bids
        lengths = np.array([len(bid.sizes) for bid in bids], dtype=np.int64)
        is_size = np.arange(lengths.max(initial=1)) < lengths[:, None]
        self._all_sizes: Ints = np.zeros(is_size.shape, dtype=np.int64)
        seconds, lost_s = np.full(is_size.shape, math.inf), np.zeros(is_size.shape)
        self._all_sizes[is_size] = [*chain.from_iterable([bid.sizes for bid in bids])]
        seconds[is_size] = [*chain.from_iterable([bid.seconds for bid in bids])]
        lost_s[is_size] = [*chain.from_iterable([bid.lost_s for bid in bids])]
        reach_s = np.minimum(seconds, HORIZON_S)
        self._all_seconds, self._all_worth = seconds, reach_s / (reach_s + lost_s) / seconds
        # Those that may be chosen.
        num_open = np.array([bid.num_open for bid in bids], dtype=np.int64)
        is_open = np.arange(max(1, int(num_open.max(initial=1)))) < num_open[:, None]
        first = slice(is_open.shape[1])
        self._sizes: Ints = np.where(is_open, self._all_sizes[:, first], 0)
        self._seconds: Floats = np.where(is_open, seconds[:, first], math.inf)
        self._worth: Floats = np.where(is_open, self._all_worth[:, first], 0.0)
        self._weights: Floats | None = None
        self._is_weighed = False
        self._index = {bid.job_id: index for index, bid in enumerate(bids) if bid.num_open}

    def _weigh(self) -> Floats:
        """What a unit of each job's work is worth beside all others. Shape [bids]."""
        if self._weights is None:
            self._weights = self._weights_of(self._sizes, self._seconds, self._capacity)
        return self._weights

    def _weights_of(self, sizes: Ints, seconds: Floats, capacity: int) -> Floats:
        # The last one to end comes first.
        order = np.argsort(-seconds.min(axis=1), kind="stable")
        weights = np.zeros(len(order))
        weights[order] = work_weights_of_many(sizes[order], 1.0 / seconds[order], capacity, COMPANY)
        return weights

    def _note_price(self, rows: Ints, floors: Ints, spare: int) -> None:
        """The price of a device beyond these floors, with what sizes would be worth that may not be chosen."""
        weights = self._weigh()
        if bool((self._sizes.max(axis=1) == 0).any()):
            # Some may have no size at all: they are weighed by what they could have if there were enough devices.
            most = max(self._num_devices, int(self._all_sizes.max()))
            weights = self._weights_of(self._all_sizes, self._all_seconds, most)
        more, gains = _beyond_floors(self._all_sizes[rows], weights[rows, None] * self._all_worth[rows], floors)
        self.price_s = max(self.price_s, marginal_value(more, gains, spare))

    def _choose(self, which: Sequence[int], floors: Sequence[int], spare: int) -> list[int]:
        """The sizes of these bids with the largest sum of values within `spare` devices beyond the floors."""
        if not which:
            return []
        rows, at_least, spare = np.array(which), np.array(floors, dtype=np.int64), max(0, spare)
        sizes, worth = self._sizes[rows], self._worth[rows]
        best = sizes[np.arange(len(rows)), np.argmax(worth, axis=1)]
        is_enough = int((best - at_least).sum()) <= spare
        if not is_enough or bool((self._all_worth[rows].max(axis=1) > worth.max(axis=1)).any()):
            self._note_price(rows, at_least, spare)
        if is_enough:
            # Each can have the size that is best for it.
            return [int(size) for size in best]
        self._is_weighed = True
        more, gains = _beyond_floors(sizes, self._weigh()[rows, None] * worth, at_least)
        if more.size * (spare + 1) <= MAX_CELLS:
            kept = more > 0
            choices = [(more[i][kept[i]], gains[i][kept[i]]) for i in range(len(rows))]
            found = best_shares([size for size, _ in choices], [gain for _, gain in choices], spare)
        else:
            found = shares_along_hulls(more, gains, spare).tolist()
        return [floor + count for floor, count in zip(floors, found, strict=True)]


def _kept_size(job: OutsideJob, kept: Mapping[WorkloadId, int]) -> int:
    """What a job holds that others may not gain by: while it is measured, or to be as little late as it can be."""
    size = min(job.held, kept.get(job.job_id, 0))
    return max(size, min(job.held, job.sizes[-1])) if job.is_pursued else size


def _beyond_floors(sizes: Ints, values: Floats, floors: Ints) -> tuple[Ints, Floats]:
    """How many devices each size has beyond the floor of its job, and how much more it is worth. Shapes [J, S]."""
    at_floor = np.where(sizes == floors[:, None], values, 0.0).max(axis=1)
    more = np.maximum(sizes - floors[:, None], 0)
    return more, np.where(more > 0, values - at_floor[:, None], 0.0)
