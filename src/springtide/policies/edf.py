"""Earliest deadline first: the job whose deadline is nearest takes all it can use, the others what is left.

Jobs without a deadline come last, in order of arrival. Later deadlines are shrunk or preempted for earlier ones.
(Liu and Layland, 1973; as a GPU-cluster baseline in ElasticFlow §6.)
"""

from __future__ import annotations

import math

import msgspec

from springtide.core.decision import JobView, Plan, Snapshot
from springtide.policies.placement import held_counts
from springtide.policies.shares import Shares, most_workers, serve_demand, serve_minimum


class EarliestDeadlineFirst(msgspec.Struct, frozen=True, kw_only=True):
    """Services first, by load; then jobs by deadline, each up to its maximum."""

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        shares = Shares(snapshot)
        held = held_counts(snapshot)
        serve_minimum(shares)
        serve_demand(shares)
        for view in sorted(snapshot.jobs, key=_deadline_then_arrival):
            wanted = min(most_workers(view), shares.left)
            if not view.job.elastic:
                # Its processes cannot change their number: it goes on as it is, or starts at its full size.
                wanted = held.get(view.job.job_id) or view.max_workers
            if wanted >= view.min_workers:
                shares.raise_to(view.job.job_id, wanted)
        return shares.plan()


def _deadline_then_arrival(view: JobView) -> tuple[float, float]:
    deadline_s = view.job.goal.deadline_s
    return (math.inf if deadline_s is None else deadline_s, view.submitted_at_s)
