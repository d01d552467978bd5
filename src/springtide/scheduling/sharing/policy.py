"""Shared devices beside whole ones: a packer places workloads with shares, any inner policy plans all others.

Dilu (ASPLOS'25), section 3.3. Workloads with a share are packed on as few devices as possible; the inner policy plans
the other devices as if they were the whole cluster. See docs/policies/sharing.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from springtide.core.decision import Allocation, Capacity, JobView, Plan, PlannedRun, Policy, Snapshot, TimeClaim
from springtide.core.resources import DeviceId, Node, Topology
from springtide.core.workload import JobState, WorkloadId
from springtide.perf.curve import curve_of
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.placement.layout import topology_of
from springtide.scheduling.replicas import next_idle_at_s
from springtide.scheduling.sharing.packing import DiluPacker, Packer
from springtide.scheduling.sharing.plan import WEAK_CLAIMS, Claims, SharePlan, WeakClaim

# The key of the claimed devices in the memory, beside the memory of the inner policy.
_CLAIMS = "claimed"
# How many claims of sharers are tried one by one in a decision where promises leave no room for all of them.
MOST_TRIED = 8
# A job is late when it is planned to end so long after its deadline, as a part of the time it still takes: speeds vary.
_LATE_FRACTION = 0.02
_GIVEN_UP = "promise given up: its part of a device is too little for its deadline; it ends as soon as it can"


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """A policy for whole devices with a packer for parts of them. Without any share, it is the inner policy."""

    inner: Policy
    packer: Packer = msgspec.field(default_factory=DiluPacker)

    def make_derived(self) -> DecisionCache:
        """An empty cache for the inner policy."""
        return DecisionCache(self.inner)

    def decide(self, snapshot: Snapshot, derived: DecisionCache | None = None) -> Plan:
        """Return the plan for this snapshot."""
        decisions = derived or DecisionCache(self.inner)
        memory, claims = _split(snapshot.memory)
        if not has_shares(snapshot):
            return decisions.decide(snapshot if memory is snapshot.memory else replace(snapshot, memory=memory))
        if any(node.pool != "shared" or node.owner != "shared" for node in snapshot.cluster.nodes):
            return self._one_each(snapshot, memory, decisions)
        parts, plan = self._beside_promises(snapshot, memory, claims, decisions)
        idle_at_s = next_idle_at_s([view for view in parts.services if view.wanted_replicas is None], snapshot.now_s)
        late, late_at_s = _given_up(parts, snapshot)
        moments = [at for at in (plan.revisit_at_s, idle_at_s, late_at_s) if at is not None]
        return replace(
            plan,
            allocations=_in_order(snapshot, {**plan.allocations, **parts.allocations}),
            admitted={**plan.admitted, **parts.admitted},
            rejected={**plan.rejected, **parts.rejected},
            reasons={**plan.reasons, **_displaced(parts), **parts.reasons, **dict.fromkeys(late, _GIVEN_UP)},
            claims={**plan.claims, **_waits(parts, plan, snapshot), **late},
            revisit_at_s=min(moments, default=None),
            memory={_CLAIMS: dict(parts.claims), "inner": plan.memory} if parts.claims else plan.memory,
        )

    def _beside_promises(
        self, snapshot: Snapshot, memory: Any, claims: Claims, decisions: DecisionCache
    ) -> tuple[SharePlan, Plan]:
        """The plan for sharers and the inner policy's plan for the rest.

        If the inner policy gives up promises for what sharers take beyond guaranteed minimums, they take only as much
        as every promise leaves, the strongest claims first.
        """

        def planned(barred: frozenset[WeakClaim]) -> tuple[SharePlan, Plan, set[WorkloadId]]:
            parts = SharePlan(snapshot, self.packer, claims, barred)
            plan = decisions.decide(_shown(snapshot, parts, memory))
            return parts, plan, {who for who, claim in plan.claims.items() if claim.code == "given_up"}

        parts, plan, given_up = planned(frozenset())
        if not given_up or not parts.opened:
            return parts, plan
        weak = sorted(parts.opened, key=lambda claim: WEAK_CLAIMS.index(claim[0]))
        barred = frozenset(weak)
        least_parts, least_plan, least = planned(barred)
        if given_up <= least:
            return parts, plan
        parts, plan = least_parts, least_plan
        for claim in weak[:MOST_TRIED] if len(weak) > 1 else ():
            tried_parts, tried_plan, given_up = planned(barred - {claim})
            if given_up <= least:
                parts, plan, barred = tried_parts, tried_plan, barred - {claim}
        return parts, plan

    def _one_each(self, snapshot: Snapshot, memory: Any, decisions: DecisionCache) -> Plan:
        """The plan where nodes have labels: each workload with a share is limited to it, on a device of its own.

        A strategy of loans, which plans whole devices, decides which workload may be where. It is shown the speeds that
        the jobs' requests make sure.
        """
        jobs = tuple([self._at_request(view) for view in snapshot.jobs])
        plan = decisions.decide(replace(snapshot, jobs=jobs, allocations=_one_holder_each(snapshot), memory=memory))
        shares = {view.job.job_id: view.job.share for view in snapshot.jobs if not view.job.is_on_functions}
        shares |= {view.service.service_id: view.service.share for view in snapshot.services}
        return replace(
            plan,
            allocations={
                who: given if share is None else replace(given, share=self.packer.booked(share))
                for who, given in plan.allocations.items()
                for share in [shares.get(who)]
            },
        )

    def _at_request(self, view: JobView) -> JobView:
        """The job as fast as profiled on the part of a device that is booked for it."""
        share = view.job.share
        if share is None or view.job.is_on_functions:
            return view
        request = self.packer.booked(share).request
        rates = {count: rate * request for count, rate in view.job.profile_steps_per_s.items()}
        return replace(view, job=replace(view.job, profile_steps_per_s=rates))


def has_shares(snapshot: Snapshot) -> bool:
    """Whether any workload asks for a part of a device, or holds one."""
    return (
        any(view.job.share is not None and not view.job.is_on_functions for view in snapshot.jobs)
        or any(view.service.share is not None for view in snapshot.services)
        or any(held.share is not None for held in snapshot.allocations.values())
    )


def _split(memory: Any) -> tuple[Any, Claims]:
    """The inner policy's memory, and the devices that were claimed at the last decision."""
    if isinstance(memory, Mapping) and memory.keys() == {_CLAIMS, "inner"}:
        return memory["inner"], memory[_CLAIMS]
    return memory, {}


def _in_order(snapshot: Snapshot, allocations: Mapping[WorkloadId, Allocation]) -> dict[WorkloadId, Allocation]:
    """The allocations in order of arrival, jobs first, as in every plan."""
    order = [view.job.job_id for view in snapshot.jobs] + [view.service.service_id for view in snapshot.services]
    return {who: allocations[who] for who in order if who in allocations}


def _waits(parts: SharePlan, plan: Plan, snapshot: Snapshot) -> dict[WorkloadId, TimeClaim]:
    """When services that wait for a device of promised jobs can have one, by the schedules of these."""
    if not parts.waiting:
        return {}
    num_left = len(snapshot.cluster.device_set - parts.taken)
    runs = [run for schedule in plan.future.values() for run in schedule]
    moments = sorted({snapshot.now_s, *(run.end_s for run in runs)})
    found: dict[WorkloadId, TimeClaim] = {}
    for number, service_id in enumerate(parts.waiting, start=1):
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
        end_s = _end_s(view, view.bounds.min_workers if given is None else given.num_devices, now_s)
        if now_s > deadline_s or end_s > deadline_s + _LATE_FRACTION * (end_s - now_s):
            is_known = given is not None and end_s < math.inf
            late[job_id] = TimeClaim(code="given_up", at_s=end_s if is_known else None)
        else:
            deadlines_s.append(deadline_s + 1e-3)
    return late, min(deadlines_s, default=None)


def _end_s(view: JobView, num_devices: int, now_s: float) -> float:
    """When the job ends on parts of so many devices: as fast as it was there, at first as fast as it can count on."""
    if view.total_equivalent_steps is None or view.job.share is None:
        return now_s
    rate = curve_of(view).rate(num_devices)
    rate *= 1.0 if view.learnt.throughput_samples_per_s else view.job.share.request
    left = max(0.0, view.total_equivalent_steps - view.equivalent_steps)
    since_s = view.progress.progress_at_s if view.state is JobState.RUNNING else now_s
    return max(now_s, since_s + left / rate) if rate > 0.0 else math.inf


def _most_used(runs: Sequence[PlannedRun], from_s: float) -> int:
    """The most devices that these runs use at one moment from `from_s` on."""
    starts = [max(run.start_s, from_s) for run in runs if run.end_s > from_s]
    return max((sum(run.num_devices for run in runs if run.start_s <= at_s < run.end_s) for at_s in starts), default=0)


def _displaced(parts: SharePlan) -> dict[WorkloadId, str]:
    """The reasons of jobs of the inner policy that lose a device to a share."""
    return {job_id: f"'{name}' needs a part of one of its devices" for job_id, name in parts.displaced.items()}


def _one_holder_each(snapshot: Snapshot) -> dict[WorkloadId, Allocation]:
    """The allocations with one holder for each device. If a newcomer has been put beside a leaving workload, only the
    newcomer counts."""
    staying = {view.job.job_id for view in snapshot.jobs if view.state is not JobState.PREEMPTING}
    staying |= {view.service.service_id for view in snapshot.services}
    taken: set[DeviceId] = set()
    shown: dict[WorkloadId, Allocation] = {}
    for who, held in sorted(snapshot.allocations.items(), key=lambda item: item[0] not in staying):
        mine = tuple(device_id for device_id in held.device_ids if device_id not in taken)
        taken.update(mine)
        if mine:
            shown[who] = held if mine == held.device_ids else replace(held, device_ids=mine)
    return {who: shown[who] for who in snapshot.allocations if who in shown}


def _shown(snapshot: Snapshot, parts: SharePlan, memory: Any) -> Snapshot:
    """The snapshot for the inner policy: without workloads that have a share, and without the devices for shares."""
    taken = parts.taken
    cluster = _without(snapshot.cluster, taken)
    alive = cluster.device_set
    sharers = parts.sharers
    allocations: dict[WorkloadId, Allocation] = {}
    for who, held in snapshot.allocations.items():
        if who in sharers or held.share is not None:
            continue
        if all(device_id in alive for device_id in held.device_ids):
            allocations[who] = held
            continue
        left = tuple(device_id for device_id in held.device_ids if device_id in alive)
        if left:
            allocations[who] = replace(held, device_ids=left)
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
    )


def _less(capacity: tuple[Capacity, ...], num_taken: int) -> tuple[Capacity, ...]:
    return tuple(replace(each, num_devices=max(0, each.num_devices - num_taken)) for each in capacity)


def _without(cluster: Topology, taken: Collection[DeviceId]) -> Topology:
    """The cluster without these devices."""
    nodes: list[Node] = []
    gone = {cluster.node_of[at] for at in taken if at in cluster.node_of}
    for node in cluster.nodes:
        if node.node_id not in gone:
            nodes.append(node)
            continue
        left = tuple(device for device in node.devices if device.device_id not in taken)
        if left:
            nodes.append(replace(node, devices=left))
    return topology_of(tuple(nodes))
