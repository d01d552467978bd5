"""Themis: devices are lent for a lease and auctioned among the jobs that sharing has slowed down most.

Mahajan et al., "Themis: Fair and Efficient GPU Cluster Scheduling", NSDI 2020, sections 3 and 4: the metric is
finish-time fairness, rho = T_shared / T_ideal, the time from arrival to finish over the time on a private share of
1/N of the cluster. Whenever leases run out, the devices are offered to the fraction 1 - f of jobs that are worst off;
among these the auction maximises the product of valuations 1/rho; what is left goes to the others.
Jobs run on the number of workers they asked for. No deadlines.
Differences: bids are computed here from the profile, so that honesty is not at issue and the hidden payments of the
partial allocation mechanism are left out. A bid is for all the workers of a job or none, so the product is maximised
greedily by gain per device; the loser's finish is one lease later. Leftovers go to the worst off, where the paper draws
lots. N is the number of jobs now, where the paper averages over the job's life. Placement does not enter the bids.
ElasticFlow's artifact runs Gavel's heterogeneous max-min linear program of rho under this name, without any overhead;
we follow the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from springtide.core.decision import JobView, Plan, Snapshot
from springtide.core.workload import WorkloadId
from springtide.perf.curve import curve_of
from springtide.scheduling.decisions.fingerprint import Fingerprints, Reads
from springtide.scheduling.decisions.recall import State, decide_once, recall_fingerprints, recall_reads
from springtide.scheduling.placement.allocation_ledger import AllocationLedger, serve_demand, serve_minimum
from springtide.scheduling.placement.gangs import devices_text
from springtide_studies.rivals.policies.gangs import Gangs


class Themis(msgspec.Struct, frozen=True, kw_only=True):
    """Services first, by load; then jobs by auction.

    `lease_s` is how long devices are lent, `fairness_fraction` the paper's f: its defaults are the paper's.
    """

    lease_s: float = 1200.0
    fairness_fraction: float = 0.8

    reads: ClassVar[Reads] = recall_reads(
        "job",
        "num_replicas",
        "progress.progress_at_s",
        "service_offset_s",
        "state",
        "progress.step",
        "submitted_at_s",
        "learnt.throughput_samples_per_s",
    )

    def make_derived(self) -> Fingerprints:
        """The fingerprints to keep between two decisions."""
        return recall_fingerprints(repr(self))

    def decide(self, snapshot: Snapshot, derived: Fingerprints | None = None) -> Plan:
        """Return the plan for this snapshot."""
        return decide_once(repr(self), snapshot, self._decide, derived)

    def _decide(self, shares: AllocationLedger, state: State) -> tuple[float | None, dict[str, Any]]:
        gangs = Gangs(shares)
        serve_minimum(shares)
        leases: dict[str, float] = state.get("leases", {})
        lent = [v for v in gangs.views if gangs.holds(v) and leases.get(v.job.job_id, -math.inf) > gangs.now_s]
        gangs.keep(lent)
        serve_demand(shares)
        rho = {view.job.job_id: self.unfairness(gangs, view) for view in gangs.views}
        bidders = [view for view in gangs.views if not shares.of(view.job.job_id) and gangs.size(view)]
        # Among equals, the job that holds devices keeps them: renewing a lease costs nothing.
        bidders.sort(key=lambda view: (-rho[view.job.job_id], not gangs.holds(view), view.submitted_at_s))
        num_offered = math.ceil(len(bidders) * (1.0 - self.fairness_fraction) - 1e-9)
        gangs.fill(self._by_bid(gangs, bidders[:num_offered]))
        gangs.fill(view for view in bidders if not shares.of(view.job.job_id))
        kept = {view.job.job_id: leases[view.job.job_id] for view in lent if shares.of(view.job.job_id)}
        until_s = {
            str(view.job.job_id): kept.get(view.job.job_id, gangs.now_s + self.lease_s)
            for view in gangs.views
            if shares.of(view.job.job_id)
        }
        gangs.note_stopped("its lease is over and others are worse off")
        gangs.note_waiting(lambda view: f"waits for a lease of {devices_text(gangs.size(view))}: others are worse off")
        return (min(until_s.values(), default=None) if gangs.waiting() else None), {"leases": until_s}

    def unfairness(self, gangs: Gangs, view: JobView) -> float:
        """rho of a job if it got its devices now (section 3.1).

        If its length or speed is not known: the time since its arrival divided by the time that it ran.
        """
        size = max(1, gangs.size(view))
        elapsed_s = gangs.now_s - view.submitted_at_s
        left_s = gangs.remaining_s(view)
        if not math.isfinite(left_s) or view.total_steps is None:
            return elapsed_s / max(view.attained_service_s(gangs.now_s) / size, self.lease_s)
        alone_s = max(view.total_steps / curve_of(view).rate(size), 1e-9)
        # On 1/N of the cluster, a job that asked for more devices would run on fewer workers.
        slowdown = max(1.0, size * len(gangs.views) / max(1, gangs.total))
        return (elapsed_s + left_s) / (alone_s * slowdown)

    def _by_bid(self, gangs: Gangs, bidders: Sequence[JobView]) -> list[JobView]:
        """The bidders by what a device adds to the logarithm of the product of all valuations (section 4.1)."""

        def gain(view: JobView) -> tuple[float, float, WorkloadId]:
            left_s = gangs.remaining_s(view)
            shared_s = gangs.now_s - view.submitted_at_s + (left_s if math.isfinite(left_s) else self.lease_s)
            log_gain = math.log1p(self.lease_s / max(shared_s, 1e-9))
            return (-log_gain / max(1, gangs.size(view)), view.submitted_at_s, view.job.job_id)

        return sorted(bidders, key=gain)
