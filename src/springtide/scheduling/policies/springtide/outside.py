"""Jobs outside the reservation table (best effort, soft deadlines): their devices, and trials of larger sizes.

They get devices that no promise uses now. A job without a profile, whose first measurements may have been wrong, keeps
a new size until its speed there is measured; if it was slow there, it is tried again later on idle devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from springtide.core.decision import PoolAllocation, Snapshot
from springtide.core.workload import JobState, WorkloadId
from springtide.scheduling.placement.allocation_ledger import most_workers
from springtide.scheduling.placement.gangs import devices_text
from springtide.scheduling.policies.springtide.memory import State
from springtide.scheduling.policies.springtide.rows import SETTLE_S, SPEED_STEP_FRACTION, PromiseRow
from springtide.scheduling.speed_reasons import WHY_TRIED, why_fewer
from springtide.solvers.reservations.fit import PlannedStretch
from springtide.solvers.reservations.reservation_table import Entry

# A change has to save at least this many times its cost, and its devices have to be free for as long as that.
MIN_GAIN = 4.0
# A job is tried on more devices so long after its last change; each trial without a gain doubles the time.
RETRY_S = 300.0
MAX_DOUBLINGS = 4


# --- trials of larger sizes -----------------------------------------------------------------------------------------


def is_settling(row: PromiseRow, state: State, now_s: float) -> bool:
    """Whether the speed of a job at its decided size is not measured yet.

    A change that is not confirmed within `RETRY_S` is not waited for any longer.
    """
    decided_s = state.formed_s.get(row.job_id)
    if not row.trial_sizes or decided_s is None:
        return False
    resized_at_s = row.view.changes.resized_at_s
    if resized_at_s is None or resized_at_s < decided_s:
        return now_s < decided_s + RETRY_S
    return not row.is_settled


def is_cut_short(row: PromiseRow, state: State, now_s: float) -> bool:
    """Whether a job would lose devices by its first measurements at its size, before these are enough.

    Devices beyond its owner's present bounds do not count: they go at once.
    """
    return is_settling(row, state, now_s) and row.sizes[-1] < len(state.devices[row.job_id]) <= row.trial_sizes[-1]


def _constant_size(entry: Entry, now_s: float) -> int:
    """The size at which a job of the table is to run to its end; 0 if its size will change, or if it is late or
    fixed."""
    is_free = not (entry.is_late or entry.is_fixed)
    return entry.size_at(now_s) if is_free and len(entry.runs) == 1 else 0


class Trials:
    """The trials in one decision. `kept` maps jobs to a size that they may keep whatever was measured there: their
    present size while it is being measured, and during a trial the size before it.
    """

    def __init__(self, state: State, rows: Mapping[WorkloadId, PromiseRow], now_s: float) -> None:
        self._state, self._now_s = state, now_s
        self._running: dict[WorkloadId, int] = {}
        self._aborted: set[WorkloadId] = set()
        self.kept: dict[WorkloadId, int] = {}
        # When each job is due for a trial that is possible now except for the time since its last change.
        self.moments_s: list[float] = []
        for workload_id in [workload_id for workload_id in state.trials if workload_id not in rows]:
            del state.trials[workload_id]
        for workload_id, row in rows.items():
            if not row.trial_sizes and workload_id not in state.trials:
                continue
            size, number = state.trials.get(workload_id, (0, 0))
            has = len(state.devices.get(workload_id, ()))
            if size and size == has and is_settling(row, state, now_s) and size <= row.trial_sizes[-1]:
                self._running[workload_id] = size
                self.kept[workload_id] = max([n for n in row.trial_sizes if n < size], default=row.sizes[0])
                continue
            if size:
                self._end(row, size, number)
            if is_cut_short(row, state, now_s):
                self.kept[workload_id] = has

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
        """Raise the counts of jobs on trial, if devices are left that no other job gains by.

        A trial that is under way goes on as long as there are such devices. A new one needs devices that promises could
        use, free for long enough, and a job that would gain several times what the trial costs, at best.
        """
        state, reservations, now_s = self._state, self._state.reservations, self._now_s
        room = reservations.profile.at(now_s) + num_surplus
        for workload_id, size in self._running.items():
            if workload_id in reservations.entries:
                continue
            more = size - counts.get(workload_id, 0)
            if counts.get(workload_id) and sum(counts.values()) + more <= room:
                counts[workload_id] = size
            else:
                # The trial ends because others need the devices; it does not count as one without a gain.
                state.trials[workload_id] = (0, state.trials[workload_id][1] - 1)
                self._aborted.add(workload_id)
        for row in rows:
            if not row.trial_sizes:
                continue
            entry = reservations.entries.get(row.job_id)
            count = counts.get(row.job_id, 0) if entry is None else _constant_size(entry, now_s)
            size = self._next_size(row, snapshot, count)
            if not size:
                continue
            span_s = reservations.costs.later[size] + SETTLE_S
            if reservations.profile.least(now_s, now_s + span_s) < sum(counts.values()) + size - count:
                continue
            is_untried = size not in row.view.learnt.throughput_samples_per_s
            # A promise counts on no more devices than were measured, so that its job does not grow there otherwise.
            due_s = now_s if is_untried and entry is not None and entry.is_promised else self._due_s(row)
            if due_s > now_s:
                self.moments_s.append(due_s)
                continue
            if entry is None:
                counts[row.job_id] = size
            elif not self._enlarge(entry, count, size, sum(counts.values())):
                continue
            state.trials[row.job_id] = (size, state.trials.get(row.job_id, (0, 0))[1] + 1)

    def _enlarge(self, entry: Entry, count: int, size: int, num_others: int) -> bool:
        """Plan a job of the table on `size` devices from now on, at its present estimate of speed; returns whether that
        fits. A promised one has to keep its deadline although it stands still in the trial and goes back to `count`."""
        reservations, now_s = self._state.reservations, self._now_s
        overhead_s = reservations.costs.now(size)
        if entry.is_promised:
            slower_s = entry.left / entry.rates[count] - entry.left / entry.rates[size]
            overhead_s += SETTLE_S + reservations.costs.later[count] + max(0.0, slower_s)
        end_s = reservations.costs.end_s(size, now_s, now_s + overhead_s + entry.left / entry.rates[size])
        before = entry.runs
        reservations.change_runs(entry, ())
        fits = end_s <= entry.deadline_s and reservations.profile.least(now_s, end_s) >= size + num_others
        reservations.change_runs(entry, (PlannedStretch(now_s, end_s, size, overhead_s),) if fits else before)
        return fits

    def _next_size(self, row: PromiseRow, snapshot: Snapshot, count: int) -> int:
        """The next larger size if the job runs undisturbed on `count` and could gain enough there; otherwise 0."""
        workload_id, view = row.job_id, row.view
        held = snapshot.allocations.get(workload_id)
        is_still = held is not None and held.num_devices == count == len(self._state.devices.get(workload_id, ()))
        size = next((n for n in row.trial_sizes if n > count), 0)
        if not (size and count and is_still and view.state is JobState.RUNNING) or workload_id in self._running:
            return 0
        left_s = row.steps_left(self._now_s, count) / (row.rates[count] * row.scale)
        cost_s = 2 * self._state.reservations.costs.later[size] + SETTLE_S
        return size if left_s * (1.0 - count / size) >= MIN_GAIN * cost_s else 0

    def _due_s(self, row: PromiseRow) -> float:
        _, number = self._state.trials.get(row.job_id, (0, 0))
        since_s = max(row.view.changes.resized_at_s or 0.0, self._state.formed_s.get(row.job_id, 0.0))
        return since_s + RETRY_S * float(2 ** min(number, MAX_DOUBLINGS))

    def reasons(
        self, rows: Sequence[PromiseRow], snapshot: Snapshot, placed: Mapping[WorkloadId, PoolAllocation]
    ) -> dict[WorkloadId, str]:
        """The reasons of jobs that are tried on more devices, or get fewer because more brought no speed, or because
        their owners do not allow more."""
        notes: dict[WorkloadId, str] = {}
        for row in rows:
            allocation, held = placed.get(row.job_id), snapshot.allocations.get(row.job_id)
            if allocation is None or held is None:
                continue
            measured = row.view.learnt.throughput_samples_per_s
            if held.num_devices in measured and held.num_devices > most_workers(row.view):
                notes[row.job_id] = f"its owner allows at most {devices_text(most_workers(row.view))}"
                continue
            if not row.trial_sizes or row.job_id in self._aborted:
                continue
            # While a job moves, it holds more devices than it has ever run on.
            is_by_speed = held.num_devices in measured and self.kept.get(row.job_id, 0) < held.num_devices
            if is_by_speed and allocation.num_devices == row.sizes[-1] < held.num_devices:
                notes[row.job_id] = why_fewer(measured, held.num_devices, allocation.num_devices)
            elif self._state.trials.get(row.job_id, (0, 0))[0] == allocation.num_devices > held.num_devices:
                notes[row.job_id] = WHY_TRIED
        return notes
