"""Earliest deadline first: the job whose deadline is nearest takes all it can use, the others what is left.

Jobs without a deadline come last, in order of arrival. Later deadlines are shrunk or preempted for earlier ones.
(Liu and Layland, 1973; as a GPU-cluster baseline in ElasticFlow §6.1: "as many GPUs as a job can scale out without
decreasing the throughput".) We follow the paper: a job with a profile stops at the fastest number of workers. The
artifact takes up to 64 even where its own table says that this is slower; `caps=False` does as the artifact does.
"""

from __future__ import annotations

import bisect
import math
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

from springtide.core.decision import JobView, Plan, Snapshot
from springtide.perf.curve import curve_of
from springtide.scheduling.decisions.fingerprint import Fingerprints, Reads, of_fields
from springtide.scheduling.decisions.recall import MATERIAL, State, decide_once, recall_fingerprints
from springtide.scheduling.placement.allocation_ledger import (
    AllocationLedger,
    most_workers,
    serve_demand,
    serve_minimum,
)
from springtide.scheduling.placement.placing import held_counts

_READS = replace(
    MATERIAL,
    jobs=(*MATERIAL.jobs, of_fields("back-off", "restarts.starts_at_s")),
    also=("job", "submitted_at_s"),
)


class EarliestDeadlineFirst(msgspec.Struct, frozen=True, kw_only=True):
    """Services first, by load; then jobs by deadline, each up to its maximum.

    `caps`: a job with a profile takes no more than the number of workers it is fastest on, and of fewer only numbers
    that are faster than every smaller one. Without a profile, or without `caps`, it takes whatever there is.
    """

    caps: bool = True

    reads: ClassVar[Reads] = _READS

    def make_derived(self) -> Fingerprints:
        """The fingerprints to keep between two decisions."""
        return recall_fingerprints(repr(self), _READS)

    def decide(self, snapshot: Snapshot, derived: Fingerprints | None = None) -> Plan:
        """Return the plan for this snapshot."""
        return decide_once(repr(self), snapshot, self._decide, derived or self.make_derived())

    def _decide(self, shares: AllocationLedger, state: State) -> tuple[float | None, dict[str, Any]]:
        held, now_s = held_counts(shares.snapshot), shares.snapshot.now_s
        serve_minimum(shares)
        serve_demand(shares)
        waiting_s: list[float] = []
        for view in sorted(shares.snapshot.jobs, key=_deadline_then_arrival):
            if not shares.left:
                break
            num_held = held.get(view.job.job_id, 0)
            if view.restarts.starts_at_s > now_s:
                waiting_s.append(view.restarts.starts_at_s)
                shares.notes[view.job.job_id] = "starts again after a pause"
                continue
            wanted = self._wanted(view, shares.left)
            if not view.job.elastic:
                # It cannot change the number of its workers: it goes on as it is, or starts at its full size.
                wanted = num_held or view.bounds.max_workers
            elif wanted < view.bounds.min_workers:
                # Those that are left after a loss go on.
                wanted = num_held if num_held < view.bounds.min_workers else 0
            shares.raise_to(view.job.job_id, wanted)
        return min(waiting_s, default=None), {}

    def _wanted(self, view: JobView, num_left: int) -> int:
        if not view.job.profile_steps_per_s:
            return min(most_workers(view), num_left)
        curve = curve_of(view)
        if not curve.sizes:
            # Its owner demands more workers than were profiled.
            return min(view.bounds.min_workers, num_left)
        if not self.caps:
            return min(most_workers(view), len(curve.steps_per_s) - 1, num_left)
        index = bisect.bisect_right(curve.sizes, num_left)
        return curve.sizes[index - 1] if index else 0


def _deadline_then_arrival(view: JobView) -> tuple[float, float]:
    deadline_s = view.job.goal.deadline_s
    return (math.inf if deadline_s is None else deadline_s, view.submitted_at_s)
