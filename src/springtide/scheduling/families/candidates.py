"""Which sizes jobs could have, and how long each would take by what is known of their families."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from springtide.core.decision import JobView, Snapshot
from springtide.core.job_parts import GradientNoise
from springtide.core.resources import DeviceId
from springtide.core.workload import JobState, TrainingJob, WorkloadId
from springtide.perf.curve import curve_of
from springtide.scheduling.families.family import FamilySpeed, JobFamily
from springtide.scheduling.placement.allocation_ledger import most_workers

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# How far a family's model is extrapolated: up to this many times the largest measured number of workers. A job that
# runs there is measured within a minute.
TRUSTED_FACTOR = 4
# A job of unknown length is assumed to be half done, if none of its family has come further, but never to end sooner
# than in this time.
LEAST_UNKNOWN_S = 600.0
# A job that should have ended by now is assumed to need so long.
LEAST_LEFT_S = 1.0

# A batch that would change by less than this factor stays as it is: goodput is flat around its best.
SAME_BATCH = 1.2


@dataclass(slots=True)
class JobCandidates:
    """One job: `seconds[i]` to its end on `sizes[i]` workers without further changes. `held` is its last allocation.

    `stall_s` is how long it makes no progress yet after its last change. `pace` is None if no model of its family is
    used. `is_fixed`: it keeps its devices, since they cannot be changed.
    """

    view: JobView
    key: str
    held: int
    sizes: Ints
    seconds: Floats
    stall_s: float = 0.0
    pace: FamilySpeed | None = None
    noise: GradientNoise | None = None
    is_fixed: bool = False

    @property
    def job_id(self) -> WorkloadId:
        """The job of this row."""
        return self.view.job.job_id

    @property
    def least_s(self) -> float:
        """Seconds to its end at its fastest size."""
        return float(self.seconds.min()) if len(self.seconds) else math.inf

    def batch_on(self, num_nodes: int, num_devices: int, *, adapts: bool = True) -> int:
        """The global batch for so many devices: the best one by its family's model, or the present one if that is
        about as good or nothing is known."""
        view, bounds = self.view, self.view.job.batch
        if bounds is None:
            return view.job.global_batch_size
        now_size = view.global_batch_size or view.job.global_batch_size
        if self.pace is None or not adapts:
            size = max(now_size, bounds.min_local_size * num_devices)
        else:
            size, rate = self.pace.batch_for(num_nodes, num_devices, self.noise)
            is_near = max(size, now_size) <= SAME_BATCH * min(size, now_size)
            if rate <= 0.0 or (is_near and num_devices == view.num_replicas):
                size = now_size
        return min(max(size, bounds.min_size), bounds.max_size)

    def seconds_on(self, num_devices: int) -> float:
        """Seconds to its end on so many devices; inf if that is none of its sizes."""
        found = np.flatnonzero(self.sizes == num_devices)
        return float(self.seconds[found[0]]) if len(found) else math.inf


@lru_cache(maxsize=1024)
def size_grid(most: int) -> tuple[int, ...]:
    """The numbers of workers that are tried: 1, 2, 3, 4, 6, 8, 12, and from 16 on four to every doubling.

    Few sizes within a node, so that groups fill nodes; more above, so that a few large groups fill the cluster.
    """
    found = {1, 3, *(size * factor for size in (2, 4) for factor in (1, 3)), 8}
    doubling = 16
    while doubling <= most:
        found |= {doubling * quarters // 4 for quarters in (4, 5, 6, 7)}
        doubling *= 2
    return tuple(sorted(size for size in found if size <= most))


def is_waiting(view: JobView, now_s: float) -> bool:
    """Whether a job waits for its restart after a crash."""
    return view.restarts.starts_at_s > now_s


def read_rows(
    views: Sequence[JobView],
    snapshot: Snapshot,
    held: Mapping[WorkloadId, Sequence[DeviceId]],
    key_of: Callable[[TrainingJob], str],
    families: Mapping[str, JobFamily],
    paces: Mapping[str, FamilySpeed],
    capacity: int,
) -> list[JobCandidates]:
    """A row for each of these jobs that can get devices now, in their order."""
    rows: list[JobCandidates] = []
    by_pace: dict[str, list[JobCandidates]] = {}
    for view in views:
        num_held = len(held.get(view.job.job_id, ()))
        if is_waiting(view, snapshot.now_s):
            continue
        row = JobCandidates(view, key_of(view.job), num_held, _sizes(view, num_held, capacity), np.zeros(0))
        row.is_fixed = not view.job.elastic and num_held > 0
        row.stall_s = _stall_s(view, snapshot)
        family = families.get(row.key)
        pace = paces.get(row.key)
        if pace is not None and family is not None and (view.job.batch is not None or curve_of(view).source == "guess"):
            row.pace = pace
            row.noise = view.learnt.noise or family.noise_at(view.equivalent_steps)
            by_pace.setdefault(row.key, []).append(row)
        elif view.job.batch is None and (curve := curve_of(view)).source != "guess" and curve.sizes:
            _by_curve(row, [curve.rate(int(size)) for size in row.sizes], snapshot)
        else:
            _unknown(row)
        rows.append(row)
    for key, same in by_pace.items():
        _by_pace(same, paces[key], families[key], snapshot)
    return [row for row in rows if len(row.sizes)]


def _sizes(view: JobView, num_held: int, capacity: int) -> Ints:
    """The numbers of devices that the job could get."""
    most = min(most_workers(view), capacity)
    if not view.job.elastic:
        fixed = num_held or view.bounds.max_workers
        return np.array([fixed] if fixed <= max(capacity, num_held) else [], dtype=np.int64)
    if view.bounds.min_workers > most:
        return np.zeros(0, dtype=np.int64)
    sizes = {size for size in size_grid(most) if size >= view.bounds.min_workers} | {view.bounds.min_workers, most}
    return np.array(sorted(sizes), dtype=np.int64)


def _stall_s(view: JobView, snapshot: Snapshot) -> float:
    """For how many seconds the job makes no progress yet because of its last change."""
    if not view.num_replicas or view.changes.resized_at_s is None:
        return 0.0
    return max(0.0, view.changes.resized_at_s + snapshot.overheads.cost_s(view.num_replicas) - snapshot.now_s)


def _since_s(view: JobView, snapshot: Snapshot) -> float:
    """For how many seconds the job has made progress since its last report."""
    if view.state is not JobState.RUNNING or not view.num_replicas:
        return 0.0
    begun_s = view.progress.progress_at_s
    if view.changes.resized_at_s is not None:
        begun_s = max(begun_s, view.changes.resized_at_s + snapshot.overheads.cost_s(view.num_replicas))
    return max(0.0, snapshot.now_s - begun_s)


def _total(view: JobView) -> float | None:
    """The job's length in its own unit of progress, if it is known."""
    if view.total_equivalent_steps is not None:
        return view.total_equivalent_steps
    return None if view.total_steps is None else float(view.total_steps)


def _as_much_again(progress: float) -> float:
    """The estimate of what is left of a job that may end at any time: as much as it has done, rounded to a doubling.

    Rounded, so that jobs with about the same progress do not overtake each other all the time (Tiresias, NSDI'19,
    section 3.1, has queues for that).
    """
    return 2.0 ** math.ceil(math.log2(max(progress, 1.0)))


def _by_curve(row: JobCandidates, rates: list[float], snapshot: Snapshot) -> None:
    """Times by the job's own curve: a fixed batch and a profile or measurements at it."""
    view = row.view
    speeds = np.array(rates)
    able = speeds > 0.0
    row.sizes, speeds = row.sizes[able], speeds[able]
    if not len(speeds):
        return
    now_rate = curve_of(view).rate(view.num_replicas)
    total, done = (
        _total(view),
        max(view.equivalent_steps, float(view.progress.step)) + now_rate * _since_s(view, snapshot),
    )
    left = max(_as_much_again(done), LEAST_UNKNOWN_S * float(speeds[0])) if total is None else total - done
    row.seconds = np.maximum(left / speeds, LEAST_LEFT_S)


def _unknown(row: JobCandidates) -> None:
    """The times of a job without any measurement: its smallest size, to measure it, or the devices that it has."""
    least = row.sizes[:1]
    kept = row.sizes[(row.sizes == row.held) & (row.sizes > least)] if len(least) else least
    row.sizes = np.concatenate([least, kept])
    # More devices are assumed to be faster; by how much is a guess.
    row.seconds = LEAST_UNKNOWN_S / np.sqrt(row.sizes)


def _progress(row: JobCandidates, pace: FamilySpeed, index_of: Mapping[int, int], snapshot: Snapshot) -> float:
    """The progress of a job by now, at the speed of its family since its last report."""
    view, since_s = row.view, _since_s(row.view, snapshot)
    if not since_s or view.num_replicas not in index_of:
        return view.equivalent_steps
    return view.equivalent_steps + since_s * float(pace.rates_at(row.noise)[index_of[view.num_replicas]])


def _by_pace(rows: list[JobCandidates], pace: FamilySpeed, family: JobFamily, snapshot: Snapshot) -> None:
    """Times of the jobs of one family by its model, all at once."""
    measured = max(sum(step.placement) for step in family.steps)
    index_of = {size: index for index, size in enumerate(pace.sizes.tolist())}
    done = [_progress(row, pace, index_of, snapshot) for row in rows]
    lengths = [_total(row.view) for row in rows]
    if None in lengths:
        # As long as none has ended, they are all assumed to be twice as long as the one that has come furthest.
        furthest = max(progress for progress, length in zip(done, lengths, strict=True) if length is None)
    totals: list[float] = []
    for row, progress, length in zip(rows, done, lengths, strict=True):
        total = length
        if total is None:
            left = family.left_of(progress)
            if left is None:
                alone = float(pace.rates_at(row.noise)[index_of.get(max(row.view.bounds.min_workers, 1), 0)])
                left = furthest - progress + max(_as_much_again(furthest), LEAST_UNKNOWN_S * alone)
            total = progress + left
        totals.append(total)
    done = [min(progress, total) for progress, total in zip(done, totals, strict=True)]
    seconds = pace.seconds(np.array(done), np.array(totals))
    for row, times in zip(rows, seconds, strict=True):
        cap = max(TRUSTED_FACTOR * measured, row.view.bounds.min_workers, row.held)
        chosen = [index_of[size] for size in row.sizes.tolist() if size <= cap and size in index_of]
        chosen = [index for index in chosen if math.isfinite(times[index])]
        if chosen:
            row.sizes = pace.sizes[chosen]
            row.seconds = np.maximum(times[chosen], LEAST_LEFT_S)
        else:
            # By its own bounds it cannot run on any size; a start on the smallest one shows the error.
            _unknown(row)
