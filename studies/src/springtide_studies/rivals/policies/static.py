"""Static sizes: jobs start in order of arrival on the number of workers they asked for and keep them to the end.

The baseline of a platform without a scheduler worth the name (the static allocations that elastic schedulers are
compared with, as in ElasticFlow §2.2 and Optimus §2.3): never preempted, never resized, no look at deadlines.
Differences: `num_workers` replaces what each owner asked for by one number for all; a job that asked for nothing
gets its minimum, because no more was chosen for it. A job that lost a device gets it back as soon as there is one.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from springtide.core.decision import JobView, Plan, Snapshot
from springtide.core.workload import JobState
from springtide.scheduling.decisions.fingerprint import Fingerprints, Reads
from springtide.scheduling.decisions.recall import State, decide_once, recall_fingerprints, recall_reads
from springtide.scheduling.placement.allocation_ledger import AllocationLedger, serve_demand, serve_minimum
from springtide.scheduling.placement.placing import held_counts
from springtide_studies.rivals.policies.gangs import Gangs


class Static(msgspec.Struct, frozen=True, kw_only=True):
    """`num_workers` is the size of every job, within its bounds; None: what its owner asked for, else its minimum."""

    num_workers: int | None = None

    reads: ClassVar[Reads] = recall_reads("job", "state")

    def make_derived(self) -> Fingerprints:
        """The fingerprints to keep between two decisions."""
        return recall_fingerprints(repr(self))

    def decide(self, snapshot: Snapshot, derived: Fingerprints | None = None) -> Plan:
        """Return the plan for this snapshot."""
        return decide_once(repr(self), snapshot, self._decide, derived)

    def _decide(self, shares: AllocationLedger, state: State) -> tuple[float | None, dict[str, Any]]:
        sizes, held = state.get("sizes", {}), held_counts(shares.snapshot)

        def wanted(view: JobView) -> int:
            """What the job started on; else the one number for all, what its owner asked for, or its minimum."""
            job_id = view.job.job_id
            running = 0 if view.state is JobState.PREEMPTING else held.get(job_id, 0)
            return (
                sizes.get(job_id)
                or running
                or self.num_workers
                or view.job.requested_workers
                or view.bounds.min_workers
            )

        gangs = Gangs(shares, wanted)
        serve_minimum(shares)
        gangs.keep(view for view in gangs.views if gangs.holds(view))
        serve_demand(shares)
        gangs.fill((view for view in gangs.views if not gangs.holds(view)), passes_over=False)
        return None, {"sizes": {v.job.job_id: gangs.size(v) for v in gangs.views if shares.of(v.job.job_id)}}
