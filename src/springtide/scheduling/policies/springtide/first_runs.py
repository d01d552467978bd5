"""Deadlines of jobs whose speed was not known when they came: promised once it is measured, or it is said why not."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping

from springtide.core.decision import PromiseCondition, Snapshot
from springtide.core.workload import JobState, WorkloadId
from springtide.scheduling.placement.allocation_ledger import most_workers
from springtide.scheduling.policies.springtide.batches import AdaptiveBatches
from springtide.scheduling.policies.springtide.memory import State, entry_of
from springtide.scheduling.policies.springtide.moves import Placed
from springtide.scheduling.policies.springtide.outside import is_settling
from springtide.scheduling.policies.springtide.rows import SURE_FRACTION, PromiseRow, num_held
from springtide.solvers.reservations.reservation_table import Entry, ReservationTable

# A promise counts on this part of the speed that a first run has shown.
MEASURED_FRACTION = 0.9


class FirstRuns:
    """The first runs in one decision. What promised ones are planned on is in `State.sure`.

    A promise rests on one measured number: the speed on the workers that it has run on for long enough. Fewer workers
    are taken to have that speed in proportion to their number, which is no more than they have in truth; more workers
    are not counted on.
    """

    def __init__(
        self,
        state: State,
        snapshot: Snapshot,
        rows: Mapping[WorkloadId, PromiseRow],
        batches: AdaptiveBatches | None,
    ) -> None:
        self._state, self._snapshot, self._rows, self._batches = state, snapshot, rows, batches
        self._too_slow: dict[WorkloadId, PromiseCondition] = {}

    def plan_on_known(self, row: PromiseRow) -> None:
        """Plan a job on what its family has measured or, for a first run that is promised, on what itself has. Where it
        is slower than its promise counts on, all of the measured speed counts."""
        if self._batches is not None:
            self._batches.plan_on_family(row)
        view, job_id = row.view, row.job_id
        is_other = view.promise.admitted_at_s is None or view.job.batch is not None or view.job.profile_steps_per_s
        if is_other or not row.is_known:
            return
        known = self._state.sure.get(job_id, {})
        if self._is_measured(row) or not known:
            known = _updated(known, row)
        self._state.sure[job_id] = known
        row.plan_on(known)

    def promise(self, *, has_new_room: bool) -> None:
        """Promise the deadlines of first runs that are measured, most urgent first, where the table has room for them.

        No promise that was given is displaced. Others are planned anew for one that was refused before only if there is
        new room.
        """
        state, reservations = self._state, self._state.reservations
        due = [row for row in self._rows.values() if row.is_first_run and self._is_measured(row)]
        for row in sorted(due, key=lambda row: (row.deadline_s, row.job_id)):
            entry, rates = reservations.entries.get(row.job_id), self._sure_rates(row)
            if not rates or (entry is not None and (entry.is_promised or entry.is_fixed)):
                continue
            is_new = has_new_room or row.job_id not in state.waiting
            if entry is None or not self._promise_one(row, entry, rates, repairs=is_new):
                size = max([n for n in rates if n <= row.view.num_replicas], default=min(rates))
                self._too_slow[row.job_id] = self._condition(row, size, float(MEASURED_FRACTION / rates[size]))

    def _is_measured(self, row: PromiseRow) -> bool:
        """Whether its speed is measured on the workers that were decided for it last, or that it had when it ran."""
        view = row.view
        has_size = not view.num_replicas or view.num_replicas in view.learnt.throughput_samples_per_s
        return row.is_settled and has_size and not is_settling(row, self._state, self._state.reservations.now_s)

    def _promise_one(self, row: PromiseRow, before: Entry, rates: dict[int, float], *, repairs: bool) -> bool:
        state, reservations, job_id = self._state, self._state.reservations, row.job_id
        planned = PromiseRow(row.view)
        planned.plan_on(rates)
        entry = entry_of(
            planned,
            planned.steps_left(reservations.now_s, before.held),
            since_s=reservations.now_s,
            ready_s=before.ready_s,
            held=before.held,
        )
        entry.residual_s, entry.is_promised = before.residual_s, True
        reservations.drop(before.key)
        if not (reservations.admit(entry, repairs=repairs) or (repairs and reservations.admit_over_pursued(entry))):
            reservations.load(before)
            state.waiting.add(job_id)
            return False
        state.sure[job_id] = rates
        state.scales.pop(job_id, None)
        state.slowed.pop(job_id, None)
        row.plan_on(rates)
        return True

    def _sure_rates(self, row: PromiseRow) -> dict[int, float]:
        """The speeds by number of workers that a promise to this job would count on; empty if nothing is measured."""
        view = row.view
        if view.job.batch is not None:
            family = self._state.sure.get(row.job_id, {})
            return {size: rate * MEASURED_FRACTION / SURE_FRACTION for size, rate in family.items()}
        found, low, high = _updated({}, row), view.bounds.min_workers, most_workers(view)
        rates = {n: found[n] for n in range(low, high + 1, view.job.devices_each) if n in found}
        # More workers that are slower are of no use.
        return {n: rate for n, rate in rates.items() if rate > max([rates[m] for m in rates if m < n], default=0.0)}

    # --- what the others wait for -------------------------------------------------------------------------------------

    def conditions(self, placed: Placed) -> dict[WorkloadId, PromiseCondition]:
        """What each deadline waits for that is not promised, on the workers that its job gets now."""
        found: dict[WorkloadId, PromiseCondition] = {}
        for row in self._rows.values():
            view, entry = row.view, self._state.reservations.entries.get(row.job_id)
            is_promised = row.can_promise or (entry is not None and entry.is_promised)
            if is_promised or row.total is None or not view.job.goal.is_hard or view.job.profile_steps_per_s:
                continue
            given = placed.get(row.job_id)
            size = given.num_devices if given is not None else num_held(self._snapshot, row) or row.sizes[0]
            found[row.job_id] = self._too_slow.get(row.job_id) or self._condition(row, size)
        return found

    def _condition(self, row: PromiseRow, size: int, measured_s: float | None = None) -> PromiseCondition:
        """The slowest step on `size` workers with which the deadline can still be promised, beside all others."""
        reservations = self._state.reservations
        entry = reservations.entries.get(row.job_id)
        runs = () if entry is None else entry.runs
        held = num_held(self._snapshot, row)
        lost_s = 0.0 if size == held and row.view.state is JobState.RUNNING else reservations.costs.now(size)
        if entry is not None:
            lost_s = entry.residual_s if size == entry.held else lost_s
            reservations.change_runs(entry, ())
        work_s = _longest_s(reservations, size, row.deadline_s, row.view.restarts.starts_at_s, lost_s)
        if entry is not None:
            reservations.change_runs(entry, runs)
        step_s = MEASURED_FRACTION * work_s / row.steps_left(reservations.now_s, 0)
        return PromiseCondition(step_s=float(step_s), num_workers=size, measured_s=measured_s)


def _updated(known: Mapping[int, float], row: PromiseRow) -> dict[int, float]:
    """What a promise counts on by what is measured now: 0.9 of that, and what is `known` as long as that is no more
    than the speed measured on the workers that the job has."""
    job, size = row.view.job, row.view.num_replicas
    speeds = {n: rate / job.global_batch_size for n, rate in row.view.learnt.throughput_samples_per_s.items()}
    if size not in speeds:
        size = max(speeds, default=0)
    before, speed = known.get(size, 0.0), speeds.get(size, 0.0)
    if before > speed > 0.0:
        return {n: rate * speed / before for n, rate in known.items()}
    if before >= MEASURED_FRACTION * speed:
        return dict(known)
    sure = {n: MEASURED_FRACTION * max(speed * n / size, speeds.get(n, 0.0)) for n in range(1, size + 1)}
    return {**known, **{n: max(known.get(n, 0.0), rate) for n, rate in sure.items()}}


def _longest_s(reservations: ReservationTable, size: int, deadline_s: float, ready_s: float, lost_s: float) -> float:
    """For how long a job could work before its deadline in one stretch on `size` devices that no schedule uses.

    `lost_s` is what a start at this moment costs; later ones, and devices that go away, cost what they cost in plans.
    """
    profile, costs, first_s = reservations.profile, reservations.costs, max(reservations.now_s, ready_s)
    longest_s = 0.0
    times, free = [*profile.times, math.inf], profile.free
    # The stretches of the profile from `first_s` to the deadline.
    index, end = max(0, bisect_right(profile.times, first_s) - 1), bisect_left(profile.times, deadline_s)
    while index < end:
        if free[index] < size:
            index += 1
            continue
        began, began_s = index, max(times[index], first_s)
        while index < end and free[index] >= size:
            index += 1
        start_s = lost_s if began_s <= reservations.now_s else costs.later[size] + costs.reserve[size]
        # A stretch that ends before a fall may leave more time.
        for until_s in times[began + 1 : index + 1] if costs.falls else (times[index],):
            to_s = min(until_s, deadline_s)
            num_falls = sum(began_s < fall_s < to_s for fall_s in costs.falls)
            longest_s = max(longest_s, to_s - began_s - start_s - num_falls * costs.later[size])
    return longest_s
