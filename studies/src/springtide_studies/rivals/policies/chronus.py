"""Chronus: leases for as many deadline jobs as can make it, chosen by a mixed-integer program; best effort between.

Ye et al., "Chronus: A Novel Deadline-aware Scheduler for Deep Learning Training Jobs", SoCC 2021, sections 3 and 4:
time is cut into leases and a job holds its devices for whole leases; at each lease a MILP chooses the largest set of
SLO jobs that can all make their deadlines, without giving up one that was accepted before; best-effort jobs share
what is left, shortest remaining service first. Jobs run on the number of workers they asked for; never resized.
An SLO job that cannot be accepted is not rejected: it runs behind all others, on devices that would be idle.
Differences: the MILP is solved on lease buckets that grow by doubling, with one overhead of a change reserved for each
job that does not run now; where all fit a packing proves that there is nothing to choose. Placement by local search
(4.3) is left to `place`. Devices that come free within a lease start waiting jobs at once. Soft deadlines count as
deadlines. A lease is as long as the operator says; the default, 240 s, is what ElasticFlow's runs used. Its artifact
is the authors' own scheduler with Gurobi for the program, without noise tolerance and resource switching; so is this.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import msgspec

from springtide.core.decision import JobView, Plan, Snapshot
from springtide.core.errors import InvalidRequest
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.fingerprint import Fingerprints, Reads
from springtide.scheduling.decisions.recall import State, decide_once, recall_fingerprints, recall_reads
from springtide.scheduling.placement.allocation_ledger import AllocationLedger, serve_demand, serve_minimum
from springtide.scheduling.placement.gangs import devices_text
from springtide_studies.rivals.policies.gangs import Gangs
from springtide_studies.rivals.solvers.lease_milp import LeaseJob, is_available, plan_leases

_ROUNDING = 1e-9


class Chronus(msgspec.Struct, frozen=True, kw_only=True):
    """Services first, by load; then jobs by lease of `lease_s`.

    At most `max_candidates` SLO jobs, the nearest deadlines first, are considered in one lease; the others wait.
    Raises InvalidRequest if the solver is not installed.
    """

    lease_s: float = 240.0
    max_candidates: int = 400

    def __post_init__(self) -> None:
        if not is_available():
            raise InvalidRequest("the policy chronus needs SciPy's solver: pip install 'springtide[solvers]'")

    reads: ClassVar[Reads] = recall_reads(
        "job", "progress.progress_at_s", "state", "progress.step", "submitted_at_s", "learnt.throughput_samples_per_s"
    )

    def make_derived(self) -> Fingerprints:
        """The fingerprints to keep between two decisions."""
        return recall_fingerprints(repr(self))

    def decide(self, snapshot: Snapshot, derived: Fingerprints | None = None) -> Plan:
        """Return the plan for this snapshot."""
        return decide_once(repr(self), snapshot, self._decide, derived)

    def _decide(self, shares: AllocationLedger, state: State) -> tuple[float | None, dict[str, Any]]:
        gangs = Gangs(shares)
        ends_s = state.get("ends_s")
        accepted = set(state.get("accepted", ()))
        serve_minimum(shares)
        if ends_s is None or gangs.now_s < ends_s:
            gangs.keep(view for view in gangs.views if gangs.holds(view))
            serve_demand(shares)
            first: list[JobView] = []
        else:
            serve_demand(shares)
            first, accepted = self._choose(gangs, accepted)
            ends_s = None
        gangs.fill(first)
        rest = [view for view in gangs.views if not shares.of(view.job.job_id)]
        gangs.fill(sorted(rest, key=lambda view: self._rank(gangs, view, accepted)))
        if not gangs.waiting():
            ends_s = None
        elif ends_s is None:
            ends_s = (math.floor(gangs.now_s / self.lease_s + _ROUNDING) + 1) * self.lease_s
        gangs.note_stopped("its lease is over and others need the devices")
        gangs.note_waiting(lambda view: self._why(gangs, view, accepted))
        still = [view.job.job_id for view in gangs.views if view.job.job_id in accepted]
        return ends_s, {"ends_s": ends_s, "accepted": still}

    def _choose(self, gangs: Gangs, accepted: set[WorkloadId]) -> tuple[list[JobView], set[WorkloadId]]:
        """The SLO jobs that have to run in the lease that begins now, and all that are accepted."""
        candidates = [view for view in gangs.views if self._slack_s(gangs, view) >= 0.0 and gangs.size(view)]
        candidates.sort(
            key=lambda view: (view.job.job_id not in accepted, view.job.goal.deadline_s or 0.0, view.submitted_at_s)
        )
        num_kept = sum(view.job.job_id in accepted for view in candidates)
        candidates = candidates[: max(self.max_candidates, num_kept)]
        if sum(gangs.size(view) for view in gangs.views) <= gangs.shares.left:
            # All jobs run, so each job that can meet its deadline alone does.
            return [], {view.job.job_id for view in candidates}
        plan = plan_leases([self._on_grid(gangs, view, accepted) for view in candidates], gangs.shares.left)
        makes_it = {view.job.job_id for view, makes in zip(candidates, plan.makes_it, strict=True) if makes}
        first = [view for view, runs in zip(candidates, plan.runs_now, strict=True) if runs]
        return first, makes_it

    def _on_grid(self, gangs: Gangs, view: JobView, accepted: set[WorkloadId]) -> LeaseJob:
        """The job in whole leases; the last one may be the lease in which its deadline lies."""
        assert view.job.goal.deadline_s is not None
        need_s, left_s = self._need_s(gangs, view), view.job.goal.deadline_s - gangs.now_s
        num_needed = max(1, math.ceil(need_s / self.lease_s - _ROUNDING))
        num_usable = math.floor(left_s / self.lease_s + _ROUNDING)
        if need_s - (num_needed - 1) * self.lease_s <= left_s - num_usable * self.lease_s:
            num_usable += 1
        return LeaseJob(
            width=gangs.size(view),
            num_needed=num_needed,
            num_usable=num_usable,
            is_accepted=view.job.job_id in accepted,
        )

    def _need_s(self, gangs: Gangs, view: JobView) -> float:
        """Seconds that it needs its devices for, with the overhead of a start if it does not run now."""
        start_s = 0.0 if gangs.holds(view) else gangs.shares.snapshot.overheads.cost_s(max(1, gangs.size(view)))
        return gangs.remaining_s(view) + start_s

    def _slack_s(self, gangs: Gangs, view: JobView) -> float:
        """Seconds that the job could still wait and meet its deadline; -inf without a deadline or a known length."""
        deadline_s = view.job.goal.deadline_s
        if deadline_s is None:
            return -math.inf
        need_s = self._need_s(gangs, view)
        return deadline_s - gangs.now_s - need_s if math.isfinite(need_s) else -math.inf

    def _rank(self, gangs: Gangs, view: JobView, accepted: set[WorkloadId]) -> tuple[int, float, float]:
        """Best effort by remaining service, then deadline jobs that could wait by slack, then those that are lost.

        Jobs not decided on yet count as accepted: the next lease decides.
        """
        slack_s = self._slack_s(gangs, view)
        service_s = gangs.remaining_s(view) * gangs.size(view)
        if view.job.goal.deadline_s is None or not math.isfinite(gangs.remaining_s(view)):
            return (0, service_s, view.submitted_at_s)
        if view.job.job_id in accepted or slack_s >= 0.0:
            return (1, slack_s, view.submitted_at_s)
        return (2, service_s, view.submitted_at_s)

    def _why(self, gangs: Gangs, view: JobView, accepted: set[WorkloadId]) -> str:
        size = gangs.size(view)
        if view.job.goal.deadline_s is None:
            return f"waits for a lease of {devices_text(size)} behind deadlines and shorter jobs"
        if view.job.job_id in accepted:
            return f"waits for a lease of {devices_text(size)}: there is time until its deadline"
        if self._slack_s(gangs, view) >= 0.0:
            return f"waits for the next lease, which decides whether {devices_text(size)} can be promised"
        return f"its deadline cannot be made on {devices_text(size)} any more: it waits for devices that would idle"
