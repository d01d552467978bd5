"""What jobs lose, in device-seconds, when a server is taken from them, and when they would leave it anyway."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from springtide.core.decision import JobView
from springtide.core.workload import WorkloadId
from springtide.perf.curve import curve_of
from springtide.scheduling.loans.pools import NodeView, PoolState
from springtide.scheduling.placement.gangs import remaining_s
from springtide.scheduling.placement.placing import held_counts
from springtide.solvers.reclaim import Victim

# A broken promise costs more than all work together: such a job loses devices only if no other job is left.
BROKEN_PROMISE = 1e12
# The least cost of stopping a job, so that among jobs that lose nothing as few as possible are stopped.
_LEAST_LOSS = 1.0


class Losses:
    """What each job of a snapshot would lose. `away_s` is how long services will need a server that is taken now.

    With `shrinks`, a job that can run on fewer devices gives up some before it is stopped.
    """

    def __init__(self, pools: PoolState, *, away_s: float, shrinks: bool) -> None:
        self.now_s = pools.now_s
        self.overheads = pools.snapshot.overheads
        self.held = held_counts(pools.snapshot)
        self.away_s = away_s
        self.shrinks = shrinks

    def spare(self, view: JobView) -> int:
        """How many devices the job can give up and still run."""
        if not (self.shrinks and view.job.elastic):
            return 0
        return max(0, self.held.get(view.job.job_id, 0) - view.bounds.min_workers)

    def left_s(self, view: JobView) -> float:
        """Seconds until the job ends on the devices that it holds; infinite if that is not known."""
        held = self.held.get(view.job.job_id, 0)
        return remaining_s(view, held, self.now_s, held) if held else math.inf

    def work_s(self, view: JobView) -> float:
        """Seconds of its work that a job loses by stopping: since its last checkpoint, unless it can take one.

        A job that is not a script commits a checkpoint within its grace; a script is cut off.
        """
        if not view.job.is_script and view.job.grace_s > 0:
            return 0.0
        saved = view.checkpoint.step if view.checkpoint is not None else 0
        num_held = self.held.get(view.job.job_id, 0)
        curve = curve_of(view)
        rate = curve.rate(num_held)
        since_s = max(0.0, self.now_s - (view.started_at_s if view.started_at_s is not None else self.now_s))
        if curve.source == "guess" or rate <= 0:
            return since_s * (1.0 - saved / view.progress.step) if view.progress.step > saved else 0.0
        reported_s = max(0, view.progress.step - saved) / rate
        return reported_s + max(0.0, self.now_s - view.progress.progress_at_s)

    def victim(self, view: JobView) -> Victim:
        """The job as the choice of servers sees it."""
        num_held = self.held.get(view.job.job_id, 0)
        overhead_s = self.overheads.cost_s(max(1, num_held))
        work_s = self.work_s(view)
        stop = max(_LEAST_LOSS, num_held * (work_s + overhead_s))
        if self._breaks(view, num_held, work_s + overhead_s + view.job.grace_s):
            stop += BROKEN_PROMISE
        num_spare = self.spare(view)
        if num_spare <= 0:
            return Victim(stop_cost=stop)
        fewer = num_held - num_spare
        curve = curve_of(view)
        rate = curve.rate(num_held)
        slower = 1.0 - curve.rate(fewer) / rate if rate > 0 else num_spare / num_held
        # The devices serve in the meantime: only a loss of speed beyond their number counts.
        shrink = fewer * overhead_s + max(0.0, slower * num_held - num_spare) * self.away_s
        if self._breaks(view, fewer, overhead_s):
            shrink += BROKEN_PROMISE
        return Victim(stop_cost=max(stop, shrink), shrink_cost=shrink, num_spare=num_spare)

    def _breaks(self, view: JobView, num_workers: int, lost_s: float) -> bool:
        """Whether the job would break its promise, with `lost_s` seconds lost and `num_workers` workers after that."""
        goal = view.job.goal
        if view.promise.promised_finish_s is None or not goal.is_hard or goal.deadline_s is None:
            return False
        left_s = remaining_s(view, max(1, num_workers), self.now_s, self.held.get(view.job.job_id, 0))
        return math.isfinite(left_s) and self.now_s + lost_s + left_s > goal.deadline_s


def any_job(view: JobView) -> Victim:
    """The same victim for every job, for a choice of servers that ignores losses."""
    del view
    return Victim(stop_cost=1.0)


class Leaving:
    """When the jobs on a server would leave it if no other job started there."""

    def __init__(self, pools: PoolState, losses: Losses) -> None:
        self.losses = losses
        self.jobs = pools.job_of
        self._left: dict[WorkloadId, float] = {}
        self._spare: dict[WorkloadId, int] = {}

    def ends_in_s(self, node: NodeView) -> float:
        """Seconds until the last job on the server ends; 0 without jobs, infinite if that is not known."""
        return max((self._ends_in_s(job_id) for job_id in node.jobs), default=0.0)

    def _ends_in_s(self, job_id: WorkloadId) -> float:
        if job_id not in self._left:
            view = self.jobs.get(job_id)
            # A job without a view has ended and is leaving.
            self._left[job_id] = self.losses.left_s(view) if view is not None else 0.0
        return self._left[job_id]

    def can_shrink(self, node: NodeView) -> bool:
        """Whether every job on the server can give up its devices there and still run."""
        return bool(node.jobs) and all(self._spare_of(job_id) >= count for job_id, count in node.jobs.items())

    def shrink(self, node: NodeView) -> None:
        """Count the jobs on the server as having given it up."""
        for job_id, count in node.jobs.items():
            self._spare[job_id] = self._spare_of(job_id) - count

    def _spare_of(self, job_id: WorkloadId) -> int:
        if job_id not in self._spare:
            view = self.jobs.get(job_id)
            self._spare[job_id] = self.losses.spare(view) if view is not None else 1_000_000
        return self._spare[job_id]


def stay_s(waiting: Iterable[JobView], losses: Losses, now_s: float, size_of: Callable[[JobView], int]) -> float:
    """How long the next job to start would stay where it starts: 0 if it could be shrunk again, or if none waits.

    It is the one that waits longest of those that fit (`size_of` is 0 for the others).
    """
    for view in waiting:
        size = size_of(view)
        if size:
            is_movable = losses.shrinks and view.job.elastic and size > view.bounds.min_workers
            return 0.0 if is_movable else remaining_s(view, size, now_s)
    return 0.0
