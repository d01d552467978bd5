"""Gandiva: all jobs run at once; where that does not fit, jobs take turns of a minute (introspective time-slicing).

Xiao et al., "Gandiva: Introspective Cluster Scheduling for Deep Learning", OSDI 2018, sections 3.1, 3.3 and 4: a job
starts at once if devices are idle; an over-subscribed cluster suspends and resumes jobs round robin every quantum, so
that each gets early feedback and a fair share of time; idle devices are lent to jobs that can use them and taken back
when another job comes (grow-shrink, section 3.4). No deadlines; jobs run on the number of workers they asked for.
Differences: two jobs are not packed on one device (3.2), because a device has one holder here; jobs are not migrated
to better nodes (3.3), because `place` packs at each start and nothing here runs faster for being moved; turns are
taken over the whole cluster, not within groups of servers of one job size. Grow-shrink is off unless `grows`, as in
ElasticFlow §6.1 ("not elastic"). ElasticFlow's artifact time-slices within such groups while other servers are idle
and charges its largest overhead at every event; we follow the paper, where over-subscription is the last resort.
"""

from __future__ import annotations

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


class Gandiva(msgspec.Struct, frozen=True, kw_only=True):
    """Services first, by load; then all jobs, in turns of `quantum_s` (the paper's minute) if they do not fit.

    `grows` lends idle devices to elastic jobs, in order of arrival, up to the number they are fastest on.
    """

    quantum_s: float = 60.0
    grows: bool = False

    reads: ClassVar[Reads] = recall_reads("job", "state")

    def make_derived(self) -> Fingerprints:
        """The fingerprints to keep between two decisions."""
        return recall_fingerprints(repr(self))

    def decide(self, snapshot: Snapshot, derived: Fingerprints | None = None) -> Plan:
        """Return the plan for this snapshot."""
        return decide_once(repr(self), snapshot, self._decide, derived)

    def _decide(self, shares: AllocationLedger, state: State) -> tuple[float | None, dict[str, Any]]:
        gangs = Gangs(shares)
        serve_minimum(shares)
        serve_demand(shares)
        if sum(gangs.size(view) for view in gangs.views) <= shares.left:
            gangs.fill(gangs.views)
            if self.grows:
                _grow(gangs)
            return None, {}
        queue = _queue(gangs.views, state.get("queue", ()))
        ends_at_s = state.get("ends_at_s")
        running = [view for view in queue if gangs.holds(view)]
        others = [view for view in queue if not gangs.holds(view)]
        if ends_at_s is None or gangs.now_s < ends_at_s:
            # Within a turn no job is stopped, and devices that become free are used at once.
            gangs.keep(running)
            gangs.fill(others)
        else:
            # The turn is over: jobs that ran go to the back of the queue, and those at its front start first.
            queue = [*others, *running]
            gangs.fill(queue)
            ends_at_s = None
        if not gangs.waiting():
            return None, {}
        gangs.note_stopped("its turn is over")
        gangs.note_waiting(lambda view: f"waits for its turn on {devices_text(gangs.size(view))}")
        ends_at_s = gangs.now_s + self.quantum_s if ends_at_s is None else ends_at_s
        return ends_at_s, {"queue": [view.job.job_id for view in queue], "ends_at_s": ends_at_s}


def _queue(views: Sequence[JobView], remembered: Sequence[str]) -> list[JobView]:
    """The round-robin queue: jobs in it keep their places, new ones join at the back in order of arrival."""
    by_id = {view.job.job_id: view for view in views}
    known = [by_id.pop(job_id) for job_id in map(WorkloadId, remembered) if job_id in by_id]
    return [*known, *by_id.values()]


def _grow(gangs: Gangs) -> None:
    for view in gangs.views:
        if not gangs.shares.left:
            return
        if view.job.elastic and gangs.shares.of(view.job.job_id):
            sizes = [
                size for size in curve_of(view).sizes if size <= gangs.shares.of(view.job.job_id) + gangs.shares.left
            ]
            if sizes:
                gangs.shares.raise_to(view.job.job_id, sizes[-1])
