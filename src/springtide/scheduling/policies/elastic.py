"""Deadlines first, then a share for each job, then idle devices to the job that gains most.

A first elastic policy: each deadline job gets the fewest workers that make its deadline at its measured speed, in
order of deadlines; what is left goes one device at a time to the job whose throughput it raises most, relative to
one worker (the marginal return of ElasticFlow §4.2, without its admission and look-ahead).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from springtide.core.decision import JobView, Plan, Snapshot
from springtide.core.workload import WorkloadId
from springtide.perf.curve import ScalingCurve, fit_scaling
from springtide.scheduling.placement.allocation_ledger import (
    AllocationLedger,
    most_workers,
    serve_demand,
    serve_minimum,
)
from springtide.scheduling.placement.placing import held_counts
from springtide.scheduling.speed_reasons import WHY_TRIED, why_fewer

RULE = "elastic-1"
# The waits between trials double so often.
MAX_DOUBLINGS = 4
# The gain of a trial: less than any measured gain.
TRIED = math.ulp(0.0)


class Elastic(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters guard against flapping; none of them is tuned to a trace.

    `safety_fraction` of the time left is kept in reserve for deadlines; a job gives workers back only if it stays
    within its deadline with twice that reserve. Deadlines are checked again every `revisit_s`.

    A device moves between running jobs only if the other job gains `keep_bonus` times as much from it. It never moves
    within `settle_s` of the holder's last resize, while the speed at the new size is still being measured, nor within
    `num_changes_to_settle` times the cost of a change: where a worker takes half a minute to start, devices stay for
    minutes.

    A job that gained nothing from one more device by its measurements is tried again on an idle one `retry_s` after its
    last resize: the measurements may have been wrong.
    """

    safety_fraction: float = 0.1
    keep_bonus: float = 1.5
    settle_s: float = 20.0
    num_changes_to_settle: float = 8.0
    retry_s: float = 300.0
    revisit_s: float = 5.0

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        shares = AllocationLedger(snapshot)
        held = held_counts(snapshot)
        curves = {view.job.job_id: fit_scaling(view.learnt.throughput_samples_per_s) for view in snapshot.jobs}
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
        trials = _Trials(self, snapshot, curves)
        self._share_out(shares, snapshot, curves, held, trials)
        revisits = [snapshot.now_s + self.revisit_s] if urgent else []
        if shares.left and (retries := self._retries_at_s(shares, snapshot, trials)):
            revisits.append(max(min(retries), snapshot.now_s + self.revisit_s))
        return msgspec.structs.replace(shares.plan(min(revisits, default=None)), memory=trials.encode())

    def _retries_at_s(self, shares: AllocationLedger, snapshot: Snapshot, trials: _Trials) -> list[float]:
        """When jobs that could have more workers are tried on them again."""
        growing = [view for view in snapshot.jobs if view.job.elastic and shares.of(view.job.job_id)]
        return [
            view.changes.resized_at_s + trials.wait_s(view)
            for view in growing
            if view.changes.resized_at_s is not None and shares.of(view.job.job_id) < most_workers(view)
        ]

    def _minimum_share(self, view: JobView, curve: ScalingCurve, num_held: int, now_s: float) -> int | None:
        """The fewest workers that make the deadline; None if it cannot be made, so that it starves no other job."""
        job = view.job
        assert job.goal.deadline_s is not None
        if not job.elastic:
            return num_held or view.bounds.max_workers
        time_left_s = job.goal.deadline_s - now_s
        if time_left_s <= 0:
            return None
        if view.total_steps is None or not curve.is_measured:
            # Its speed is not known yet: the fewest workers that it can be measured on, or those that it has.
            return max(view.bounds.min_workers, min(num_held, most_workers(view)))
        samples_left = (view.total_steps - view.progress.step) * job.global_batch_size
        for count in range(view.bounds.min_workers, most_workers(view) + 1):
            reserve = self.safety_fraction * (2 if count < num_held else 1)
            if samples_left / curve.samples_per_s(count) <= time_left_s * (1 - reserve):
                return count
        fastest = curve.samples_per_s(most_workers(view))
        if samples_left / fastest > time_left_s:
            return None
        # It meets the deadline only without the reserve: take the fewest workers that are as fast as all of them.
        return next(
            n for n in range(view.bounds.min_workers, most_workers(view) + 1) if curve.samples_per_s(n) >= fastest
        )

    def _entry_size(self, view: JobView, num_held: int) -> int:
        """What a job needs to run at all."""
        if view.job.elastic:
            return view.bounds.min_workers
        return num_held or view.bounds.max_workers

    def _share_out(
        self,
        shares: AllocationLedger,
        snapshot: Snapshot,
        curves: Mapping[WorkloadId, ScalingCurve],
        held: Mapping[WorkloadId, int],
        trials: _Trials,
    ) -> None:
        """Give what is left one device at a time to the job that gains most from one more."""
        growing = {view.job.job_id: view for view in snapshot.jobs if view.job.elastic and shares.of(view.job.job_id)}
        settle_s = max(self.settle_s, self.num_changes_to_settle * snapshot.overheads.change_s)
        while shares.left:
            best_gain, best_id = 0.0, None
            for job_id, view in growing.items():
                count = shares.of(job_id)
                if count >= most_workers(view):
                    continue
                gain = curves[job_id].speedup(count + 1) - curves[job_id].speedup(count)
                is_held = count < held.get(job_id, 0)
                if is_held:
                    since_s = snapshot.now_s - (view.changes.resized_at_s or snapshot.now_s)
                    is_settling = since_s < (self.settle_s if trials.is_on(view) else settle_s)
                    gain = math.inf if is_settling else gain * self.keep_bonus
                if gain <= 0.0 and (trials.is_joining(view) if is_held else trials.is_due(view)):
                    gain = TRIED
                if gain > best_gain:
                    best_gain, best_id = gain, job_id
            if best_id is None:
                break
            shares.raise_to(best_id, shares.of(best_id) + 1)
            if best_gain == TRIED and shares.of(best_id) > held.get(best_id, 0):
                trials.begin(best_id, shares.of(best_id))
                shares.notes[best_id] = WHY_TRIED
        for job_id, view in growing.items():
            before, after = held.get(job_id, 0), shares.of(job_id)
            if shares.left and after < before <= most_workers(view) and before in view.learnt.throughput_samples_per_s:
                shares.notes[job_id] = why_fewer(view.learnt.throughput_samples_per_s, before, after)


class _Trials:
    """The trials of jobs on more devices than they gained by, according to their measurements.

    For each such job: when its last trial began, how many trials there were, and the number of devices. The start has
    to be remembered, since nothing else identifies a trial until its workers have joined. A job is forgotten once its
    curve says that more devices are worth having.
    """

    def __init__(self, policy: Elastic, snapshot: Snapshot, curves: Mapping[WorkloadId, ScalingCurve]) -> None:
        self._policy, self._now_s = policy, snapshot.now_s
        self._by_id: dict[WorkloadId, tuple[float, int, int]] = {}
        memory: Any = snapshot.memory
        known = memory["trials"] if isinstance(memory, dict) and memory.get("rule") == RULE else {}
        for view in snapshot.jobs:
            job_id = view.job.job_id
            if job_id not in known:
                continue
            began_s, number, size = known[job_id]
            settled_at_s = (view.changes.resized_at_s or 0.0) + policy.settle_s
            is_over = (view.changes.resized_at_s or 0.0) >= began_s and snapshot.now_s >= settled_at_s
            if not (is_over and curves[job_id].speedup(size) > curves[job_id].speedup(size - 1)):
                self._by_id[job_id] = began_s, number, size

    def begin(self, job_id: WorkloadId, size: int) -> None:
        """Begin a trial of the job on `size` devices."""
        _, number, _ = self._by_id.get(job_id, (0.0, 0, 0))
        self._by_id[job_id] = self._now_s, number + 1, size

    def is_joining(self, view: JobView) -> bool:
        """Whether the workers of its trial have not joined yet. After `retry_s` they are not expected any more."""
        began_s, _, _ = self._by_id.get(view.job.job_id, (-math.inf, 0, 0))
        return (view.changes.resized_at_s or 0.0) < began_s and self._now_s < began_s + self._policy.retry_s

    def is_on(self, view: JobView) -> bool:
        """Whether its last change was the beginning or the end of a trial."""
        began_s, _, _ = self._by_id.get(view.job.job_id, (math.inf, 0, 0))
        return (view.changes.resized_at_s or 0.0) >= began_s

    def is_due(self, view: JobView) -> bool:
        """Whether it is time to try the job on more devices."""
        return view.changes.resized_at_s is not None and self._now_s >= view.changes.resized_at_s + self.wait_s(view)

    def wait_s(self, view: JobView) -> float:
        """How long after its last change the job is tried; each trial without a gain doubles the time."""
        _, number, _ = self._by_id.get(view.job.job_id, (0.0, 0, 0))
        return self._policy.retry_s * float(2 ** min(number, MAX_DOUBLINGS))

    def encode(self) -> Any:
        """As plain values for the journal; None if no job was tried."""
        trials = {str(job_id): list(trial) for job_id, trial in self._by_id.items()}
        return {"rule": RULE, "trials": trials} if trials else None
