"""The elastic planners' rows of jobs: sizes worth having, speeds, work left. Derived once for each view of a job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from springtide.core.decision import JobView, Overheads, Snapshot
from springtide.core.workload import JobState, WorkloadId
from springtide.perf.curve import curve_of
from springtide.scheduling.decisions.cache import RowTable
from springtide.scheduling.decisions.fingerprint import (
    BOUNDS,
    CURVE_FIELDS,
    LENGTH,
    NODES,
    RESTARTS,
    SERVICES,
    Projection,
    Reads,
    of_rows,
)
from springtide.scheduling.placement.allocation_ledger import most_workers
from springtide_studies.rivals.solvers.minimum_share import Demands, Floats, Ints

# A job of unknown length counts as if it had an hour of work left on its smallest size.
UNKNOWN_RUN_S = 3600.0
# A job that should have ended by now still counts with this much work.
LEAST_RUN_S = 1.0
# Measured speeds that differ by less than this fraction count as equal: noise is no reason to decide anew.
SPEED_STEP_FRACTION = 0.1


class ElasticRow:
    """One job as the planners see it. `speed_bucket` is its speed in steps of a tenth; None where it is not known."""

    __slots__ = (
        "deadline_s",
        "is_known",
        "job_id",
        "rates",
        "sizes",
        "slot",
        "speed_bucket",
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
            # It cannot change the number of its workers while it runs.
            most = min(view.bounds.max_workers, job.num_virtual_shards)
            self.sizes: tuple[int, ...] = (min(view.num_replicas or most, most),)
        elif curve.source == "guess" or not curve.sizes:
            # Its speed is not known: its minimum, to measure it, or what it has if no other job needs the devices.
            most = most_workers(view)
            least = min(view.bounds.min_workers, most)
            self.sizes = tuple(sorted({least, max(least, min(view.num_replicas, most))}))
        else:
            # The smallest size that it accepts is a level, too: on a small cluster it may be the only one that fits.
            self.sizes = tuple(sorted({curve.sizes[0], *curve.doubling_sizes})) if only_doublings else curve.sizes
        self.rates = tuple(curve.rate(size) for size in self.sizes)
        if self.rates[0] <= 0:
            self.rates, self.is_known = (1.0,) * len(self.sizes), False
        deadline_s = job.goal.deadline_s
        self.deadline_s = math.inf if deadline_s is None or not self.is_known else deadline_s
        self.speed_bucket = round(math.log(self.rates[0]) / SPEED_STEP_FRACTION) if has_speed else None

    @property
    def is_hard(self) -> bool:
        """Whether the job has a hard deadline, and its length and speed are known well enough to promise it."""
        return self.is_known and self.view.job.goal.is_hard

    def rate(self, num_devices: int) -> float:
        """Steps a second on `num_devices`, 0.0 on a number that is none of its sizes and below the smallest."""
        for size, rate in zip(reversed(self.sizes), reversed(self.rates), strict=True):
            if size <= num_devices:
                return rate
        return 0.0

    def work_left(self, now_s: float, num_held: int, overheads: Overheads) -> float:
        """Steps left at `now_s`: by the last report, less those done since at the speed of the devices held.

        After a change, the job is assumed to have made no progress for the whole cost of a fresh set of devices.
        """
        if self.total_steps is None:
            return UNKNOWN_RUN_S * self.rates[0]
        view = self.view
        done = float(view.progress.step)
        if num_held and view.state is JobState.RUNNING:
            since_s = view.progress.progress_at_s
            if view.changes.resized_at_s is not None:
                since_s = max(since_s, view.changes.resized_at_s + overheads.cost_s(num_held))
            if now_s > since_s:
                done += (now_s - since_s) * self.rate(num_held)
        return max(self.total_steps - done, LEAST_RUN_S * self.rates[0])


READS = Reads(
    jobs=(
        of_rows(BOUNDS),
        of_rows(LENGTH),
        of_rows(RESTARTS),
        Projection("speed", CURVE_FIELDS, attrgetter("speed_bucket")),
        Projection("sizes", CURVE_FIELDS, lambda row: row.sizes if row.view.job.elastic else None),
    ),
    services=SERVICES,
    nodes=NODES,
    job_id="job_id",
    also=(
        "state",
        "progress.step",
        "progress.progress_at_s",
        "changes.resized_at_s",
        "started_at_s",
        "promise.admitted_at_s",
        "restarts.starts_at_s",
    ),
)


class CurveTable:
    """The rows of the live jobs, and their curves as one table. Derived from snapshots alone."""

    def __init__(self, *, only_doublings: bool = True) -> None:
        self._only_doublings = only_doublings
        self._table: RowTable[ElasticRow] = RowTable(self._read)
        self._free_slots: list[int] = []
        self._sizes: Ints = np.ones((64, 1), dtype=np.int64)
        self._rates: Floats = np.ones((64, 1))
        self._num_slots = 0

    def rows(self, snapshot: Snapshot) -> list[ElasticRow]:
        """One row for every job of the snapshot, in its order. The list is not to be changed."""
        rows = self._table.read(snapshot)
        self._free_slots += [row.slot for row in self._table.gone]
        return rows

    def curves(self, rows: Sequence[ElasticRow]) -> tuple[Ints, Floats]:
        """Sizes and steps a second, (rows, levels); fewer levels are filled up with the last one."""
        slots = [row.slot for row in rows]
        width = max((len(row.sizes) for row in rows), default=1)
        return self._sizes[slots, :width], self._rates[slots, :width]

    def _read(self, view: JobView, before: ElasticRow | None) -> ElasticRow:
        if before is not None:
            slot = before.slot
        elif self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = self._num_slots
            self._num_slots += 1
        row = ElasticRow(view, slot, only_doublings=self._only_doublings)
        if before is None or before.sizes != row.sizes or before.rates != row.rates:
            self._write(row)
        return row

    def _write(self, row: ElasticRow) -> None:
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

    def __init__(self, curves: CurveTable, rows: Sequence[ElasticRow], snapshot: Snapshot) -> None:
        held = snapshot.allocations
        now_s, overheads = snapshot.now_s, snapshot.overheads
        self.now_s = now_s
        self.rows = rows
        self.held = [held[row.job_id].num_devices if row.job_id in held else 0 for row in rows]
        left = [row.work_left(now_s, num, overheads) for row, num in zip(rows, self.held, strict=True)]
        self.work: Floats = np.array(left)
        self.deadlines_s: Floats = np.array([row.deadline_s for row in rows])
        self.sizes, self.rates = curves.curves(rows)

    def demands(self, chosen: Sequence[int], deadlines_s: Floats | None = None) -> Demands:
        """The demands of the chosen rows, in that order."""
        index = np.asarray(chosen, dtype=np.int64)
        times_s = self.deadlines_s if deadlines_s is None else deadlines_s
        return Demands(self.work[index], times_s[index], self.sizes[index], self.rates[index])

    def by_deadline(self, chosen: Sequence[int]) -> list[int]:
        """The chosen rows by deadline, then in order of arrival."""
        times_s = self.deadlines_s
        return sorted(chosen, key=lambda index: (times_s[index], index))
