"""One pool of machines for serving and training: any training policy on the nodes that a strategy of loans leaves it.

FaPES (SoCC'24), sections 3.2 to 3.4. The strategy labels nodes, services get replicas on those that serve, and the
training policy plans the rest as if that were the whole cluster. See docs/policies/loaning.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from springtide.core.decision import Drain, Plan, Policy, PoolAllocation, Snapshot
from springtide.core.resources import Device, DeviceId, Node, NodeId, Pool, Topology
from springtide.core.workload import WorkloadId
from springtide.perf.tide import Forecasters
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.loans.inference import Served, names_text, serve, wanted_label
from springtide.scheduling.loans.pools import LabelVerdict, NodeView, PoolState, Strategy, pool_state
from springtide.scheduling.placement.gangs import devices_text
from springtide.scheduling.placement.layout import topology_of
from springtide.scheduling.replicas import next_idle_at_s

# How often a training policy decides at most: again without the cordoned devices that it gave to other jobs.
MAX_DECISIONS = 4
Allocations = Mapping[WorkloadId, PoolAllocation]


class DerivedLoans:
    """What a policy under a strategy of loans keeps between two decisions."""

    def __init__(self, training: Policy) -> None:
        self.training = DecisionCache(training)
        self.forecasters = Forecasters()


class Loaning(msgspec.Struct, frozen=True, kw_only=True):
    """A training policy under a strategy of loans."""

    strategy: Strategy
    training: Policy

    def make_derived(self) -> DerivedLoans:
        """An empty object to keep derived values in."""
        return DerivedLoans(self.training)

    def decide(self, snapshot: Snapshot, derived: DerivedLoans | None = None) -> Plan:
        """Return the plan for this snapshot."""
        derived = derived or self.make_derived()
        if not snapshot.jobs and not snapshot.services and not snapshot.num_parts_waiting:
            # No workload gains from a loan, and a platform that is going down changes no labels.
            return Plan(memory=snapshot.memory)
        pools = pool_state(snapshot, derived.forecasters)
        verdict = self.strategy.choose(pools)
        served = serve(pools, verdict)
        left = TrainingView(pools, verdict, served)
        memory = snapshot.memory.get("training") if isinstance(snapshot.memory, dict) else None
        capacity = self.strategy.capacity(pools, verdict) or snapshot.capacity
        plan, given = left.plan_training(derived.training, replace(snapshot, memory=memory, capacity=capacity))
        idle_at_s = next_idle_at_s(snapshot.services, snapshot.now_s)
        moments = [at for at in (plan.revisit_at_s, verdict.revisit_at_s, idle_at_s) if at is not None]
        return replace(
            plan,
            allocations={**given, **served.allocations},
            reasons={**plan.reasons, **left.waits(given), **left.reasons(given), **served.reasons},
            revisit_at_s=min(moments, default=None),
            memory={"training": plan.memory},
            pools=verdict.pools,
            capacity=plan.capacity or capacity,
        )


class TrainingView:
    """The part of the cluster that a verdict leaves to training, and the decision of a training policy on it.

    `cordoned` maps devices of nodes that are to serve to the jobs that may keep them until they end; `closed` are the
    devices that services hold or get.
    """

    def __init__(self, pools: PoolState, verdict: LabelVerdict, served: Served) -> None:
        self.pools = pools
        self.verdict = verdict
        self.holder: dict[DeviceId, WorkloadId] = {}
        jobs = pools.job_of
        services = {need.service_id for need in pools.needs}
        replicas: set[DeviceId] = set()
        for workload_id, held in pools.snapshot.allocations.items():
            if workload_id in jobs:
                self.holder.update(dict.fromkeys(held.device_ids, workload_id))
            elif workload_id in services:
                replicas.update(held.device_ids)
        self.closed = replicas | served.devices
        self.cordoned: dict[DeviceId, WorkloadId] = {}
        self.open: list[tuple[Node, Pool, list[Device]]] = []
        self.is_whole = True
        for node in pools.nodes:
            self._open(node)

    def _open(self, node: NodeView) -> None:
        """Add the devices of a node that training may hold."""
        seen = self.pools.snapshot.cluster.by_id[node.node_id]
        label = wanted_label(node, self.verdict)
        is_moving = label != node.pool
        if label == "inference":
            devices = []
            if is_moving and node.node_id not in self.verdict.reclaimed:
                mine = [device for device in seen.devices if device.device_id in self.holder]
                devices = [device for device in mine if device.device_id not in self.closed]
                self.cordoned.update({device.device_id: self.holder[device.device_id] for device in devices})
        elif label == "training" and is_moving and node.pool == "inference" and node.replicas:
            # Its label changes when the last replica has left.
            devices = []
        else:
            devices = [device for device in seen.devices if device.device_id not in self.closed]
        self.is_whole = self.is_whole and label == node.pool and len(devices) == len(seen.devices)
        if devices:
            # A cordoned node keeps the label under which jobs may stay.
            self.open.append((seen, node.pool if label == "inference" else label, devices))

    def plan_training(self, policy: Policy, whole: Snapshot) -> tuple[Plan, dict[WorkloadId, PoolAllocation]]:
        """The policy's plan for the part of `whole` that is left to training, and the allocations of jobs by it.

        No other job may get a device that a job gives up on a cordoned node. If the policy gives it to one, it decides
        again as if the device were gone, as it will once the job has left.
        """
        gone: frozenset[DeviceId] = frozenset()
        for _ in range(MAX_DECISIONS):
            shown = self._shown(whole, gone)
            plan = policy.decide(shown)
            kept = self._kept(plan.allocations)
            if not any(self._strays(who, given) for who, given in plan.allocations.items()):
                break
            gone |= self.cordoned.keys() - kept
        return plan, self._given(plan.allocations, shown)

    def _kept(self, given: Allocations) -> set[DeviceId]:
        """The cordoned devices that the job on them keeps."""
        return {at for who, mine in given.items() for at in mine.device_ids if self.cordoned.get(at) == who}

    def _strays(self, workload_id: WorkloadId, given: PoolAllocation) -> list[DeviceId]:
        """The cordoned devices given to a job that does not hold them."""
        return [at for at in given.device_ids if self.cordoned.get(at, workload_id) != workload_id]

    def _shown(self, whole: Snapshot, gone: frozenset[DeviceId]) -> Snapshot:
        """The snapshot with training alone in it."""
        cluster = whole.cluster
        if gone or not self.is_whole:
            parts = (_part(node, label, devices, gone) for node, label, devices in self.open)
            cluster = topology_of(tuple([node for node in parts if node]))
        alive, existing = cluster.device_set, whole.cluster.device_set
        rigid = {view.job.job_id for view in whole.jobs if not view.job.elastic}
        closed = {need.service_id for need in self.pools.needs}
        allocations: dict[WorkloadId, PoolAllocation] = {}
        for workload_id, held in whole.allocations.items():
            if workload_id in closed:
                continue
            left = tuple([at for at in held.device_ids if at in alive])
            if len(left) == len(held.device_ids):
                allocations[workload_id] = held
            elif workload_id in rigid and any(at in existing and at not in alive for at in held.device_ids):
                # It cannot go on with fewer devices: it starts anew elsewhere.
                continue
            elif left:
                allocations[workload_id] = replace(held, device_ids=left)
        return replace(whole, cluster=cluster, services=(), allocations=allocations, drains=self._drains(cluster))

    def _drains(self, cluster: Topology) -> dict[NodeId, Drain]:
        """The nodes on which jobs may stay and none may start, by their names in the shown snapshot."""
        drains: dict[NodeId, Drain] = {}
        for node in cluster.nodes:
            if node.devices[0].device_id in self.cordoned:
                seen = self.pools.by_id[self.pools.snapshot.cluster.node_of[node.devices[0].device_id]]
                relabel = self.verdict.pools[seen.node_id]
                begun = Drain(pool=relabel.pool, since_s=self.pools.now_s, reason=relabel.reason)
                drains[node.node_id] = seen.drain or begun
        return drains

    def _given(self, wanted: Allocations, shown: Snapshot) -> dict[WorkloadId, PoolAllocation]:
        """The allocations of a plan that may be given now."""
        held = self.pools.snapshot.allocations
        given: dict[WorkloadId, PoolAllocation] = {}
        for workload_id, allocation in wanted.items():
            view = self.pools.job_of.get(workload_id)
            if view is None:
                continue
            if not view.job.elastic and workload_id in held and workload_id not in shown.allocations:
                # It has to stop where it is before it may start elsewhere; its new place is kept for it.
                continue
            strays = self._strays(workload_id, allocation)
            if strays:
                left = tuple([at for at in allocation.device_ids if at not in strays])
                if not view.job.elastic or len(left) < view.bounds.min_workers:
                    continue
                allocation = replace(allocation, device_ids=left)
            if allocation.num_devices < view.bounds.min_workers and self._loses(workload_id, shown):
                # A reclaim leaves no job with less than its minimum: such a job stops and waits.
                continue
            given[workload_id] = allocation
        return given

    def _loses(self, workload_id: WorkloadId, shown: Snapshot) -> bool:
        """Whether the workload has to give up a device that is alive."""
        whole = self.pools.snapshot
        held = whole.allocations.get(workload_id)
        alive, existing = shown.cluster.device_set, whole.cluster.device_set
        return held is not None and any(at in existing and at not in alive for at in held.device_ids)

    def waits(self, given: Allocations) -> dict[WorkloadId, str]:
        """The reasons of waiting jobs that fit into the cluster, but not into training's part of it at present."""
        num_open = sum(len(devices) for _, _, devices in self.open)
        whole = self.pools.snapshot
        total = len(whole.cluster.device_set)
        return {
            view.job.job_id: f"needs {view.bounds.min_workers} devices, training has {num_open} of {total} now"
            for view in whole.jobs
            if num_open < view.bounds.min_workers <= total
            and view.job.job_id not in given
            and view.job.job_id not in whole.allocations
        }

    def reasons(self, given: Allocations) -> dict[WorkloadId, str]:
        """The reasons of jobs that give up devices for services."""
        found: dict[WorkloadId, str] = {}
        held = self.pools.snapshot.allocations
        for node in self.pools.nodes:
            relabel = self.verdict.pools.get(node.node_id)
            for workload_id in node.jobs:
                mine = held[workload_id].device_ids
                if workload_id not in self.pools.job_of or workload_id in found:
                    continue
                now = given[workload_id].device_ids if workload_id in given else ()
                lost = [at for at in mine if at in self.closed and at not in now]
                if relabel is not None and node.node_id in self.verdict.reclaimed:
                    found[workload_id] = f"leaves {node.node_id}: {relabel.reason}"
                elif lost:
                    nodes = list(dict.fromkeys(self.pools.snapshot.cluster.node_of[at] for at in lost))
                    found[workload_id] = f"services take {devices_text(len(lost))} on {names_text(nodes)}"
        return found


def _part(node: Node, label: Pool, devices: list[Device], gone: frozenset[DeviceId]) -> Node | None:
    """A node under its new label with only some of its devices; None without any.

    A part of a node gets a name of its own, since policies remember devices by their number on the node.
    """
    left = [device for device in devices if device.device_id not in gone]
    if not left:
        return None
    if len(left) == len(node.devices):
        return node if label == node.pool else replace(node, pool=label)
    name = NodeId(f"{node.node_id}[{','.join(str(device.index) for device in left)}]")
    part = tuple([replace(device, node_id=name) for device in left])
    return replace(node, node_id=name, pool=label, devices=part)
