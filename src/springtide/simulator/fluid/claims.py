"""Checks what plans say about time: each claim is worked out anew from the snapshot and the schedules of the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

from msgspec.structs import replace

from springtide.core.decision import JobView, Plan, PlannedRun, ServiceView, Snapshot, TimeClaim
from springtide.core.events import (
    Event,
    GroupBroken,
    JobEdited,
    MoveRequested,
    NodeLost,
    PauseRequested,
    ReplicaLost,
    ScaleRequested,
    ServiceDeployed,
)
from springtide.core.job_parts import LearntSpeed
from springtide.core.workload import JobState, WorkloadId
from springtide.perf.curve import SpeedCurve, curve_of
from springtide.simulator.fluid.rules import DEADLINE_TOLERANCE_S

# Moments are sums of floats, and a device counts as free a moment after it was needed.
MOMENT_TOLERANCE_S = 0.01
# What a decision leaves free in the end is given by the next one, which comes so long after it.
NEXT_DECISION_S = 1.0
# A change is charged as if the job were changed again within so many seconds (docs/policies/springtide.md).
HORIZON_S = 300.0
# How much is left of a job that ends sooner than this depends on when it reported last.
SHORT_S = 10.0
# Prices are as of the last decision, and speeds that differ by less are no reason for a new one.
PRICE_TOLERANCE = 1.1


class ClaimChecks:
    """Follows one run. `complain` takes the name of an invariant, what is wrong, and the moment.

    `kept_in_time`: the schedule ends by the deadline. `waits_for`: no device is free now for as long as a first replica
    needs one, and the moment is the first at which one is. `given_up`, and any promised job that is planned to end too
    late: since its admission something has happened that a promise excludes. The last is looked at only with
    `keeps_promises`, where speeds are as promises assume. A price of nothing: a device is idle or no job gains.
    """

    def __init__(self, complain: Callable[[str, str, float], object], *, keeps_promises: bool = False) -> None:
        self._complain = complain
        self._keeps_promises = keeps_promises
        self._promised: set[WorkloadId] = set()
        self._excused: set[WorkloadId] = set()

    def note(self, event: Event) -> None:
        """Note what a promise given before this event excludes. Deployments come here without the question whether
        their minimum fits, which the API asks."""
        match event:
            case NodeLost():
                self._excused |= self._promised
            case ServiceDeployed() if event.service.min_replicas:
                self._excused |= self._promised
            case ScaleRequested():
                self._excused |= {event.workload_id} if event.workload_id in self._promised else self._promised
            case ReplicaLost():
                self._excused.add(event.workload_id)
            case GroupBroken() | JobEdited() | PauseRequested() | MoveRequested():
                self._excused.add(event.job_id)

    def check(self, snapshot: Snapshot, plan: Plan) -> None:
        """Check the plan that was made for this snapshot."""
        now_s = snapshot.now_s
        # The schedule of a job on functions is not planned around other jobs.
        jobs = {view.job.job_id: view for view in snapshot.jobs if not view.job.is_on_functions}
        for job_id, claim in plan.claims.items():
            if claim.code == "kept_in_time" and job_id in jobs:
                self._check_kept(jobs[job_id], claim, plan, now_s)
        if self._keeps_promises:
            for view in jobs.values():
                self._check_promise(view, plan, now_s)
        waiting = [view for view in snapshot.services if _is_waiting(view, plan.claims)]
        if not snapshot.drains and not snapshot.capacity:
            if waiting:
                self._check_waits(waiting, snapshot, plan)
            # A price is true of the decision that it was made in: the memory is another one after that.
            is_new = plan.memory is None or plan.memory != snapshot.memory
            if is_new and plan.price_s == 0.0 and not _num_idle(snapshot, plan):
                for view in jobs.values():
                    self._check_worthless(view, plan, snapshot)

    def _check_kept(self, view: JobView, claim: TimeClaim, plan: Plan, now_s: float) -> None:
        job, runs = view.job, plan.future.get(view.job.job_id, ())
        end_s = runs[-1].end_s if runs else None
        deadline_s = job.goal.deadline_s
        is_kept = end_s is not None and deadline_s is not None and end_s <= deadline_s + DEADLINE_TOLERANCE_S
        if not is_kept or claim.at_s != end_s:
            self._complain(
                "reason-true",
                f"{job.job_id} is said to be in time, {claim}, and ends at {end_s} of {deadline_s}",
                now_s,
            )

    def _check_promise(self, view: JobView, plan: Plan, now_s: float) -> None:
        job_id, deadline_s = view.job.job_id, view.job.goal.deadline_s
        if view.promise.admitted_at_s is None or deadline_s is None or not view.job.goal.is_hard:
            self._promised.discard(job_id)
            self._excused.discard(job_id)
            return
        self._promised.add(job_id)
        runs, claim = plan.future.get(job_id, ()), plan.claims.get(job_id)
        is_late = bool(runs) and runs[-1].end_s > deadline_s + DEADLINE_TOLERANCE_S
        is_told = claim is not None and claim.code == "given_up"
        if is_late and not is_told:
            self._complain(
                "promise-told", f"{job_id} is planned to miss its promised deadline, which is not said", now_s
            )
        if (is_late or is_told) and job_id not in self._excused:
            why = plan.reasons.get(job_id, "no reason")
            self._complain("promise-excused", f"{job_id} loses its promise for nothing that it excludes: {why}", now_s)

    def _check_worthless(self, view: JobView, plan: Plan, snapshot: Snapshot) -> None:
        """Devices are said to be worth nothing more: this job gains by no size above the one that it gets."""
        job, curve = view.job, curve_of(view)
        given, held = plan.allocations.get(job.job_id), snapshot.allocations.get(job.job_id)
        before, after = (0 if each is None else each.num_devices for each in (held, given))
        # One with a deadline may start later by its plan, and one that cannot be resized has what it holds.
        is_bound = (after == 0 and job.goal.deadline_s is not None) or (before > 0 and not job.elastic)
        is_other = job.batch is not None or job.share is not None or view.restarts.starts_at_s > snapshot.now_s
        # What a change that is under way will cost yet is not in the snapshot.
        is_changing = before not in (0, after)
        if is_bound or is_other or is_changing or view.total_steps is None or curve.source != "profile":
            return
        # A policy may doubt what was measured: the job has to gain by the profile alone, too.
        for believed in (curve, curve_of(replace(view, learnt=LearntSpeed()))):
            best = _best_size(view, plan, snapshot, believed)
            if best == after:
                return
        detail = f"a device is said to be worth nothing, and {job.job_id} gains by {best} in place of {after}"
        self._complain("reason-true", detail, snapshot.now_s)

    def _check_waits(self, waiting: list[ServiceView], snapshot: Snapshot, plan: Plan) -> None:
        """The waiting services in order: the first needs one free device, the second two."""
        services = {view.service.service_id for view in snapshot.services}
        sharers = [a for a in chain(snapshot.allocations.values(), plan.allocations.values()) if a.share is not None]
        serving = [a for who, a in plan.allocations.items() if who in services and a.share is None]
        taken = {device_id for allocation in (*sharers, *serving) for device_id in allocation.device_ids}
        num_left = len(snapshot.cluster.machines.device_set - taken)
        runs = list(chain.from_iterable(plan.future.values()))
        for number, view in enumerate(waiting, start=1):
            claim = plan.claims[view.service.service_id]
            span_s = 2.0 * view.service.grace_s
            free_at_s = _first_free_s(runs, num_left - number, span_s, snapshot.now_s)
            next_s = snapshot.now_s + NEXT_DECISION_S
            expected = None if num_left < number else max(free_at_s, next_s)
            is_right = (claim.at_s is None) == (expected is None) and (
                claim.at_s is None
                or expected is None
                or abs(claim.at_s - expected) <= MOMENT_TOLERANCE_S
                # Said by the decision before this one, which is taken anew then.
                or free_at_s <= claim.at_s <= next_s
            )
            if not is_right:
                detail = f"{view.service.service_id} is said to wait, {claim}, and a device is free at {expected}"
                self._complain("reason-true", detail, snapshot.now_s)


def _best_size(view: JobView, plan: Plan, snapshot: Snapshot, curve: SpeedCurve) -> int:
    """The size by which the job gains most in place of the one that it gets; that one if it gains by none for sure."""
    job_id = view.job.job_id
    given, held = plan.allocations.get(job_id), snapshot.allocations.get(job_id)
    before, after = (0 if each is None else each.num_devices for each in (held, given))
    assert view.total_steps is not None
    since_s = snapshot.now_s - view.progress.progress_at_s if before and view.state is JobState.RUNNING else 0.0
    left = max(1.0, view.total_steps - view.progress.step - since_s * curve.rate(before))
    if runs := plan.future.get(job_id):
        # What is left of it by its schedule, which it may be behind.
        left = min(left, (runs[-1].end_s - snapshot.now_s) * curve.rate(runs[-1].num_devices))
    if after and left < SHORT_S * curve.rate(after):
        return after

    def worth(size: int) -> float:
        seconds = left / curve.rate(size)
        reach_s = min(seconds, HORIZON_S)
        lost_s = snapshot.overheads.cost_s(size) if before and size != before else 0.0
        return reach_s / (reach_s + lost_s) / seconds

    sizes = [n for n in curve.doubling_sizes if after < n <= len(snapshot.cluster.device_ids())]
    best = max(sizes, key=worth, default=after)
    return best if not after or worth(best) > PRICE_TOLERANCE * worth(after) else after


def _num_idle(snapshot: Snapshot, plan: Plan) -> int:
    taken = {device_id for allocation in plan.allocations.values() for device_id in allocation.device_ids}
    return len(snapshot.cluster.machines.device_set - taken)


def _is_waiting(view: ServiceView, claims: Mapping[WorkloadId, TimeClaim]) -> bool:
    claim = claims.get(view.service.service_id)
    return claim is not None and claim.code == "waits_for" and view.service.share is None


def _first_free_s(runs: list[PlannedRun], most_used: int, span_s: float, now_s: float) -> float:
    """The first moment from which the runs use no more than `most_used` devices for `span_s`."""
    for from_s in sorted({now_s, *(run.end_s for run in runs if run.end_s > now_s)}):
        inside = [run for run in runs if run.end_s > from_s and run.start_s < from_s + span_s]
        moments = {max(run.start_s, from_s) for run in inside}
        if all(sum(r.num_devices for r in inside if r.start_s <= at_s < r.end_s) <= most_used for at_s in moments):
            return from_s
    return now_s
