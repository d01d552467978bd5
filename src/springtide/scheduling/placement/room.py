"""Keeps plans within what nodes have for pods: processors, memory, pods, and devices that the pods of others left.

Policies count devices alone, as if all were the platform's.

A policy is shown no more of a node's devices than can be used there, and no workload that no node can take; a job's
bounds are those that the nodes have room for. What its plan still puts where there is no room goes to another device,
or is left out, and then the policy is asked again with that bound, so that others get what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from springtide.core.containers import ContainerSettings
from springtide.core.decision import JobView, Plan, PoolAllocation, ServiceView, Snapshot
from springtide.core.job_parts import NodeRefusal
from springtide.core.resources import DeviceId, HostResources, Node, NodeId, Topology, admits
from springtide.core.shares import Share
from springtide.core.workload import WorkloadId

# How often a policy is asked again in one turn. The plan of the last time fits as well.
MAX_ROUNDS = 4
_NOTHING = HostResources()
_UNTOLD = ContainerSettings()


class Demand(NamedTuple):
    """What one replica requests, as far as its workload says; None: as much as the platform's settings say."""

    cpu_m: int | None = None
    memory_bytes: int | None = None
    share_m: int | None = None

    def on(self, node: Node, *, is_beside: bool = False) -> HostResources:
        """What it requests on this node; `is_beside`: on a device that is taken already, beside its other sharers."""
        if node.room is None:
            return _NOTHING
        replica, beside = node.room.replica, node.room.beside
        cpu_m, memory_bytes = replica.cpu_m, replica.memory_bytes
        if self.share_m is not None and node.devices[0].kind == "cpu":
            # Such a device is a processor, and so a part of it one, too.
            cpu_m = beside.cpu_m + self.share_m
        elif self.cpu_m is not None:
            cpu_m = beside.cpu_m + self.cpu_m
        if self.memory_bytes is not None:
            memory_bytes = beside.memory_bytes + self.memory_bytes
        return HostResources(
            cpu_m=cpu_m,
            memory_bytes=memory_bytes,
            num_pods=replica.num_pods,
            num_devices=0 if is_beside else replica.num_devices,
        )

    def times_on(self, node: Node) -> int:
        """How many such replicas the node has room for, one on a device."""
        most = len(node.devices)
        return most if node.room is None else self.on(node).times_in(node.room.free, most)


def demand_of(container: ContainerSettings | None, share: Share | None) -> Demand:
    """The demand of a replica with these settings."""
    told = container or _UNTOLD
    return Demand(
        cpu_m=told.cpu_m,
        memory_bytes=told.memory_bytes,
        share_m=None if share is None else max(1, round(share.request * 1000)),
    )


class Claimant(NamedTuple):
    """A workload that wants devices of machines. `least` is what it needs to run at all; `avoided` refused it."""

    workload_id: WorkloadId
    is_job: bool
    demand: Demand
    least: int
    is_promised: bool
    avoided: tuple[NodeRefusal, ...]


class RoomFitter:
    """Asks for plans until one fits.

    What it keeps follows from the topology, from the demands of the workloads and from their views: `capacity` is made
    anew for another topology, a view of a job anew for another view or another bound.
    """

    def __init__(self) -> None:
        self._capacity = _Capacity(Topology())
        self._views: dict[WorkloadId, tuple[JobView, int, JobView]] = {}

    def decide(self, ask: Callable[[Snapshot], Plan], snapshot: Snapshot) -> Plan:
        """The plan of `ask`, within the room on every node."""
        if self._capacity.topology is not snapshot.cluster:
            self._capacity = _Capacity(snapshot.cluster)
        turn = _Turn(snapshot, self._capacity)
        self._views = {job_id: known for job_id, known in self._views.items() if job_id in turn.claimants}
        caps = turn.caps()
        for _ in range(MAX_ROUNDS):
            plan, lowered = turn.fitted(ask(self._shown(turn, caps)))
            lowered = {who: count for who, count in lowered.items() if count < caps.get(who, count + 1)}
            if not lowered:
                break
            caps |= lowered
        revisits_s = [refusal.until_s for who in turn.claimants.values() for refusal in who.avoided]
        if plan.revisit_at_s is not None:
            revisits_s.append(plan.revisit_at_s)
        return replace(plan, no_room=turn.reasons(plan, caps), revisit_at_s=min(revisits_s, default=None))

    def _shown(self, turn: _Turn, caps: Mapping[WorkloadId, int]) -> Snapshot:
        """The snapshot as the policy sees it under these bounds."""
        snapshot = turn.snapshot
        jobs = [self._shown_job(view, caps) for view in snapshot.jobs if not turn.is_hidden(view.job.job_id, caps)]
        services = [_shown_service(view, caps) for view in snapshot.services]
        services = [view for view in services if not turn.is_hidden(view.service.service_id, caps)]
        demands = frozenset(who.demand for who in turn.claimants.values() if not turn.is_hidden(who.workload_id, caps))
        held = frozenset(device for given in snapshot.allocations.values() for device in given.device_ids)
        cluster = self._capacity.shown(demands, held)
        return replace(snapshot, cluster=cluster, jobs=tuple(jobs), services=tuple(services))

    def _shown_job(self, view: JobView, caps: Mapping[WorkloadId, int]) -> JobView:
        job_id, bounds = view.job.job_id, view.bounds
        cap = caps.get(job_id)
        if cap is None or cap >= bounds.max_workers or not view.job.elastic:
            self._views.pop(job_id, None)
            return view
        most = max(cap, bounds.min_workers)
        known = self._views.get(job_id)
        if known is None or known[0] is not view or known[1] != most:
            known = self._views[job_id] = (view, most, replace(view, bounds=replace(bounds, max_workers=most)))
        return known[2]


def _shown_service(view: ServiceView, caps: Mapping[WorkloadId, int]) -> ServiceView:
    cap = caps.get(view.service.service_id)
    if cap is None or cap >= view.max_replicas:
        return view
    return replace(view, max_replicas=max(1, cap), min_replicas=min(view.min_replicas, max(1, cap)))


class _Capacity:
    """What follows from the topology alone."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.nodes = tuple(node for node in topology.nodes if node.functions is None and node.devices)
        self.num_devices = sum(len(node.devices) for node in self.nodes)
        self._times: dict[Demand, dict[NodeId, int]] = {}
        self._usable: dict[frozenset[Demand], dict[NodeId, int]] = {}
        self._shown: tuple[frozenset[DeviceId], Topology] | None = None

    def times(self, demand: Demand) -> Mapping[NodeId, int]:
        """How many replicas each node has room for."""
        known = self._times.get(demand)
        if known is None:
            known = self._times[demand] = {node.node_id: demand.times_on(node) for node in self.nodes}
        return known

    def shown(self, demands: frozenset[Demand], held: frozenset[DeviceId]) -> Topology:
        """The topology without the devices that none of the demands leaves room to use."""
        usable = self._usable.get(demands)
        if usable is None:
            tables = [self.times(each) for each in demands]
            usable = {node.node_id: max(times[node.node_id] for times in tables) for node in self.nodes if tables}
            self._usable[demands] = usable
        hidden: list[DeviceId] = []
        for node in self.nodes:
            left = usable.get(node.node_id, len(node.devices))
            if left == len(node.devices):
                continue
            left -= sum(device.device_id in held for device in node.devices)
            for device in node.devices:
                if device.device_id not in held:
                    left -= 1
                    if left < 0:
                        hidden.append(device.device_id)
        key = frozenset(hidden)
        if self._shown is None or self._shown[0] != key:
            self._shown = (key, Topology(nodes=tuple(_shown_node(node, key) for node in self.topology.nodes)))
        return self._shown[1]


def _shown_node(node: Node, hidden: frozenset[DeviceId]) -> Node:
    # Without its room, a node stays the same for policies while pods of others come and go.
    devices = tuple(device for device in node.devices if device.device_id not in hidden) if hidden else node.devices
    return (
        node if node.room is None and len(devices) == len(node.devices) else replace(node, devices=devices, room=None)
    )


class _Turn:
    """One snapshot: who wants devices, and which plans fit."""

    def __init__(self, snapshot: Snapshot, capacity: _Capacity) -> None:
        self.snapshot = snapshot
        self._capacity = capacity
        self._node_of = snapshot.cluster.node_of
        self._nodes = snapshot.cluster.by_id
        self.claimants = {who.workload_id: who for who in _claimants(snapshot)}

    def held(self, workload_id: WorkloadId) -> tuple[DeviceId, ...]:
        """The living devices that the workload holds."""
        given = self.snapshot.allocations.get(workload_id)
        return () if given is None else tuple(device for device in given.device_ids if device in self._node_of)

    def caps(self) -> dict[WorkloadId, int]:
        """The most replicas of each workload that nodes have room for, where that is less than they have devices."""
        caps: dict[WorkloadId, int] = {}
        for workload_id, who in self.claimants.items():
            times = self._capacity.times(who.demand)
            refused = {refusal.node_id for refusal in who.avoided}
            total = sum(times.values()) - sum(times.get(node_id, 0) for node_id in refused)
            for node_id, count in Counter(self._node_of[device] for device in self.held(workload_id)).items():
                total += max(0, count - (0 if node_id in refused else times.get(node_id, 0)))
            if total < self._capacity.num_devices:
                caps[workload_id] = total
        return caps

    def is_hidden(self, workload_id: WorkloadId, caps: Mapping[WorkloadId, int]) -> bool:
        """Whether the policy does not see the workload: it holds nothing, and cannot run."""
        who, cap = self.claimants.get(workload_id), caps.get(workload_id)
        return who is not None and cap is not None and cap < who.least and not self.held(workload_id)

    def fitted(self, plan: Plan) -> tuple[Plan, dict[WorkloadId, int]]:
        """The plan with what has no room moved or left out, and the workloads that got fewer than planned."""
        claims = list(self._claims(plan))
        if any(claim.device not in self._node_of for claim in claims) or self._fits(claims):
            # A plan with a device that is not there is refused by the caller.
            return plan, {}
        placing = _Placing(self, plan, claims)
        allocations, lowered = dict(plan.allocations), {}
        for workload_id in {claim.who.workload_id: None for claim in claims}:
            given, who = allocations[workload_id], self.claimants[workload_id]
            found = placing.devices(workload_id, given.num_devices)
            if len(found) < who.least and not self.held(workload_id):
                del allocations[workload_id]
                lowered[workload_id] = 0
                continue
            if found != given.device_ids:
                allocations[workload_id] = replace(given, device_ids=found)
            if len(found) < given.num_devices:
                lowered[workload_id] = len(found)
        return replace(plan, allocations=allocations), lowered

    def _claims(self, plan: Plan) -> Iterable[_Claim]:
        for workload_id, given in plan.allocations.items():
            who = self.claimants.get(workload_id)
            if who is None:
                continue
            held = frozenset(self.held(workload_id))
            order = sorted(range(given.num_devices), key=lambda at: given.device_ids[at] not in held)
            least = max(1, who.least)
            for position, at in enumerate(order):
                device = given.device_ids[at]
                urgency = 0 if who.is_promised else 1 if position < least else 2
                yield _Claim(urgency, device not in held, who, at, device, given)

    def _fits(self, claims: Iterable[_Claim]) -> bool:
        used: dict[NodeId, HostResources] = {}
        gains: set[NodeId] = set()
        seen: set[DeviceId] = set()
        for claim in claims:
            node = self._nodes[self._node_of[claim.device]]
            asked = claim.who.demand.on(node, is_beside=claim.device in seen)
            seen.add(claim.device)
            used[node.node_id] = used.get(node.node_id, _NOTHING) + asked
            if claim.is_new:
                gains.add(node.node_id)
                if any(refusal.node_id == node.node_id for refusal in claim.who.avoided):
                    return False
        rooms = ((self._nodes[node_id].room, used[node_id]) for node_id in gains)
        return all(room is None or taken.times_in(room.free, 1) for room, taken in rooms)

    def reasons(self, plan: Plan, caps: Mapping[WorkloadId, int]) -> dict[WorkloadId, str]:
        """Why workloads wait that are kept out by the room, or by nodes that refused them."""
        return {
            workload_id: self._reason(who)
            for workload_id, who in self.claimants.items()
            if caps.get(workload_id, who.least) < who.least
            and workload_id not in plan.allocations
            and not self.held(workload_id)
        }

    def _reason(self, who: Claimant) -> str:
        times = self._capacity.times(who.demand)
        refused = {refusal.node_id for refusal in who.avoided}
        if who.avoided and all(node_id in refused or not count for node_id, count in times.items()):
            return who.avoided[-1].reason
        what = "worker" if who.is_job else "replica"
        nodes = [node for node in self._capacity.nodes if node.room is not None]
        if not nodes:
            return ""
        asked = who.demand.on(nodes[0])
        total = [node.room.total for node in nodes if node.room is not None]
        free = [node.room.free for node in nodes if node.room is not None]
        most_cpu_m, most_bytes = max(each.cpu_m for each in total), max(each.memory_bytes for each in total)
        if asked.cpu_m > most_cpu_m:
            return f"asks for {_cpus(asked.cpu_m)} per {what}; the largest node has {_cpus(most_cpu_m, is_short=True)}"
        if asked.memory_bytes > most_bytes:
            return f"asks for {_memory(asked.memory_bytes)} per {what}; the largest node has {_size(most_bytes)}"
        devices = self._capacity.num_devices
        foreign = sum(node.room.others.num_devices for node in nodes if node.room is not None)
        if foreign and devices - foreign < who.least:
            needed = f"{who.least} {what}" if who.least == 1 else f"{who.least} {what}s"
            return f"needs {needed}; pods of others hold {foreign} of the {devices} devices"
        if not any(times.values()):
            left_m, left_bytes = max(each.cpu_m for each in free), max(each.memory_bytes for each in free)
            return (
                f"asks for {_words(asked)} per {what}; pods of others leave at most {_cpus(left_m)} and "
                f"{_memory(left_bytes)} on a node"
            )
        if sum(times.values()) < who.least:
            return f"needs {who.least} {what}s of {_words(asked)} each; the nodes have room for {sum(times.values())}"
        refusal = f" ({who.avoided[-1].reason})" if who.avoided else ""
        return f"asks for {_words(asked)} per {what}, and no node has that left beside the others{refusal}"


class _Claim(NamedTuple):
    """A device of an allocation: the `at`-th. The less `urgency` is, the earlier it gets its room."""

    urgency: int
    is_new: bool
    who: Claimant
    at: int
    device: DeviceId
    given: PoolAllocation


class _Placing:
    """Gives room to claims: to promised jobs and each workload's least, then to the rest; to holders before others.

    What is held stays, unless it is more than its workload needs and the room went to a newcomer's least; pods of
    others never displace it.
    """

    def __init__(self, turn: _Turn, plan: Plan, claims: Iterable[_Claim]) -> None:
        self._turn, self._plan = turn, plan
        snapshot = turn.snapshot
        self._node_of, self._nodes = snapshot.cluster.node_of, snapshot.cluster.by_id
        ordered = sorted(claims, key=lambda claim: (claim.urgency == 2, claim.is_new, claim.urgency))
        self._urgency = {claim.device: claim.urgency for claim in reversed(ordered)}
        self._held = frozenset(device for given in snapshot.allocations.values() for device in given.device_ids)
        self._left: dict[NodeId, HostResources] = {}
        self._taken: dict[DeviceId, bool] = {}
        self._gained: set[NodeId] = set()
        self._found: dict[WorkloadId, dict[int, DeviceId]] = {}
        for claim in ordered:
            device: DeviceId | None = claim.device
            if not self._may_have(claim):
                device = self._other_place(claim)
            if device is not None:
                self._take(claim, device)

    def devices(self, workload_id: WorkloadId, count: int) -> tuple[DeviceId, ...]:
        """The devices of the workload, in the order of the plan."""
        found = self._found.get(workload_id, {})
        return tuple(found[at] for at in range(count) if at in found)

    def _may_have(self, claim: _Claim) -> bool:
        node = self._nodes[self._node_of[claim.device]]
        if self._is_taken(claim.device, claim.given.share):
            return False
        if not claim.is_new and (claim.urgency < 2 or node.node_id not in self._gained):
            return True
        return self._has_room(claim.who, node, is_new=claim.is_new, is_beside=claim.device in self._taken)

    def _is_taken(self, device: DeviceId, share: Share | None) -> bool:
        """Whether another has it: for one that shares it, whole."""
        is_shared = self._taken.get(device)
        return is_shared is not None and (share is None or not is_shared)

    def _has_room(self, who: Claimant, node: Node, *, is_new: bool = True, is_beside: bool = False) -> bool:
        if is_new and any(refusal.node_id == node.node_id for refusal in who.avoided):
            return False
        asked = who.demand.on(node, is_beside=is_beside)
        return node.room is None or asked.times_in(self._left_on(node), 1) > 0

    def _left_on(self, node: Node) -> HostResources:
        return self._left.get(node.node_id, _NOTHING if node.room is None else node.room.free)

    def _take(self, claim: _Claim, device: DeviceId) -> None:
        node = self._nodes[self._node_of[device]]
        asked = claim.who.demand.on(node, is_beside=device in self._taken)
        self._left[node.node_id] = self._left_on(node) - asked
        self._taken[device] = claim.given.share is not None
        if device not in self._turn.held(claim.who.workload_id):
            self._gained.add(node.node_id)
        self._found.setdefault(claim.who.workload_id, {})[claim.at] = device

    def _other_place(self, claim: _Claim) -> DeviceId | None:
        """A whole device on a node with room: its own, else near its others, else free. None: there is none."""
        snapshot, who = self._turn.snapshot, claim.who
        own = frozenset(self._turn.held(who.workload_id))
        near = {self._node_of[device] for device in self._found.get(who.workload_id, {}).values()}
        best: tuple[tuple[bool, bool, bool, bool], DeviceId] | None = None
        for node in snapshot.cluster.nodes:
            is_moving = node.node_id in self._plan.pools or node.node_id in snapshot.drains
            if node.functions is not None or is_moving or not admits(node.pool, is_job=who.is_job):
                continue
            if not self._has_room(who, node):
                continue
            for device in (each.device_id for each in node.devices):
                planned = self._urgency.get(device)
                if device in self._taken or (planned is not None and (claim.urgency == 2 or planned < 2)):
                    continue
                rank = (device not in own, planned is not None, node.node_id not in near, device in self._held)
                if best is None or rank < best[0]:
                    best = (rank, device)
        return None if best is None else best[1]


def _claimants(snapshot: Snapshot) -> Iterable[Claimant]:
    for view in snapshot.jobs:
        job = view.job
        if not job.is_on_functions:
            yield Claimant(
                workload_id=job.job_id,
                is_job=True,
                demand=demand_of(job.container, job.share),
                least=view.bounds.min_workers if job.elastic else view.bounds.max_workers,
                is_promised=view.promise.promised_finish_s is not None,
                avoided=_active(view.restarts.refusals, snapshot.now_s),
            )
    for served in snapshot.services:
        service = served.service
        yield Claimant(
            workload_id=service.service_id,
            is_job=False,
            demand=demand_of(service.container, service.share),
            least=1,
            is_promised=False,
            avoided=_active(served.refusals, snapshot.now_s),
        )


def _active(refusals: tuple[NodeRefusal, ...], now_s: float) -> tuple[NodeRefusal, ...]:
    return tuple(refusal for refusal in refusals if now_s < refusal.until_s) if refusals else ()


# --- words -----------------------------------------------------------------------------------------------------------


def _words(asked: HostResources) -> str:
    parts = [_cpus(asked.cpu_m)] if asked.cpu_m else []
    parts += [_memory(asked.memory_bytes)] if asked.memory_bytes else []
    return " and ".join(parts) or "a pod"


def _cpus(cpu_m: int, *, is_short: bool = False) -> str:
    number = f"{cpu_m / 1000:g}"
    return number if is_short else f"{number} CPU" if number == "1" else f"{number} CPUs"


def _memory(num_bytes: int) -> str:
    return f"{_size(num_bytes)} of memory"


def _size(num_bytes: int) -> str:
    gib = num_bytes / (1 << 30)
    return f"{gib:.3g} GiB" if gib >= 1 else f"{num_bytes / (1 << 20):.0f} MiB"
