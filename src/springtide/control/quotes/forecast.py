"""Forecasts of what a policy will do: it is asked turn by turn while the jobs progress along their speed curves."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from springtide.control.parts import guaranteed_curve
from springtide.control.quotes.pools_forecast import PoolForecast
from springtide.core.decision import (
    EMPTY,
    Allocation,
    FunctionAllocation,
    JobView,
    Plan,
    PlannedRun,
    Policy,
    PoolAllocation,
    Schedule,
    Snapshot,
)
from springtide.core.functions import FunctionPlan
from springtide.core.resources import DeviceId
from springtide.core.shares import Share, has_room, load_of
from springtide.core.workload import JobState, WorkloadId
from springtide.perf.curve import SpeedCurve
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.functions.ask import entry_of, pace_of
from springtide.scheduling.functions.settled import settled

# After this many turns the last plan is assumed to stay in force.
MAX_TURNS = 600
# A policy that asks to be revisited at short intervals is revisited only after this fraction of the forecast time so
# far: the further ahead, the less the exact time matters.
LEAST_LOOK_FRACTION = 0.01
_SHORTEST_TURN_S = 1e-3
# The cost of a turn grows with the number of open jobs, so that their product is bounded.
_JOB_TURNS = 30_000
_FEWEST_TURNS = 50
_NOTHING = PoolAllocation(device_ids=())


class PlanForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The schedule of each workload from the snapshot's instant on, and when it ends (absolute seconds).

    A job of unknown length or speed keeps the devices that it gets and never ends.
    """

    schedules: Mapping[WorkloadId, Schedule] = EMPTY
    finishes_s: Mapping[WorkloadId, float] = EMPTY
    refusals: Mapping[WorkloadId, str] = EMPTY


def roll_forward(
    snapshot: Snapshot, policy: Policy, *, until: WorkloadId | None = None, max_turns: int | None = None
) -> PlanForecast:
    """Ask `policy` from the snapshot on, turn by turn, until every job (or the job `until`) has ended.

    Changes take effect at once and cost what `snapshot.overheads` says; no job arrives and no device is lost. A job on
    shares of devices runs at its guaranteed speed. Services keep their load; in a cluster with pools they need what the
    tide is forecast to be (see `PoolForecast`). After `max_turns` (by default fewer, the more jobs there are) all jobs
    go on unchanged.
    """
    turns = min(MAX_TURNS, max(_FEWEST_TURNS, _JOB_TURNS // max(1, len(snapshot.jobs))))
    return _ForecastRun(snapshot, policy, until).run(turns if max_turns is None else max_turns)


def after_one_turn(snapshot: Snapshot, policy: Policy) -> Snapshot:
    """The snapshot after the policy's plan for it has taken effect."""
    run = _ForecastRun(snapshot, policy, None)
    return run.one_turn()


def while_changing(snapshot: Snapshot, policy: Policy) -> Snapshot:
    """The snapshot right after the policy's plan for it was decided: devices that are to be released are still held.

    Free devices are granted at once: to a running workload as many as are free, to a starting one only if all are.
    """
    plan = policy.decide(snapshot)
    held = dict(snapshot.allocations)
    on: dict[DeviceId, list[Share | None]] = {}
    for given in held.values():
        for device in given.device_ids:
            on.setdefault(device, []).append(given.share)
    memory_of = snapshot.cluster.memory_of
    for workload_id, wanted in plan.allocations.items():
        current = held.get(workload_id, _NOTHING)
        free = tuple(
            device
            for device in wanted.device_ids
            if device not in current.device_ids
            and has_room(load_of(on.get(device, ())), wanted.share, memory_of.get(device, 0))
        )
        if free and (current.num_devices or len(free) == wanted.num_devices):
            held[workload_id] = replace(wanted, device_ids=(*current.device_ids, *free))
            for device in free:
                on.setdefault(device, []).append(wanted.share)
    views = [
        replace(
            view,
            promise=replace(
                view.promise, admitted_at_s=snapshot.now_s, promised_finish_s=plan.admitted[view.job.job_id]
            ),
        )
        if view.promise.admitted_at_s is None and view.job.job_id in plan.admitted
        else view
        for view in snapshot.jobs
        if view.job.job_id not in plan.rejected
    ]
    views = [
        replace(view, num_replicas=held[view.job.job_id].num_devices, state=JobState.STARTING)
        if view.job.job_id in held and view.job.job_id not in snapshot.allocations
        else view
        for view in views
    ]
    return replace(snapshot, jobs=tuple(views), allocations=held, memory=plan.memory)


class _ForecastRun:
    """The state of one forecast: how far each open job is, what it holds, and from when on it makes progress."""

    def __init__(self, snapshot: Snapshot, policy: Policy, until: WorkloadId | None) -> None:
        snapshot = settled(snapshot)
        self._decisions = DecisionCache(policy)
        self._until = until
        self._began_s = snapshot.now_s
        self._now_s = snapshot.now_s
        self._snapshot = snapshot
        self._pools = PoolForecast(snapshot)
        self._is_relabelled = False
        self._views: dict[WorkloadId, JobView] = {view.job.job_id: view for view in snapshot.jobs}
        self._curves = {job_id: guaranteed_curve(view) for job_id, view in self._views.items()}
        self._held: dict[WorkloadId, Allocation] = dict(snapshot.allocations)
        self._memory = snapshot.memory
        self._used_before = {frozenset(held.device_ids) for held in snapshot.allocations.values()}
        # In steps. Jobs have gone on since they last reported.
        self._done = {job_id: self._done_by_now(view) for job_id, view in self._views.items()}
        self._busy_until_s: dict[WorkloadId, float] = {}
        self._runs: dict[WorkloadId, list[PlannedRun]] = {}
        self._finishes_s: dict[WorkloadId, float] = {}
        self._refusals: dict[WorkloadId, str] = {}

    def run(self, max_turns: int) -> PlanForecast:
        for _ in range(max_turns):
            self._remove_finished()
            if not self._views or (self._until is not None and self._until not in self._views):
                break
            plan = self._decisions.decide(self._as_snapshot())
            self._apply(plan)
            next_s = self._next_moment(plan)
            if next_s is None:
                break
            self._advance(next_s)
        else:
            self._finish_unchanged()
        return PlanForecast(
            schedules={job_id: tuple(runs) for job_id, runs in self._runs.items()},
            finishes_s=self._finishes_s,
            refusals=self._refusals,
        )

    def one_turn(self) -> Snapshot:
        self._apply(self._decisions.decide(self._as_snapshot()))
        return self._as_snapshot()

    def _done_by_now(self, view: JobView) -> float:
        held = self._held.get(view.job.job_id)
        curve = self._curves[view.job.job_id]
        if held is None:
            # Without devices, the job goes on from its last checkpoint.
            return float(view.checkpoint.step if view.checkpoint is not None else 0)
        if view.state is not JobState.RUNNING or curve.source == "guess":
            return float(view.progress.step)
        gone_s = max(0.0, self._now_s - view.progress.progress_at_s)
        return view.progress.step + _rate(view, curve, held) * gone_s

    def _as_snapshot(self) -> Snapshot:
        return replace(
            self._pools.at(self._snapshot, self._now_s, self._held),
            now_s=self._now_s,
            jobs=tuple(self._views.values()),
            allocations=dict(self._held),
            memory=self._memory,
        )

    def _apply(self, plan: Plan) -> None:
        """Let the plan take effect at once."""
        self._memory = plan.memory
        for job_id, refusal in plan.rejected.items():
            if self._views.pop(job_id, None) is not None:
                self._refusals[job_id] = refusal.reason
                self._held.pop(job_id, None)
        for job_id, view in list(self._views.items()):
            wanted = plan.allocations.get(job_id, _NOTHING)
            before = self._held.get(job_id, _NOTHING)
            if view.restarts.starts_at_s > self._now_s and not before.num_devices:
                wanted = _NOTHING
            if wanted.device_ids != before.device_ids or _functions(wanted) != _functions(before):
                self._grant(job_id, wanted)
            elif wanted.share != before.share:
                # A change of share takes effect in place, without a pause.
                self._held[job_id] = wanted
            finish_s = plan.admitted.get(job_id)
            if finish_s is not None and view.promise.admitted_at_s is None:
                self._views[job_id] = replace(
                    self._views[job_id],
                    promise=replace(self._views[job_id].promise, admitted_at_s=self._now_s, promised_finish_s=finish_s),
                )
        for served in self._snapshot.services:
            service_id = served.service.service_id
            if service_id in plan.allocations:
                self._held[service_id] = plan.allocations[service_id]
            else:
                self._held.pop(service_id, None)
        relabelled = self._pools.relabelled(replace(self._snapshot, now_s=self._now_s), plan, self._held)
        self._is_relabelled = relabelled.cluster is not self._snapshot.cluster
        self._snapshot = relabelled

    def _grant(self, job_id: WorkloadId, wanted: Allocation) -> None:
        view = self._views[job_id]
        if not wanted.num_devices:
            self._held.pop(job_id, None)
            self._views[job_id] = replace(view, state=JobState.PENDING, num_replicas=0)
            return
        devices = frozenset(wanted.device_ids)
        cost_s = self._snapshot.overheads.cost_s(wanted.num_devices, is_fresh=devices not in self._used_before)
        if isinstance(wanted, FunctionAllocation) and view.job.menu is not None:
            entry = entry_of(view.job.menu, wanted.plan)
            cost_s = entry.start_s if entry is not None else cost_s
        self._used_before.add(devices)
        self._busy_until_s[job_id] = self._now_s + cost_s
        self._held[job_id] = wanted
        self._views[job_id] = replace(
            view,
            state=JobState.RUNNING,
            num_replicas=wanted.num_devices,
            started_at_s=self._now_s if view.started_at_s is None else view.started_at_s,
            service_offset_s=view.attained_service_s(self._now_s) - wanted.num_devices * self._now_s,
            progress=replace(view.progress, step=int(self._done[job_id])),
            changes=replace(view.changes, resized_at_s=self._now_s),
        )

    def _ends_at_s(self, job_id: WorkloadId) -> float | None:
        """When the job ends if its allocation stays; None if it never ends, or if that is not known."""
        view, curve = self._views[job_id], self._curves[job_id]
        held = self._held.get(job_id)
        if held is None or view.total_steps is None or curve.source == "guess":
            return None
        rate = _rate(view, curve, held)
        if rate <= 0:
            return None
        since_s = max(self._now_s, self._busy_until_s.get(job_id, 0.0))
        return since_s + max(0.0, view.total_steps - self._done[job_id]) / rate

    def _next_moment(self, plan: Plan) -> float | None:
        if self._is_relabelled:
            # Workloads may start on the nodes with new labels at once.
            return self._now_s + _SHORTEST_TURN_S
        ends = [at_s for job_id in self._views if (at_s := self._ends_at_s(job_id)) is not None]
        moments = ends + [
            view.restarts.starts_at_s for view in self._views.values() if view.restarts.starts_at_s > self._now_s
        ]
        if plan.revisit_at_s is not None and ends:
            look_s = self._now_s + LEAST_LOOK_FRACTION * (self._now_s - self._began_s)
            moments.append(max(plan.revisit_at_s, look_s))
        elif plan.revisit_at_s is not None and plan.revisit_at_s > self._now_s:
            # No job makes progress, but the policy wants to decide again later.
            moments.append(plan.revisit_at_s)
        change_s = self._pools.next_change_s(self._now_s)
        if change_s is not None:
            moments.append(change_s)
        if not moments:
            return None
        return max(min(moments), self._now_s + _SHORTEST_TURN_S)

    def _advance(self, to_s: float) -> None:
        for job_id, view in list(self._views.items()):
            held, curve = self._held.get(job_id), self._curves[job_id]
            if held is None:
                continue
            self._note_run(job_id, to_s, held.num_devices)
            if curve.source == "guess":
                continue
            since_s = max(self._now_s, self._busy_until_s.get(job_id, 0.0))
            steps_per_s = _rate(view, curve, held)
            self._done[job_id] += max(0.0, to_s - since_s) * steps_per_s
            most = math.inf if view.total_steps is None else view.total_steps
            # A running job's speed is measured. In a forecast it is the predicted one.
            functions = _functions(held)
            size = held.num_devices if functions is None else functions.num_functions
            measured = {**view.learnt.throughput_samples_per_s, size: steps_per_s * view.job.global_batch_size}
            self._views[job_id] = replace(
                view,
                progress=replace(view.progress, step=int(min(most, self._done[job_id])), progress_at_s=to_s),
                learnt=replace(
                    view.learnt,
                    throughput_samples_per_s=measured
                    if size not in view.learnt.throughput_samples_per_s
                    else view.learnt.throughput_samples_per_s,
                ),
            )
        self._now_s = to_s

    def _note_run(self, job_id: WorkloadId, to_s: float, num_devices: int) -> None:
        runs = self._runs.setdefault(job_id, [])
        if runs and runs[-1].num_devices == num_devices and runs[-1].end_s == self._now_s:
            runs[-1] = replace(runs[-1], end_s=to_s)
        else:
            runs.append(PlannedRun(start_s=self._now_s, end_s=to_s, num_devices=num_devices))

    def _remove_finished(self) -> None:
        for job_id, view in list(self._views.items()):
            # The tolerance covers rounding errors.
            if view.total_steps is not None and self._done[job_id] >= view.total_steps - 1e-6:
                del self._views[job_id]
                self._held.pop(job_id, None)
                self._finishes_s[job_id] = self._now_s

    def _finish_unchanged(self) -> None:
        for job_id in self._views:
            ends_s = self._ends_at_s(job_id)
            if ends_s is not None:
                self._note_run(job_id, ends_s, self._held[job_id].num_devices)
                self._finishes_s[job_id] = ends_s


def _functions(held: PoolAllocation) -> FunctionPlan | None:
    return held.plan if isinstance(held, FunctionAllocation) else None


def _rate(view: JobView, curve: SpeedCurve, held: PoolAllocation) -> float:
    """Steps a second with the allocation."""
    menu, functions = view.job.menu, _functions(held)
    entry = entry_of(menu, functions) if menu is not None and functions is not None else None
    if menu is None or entry is None:
        return curve.rate(held.num_devices)
    return 1.0 / (entry.step_s * pace_of(view, menu, functions))
