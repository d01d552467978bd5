"""A scheduling policy of your own in twenty lines, played in the simulator against the ones that come along.

python examples/own_policy.py
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
from springtide.scheduling.policies.elastic import Elastic
from springtide.scheduling.policies.fifo import Fifo
from springtide.simulator.simulate import simulate


class ShortestFirst(msgspec.Struct, frozen=True, kw_only=True):
    """The job with the least work left takes all it can use, then the next; services come before jobs."""

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the whole wanted state: the same snapshot always gives the same plan."""
        shares = AllocationLedger(snapshot)
        held = held_counts(snapshot)
        serve_minimum(shares)
        serve_demand(shares)
        for view in sorted(snapshot.jobs, key=steps_left):
            if view.job.elastic:
                count = min(most_workers(view), shares.left)
            else:
                count = held.get(view.job.job_id) or view.bounds.max_workers
            if count >= view.bounds.min_workers:
                shares.raise_to(view.job.job_id, count)
        return shares.plan()


def steps_left(view: JobView) -> float:
    """Optimizer steps to go; a job that has not begun yet counts as short, so that its length is found out."""
    return 0 if view.total_steps is None else view.total_steps - view.progress.step


def main(seed: int = 2) -> None:
    """Play the same drawn jobs under each policy; the simulator checks every step of each run."""
    policies = {"ShortestFirst": ShortestFirst(), "Elastic": Elastic(), "Fifo": Fifo()}
    answer = simulate("generated:60", "4x4", policies, seed=seed)
    print("policy          ended   deadlines met   mean time   all done after")
    for name, row in answer["policies"].items():
        met = f"{row['deadlines_met']} of {row['deadline_jobs']}"
        print(f"{name:15} {row['jobs']:5}   {met:>13}   {row['jct_mean_s']:7.0f} s   {row['makespan_s']:12.0f} s")


if __name__ == "__main__":
    main()
