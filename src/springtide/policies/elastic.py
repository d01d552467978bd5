"""Deadlines first, then everyone a share, then idle devices to whoever gains most.

A first elastic policy: each deadline job gets the fewest workers that make its deadline at its measured speed, in
order of deadlines; what is left goes one device at a time to the job whose throughput it raises most, relative to
one worker (the marginal return of ElasticFlow §4.2, without its admission and look-ahead).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from springtide.core.decision import JobView, Plan, Snapshot
from springtide.core.workload import WorkloadId
from springtide.perf.scaling import ScalingCurve, fit_scaling
from springtide.policies.placement import held_counts
from springtide.policies.shares import Shares, most_workers, serve_demand, serve_minimum


class Elastic(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters guard against flapping; none of them is tuned to a trace.

    `safety_fraction` of the time left is kept in reserve for deadlines; a job gives workers back only if it stays
    within its deadline with twice that reserve. A device moves between running jobs only if the other one gains
    `keep_bonus` times as much from it, and not within `settle_s` of the holder's last resize, while its speed at the
    new size is still being measured, nor before the change has had `num_changes_to_settle` times as long as it cost:
    where a worker takes half a minute to start, devices stay for minutes. A job that gained nothing from one more, as
    far as it was measured, is tried again on an idle one `retry_s` after its last resize: it may have been measured at
    a bad moment. Deadlines are looked at again every `revisit_s`.
    """

    safety_fraction: float = 0.1
    keep_bonus: float = 1.5
    settle_s: float = 20.0
    num_changes_to_settle: float = 8.0
    retry_s: float = 300.0
    revisit_s: float = 5.0

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        shares = Shares(snapshot)
        held = held_counts(snapshot)
        curves = {view.job.job_id: fit_scaling(view.throughput_samples_per_s) for view in snapshot.jobs}
        serve_minimum(shares)
        urgent = sorted(
            (view for view in snapshot.jobs if view.job.goal.deadline_s is not None),
            key=lambda view: (view.job.goal.deadline_s, view.submitted_at_s),
        )
        for view in urgent:
            job_id = view.job.job_id
            needed = self._minimum_share(view, curves[job_id], held.get(job_id, 0), snapshot.now_s)
            if needed is not None:
                shares.raise_to(job_id, needed)
        serve_demand(shares)
        for view in snapshot.jobs:
            job_id = view.job.job_id
            if not shares.of(job_id):
                shares.raise_to(job_id, self._entry_size(view, held.get(job_id, 0)))
        self._share_out(shares, snapshot, curves, held)
        revisits = [snapshot.now_s + self.revisit_s] if urgent else []
        if shares.left and (retries := self._retries_at_s(shares, snapshot)):
            revisits.append(max(min(retries), snapshot.now_s + self.revisit_s))
        return shares.plan(min(revisits, default=None))

    def _retries_at_s(self, shares: Shares, snapshot: Snapshot) -> list[float]:
        """When jobs that could have more workers are tried on them again."""
        growing = [view for view in snapshot.jobs if view.job.elastic and shares.of(view.job.job_id)]
        return [
            view.resized_at_s + self.retry_s
            for view in growing
            if view.resized_at_s is not None and shares.of(view.job.job_id) < most_workers(view)
        ]

    def _minimum_share(self, view: JobView, curve: ScalingCurve, num_held: int, now_s: float) -> int | None:
        """The fewest workers that make the deadline; None if it cannot be made, so that a lost cause starves nobody."""
        job = view.job
        assert job.goal.deadline_s is not None
        if not job.elastic:
            return num_held or view.max_workers
        time_left_s = job.goal.deadline_s - now_s
        if time_left_s <= 0:
            return None
        if view.total_steps is None or not curve.is_measured:
            # Nothing is known of its speed yet: the least it takes to find out.
            return max(view.min_workers, min(num_held, most_workers(view)))
        samples_left = (view.total_steps - view.step) * job.global_batch_size
        for count in range(view.min_workers, most_workers(view) + 1):
            reserve = self.safety_fraction * (2 if count < num_held else 1)
            if samples_left / curve.samples_per_s(count) <= time_left_s * (1 - reserve):
                return count
        can_at_all = samples_left / curve.samples_per_s(most_workers(view)) <= time_left_s
        return most_workers(view) if can_at_all else None

    def _entry_size(self, view: JobView, num_held: int) -> int:
        """What a job needs to run at all."""
        if view.job.elastic:
            return view.min_workers
        return num_held or view.max_workers

    def _share_out(
        self,
        shares: Shares,
        snapshot: Snapshot,
        curves: Mapping[WorkloadId, ScalingCurve],
        held: Mapping[WorkloadId, int],
    ) -> None:
        """Give what is left one device at a time to the job that gains most from one more."""
        growing = [view for view in snapshot.jobs if view.job.elastic and shares.of(view.job.job_id)]
        settle_s = max(self.settle_s, self.num_changes_to_settle * snapshot.overheads.change_s)
        while shares.left:
            best_gain, best_id = 0.0, None
            for view in growing:
                job_id = view.job.job_id
                count = shares.of(job_id)
                if count >= most_workers(view):
                    continue
                gain = curves[job_id].speedup(count + 1) - curves[job_id].speedup(count)
                if count < held.get(job_id, 0):
                    is_settling = snapshot.now_s - (view.resized_at_s or snapshot.now_s) < settle_s
                    gain = math.inf if is_settling else gain * self.keep_bonus
                elif gain <= 0.0 and snapshot.now_s >= (view.resized_at_s or math.inf) + self.retry_s:
                    gain = math.ulp(0.0)
                if gain > best_gain:
                    best_gain, best_id = gain, job_id
            if best_id is None:
                return
            shares.raise_to(best_id, shares.of(best_id) + 1)
