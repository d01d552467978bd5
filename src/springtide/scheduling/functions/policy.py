"""Jobs on function services: chooses the entry of its menu that each one runs as; an inner policy plans the others.

A job comes with its menu (FuncPipe's Pareto front, planned at submission). The policy decides which entry meets the
deadline or the budget at the lowest cost, and whether a job that falls behind moves to a faster one. If the job's
workers and memory are searched for, the search supplies the menu by its present estimates, and the next configuration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import msgspec
from msgspec.structs import replace

from springtide.core.decision import (
    Allocation,
    FunctionAllocation,
    JobView,
    Plan,
    PlannedRun,
    Policy,
    Refusal,
    Schedule,
    Snapshot,
)
from springtide.core.functions import FunctionMenu, FunctionOption, FunctionPlan, FunctionService
from springtide.core.resources import DeviceId, Node
from springtide.core.workload import Goal, WorkloadId
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.functions.ask import Ask
from springtide.scheduling.functions.goal_search import SearchStep, search_step
from springtide.scheduling.functions.plan_text import words
from springtide.scheduling.functions.room import MOMENT_S, ServiceRoom
from springtide.scheduling.functions.settled import settled

# A job that is being stopped gives up its place within so many seconds.
_LEAVING_S = 5.0


def machines_only(snapshot: Snapshot) -> Snapshot:
    """The snapshot without function services, and without the jobs that run on them."""
    services = snapshot.cluster.function_services
    if not services and not any(view.job.is_on_functions for view in snapshot.jobs):
        return snapshot
    places = {device.device_id for node in services for device in node.devices}
    gone = {view.job.job_id for view in snapshot.jobs if view.job.is_on_functions}
    return replace(
        snapshot,
        cluster=snapshot.cluster.machines,
        jobs=tuple(view for view in snapshot.jobs if not view.job.is_on_functions),
        # A job that has ended may hold its place for a moment longer.
        allocations={
            job_id: allocation
            for job_id, allocation in snapshot.allocations.items()
            if job_id not in gone and places.isdisjoint(allocation.device_ids)
        },
    )


class WithFunctions(msgspec.Struct, frozen=True):
    """A policy that plans jobs on functions itself, and all other workloads with the inner `policy`.

    The inner policy sees a cluster of machines only. Jobs are planned in order of arrival; a promise is based on the
    upper end of an entry's predicted time.
    """

    policy: Policy

    def make_derived(self) -> DecisionCache:
        """An empty cache for the inner policy."""
        return DecisionCache(self.policy)

    def decide(self, snapshot: Snapshot, derived: DecisionCache | None = None) -> Plan:
        """Return the inner policy's plan, joined with the plans of the jobs on functions."""
        decisions = derived or DecisionCache(self.policy)
        on_functions = [view for view in snapshot.jobs if view.job.is_on_functions]
        if not on_functions and not snapshot.cluster.function_services:
            return decisions.decide(snapshot)
        plan = decisions.decide(machines_only(snapshot))
        if not on_functions:
            return plan
        joined = plan
        for name, views in groupby(sorted(on_functions, key=_service_of), key=_service_of):
            joined = _with_service(joined, snapshot, name, list(views))
        return joined


def _service_of(view: JobView) -> str:
    assert view.job.menu is not None
    return view.job.menu.service


def _with_service(plan: Plan, snapshot: Snapshot, name: str, views: Sequence[JobView]) -> Plan:
    """The plan, joined with the plans of the jobs on one function service."""
    services = [(node, node.functions) for node in snapshot.cluster.function_services if node.functions is not None]
    found = next(((node, service) for node, service in services if service.name == name), None)
    if found is None:
        reason = (
            f"waiting for the function service {name!r}, which this platform is not connected to: "
            "`springtide up --functions ...` connects it"
        )
        return replace(plan, reasons={**plan.reasons, **{view.job.job_id: reason for view in views}})
    planner = _ServicePlanner(snapshot, *found)
    planner.plan_jobs(views)
    moments = [at_s for at_s in (plan.revisit_at_s, planner.revisit_at_s) if at_s is not None and math.isfinite(at_s)]
    return replace(
        plan,
        revisit_at_s=min(moments, default=None),
        allocations={**plan.allocations, **planner.allocations},
        admitted={**plan.admitted, **planner.admitted},
        rejected={**plan.rejected, **planner.rejected},
        future={**plan.future, **planner.future},
        reasons={**plan.reasons, **planner.reasons},
        plan_reasons={**plan.plan_reasons, **planner.plan_reasons},
    )


class _ServicePlanner:
    """Plans the jobs of one function service: first running jobs, then promised ones, then the rest.

    Each job gets places and functions that the jobs before it leave over time, so that no later job breaks a promise.
    """

    def __init__(self, snapshot: Snapshot, node: Node, service: FunctionService) -> None:
        self._snapshot = snapshot
        self._now_s = snapshot.now_s
        self._node = node
        self._service = service
        self._room = ServiceRoom(snapshot.now_s, service.concurrency, len(node.devices))
        self._free = [device.device_id for device in node.devices]
        self._found: dict[WorkloadId, SearchStep] = {}
        self.allocations: dict[WorkloadId, Allocation] = {}
        self.admitted: dict[WorkloadId, float] = {}
        self.rejected: dict[WorkloadId, Refusal] = {}
        self.future: dict[WorkloadId, Schedule] = {}
        self.reasons: dict[WorkloadId, str] = {}
        self.plan_reasons: dict[WorkloadId, str] = {}
        self.revisit_at_s = math.inf

    def plan_jobs(self, views: Sequence[JobView]) -> None:
        known = {view.job.job_id for view in views}
        for job_id, allocation in self._snapshot.allocations.items():
            # A job that is ending holds its place for a moment longer.
            for device in allocation.device_ids:
                if device in self._free:
                    self._free.remove(device)
                    if job_id not in known:
                        plan = _plan_of(allocation)
                        self._room.claim(self._now_s, self._now_s + _LEAVING_S, plan.num_functions if plan else 0)
        held = [view for view in views if self._place(view) is not None]
        running = [view for view in held if _plan_of(self._held(view)) is not None]
        for view in running:
            self._keep_running(view)
        for view in held:
            if view not in running:
                self._start(view, self._place(view))
        for view in running:
            self._move_if_behind(view)
        waiting = [view for view in views if view not in held]
        for view in sorted(waiting, key=lambda view: not _is_promised_or_begun(view)):
            self._start(view, None)

    def _held(self, view: JobView) -> Allocation | None:
        return self._snapshot.allocations.get(view.job.job_id)

    def _place(self, view: JobView) -> DeviceId | None:
        held = self._held(view)
        here = {device.device_id for device in self._node.devices}
        return next((device for device in held.device_ids if device in here), None) if held is not None else None

    def _search(self, view: JobView) -> SearchStep | None:
        """The next step of the search for the job's workers and memory; None for a job without a search."""
        if view.job.search is None:
            return None
        job_id = view.job.job_id
        if job_id not in self._found:
            running = _plan_of(self._held(view))
            self._found[job_id] = search_step(view, self._service, self._now_s, running)
        return self._found[job_id]

    def _options_of(self, view: JobView, plan: FunctionPlan | None) -> Ask:
        """What the job wants of its menu, by the present estimates of the entries."""
        found = self._search(view)
        if found is not None:
            return Ask(view, found.menu, self._now_s, plan, is_corrected=True)
        assert view.job.menu is not None
        return Ask(view, view.job.menu, self._now_s, plan)

    def _keep_running(self, view: JobView) -> None:
        """Plan the job to go on as it is."""
        plan, place = _plan_of(self._held(view)), self._place(view)
        assert plan is not None
        assert place is not None
        ask = self._options_of(view, plan)
        entry = ask.entry(plan)
        self.allocations[view.job.job_id] = FunctionAllocation(device_ids=(place,), plan=plan)
        end_s = math.inf if entry is None else self._now_s + ask.left_s(entry)
        self._room.claim(self._now_s, end_s, plan.num_functions)
        self._record_future(view, self._now_s, end_s)

    def _move_if_behind(self, view: JobView) -> None:
        """Move a running job to another entry that fits beside what is planned: a faster one if it falls behind its
        deadline, the one that its search or its owner's new goal asks for."""
        plan, place, found = _plan_of(self._held(view)), self._place(view), self._search(view)
        if plan is None or place is None:
            return
        ask = self._options_of(view, plan)
        entry = ask.entry(plan)
        if found is not None:
            self._follow_search(view, plan, place, ask, found)
            return
        is_behind = entry is not None and ask.is_behind(entry)
        if entry is None or not (is_behind or view.bounds.num_edits):
            return
        self._room.release(plan.num_functions)
        faster = None
        if is_behind:
            faster = ask.faster(entry, [option for option in ask.options if self._fits_now(ask, option)])
        elif view.bounds.num_edits:
            faster = self._entry_for_new_goal(view, plan)
        if faster is None:
            self._room.claim(self._now_s, self._now_s + ask.left_s(entry), plan.num_functions)
        else:
            self._run_now(view, place, faster[0], faster[1], ask.time_s(faster[0]))

    def _entry_for_new_goal(self, view: JobView, plan: FunctionPlan) -> tuple[FunctionOption, str] | None:
        """The entry that the owner's new goal asks for, among those that fit beside what is planned."""
        view = _as_running(view, plan)
        ask = Ask(view, _menu_of(view), self._now_s, plan, by_own_pace=True)
        now = ask.entry(plan)
        assert now is not None
        options = [each for each in ask.options if each.plan == plan or self._fits_now(ask, each)]
        return ask.unlike(now, options, dict.fromkeys((each.plan for each in options), self._now_s))

    def offer(self, view: JobView, plan: FunctionPlan | None) -> tuple[float | None, Refusal | None]:
        """The latest end of a job that is not planned here, for its goal; or a refusal.

        `plan` is what it runs as now: it goes on with that without a new start.
        """
        if plan is not None:
            view = _as_running(view, plan)
        ask = Ask(view, _menu_of(view), self._now_s, plan, by_own_pace=True)
        options = [each for each in ask.options if each.plan.num_functions <= self._service.concurrency]
        starts_s = {each.plan: self._room.earliest_s(each.plan.num_functions, ask.time_s(each)) for each in options}
        if plan in starts_s:
            # It keeps what it has now.
            starts_s[plan] = self._now_s
        chosen = ask.choose(options, starts_s)
        if chosen is None:
            return None, ask.refusal
        end_s = starts_s[chosen[0].plan] + ask.time_s(chosen[0])
        return (end_s if math.isfinite(end_s) else None), None

    def _fits_now(self, ask: Ask, option: FunctionOption) -> bool:
        return self._room.earliest_s(option.plan.num_functions, ask.time_s(option)) == self._now_s

    def _follow_search(self, view: JobView, plan: FunctionPlan, place: DeviceId, ask: Ask, found: SearchStep) -> None:
        """Move a searched job to the next configuration of its search, if that fits."""
        if found.revisit_at_s is not None:
            self.revisit_at_s = min(self.revisit_at_s, max(found.revisit_at_s, self._now_s + MOMENT_S))
        wanted = found.next
        if wanted is None or wanted.plan == plan:
            return
        self._room.release(plan.num_functions)
        if self._fits_now(ask, wanted):
            self._run_now(view, place, wanted, found.why, ask.time_s(wanted))
        else:
            entry = ask.entry(plan)
            end_s = math.inf if entry is None else self._now_s + ask.left_s(entry)
            self._room.claim(self._now_s, end_s, plan.num_functions)

    def _start(self, view: JobView, place: DeviceId | None) -> None:
        """Plan a waiting job into what is left, and start it if it fits now. A job that is being formed has its `place`
        already."""
        job_id, found = view.job.job_id, self._search(view)
        ask = self._options_of(view, None)
        options = [option for option in ask.options if option.plan.num_functions <= self._service.concurrency]
        starts_s = {
            option.plan: self._room.earliest_s(option.plan.num_functions, ask.time_s(option)) for option in options
        }
        if place is not None:
            # It is being formed: only an entry that fits now can be chosen.
            options = [option for option in options if starts_s[option.plan] == self._now_s] or options
        chosen = ask.choose(options, starts_s)
        if chosen is None and (_is_promised_or_begun(view) or place is not None) and options:
            # A job that was promised or has begun is finished as early as possible, although late.
            best = min(options, key=lambda option: starts_s[option.plan] + ask.time_s(option))
            chosen = best, f"late: {ask.refusal.reason}"
        if chosen is None:
            latest_s = ask.latest_start_s(options)
            if view.job.goal.waits and latest_s >= self._now_s:
                self.reasons[job_id] = f"waiting in line: {ask.refusal.reason}"
                # After that moment its goal cannot be met any more, and it is refused.
                self.revisit_at_s = min(self.revisit_at_s, latest_s + MOMENT_S)
            else:
                self.rejected[job_id] = ask.refusal
            return
        option, why = chosen
        start_s, time_s = starts_s[option.plan], ask.time_s(option)
        if view.job.goal.is_hard and view.promise.admitted_at_s is None and math.isfinite(start_s + time_s):
            self.admitted[job_id] = start_s + time_s
        if found is not None and found.next is not None and start_s == self._now_s and self._fits_now(ask, found.next):
            # The promise is based on the best known entry; the job begins with the configuration of the search.
            option, why, time_s = found.next, found.why, ask.time_s(found.next)
        if place is None and start_s == self._now_s and self._free:
            place = self._free.pop(0)
        if place is not None and start_s == self._now_s:
            self._run_now(view, place, option, why, time_s)
        else:
            if math.isfinite(start_s):
                self._room.claim(start_s, start_s + time_s, option.plan.num_functions)
            self._record_future(view, start_s, start_s + time_s)
            self.reasons[job_id] = self._waiting_text(option)

    def _run_now(self, view: JobView, place: DeviceId, option: FunctionOption, why: str, time_s: float) -> None:
        job_id = view.job.job_id
        self._room.claim(self._now_s, self._now_s + time_s, option.plan.num_functions)
        self.allocations[job_id] = FunctionAllocation(device_ids=(place,), plan=option.plan)
        self.reasons[job_id] = f"{words(option.plan)}: {why}"
        self.plan_reasons[job_id] = why
        self._record_future(view, self._now_s, self._now_s + time_s)

    def _record_future(self, view: JobView, start_s: float, end_s: float) -> None:
        if math.isfinite(end_s):
            self.future[view.job.job_id] = (PlannedRun(start_s=start_s, end_s=end_s, num_devices=1),)

    def _waiting_text(self, option: FunctionOption) -> str:
        name, count = self._service.name, option.plan.num_functions
        if not self._free:
            return f"waiting: all {len(self._node.devices)} places for jobs on {name!r} are taken"
        return (
            f"waiting for {count} functions: {max(0, self._room.free_now())} of the {self._service.concurrency} that "
            f"{name!r} runs at a time are free"
        )


def goal_offer(snapshot: Snapshot, job_id: WorkloadId, goal: Goal) -> tuple[float | None, Refusal | None]:
    """Whether a job on functions in the snapshot could meet another goal without breaking the promises of others.

    Returns its latest end (None: not known), or a refusal with alternatives.
    """
    projected = settled(snapshot)
    asked = next(view for view in projected.jobs if view.job.job_id == job_id)
    name = _service_of(asked)
    found = next((node for node in projected.cluster.function_services if _functions_of(node).name == name), None)
    if found is None:
        return None, Refusal(reason=f"the function service {name!r} is not connected")
    held = projected.allocations.get(job_id)
    others = [
        view for view in projected.jobs if view.job.is_on_functions and view is not asked and _service_of(view) == name
    ]
    # A job that has neither begun nor been promised anything does not count.
    others = [view for view in others if _is_promised_or_begun(view) or view.job.job_id in projected.allocations]
    left = {job_id: allocation for job_id, allocation in projected.allocations.items() if job_id != job_id}
    planner = _ServicePlanner(replace(projected, jobs=tuple(others), allocations=left), found, _functions_of(found))
    planner.plan_jobs(others)
    return planner.offer(replace(asked, job=replace(asked.job, goal=goal)), _plan_of(held))


def _functions_of(node: Node) -> FunctionService:
    assert node.functions is not None
    return node.functions


def _menu_of(view: JobView) -> FunctionMenu:
    assert view.job.menu is not None
    return view.job.menu


def _as_running(view: JobView, plan: FunctionPlan) -> JobView:
    """The job with a menu on which its present plan starts at once and costs nothing to start."""
    menu = _menu_of(view)
    options = tuple(replace(each, start_s=0.0, start_usd=0.0) if each.plan == plan else each for each in menu.options)
    return replace(view, job=replace(view.job, menu=replace(menu, options=options)))


def _is_promised_or_begun(view: JobView) -> bool:
    """Whether the job was promised its deadline or has begun."""
    return view.promise.admitted_at_s is not None or view.started_at_s is not None


def _plan_of(held: Allocation | None) -> FunctionPlan | None:
    return held.plan if isinstance(held, FunctionAllocation) else None
