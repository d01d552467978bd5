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
from springtide_studies.fault_seeds.seeds import run_seed


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
                count = held.get(view.job.job_id) or view.max_workers
            if count >= view.min_workers:
                shares.raise_to(view.job.job_id, count)
        return shares.plan()


def steps_left(view: JobView) -> float:
    """Optimizer steps to go; a job that has not begun yet counts as short, so that its length is found out."""
    return 0 if view.total_steps is None else view.total_steps - view.step


def main(seed: int = 2) -> None:
    """Play the same seeded workload, without faults, under each policy; every invariant is checked on the way."""
    print("policy          all ended after   decisions   how the jobs ended")
    for policy in (ShortestFirst, Elastic, Fifo):
        result = run_seed(seed, policy, num_faults=0)
        assert not result.violation, f"{result.violation}\n{result.detail}"
        states = sorted(result.ends.values())
        ends = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        print(f"{policy.__name__:15} {result.virtual_s:12.1f} s   {result.num_steps:9}   {ends}")


if __name__ == "__main__":
    main()
