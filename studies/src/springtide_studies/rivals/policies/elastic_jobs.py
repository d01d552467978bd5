"""What the elastic planners know of each job: sizes worth having, speeds, work left. Read once for each view of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from springtide.core.decision import JobView, Overheads, Snapshot
from springtide.core.workload import JobState, WorkloadId
from springtide.perf.curve import curve_of
from springtide.scheduling.placement.allocation_ledger import most_workers
from springtide_studies.rivals.solvers.minimum_share import Demands, Floats, Ints

# A job of unknown length is weighed against others as if it had an hour on its smallest size to go.
UNKNOWN_RUN_S = 3600.0
# A job that should have ended by now is about to: this much is still reckoned with.
LEAST_RUN_S = 1.0
# Sums of marks stay below this, so that they fit into a journal's integers.
MARK_SPACE = 1 << 62
# Measured speeds that differ by less than this are the same: noise is no reason to decide anew.
SPEED_STEP_FRACTION = 0.1


class JobRow:
    """One job as the planners see it. `mark` stands for everything about it that is a reason to decide anew."""

    __slots__ = (
        "deadline_s",
        "is_known",
        "job_id",
        "mark",
        "rates",
        "sizes",
        "slot",
        "total_steps",
        "view",
    )

    def __init__(self, view: JobView, slot: int, *, only_doublings: bool) -> None:
        job, curve = view.job, curve_of(view)
        self.view = view
        self.slot = slot
        self.job_id: WorkloadId = job.job_id
        self.total_steps = view.total_steps
        has_speed = curve.source != "guess" and bool(curve.sizes)
        self.is_known = has_speed and view.total_steps is not None
        if not job.elastic:
            # Its processes cannot change their number.
            most = min(view.max_workers, job.num_virtual_shards)
            self.sizes: tuple[int, ...] = (min(view.num_replicas or most, most),)
        elif curve.source == "guess" or not curve.sizes:
            # Nothing is known of its speed: the least it takes to find out, or what it has where nobody else needs it.
            most = most_workers(view)
            least = min(view.min_workers, most)
            self.sizes = tuple(sorted({least, max(least, min(view.num_replicas, most))}))
        else:
            # The smallest that it accepts is a level too: on a small cluster it may be the only one that fits.
            self.sizes = tuple(sorted({curve.sizes[0], *curve.doubling_sizes})) if only_doublings else curve.sizes
        self.rates = tuple(curve.rate(size) for size in self.sizes)
        if self.rates[0] <= 0:
            self.rates, self.is_known = (1.0,) * len(self.sizes), False
        deadline_s = job.goal.deadline_s
        self.deadline_s = math.inf if deadline_s is None or not self.is_known else deadline_s
        speed = round(math.log(self.rates[0]) / SPEED_STEP_FRACTION) if has_speed else None
        facts = (
            f"{job.job_id} {view.min_workers} {view.max_workers} {view.total_steps} {view.num_restarts} {speed}"
            f" {self.sizes if job.elastic else None}"
        )
        self.mark = int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=8).digest()) % MARK_SPACE

    @property
    def is_hard(self) -> bool:
        """Whether the job has a deadline that is a condition, and enough is known to promise it."""
        return self.is_known and self.view.job.goal.is_hard

    def rate(self, num_devices: int) -> float:
        """Steps a second on `num_devices`, 0.0 on a number that is none of its sizes and below the smallest."""
        for size, rate in zip(reversed(self.sizes), reversed(self.rates), strict=True):
            if size <= num_devices:
                return rate
        return 0.0

    def work_left(self, now_s: float, num_held: int, overheads: Overheads) -> float:
        """Steps still to do at `now_s`: what was reported, and what was done since at the speed of the devices held.

        After a change the job is taken to have stood still for the whole price of a fresh set of devices.
        """
        if self.total_steps is None:
            return UNKNOWN_RUN_S * self.rates[0]
        view = self.view
        done = float(view.step)
        if num_held and view.state is JobState.RUNNING:
            since_s = view.progress_at_s
            if view.resized_at_s is not None:
                since_s = max(since_s, view.resized_at_s + overheads.cost_s(num_held))
            if now_s > since_s:
                done += (now_s - since_s) * self.rate(num_held)
        return max(self.total_steps - done, LEAST_RUN_S * self.rates[0])


class JobBook:
    """The rows of the live jobs, kept by the identity of their views, and their curves as one table.

    Derived from snapshots alone: a new book gives the same rows.
    """

    def __init__(self, *, only_doublings: bool = True) -> None:
        self._only_doublings = only_doublings
        self._rows: dict[WorkloadId, JobRow] = {}
        self._views: tuple[JobView, ...] = ()
        self._current: list[JobRow] = []
        self._free_slots: list[int] = []
        self._sizes: Ints = np.ones((64, 1), dtype=np.int64)
        self._rates: Floats = np.ones((64, 1))
        self._num_slots = 0

    def rows(self, snapshot: Snapshot) -> list[JobRow]:
        """One row for every job of the snapshot, in its order. The list is not to be changed."""
        views = snapshot.jobs
        if views is self._views:
            return self._current
        rows = self._rows
        current: list[JobRow] = []
        for view in views:
            row = rows.get(view.job.job_id)
            if row is None or row.view is not view:
                row = rows[view.job.job_id] = self._read(view, row)
            current.append(row)
        if len(rows) > len(current):
            live = {row.job_id for row in current}
            for job_id in [job_id for job_id in rows if job_id not in live]:
                self._free_slots.append(rows.pop(job_id).slot)
        self._views, self._current = views, current
        return current

    def curves(self, rows: Sequence[JobRow]) -> tuple[Ints, Floats]:
        """Sizes and steps a second, (rows, levels); fewer levels are filled up with the last one."""
        slots = [row.slot for row in rows]
        width = max((len(row.sizes) for row in rows), default=1)
        return self._sizes[slots, :width], self._rates[slots, :width]

    def _read(self, view: JobView, before: JobRow | None) -> JobRow:
        if before is not None:
            slot = before.slot
        elif self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = self._num_slots
            self._num_slots += 1
        row = JobRow(view, slot, only_doublings=self._only_doublings)
        if before is None or before.sizes != row.sizes or before.rates != row.rates:
            self._write(row)
        return row

    def _write(self, row: JobRow) -> None:
        num_slots, width = self._sizes.shape
        more = num_slots if row.slot >= num_slots else 0
        wider = max(0, len(row.sizes) - width)
        if more or wider:
            self._sizes = np.pad(self._sizes, ((0, more), (0, wider)), mode="edge")
            self._rates = np.pad(self._rates, ((0, more), (0, wider)), mode="edge")
        num = len(row.sizes)
        self._sizes[row.slot, :num], self._sizes[row.slot, num:] = row.sizes, row.sizes[-1]
        self._rates[row.slot, :num], self._rates[row.slot, num:] = row.rates, row.rates[-1]


class LiveJobs:
    """The rows of one snapshot with the work that is left, as arrays."""

    def __init__(self, book: JobBook, rows: Sequence[JobRow], snapshot: Snapshot) -> None:
        held = snapshot.allocations
        now_s, overheads = snapshot.now_s, snapshot.overheads
        self.now_s = now_s
        self.rows = rows
        self.held = [held[row.job_id].num_devices if row.job_id in held else 0 for row in rows]
        left = [row.work_left(now_s, num, overheads) for row, num in zip(rows, self.held, strict=True)]
        self.work: Floats = np.array(left)
        self.deadlines_s: Floats = np.array([row.deadline_s for row in rows])
        self.sizes, self.rates = book.curves(rows)

    def demands(self, chosen: Sequence[int], deadlines_s: Floats | None = None) -> Demands:
        """The demands of the chosen rows, in that order."""
        index = np.asarray(chosen, dtype=np.int64)
        times_s = self.deadlines_s if deadlines_s is None else deadlines_s
        return Demands(self.work[index], times_s[index], self.sizes[index], self.rates[index])

    def by_deadline(self, chosen: Sequence[int]) -> list[int]:
        """The chosen rows by deadline, then in order of arrival."""
        times_s = self.deadlines_s
        return sorted(chosen, key=lambda index: (times_s[index], index))
