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

from springtide.core.decision import JobView, Plan, PoolAllocation, ServiceView, Snapshot
from springtide.core.job_parts import NodeRefusal
from springtide.core.resources import DeviceId, HostResources, Node, NodeId, Topology, admits
from springtide.core.shares import Share
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.demand import Demand, demand_of

# How often a policy is asked again in one turn. The plan of the last time fits as well.
MAX_ROUNDS = 4
_NOTHING = HostResources()


class Claimant(NamedTuple):
    """A workload that wants devices of machines.

    `least` is how many devices it needs to run at all; `avoided` are the nodes that refused it.
    """

    workload_id: WorkloadId
    is_job: bool
    demand: Demand
    least: int
    is_promised: bool
    avoided: tuple[NodeRefusal, ...]

    @property
    def each(self) -> int:
        """How many devices each of its replicas holds."""
        return self.demand.num_devices


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
        no_room = {**plan.no_room, **turn.reasons(plan, caps)}
        return replace(plan, no_room=no_room, revisit_at_s=min(revisits_s, default=None))

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
    cap = None if cap is None else cap // view.service.devices_each
    if cap is None or cap >= view.max_replicas:
        return view
    return replace(view, max_replicas=max(1, cap), min_replicas=min(view.min_replicas, max(1, cap)))


class _Capacity:
    """What follows from the topology alone."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.nodes = tuple(node for node in topology.nodes if node.functions is None and node.devices)
        self.num_devices = self.num_in_parts(1)
        self._times: dict[Demand, dict[NodeId, int]] = {}
        self._usable: dict[frozenset[Demand], dict[NodeId, int]] = {}
        self._shown: tuple[frozenset[DeviceId], Topology] | None = None

    def num_in_parts(self, each: int) -> int:
        """The devices of which replicas of so many each can be made, on nodes without others."""
        return sum(len(node.devices) // each * each for node in self.nodes)

    def times(self, demand: Demand) -> Mapping[NodeId, int]:
        """How many devices each node has room for, as parts of whole replicas."""
        known = self._times.get(demand)
        if known is None:
            known = self._times[demand] = {
                node.node_id: demand.times_on(node) * demand.num_devices for node in self.nodes
            }
        return known

    def shown(self, demands: frozenset[Demand], held: frozenset[DeviceId]) -> Topology:
        """The topology without the devices that none of the demands leaves room to use."""
        usable = self._usable.get(demands)
        if usable is None:
            usable = {
                node.node_id: max(self._usable_for(each, node) for each in demands) for node in self.nodes if demands
            }
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

    def _usable_for(self, demand: Demand, node: Node) -> int:
        count, each = self.times(demand)[node.node_id], demand.num_devices
        # What is too few for one more replica is no matter of room.
        return len(node.devices) if count == len(node.devices) // each * each else count


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
        """The most devices of each workload that nodes have room for, where that is less than they have."""
        caps: dict[WorkloadId, int] = {}
        for workload_id, who in self.claimants.items():
            times = self._capacity.times(who.demand)
            refused = {refusal.node_id for refusal in who.avoided}
            total = sum(times.values()) - sum(times.get(node_id, 0) for node_id in refused)
            for node_id, count in Counter(self._node_of[device] for device in self.held(workload_id)).items():
                total += max(0, count - (0 if node_id in refused else times.get(node_id, 0)))
            if total < self._capacity.num_in_parts(who.each):
                caps[workload_id] = total
        return caps

    def is_hidden(self, workload_id: WorkloadId, caps: Mapping[WorkloadId, int]) -> bool:
        """Whether the policy does not see the workload: it holds nothing, and cannot run."""
        who, cap = self.claimants.get(workload_id), caps.get(workload_id)
        return who is not None and cap is not None and cap < who.least and not self.held(workload_id)

    def fitted(self, plan: Plan) -> tuple[Plan, dict[WorkloadId, int]]:
        """The plan with what has no room moved or left out, and the workloads that got fewer than planned."""
        claims = list(self._claims(plan))
        if any(device not in self._node_of for claim in claims for device in claim.devices) or self._fits(claims):
            # A plan with a device that is not there is refused by the caller.
            return plan, {}
        placing = _Placing(self, plan, claims)
        allocations, lowered = dict(plan.allocations), {}
        for workload_id in {claim.who.workload_id: None for claim in claims}:
            given, who = allocations[workload_id], self.claimants[workload_id]
            found = placing.devices(workload_id, given.num_devices // who.each)
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
            held, each = frozenset(self.held(workload_id)), who.each
            parts = [given.device_ids[at : at + each] for at in range(0, given.num_devices - each + 1, each)]
            order = sorted(range(len(parts)), key=lambda at: not held.issuperset(parts[at]))
            least = max(1, who.least // each)
            for position, at in enumerate(order):
                urgency = 0 if who.is_promised else 1 if position < least else 2
                yield _Claim(urgency, not held.issuperset(parts[at]), who, at, parts[at], given)

    def _fits(self, claims: Iterable[_Claim]) -> bool:
        used: dict[NodeId, HostResources] = {}
        gains: set[NodeId] = set()
        seen: set[DeviceId] = set()
        for claim in claims:
            node = self._nodes[self._node_of[claim.devices[0]]]
            asked = claim.who.demand.on(node, is_beside=claim.devices[0] in seen)
            seen.update(claim.devices)
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
        what, least = "worker" if who.is_job else "replica", who.least // who.each
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
            needed = f"{least} {what}" if least == 1 else f"{least} {what}s"
            needed += f" of {who.each} devices" if who.each > 1 else ""
            return f"needs {needed}; pods of others hold {foreign} of the {devices} devices"
        most_left = max(each.num_devices for each in free)
        if foreign and who.each > most_left:
            return (
                f"needs {who.each} devices of one node per {what}; pods of others leave at most {most_left} on a node"
            )
        if not any(times.values()):
            left_m, left_bytes = max(each.cpu_m for each in free), max(each.memory_bytes for each in free)
            return (
                f"asks for {_words(asked, who.each)} per {what}; pods of others leave at most {_cpus(left_m)} and "
                f"{_memory(left_bytes)} on a node"
            )
        if sum(times.values()) < who.least:
            room = sum(times.values()) // who.each
            return f"needs {least} {what}s of {_words(asked, who.each)} each; the nodes have room for {room}"
        refusal = f" ({who.avoided[-1].reason})" if who.avoided else ""
        return f"asks for {_words(asked, who.each)} per {what}, and no node has that left beside the others{refusal}"


class _Claim(NamedTuple):
    """The devices of one replica in an allocation: the `at`-th. The less `urgency`, the earlier it gets its room."""

    urgency: int
    is_new: bool
    who: Claimant
    at: int
    devices: tuple[DeviceId, ...]
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
        self._urgency = {device: claim.urgency for claim in reversed(ordered) for device in claim.devices}
        self._held = frozenset(device for given in snapshot.allocations.values() for device in given.device_ids)
        self._left: dict[NodeId, HostResources] = {}
        self._taken: dict[DeviceId, bool] = {}
        self._gained: set[NodeId] = set()
        self._found: dict[WorkloadId, dict[int, tuple[DeviceId, ...]]] = {}
        for claim in ordered:
            devices = claim.devices if self._may_have(claim) else self._other_place(claim)
            if devices:
                self._take(claim, devices)

    def devices(self, workload_id: WorkloadId, count: int) -> tuple[DeviceId, ...]:
        """The devices of the workload's `count` replicas, in the order of the plan, without those that have no room."""
        found = self._found.get(workload_id, {})
        return tuple([device for at in range(count) for device in found.get(at, ())])

    def _may_have(self, claim: _Claim) -> bool:
        node = self._nodes[self._node_of[claim.devices[0]]]
        if any(self._is_taken(device, claim.given.share) for device in claim.devices):
            return False
        if not claim.is_new and (claim.urgency < 2 or node.node_id not in self._gained):
            return True
        return self._has_room(claim.who, node, is_new=claim.is_new, is_beside=claim.devices[0] in self._taken)

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

    def _take(self, claim: _Claim, devices: tuple[DeviceId, ...]) -> None:
        node = self._nodes[self._node_of[devices[0]]]
        asked = claim.who.demand.on(node, is_beside=devices[0] in self._taken)
        self._left[node.node_id] = self._left_on(node) - asked
        self._taken |= dict.fromkeys(devices, claim.given.share is not None)
        if not set(devices).issubset(self._turn.held(claim.who.workload_id)):
            self._gained.add(node.node_id)
        self._found.setdefault(claim.who.workload_id, {})[claim.at] = devices

    def _other_place(self, claim: _Claim) -> tuple[DeviceId, ...]:
        """Whole devices on a node with room: its own, else near its others, else free. Empty: there are none."""
        snapshot, who = self._turn.snapshot, claim.who
        own = {device: at // who.each for at, device in enumerate(self._turn.held(who.workload_id))}
        near = {self._node_of[devices[0]] for devices in self._found.get(who.workload_id, {}).values()}
        best: tuple[_Rank, tuple[DeviceId, ...]] | None = None
        for node in snapshot.cluster.nodes:
            is_moving = node.node_id in self._plan.pools or node.node_id in snapshot.drains
            if node.functions is not None or is_moving or not admits(node.pool, is_job=who.is_job):
                continue
            if not self._has_room(who, node):
                continue
            ranks: dict[DeviceId, _Rank] = {}
            for device in (each.device_id for each in node.devices):
                planned = self._urgency.get(device)
                if device in self._taken or (planned is not None and (claim.urgency == 2 or planned < 2)):
                    continue
                is_far, is_held = node.node_id not in near, device in self._held
                ranks[device] = (device not in own, planned is not None, is_far, is_held)
            for place in _places(ranks, own, who.each):
                if best is None or place[0] < best[0]:
                    best = place
        return () if best is None else best[1]


_Rank = tuple[bool, bool, bool, bool]


def _places(
    ranks: Mapping[DeviceId, _Rank], own: Mapping[DeviceId, int], each: int
) -> Iterable[tuple[_Rank, tuple[DeviceId, ...]]]:
    """The devices of one node that a replica may have, with the worst of their ranks. `own` are by replica there.

    Those of a replica that is there stay together: part of them would have to wait until it has left.
    """
    parts: dict[int, list[DeviceId]] = {}
    for device in ranks:
        if device in own:
            parts.setdefault(own[device], []).append(device)
    others = sorted([device for device in ranks if device not in own], key=ranks.__getitem__)[:each]
    for part in (*parts.values(), others):
        if len(part) == each:
            yield max(ranks[device] for device in part), tuple(part)


def _claimants(snapshot: Snapshot) -> Iterable[Claimant]:
    for view in snapshot.jobs:
        job = view.job
        if not job.is_on_functions:
            yield Claimant(
                workload_id=job.job_id,
                is_job=True,
                demand=demand_of(job.container, job.share, job.devices_each),
                least=view.bounds.min_workers if job.elastic else view.bounds.max_workers,
                is_promised=view.promise.promised_finish_s is not None,
                avoided=_active(view.restarts.refusals, snapshot.now_s),
            )
    for served in snapshot.services:
        service = served.service
        yield Claimant(
            workload_id=service.service_id,
            is_job=False,
            demand=demand_of(service.container, service.share, service.devices_each),
            least=service.devices_each,
            is_promised=False,
            avoided=_active(served.refusals, snapshot.now_s),
        )


def _active(refusals: tuple[NodeRefusal, ...], now_s: float) -> tuple[NodeRefusal, ...]:
    return tuple(refusal for refusal in refusals if now_s < refusal.until_s) if refusals else ()


# --- words -----------------------------------------------------------------------------------------------------------


def _words(asked: HostResources, each: int) -> str:
    parts = [f"{each} devices"] if each > 1 else []
    parts += [_cpus(asked.cpu_m)] if asked.cpu_m else []
    parts += [_memory(asked.memory_bytes)] if asked.memory_bytes else []
    return " and ".join([", ".join(parts[:-1]), *parts[-1:]] if len(parts) > 1 else parts) or "a pod"


def _cpus(cpu_m: int, *, is_short: bool = False) -> str:
    number = f"{cpu_m / 1000:g}"
    return number if is_short else f"{number} CPU" if number == "1" else f"{number} CPUs"


def _memory(num_bytes: int) -> str:
    return f"{_size(num_bytes)} of memory"


def _size(num_bytes: int) -> str:
    gib = num_bytes / (1 << 30)
    return f"{gib:.3g} GiB" if gib >= 1 else f"{num_bytes / (1 << 20):.0f} MiB"
