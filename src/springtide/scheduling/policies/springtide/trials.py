"""Jobs whose speed is only known from measurements: no job is given up for one bad moment.

At a new size a job is left alone until its speed there is measured. Later it is tried again on idle devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from springtide.core.decision import PoolAllocation, Snapshot
from springtide.core.workload import JobState, WorkloadId
from springtide.scheduling.policies.springtide.memory import State
from springtide.scheduling.policies.springtide.rows import SETTLE_S, SPEED_STEP_FRACTION, PromiseRow
from springtide.scheduling.policies.springtide.spare import MIN_GAIN
from springtide.scheduling.speed_reasons import WHY_TRIED, why_fewer
from springtide.solvers.reservations.fit import PlannedStretch
from springtide.solvers.reservations.reservation_table import Entry

# A job is tried on more so long after its last change; after each trial that brought nothing twice as long.
RETRY_S = 300.0
MAX_DOUBLINGS = 4


def is_settling(row: PromiseRow, state: State, now_s: float) -> bool:
    """Whether a job's speed at the size that was decided for it is still to be measured.

    A change that is not confirmed after `RETRY_S` never will be.
    """
    decided_s = state.formed_s.get(row.job_id)
    if not row.reach or decided_s is None:
        return False
    resized_at_s = row.view.changes.resized_at_s
    if resized_at_s is None or resized_at_s < decided_s:
        return now_s < decided_s + RETRY_S
    return not row.is_settled


def is_cut_short(row: PromiseRow, state: State, now_s: float) -> bool:
    """Whether what was measured so far would take devices from a job before it was measured there for long enough.

    What its owner does not allow any more goes at once.
    """
    return is_settling(row, state, now_s) and row.sizes[-1] < len(state.devices[row.job_id]) <= row.reach[-1]


def _goes_on_with(entry: Entry, now_s: float) -> int:
    """The size at which a job of the table runs to its end; 0 if it changes, or the job is promised, late or fixed."""
    is_free = not (entry.is_promised or entry.is_late or entry.is_fixed)
    return entry.size_at(now_s) if is_free and len(entry.runs) == 1 else 0


class Trials:
    """The trials in one decision. `kept` says what some jobs may keep, whatever their curve says of that size now:
    a job that is settling what it has, a job on trial what it had before.
    """

    def __init__(self, state: State, rows: Mapping[WorkloadId, PromiseRow], now_s: float) -> None:
        self._state, self._now_s = state, now_s
        self._going: dict[WorkloadId, int] = {}
        self._given_up: set[WorkloadId] = set()
        self.kept: dict[WorkloadId, int] = {}
        # When a job is to be tried that could be now, but for the time since its last trial.
        self.moments_s: list[float] = []
        for who in [who for who in state.trials if who not in rows]:
            del state.trials[who]
        for who, row in rows.items():
            if not row.reach and who not in state.trials:
                continue
            size, number = state.trials.get(who, (0, 0))
            has = len(state.devices.get(who, ()))
            if size and size == has and is_settling(row, state, now_s) and size <= row.reach[-1]:
                self._going[who] = size
                self.kept[who] = max([n for n in row.reach if n < size], default=row.sizes[0])
                continue
            if size:
                self._end(row, size, number)
            if is_cut_short(row, state, now_s):
                self.kept[who] = has

    def _end(self, row: PromiseRow, size: int, number: int) -> None:
        measured = row.view.learnt.throughput_samples_per_s
        before = max([rate for count, rate in measured.items() if count < size], default=0.0)
        if measured.get(size, 0.0) > before * (1.0 + SPEED_STEP_FRACTION):
            del self._state.trials[row.job_id]
        else:
            self._state.trials[row.job_id] = (0, number)

    def share(
        self, rows: Sequence[PromiseRow], snapshot: Snapshot, counts: dict[WorkloadId, int], num_surplus: int
    ) -> None:
        """Raise counts where idle devices are left when every other job has what it wants.

        A job on trial goes on as long as that is so. A new trial needs devices that promises count on to be free for
        long enough, and a job that could gain by it, at best, several times what it costs.
        """
        state, book, now_s = self._state, self._state.book, self._now_s
        room = book.profile.at(now_s) + num_surplus
        for who, size in self._going.items():
            if who in book.entries:
                continue
            more = size - counts.get(who, 0)
            if counts.get(who) and sum(counts.values()) + more <= room:
                counts[who] = size
            else:
                # Others needed the devices, which says nothing of the job.
                state.trials[who] = (0, state.trials[who][1] - 1)
                self._given_up.add(who)
        for row in rows:
            if not row.reach:
                continue
            entry = book.entries.get(row.job_id)
            count = counts.get(row.job_id, 0) if entry is None else _goes_on_with(entry, now_s)
            size = self._next_size(row, snapshot, count)
            if not size:
                continue
            span_s = book.costs.later[size] + SETTLE_S
            if book.profile.least(now_s, now_s + span_s) < sum(counts.values()) + size - count:
                continue
            due_s = self._due_s(row)
            if due_s > now_s:
                self.moments_s.append(due_s)
                continue
            if entry is None:
                counts[row.job_id] = size
            elif not self._raise(entry, size, sum(counts.values())):
                continue
            state.trials[row.job_id] = (size, state.trials.get(row.job_id, (0, 0))[1] + 1)

    def _raise(self, entry: Entry, size: int, num_others: int) -> bool:
        """Plan a job of the table on `size` devices from now on, at its believed speed; returns whether it fits."""
        book, now_s = self._state.book, self._now_s
        overhead_s = book.costs.now(size)
        end_s = book.costs.end_s(size, now_s, now_s + overhead_s + entry.left / entry.rates[size])
        before = entry.runs
        book.change_runs(entry, ())
        fits = end_s <= entry.deadline_s and book.profile.least(now_s, end_s) >= size + num_others
        book.change_runs(entry, (PlannedStretch(now_s, end_s, size, overhead_s),) if fits else before)
        return fits

    def _next_size(self, row: PromiseRow, snapshot: Snapshot, count: int) -> int:
        """The next larger size if the job runs undisturbed on `count` and could gain enough there; otherwise 0."""
        who, view = row.job_id, row.view
        held = snapshot.allocations.get(who)
        is_still = held is not None and held.num_devices == count == len(self._state.devices.get(who, ()))
        size = next((n for n in row.reach if n > count), 0)
        if not (size and count and is_still and view.state is JobState.RUNNING) or who in self._going:
            return 0
        left_s = row.steps_left(self._now_s, count) / (row.rates[count] * row.scale)
        cost_s = 2 * self._state.book.costs.later[size] + SETTLE_S
        return size if left_s * (1.0 - count / size) >= MIN_GAIN * cost_s else 0

    def _due_s(self, row: PromiseRow) -> float:
        _, number = self._state.trials.get(row.job_id, (0, 0))
        since_s = max(row.view.changes.resized_at_s or 0.0, self._state.formed_s.get(row.job_id, 0.0))
        return since_s + RETRY_S * float(2 ** min(number, MAX_DOUBLINGS))

    def note(
        self, rows: Sequence[PromiseRow], snapshot: Snapshot, placed: Mapping[WorkloadId, PoolAllocation]
    ) -> dict[WorkloadId, str]:
        """The reasons of jobs that are tried on more, or are given less because more brought them nothing."""
        notes: dict[WorkloadId, str] = {}
        for row in rows:
            given, held = placed.get(row.job_id), snapshot.allocations.get(row.job_id)
            if given is None or held is None or not row.reach or row.job_id in self._given_up:
                continue
            measured = row.view.learnt.throughput_samples_per_s
            # A job that is moved holds for a moment more than it ever ran on.
            if given.num_devices == row.sizes[-1] < held.num_devices and held.num_devices in measured:
                notes[row.job_id] = why_fewer(measured, held.num_devices, given.num_devices)
            elif self._state.trials.get(row.job_id, (0, 0))[0] == given.num_devices > held.num_devices:
                notes[row.job_id] = WHY_TRIED
        return notes
