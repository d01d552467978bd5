"""Shared devices beside whole ones: a packer places workloads with shares, any inner policy plans all others.

Dilu (ASPLOS'25), section 3.3. Workloads with a share are packed on as few devices as possible; the inner policy plans
the other devices as if they were the whole cluster. See docs/policies/sharing.md.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from springtide.core.decision import EMPTY, Allocation, Capacity, Plan, PlannedRun, Policy, Same, Snapshot, TimeClaim
from springtide.core.resources import DeviceId, Node, Topology, admits
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.placement.layout import topology_of
from springtide.scheduling.replicas import next_idle_at_s
from springtide.scheduling.sharing.answer import GOES_ON_S, Answer, Lack, read_answer
from springtide.scheduling.sharing.board import Claims, Places
from springtide.scheduling.sharing.deadlines import end_s, is_late
from springtide.scheduling.sharing.packing import DiluPacker, Packer
from springtide.scheduling.sharing.plan import SharePlan, WeakClaim
from springtide.scheduling.sharing.search import DEVICES_PER_DECISION, Search
from springtide.scheduling.sharing.yielding import (
    asking,
    can_help,
    harmed_by,
    is_urgent,
    stopped_by,
    with_what_promises_need,
    with_what_sharers_yield,
    without_harm,
)

# The keys of the claimed devices and of the places of promised jobs that wait for others to leave them, in the memory
# beside the memory of the inner policy.
_CLAIMS, _PLANNED = "claimed", "planned"
# And what sharers were asked to leave to others.
_ANSWER = "answer"
_NONE: frozenset[DeviceId] = frozenset()
# How long after a decision a free node that it loans has its new label.
LABELLED_S = 0.1
_GIVEN_UP = "promise given up: its part of a device is too little for its deadline; it ends as soon as it can"


class _Turn(NamedTuple):
    """What one decision is made from: the snapshot, and what its memory holds."""

    snapshot: Snapshot
    memory: Any
    claims: Claims
    planned: Places
    answer: Answer | None


class DerivedPlans:
    """What the inner policy derived from earlier snapshots: for the plan that is carried out, beside the devices that
    sharers took there, and for plans that were only asked for."""

    def __init__(self, inner: Policy) -> None:
        self.decisions, self._asked = DecisionCache(inner), DecisionCache(inner)
        self._taken = _NONE

    def beside(self, taken: frozenset[DeviceId]) -> DecisionCache:
        """What is to decide beside these devices of sharers."""
        return self.decisions if taken == self._taken else self._asked

    def carry_out(self, taken: frozenset[DeviceId]) -> None:
        """The plan beside these devices is carried out: the next decision begins with what follows from it."""
        if taken != self._taken:
            self.decisions, self._asked, self._taken = self._asked, self.decisions, taken


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """A policy for whole devices with a packer for parts of them. Without any share, it is the inner policy.

    A search for devices that sharers could leave looks at `devices_per_decision` devices in one decision, each plan
    at all of the cluster's, and goes on in the next one.
    """

    inner: Policy
    packer: Packer = msgspec.field(default_factory=DiluPacker)
    devices_per_decision: int = DEVICES_PER_DECISION

    def make_derived(self) -> DerivedPlans:
        """Empty caches for the inner policy."""
        return DerivedPlans(self.inner)

    def decide(self, snapshot: Snapshot, derived: DerivedPlans | None = None) -> Plan:
        """Return the plan for this snapshot."""
        kept = derived or DerivedPlans(self.inner)
        decisions = kept.decisions
        turn = _turn(snapshot)
        if not has_shares(snapshot):
            is_inner = turn.memory is snapshot.memory
            return decisions.decide(snapshot if is_inner else replace(snapshot, memory=turn.memory))
        parts, plan, answer = self._beside_promises(turn, kept)
        kept.carry_out(parts.taken)
        parts.finish({device_id: who for who, given in plan.allocations.items() for device_id in given.device_ids})
        idle_at_s = next_idle_at_s([view for view in parts.services if view.wanted_replicas is None], snapshot.now_s)
        late, late_at_s = _given_up(parts, snapshot)
        goes_on_s = snapshot.now_s + GOES_ON_S if answer is not None and answer.is_waiting else None
        moments = [at for at in (plan.revisit_at_s, idle_at_s, late_at_s, goes_on_s) if at is not None]
        if parts.num_waiting and any(admits(wish.pool, is_job=True) for wish in plan.pools.values()):
            # A node is loaned, which those that wait may open once it has its label.
            moments.append(snapshot.now_s + LABELLED_S)
        stopped = _stopped(snapshot, parts)
        whole = {who: given for who, given in plan.allocations.items() if who not in stopped}
        return replace(
            plan,
            allocations=_in_order(snapshot, {**whole, **parts.allocations}),
            admitted={**plan.admitted, **parts.admitted},
            rejected={**plan.rejected, **parts.rejected},
            reasons={**plan.reasons, **parts.why_displaced(), **parts.reasons, **dict.fromkeys(late, _GIVEN_UP)},
            claims={**plan.claims, **_waits(parts, plan, snapshot), **late},
            revisit_at_s=min(moments, default=None),
            memory=_joined(snapshot.memory, parts.claims, parts.places_of_promised(), plan.memory, answer),
        )

    def _beside_promises(self, turn: _Turn, kept: DerivedPlans) -> tuple[SharePlan, Plan, Answer | None]:
        """The plan for sharers and the inner policy's plan for the rest, and what sharers were asked for, if they were.

        If what sharers take beyond guaranteed minimums harms a workload that it may not harm, they take only as much as
        harms none, the strongest claims first. If then a workload on whole devices lacks some, it may have those on
        which sharers have no more than workers beyond the least of their jobs; one with a stronger claim than best
        effort also those that only best-effort sharers have parts of, as few as it takes; and where a promise would be
        lost or a guaranteed minimum not met, all that has a weaker claim makes room.

        As long as the inner policy keeps its plan and no other workload lacks anything, all that stays as it was
        answered the last time; what was asked in vain is not asked again for some seconds either way. A search that
        was left waiting goes on beside that.
        """
        snapshot, before = turn.snapshot, turn.answer
        plans: dict[frozenset[DeviceId], Plan] = {}

        def is_kept(plan: Plan) -> bool:
            return plan.memory is not None and plan.memory is turn.memory

        def search_on(found: Mapping[str, frozenset[Lack]]) -> Search:
            most = max(1, self.devices_per_decision // max(1, len(snapshot.cluster.device_set)))
            goes_on = before is not None and before.is_waiting
            return Search(most, lambda: sum(not is_kept(each) for each in plans.values()), found, goes_on=goes_on)

        def parts_of(barred: frozenset[WeakClaim], yielded: frozenset[DeviceId] = _NONE) -> SharePlan:
            return SharePlan(snapshot, self.packer, turn.claims, barred, yielded, turn.planned)

        def plan_beside(parts: SharePlan) -> Plan:
            # The inner policy is shown nothing of what sharers do but the devices that they take.
            if parts.taken not in plans:
                plans[parts.taken] = kept.beside(parts.taken).decide(_shown(snapshot, parts, turn.memory))
            return plans[parts.taken]

        def planned(barred: frozenset[WeakClaim], yielded: frozenset[DeviceId] = _NONE) -> tuple[SharePlan, Plan]:
            parts = parts_of(barred, yielded)
            return parts, plan_beside(parts)

        if before is not None and before.holds(snapshot.now_s, is_kept=True):
            parts, plan = planned(before.barred, before.yielded)
            is_answered = not parts.opened and before.holds(snapshot.now_s, is_kept=is_kept(plan))
            if is_answered and before.is_waiting:
                return self._searched(turn, (parts, plan, before.barred), parts_of, planned, search_on(before.found))
            if is_answered and before.covers(*asking(snapshot, parts, plan)):
                return parts, plan, before
        parts, plan = planned(frozenset())
        barred = frozenset[WeakClaim]()
        if parts.opened and (stopped_by(plan) or can_help(harmed_by(snapshot, parts, plan), plan)):
            parts, plan, barred = without_harm(snapshot, parts, plan, parts_of, plan_beside)
        return self._searched(turn, (parts, plan, barred), parts_of, planned, search_on({}))

    def _searched(
        self,
        turn: _Turn,
        begun: tuple[SharePlan, Plan, frozenset[WeakClaim]],
        parts_of: Callable[[frozenset[WeakClaim], frozenset[DeviceId]], SharePlan],
        planned: Callable[[frozenset[WeakClaim], frozenset[DeviceId]], tuple[SharePlan, Plan]],
        search: Search,
    ) -> tuple[SharePlan, Plan, Answer | None]:
        """The plans after what this decision searches for devices that sharers could leave, and the answer."""
        snapshot, before, (parts, plan, barred) = turn.snapshot, turn.answer, begun
        on = before if search.found else None
        yielded_before = _NONE if before is None else before.yielded
        # A refusal is final, and what is urgent waits for one decision at most.
        was_waiting = before is not None and before.is_waiting
        search.is_final = bool(plan.rejected) or (was_waiting and is_urgent(snapshot, parts, plan))
        parts, plan, yielded = with_what_sharers_yield(
            snapshot,
            parts,
            plan,
            partial(planned, barred),
            yielded_before,
            search,
            None if on is None else on.yielded,
        )
        parts, plan, barred, yielded = with_what_promises_need(
            snapshot, parts, plan, planned, parts_of, (barred, yielded), search
        )
        if yielded is None and not barred:
            return parts, plan, None
        given = yielded or _NONE
        if on is not None and (barred, given) == (on.barred, on.yielded):
            # Those that lack something only since then were not asked for in all of these plans.
            lacking, devices = on.lacking, on.devices
        else:
            asked, left = asking(snapshot, parts, plan)
            lacking, devices = frozenset(asked), left | given
        found = search.found if search.is_waiting else EMPTY
        return parts, plan, Answer(snapshot.now_s, barred, given, lacking, devices, found, search.is_waiting)


def has_shares(snapshot: Snapshot) -> bool:
    """Whether any workload asks for a part of a device, or holds one."""
    return (
        any(view.job.share is not None and not view.job.is_on_functions for view in snapshot.jobs)
        or any(view.service.share is not None for view in snapshot.services)
        or any(held.share is not None for held in snapshot.allocations.values())
    )


def _turn(snapshot: Snapshot) -> _Turn:
    """The snapshot with what is in its memory: the inner policy's, the devices that were claimed at the last decision,
    the places of promised jobs that were to start, and what sharers were asked for."""
    memory, keys = snapshot.memory, {_CLAIMS, _PLANNED, _ANSWER, "inner"}
    kept = memory if isinstance(memory, Mapping) and "inner" in memory and memory.keys() <= keys else {"inner": memory}
    answer = read_answer(kept.get(_ANSWER))
    return _Turn(snapshot, kept["inner"], kept.get(_CLAIMS, {}), kept.get(_PLANNED, {}), answer)


def _joined(before: Any, claims: Claims, planned: Places, inner: Any, answer: Answer | None = None) -> Any:
    """The memory of all that: the one that was before, if that is the same."""
    found: dict[str, Any] = {key: dict(value) for key, value in ((_CLAIMS, claims), (_PLANNED, planned)) if value}
    if answer is not None:
        found[_ANSWER] = answer.write()
    if not found:
        return inner
    found["inner"] = inner
    is_same = isinstance(before, Mapping) and before.get("inner") is inner and before == found
    return before if is_same else found


def _in_order(snapshot: Snapshot, allocations: Mapping[WorkloadId, Allocation]) -> dict[WorkloadId, Allocation]:
    """The allocations in order of arrival, jobs first, as in every plan."""
    order = [view.job.job_id for view in snapshot.jobs] + [view.service.service_id for view in snapshot.services]
    return {who: allocations[who] for who in order if who in allocations}


def _waits(parts: SharePlan, plan: Plan, snapshot: Snapshot) -> dict[WorkloadId, TimeClaim]:
    """When services that wait for a device of promised jobs can have one, by the schedules of these."""
    if not parts.waiting:
        return {}
    num_left = len(snapshot.cluster.device_set - parts.taken)
    each_of = {view.service.service_id: view.service.devices_each for view in parts.services}
    runs = [run for schedule in plan.future.values() for run in schedule]
    moments = sorted({snapshot.now_s, *(run.end_s for run in runs)})
    found: dict[WorkloadId, TimeClaim] = {}
    needed = itertools.accumulate(each_of[service_id] for service_id in parts.waiting)
    for number, service_id in zip(needed, parts.waiting, strict=True):
        # From the end of the last stretch of time in which too few devices are left.
        at_s = next(
            (at_s for at_s in moments if _most_used(runs, at_s) <= num_left - number),
            None,
        )
        found[service_id] = TimeClaim(code="waits_for", at_s=at_s)
    return found


def _given_up(parts: SharePlan, snapshot: Snapshot) -> tuple[dict[WorkloadId, TimeClaim], float | None]:
    """The promised jobs with a share that cannot keep their deadline any more, and the next deadline of the others."""
    late: dict[WorkloadId, TimeClaim] = {}
    deadlines_s: list[float] = []
    for view in parts.jobs:
        job_id, deadline_s, now_s = view.job.job_id, view.job.goal.deadline_s, snapshot.now_s
        if view.promise.admitted_at_s is None or deadline_s is None:
            continue
        given = parts.allocations.get(job_id)
        num_devices = view.bounds.min_workers if given is None else given.num_devices
        if is_late(view, num_devices, now_s):
            at_s = end_s(view, num_devices, now_s)
            is_known = given is not None and at_s < math.inf
            late[job_id] = TimeClaim(code="given_up", at_s=at_s if is_known else None)
        else:
            deadlines_s.append(deadline_s + 1e-3)
    return late, min(deadlines_s, default=None)


def _most_used(runs: Sequence[PlannedRun], from_s: float) -> int:
    """The most devices that these runs use at one moment from `from_s` on."""
    starts = [max(run.start_s, from_s) for run in runs if run.end_s > from_s]
    return max((sum(run.num_devices for run in runs if run.start_s <= at_s < run.end_s) for at_s in starts), default=0)


def _stopped(snapshot: Snapshot, parts: SharePlan) -> set[WorkloadId]:
    """The jobs on whole devices that stop before they go on: all that they hold is claimed by sharers, who would wait
    for a move as long as its devices are taken; or a part of it, and they cannot be resized."""
    stopped: set[WorkloadId] = set()
    for view in snapshot.jobs:
        held = snapshot.allocations.get(view.job.job_id)
        if held is None or view.job.job_id in parts.sharers:
            continue
        if held.device_ids and (not parts.claims or parts.claims.keys().isdisjoint(held.device_ids)):
            continue
        left = set(held.device_ids) - parts.claims.keys()
        if not left or (not view.job.elastic and len(left) < held.num_devices):
            stopped.add(view.job.job_id)
    return stopped


def _shown(snapshot: Snapshot, parts: SharePlan, memory: Any) -> Snapshot:
    """The snapshot for the inner policy: without workloads that have a share, and without the devices for shares.

    What is left by a sharer that has ended becomes free as that of any other workload.
    """
    cluster = _without(Same(snapshot.cluster), parts.taken)
    sharers = parts.sharers
    allocations = _held_whole(Same(snapshot.allocations), Same(cluster), frozenset(sharers))
    num_taken = len(snapshot.cluster.device_ids()) - len(cluster.device_ids())
    return replace(
        snapshot,
        cluster=cluster,
        jobs=tuple(view for view in snapshot.jobs if view.job.job_id not in sharers),
        services=tuple(view for view in snapshot.services if view.service.service_id not in sharers),
        allocations=allocations,
        drains={node_id: drain for node_id, drain in snapshot.drains.items() if node_id in cluster.by_id},
        capacity=_less(snapshot.capacity, num_taken),
        memory=memory,
        num_parts_waiting=parts.num_waiting,
    )


def _less(capacity: tuple[Capacity, ...], num_taken: int) -> tuple[Capacity, ...]:
    return tuple(replace(each, num_devices=max(0, each.num_devices - num_taken)) for each in capacity)


@functools.lru_cache(maxsize=8)
def _held_whole(
    allocations: Same[Mapping[WorkloadId, Allocation]], cluster: Same[Topology], sharers: frozenset[WorkloadId]
) -> Mapping[WorkloadId, Allocation]:
    """What others than sharers hold in this cluster; the same object again for the same allocations, since policies
    keep what they derive from it. What sharers hold that have ended becomes free."""
    alive = cluster.value.device_set
    found: dict[WorkloadId, Allocation] = {}
    leaving = set[DeviceId]()
    for who, held in allocations.value.items():
        if who in sharers:
            continue
        if held.share is None and alive.issuperset(held.device_ids):
            found[who] = held
            continue
        left = tuple(device_id for device_id in held.device_ids if device_id in alive and device_id not in leaving)
        if held.share is not None:
            leaving.update(left)
        if left:
            found[who] = replace(held, device_ids=left, share=None)
    return found


@functools.lru_cache(maxsize=16)
def _without(topology: Same[Topology], taken: frozenset[DeviceId]) -> Topology:
    """The cluster without these devices."""
    cluster, nodes = topology.value, list[Node]()
    gone = {cluster.node_of[at] for at in taken if at in cluster.node_of}
    for node in cluster.nodes:
        if node.node_id not in gone:
            nodes.append(node)
            continue
        left = tuple(device for device in node.devices if device.device_id not in taken)
        if left:
            nodes.append(replace(node, devices=left))
    return topology_of(tuple(nodes))
