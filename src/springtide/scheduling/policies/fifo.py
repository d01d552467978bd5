"""First in, first out: jobs in order of arrival, each with all the workers it asked for, none overtakes another.

The baseline of every comparison. A running job is never resized; the head of the queue blocks those behind it.
"""

from __future__ import annotations

import msgspec

from springtide.core.decision import JobView, Plan, Snapshot
from springtide.scheduling.placement.allocation_ledger import (
    AllocationLedger,
    most_workers,
    serve_demand,
    serve_minimum,
)
from springtide.scheduling.placement.placing import held_counts


class Fifo(msgspec.Struct, frozen=True, kw_only=True):
    """Services first, by load; then jobs in arrival order at the size their owner asked for, else at their full size.

    Both are clipped to the cluster.
    """

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        shares = AllocationLedger(snapshot)
        total = shares.left
        held = held_counts(snapshot)
        serve_minimum(shares)
        running = [view for view in snapshot.jobs if held.get(view.job.job_id)]
        for view in running:
            if not shares.raise_to(view.job.job_id, _size(view, total)):
                shares.raise_to(view.job.job_id, held[view.job.job_id])
        serve_demand(shares)
        for view in snapshot.jobs:
            if shares.of(view.job.job_id):
                continue
            if not shares.raise_to(view.job.job_id, _size(view, total)):
                break
        return shares.plan()


def _size(view: JobView, total: int) -> int:
    most = most_workers(view)
    if view.job.elastic and view.job.requested_workers is not None:
        most = min(most, view.job.requested_workers)
    return max(view.bounds.min_workers, min(most, total))
