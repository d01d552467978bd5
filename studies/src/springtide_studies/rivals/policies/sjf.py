"""Shortest job first: of those that wait, the one with the least time of work left starts next.

The classic rule for short mean completion times (Conway, Maxwell and Miller, Theory of Scheduling, 1967). The time
left is the remaining steps at the profiled speed on the workers the owner asked for. Differences: a job that does not
fit is passed over, so that devices do not idle for a wide job; a job whose length or speed is not known comes after
those that are known, in order of arrival. `preemptive` makes it shortest remaining time first: a running job gives way.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from springtide.core.decision import Plan, Snapshot
from springtide.scheduling.decisions.fingerprint import Fingerprints, Reads
from springtide.scheduling.decisions.recall import State, decide_once, recall_fingerprints, recall_reads
from springtide.scheduling.placement.allocation_ledger import AllocationLedger, serve_demand, serve_minimum
from springtide.scheduling.placement.gangs import devices_text
from springtide_studies.rivals.policies.gangs import Gangs


class ShortestJobFirst(msgspec.Struct, frozen=True, kw_only=True):
    """Services first, by load; then jobs by the time they have left. `preemptive`: also against running ones."""

    preemptive: bool = False

    reads: ClassVar[Reads] = recall_reads(
        "job", "progress.progress_at_s", "state", "progress.step", "learnt.throughput_samples_per_s"
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
        if not self.preemptive:
            gangs.keep(view for view in gangs.views if gangs.holds(view))
        serve_demand(shares)
        # The order of arrival breaks ties: sorting keeps it.
        by_length = sorted(gangs.views, key=gangs.remaining_s)
        gangs.fill(view for view in by_length if not shares.of(view.job.job_id))
        gangs.note_stopped("a shorter job needs the devices")
        gangs.note_waiting(lambda view: f"waits for {devices_text(gangs.size(view))} behind shorter or running jobs")
        return None, {}
