"""Tiresias: jobs that have had little so far go first, in a few queues (discretized two-dimensional LAS).

Gu et al., "Tiresias: A GPU Cluster Manager for Distributed Deep Learning", NSDI 2019, sections 3.2 and 3.3: a job's
priority is its attained service, devices times seconds; queues separated by thresholds; within a queue first started,
first served, so that only a higher queue preempts; a job that has waited `promotion_factor` times as long as it ran
goes back to the first queue (their PROMOTEKNOB). With the distribution of service of earlier jobs a queue is ordered
by the Gittins index (section 3.2.2). Jobs run on the number of workers they asked for and are never resized.
Differences: the placement by tensor skew (3.4) is not modelled, `place` packs every job. A job moves to its next queue
at the moment it crosses the threshold, not at the next round of a fixed length. ElasticFlow's artifact is Tiresias-L
with thresholds at 3,250 and 7,200 device-seconds and no promotion; we follow the paper's two queues with the first of
these thresholds, and promotion is off as there.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from springtide.core.decision import JobView, Plan, Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.fingerprint import Fingerprints, Reads
from springtide.scheduling.decisions.recall import State, decide_once, recall_fingerprints, recall_reads
from springtide.scheduling.placement.allocation_ledger import AllocationLedger, serve_demand, serve_minimum
from springtide.scheduling.placement.gangs import devices_text
from springtide_studies.rivals.policies.gangs import Gangs

# The policy decides so long after a crossing, so that a rounded time is never just before it.
_AFTER_S = 0.001


class Tiresias(msgspec.Struct, frozen=True, kw_only=True):
    """Services first, by load; then jobs queue by queue.

    `thresholds_s` (device-seconds, ascending) separate the queues. `promotion_factor` 0 promotes no job.
    `history_device_s`, if given, is the service that earlier jobs needed until they ended: Gittins instead of LAS.
    """

    thresholds_s: tuple[float, ...] = (3250.0,)
    promotion_factor: float = 0.0
    history_device_s: tuple[float, ...] = ()

    reads: ClassVar[Reads] = recall_reads(
        "job", "num_replicas", "service_offset_s", "started_at_s", "state", "submitted_at_s"
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
        serve_demand(shares)
        history = sorted(self.history_device_s)
        since, forgiven = self._promote(gangs, state)
        attained = {
            view.job.job_id: view.attained_service_s(gangs.now_s) - forgiven.get(view.job.job_id, 0.0)
            for view in gangs.views
        }

        def order(view: JobView) -> tuple[int, float, float, float]:
            service_s = attained[view.job.job_id]
            queue = bisect.bisect_right(self.thresholds_s, service_s)
            index = gittins_index(history, service_s, self._quantum_s(queue)) if history else 0.0
            # First started, first served: a job that has never run cannot stop a running one of the same queue.
            started_s = math.inf if view.started_at_s is None else view.started_at_s
            return (queue, -index, started_s, view.submitted_at_s)

        gangs.fill(sorted(gangs.views, key=order))
        gangs.note_stopped("jobs that have had less so far need the devices")
        gangs.note_waiting(
            lambda view: (
                f"waits for {devices_text(gangs.size(view))} in queue "
                f"{order(view)[0] + 1} of {len(self.thresholds_s) + 1}"
            )
        )
        remembered: dict[str, Any] = {"forgiven": forgiven, "since": since} if self.promotion_factor else {}
        return self._next_moment_s(gangs, attained, since), remembered

    def _quantum_s(self, queue: int) -> float:
        """The service between two thresholds; in the last queue, as much as all queues before it together."""
        edges = (0.0, *self.thresholds_s)
        if queue < len(self.thresholds_s):
            return edges[queue + 1] - edges[queue]
        return edges[-1] or 1.0

    def _promote(self, gangs: Gangs, state: State) -> tuple[dict[WorkloadId, float], dict[WorkloadId, float]]:
        """Since when each started job has been stopped, and how much service of each promoted one does not count."""
        if not self.promotion_factor:
            return {}, {}
        was_since, was_forgiven = state.get("since", {}), state.get("forgiven", {})
        since: dict[WorkloadId, float] = {}
        forgiven: dict[WorkloadId, float] = {}
        for view in gangs.views:
            job_id = view.job.job_id
            if job_id in was_forgiven:
                forgiven[job_id] = was_forgiven[job_id]
            if view.started_at_s is None or gangs.holds(view):
                continue
            since[job_id] = was_since.get(job_id, gangs.now_s)
            if gangs.now_s >= self._promotion_at_s(gangs, view, since, forgiven):
                forgiven[job_id] = view.attained_service_s(gangs.now_s)
                since[job_id] = gangs.now_s
        return since, forgiven

    def _promotion_at_s(
        self, gangs: Gangs, view: JobView, since: dict[WorkloadId, float], forgiven: dict[WorkloadId, float]
    ) -> float:
        attained_s = view.attained_service_s(gangs.now_s) - forgiven.get(view.job.job_id, 0.0)
        if attained_s <= 0.0:
            # It is in the first queue already.
            return math.inf
        executed_s = attained_s / max(1, gangs.size(view))
        return since[view.job.job_id] + max(_AFTER_S, self.promotion_factor * executed_s)

    def _next_moment_s(
        self, gangs: Gangs, attained: dict[WorkloadId, float], since: dict[WorkloadId, float]
    ) -> float | None:
        """When the first running job enters a lower queue or a waiting one is promoted; None if no job waits."""
        waiting = gangs.waiting()
        if not waiting:
            return None
        moments = []
        for view in gangs.views:
            count, service_s = gangs.shares.of(view.job.job_id), attained[view.job.job_id]
            queue = bisect.bisect_right(self.thresholds_s, service_s)
            if count and queue < len(self.thresholds_s):
                moments.append(gangs.now_s + (self.thresholds_s[queue] - service_s) / count + _AFTER_S)
        if self.promotion_factor:
            # A job that is stopped now waits from now on.
            for view in waiting:
                if view.started_at_s is not None:
                    since.setdefault(view.job.job_id, gangs.now_s)
                    forgiven = {view.job.job_id: view.attained_service_s(gangs.now_s) - attained[view.job.job_id]}
                    moments.append(self._promotion_at_s(gangs, view, since, forgiven) + _AFTER_S)
        moment_s = min(moments, default=math.inf)
        return moment_s if moment_s < math.inf else None


def gittins_index(history_device_s: Sequence[float], attained_s: float, quantum_s: float) -> float:
    """The Gittins index of a job with this attained service (Tiresias, section 3.2.2, equation of G).

    The chance that it ends within the next `quantum_s` of service, divided by the service that it is expected to take
    of them, by the earlier jobs (ascending) that needed more than it has had; 0 if none did.
    """
    longer = history_device_s[bisect.bisect_right(history_device_s, attained_s) :]
    if not longer:
        return 0.0
    num_ended = bisect.bisect_right(longer, attained_s + quantum_s)
    expected_s = sum(need - attained_s for need in longer[:num_ended]) + quantum_s * (len(longer) - num_ended)
    return num_ended / expected_s
