"""Nodes that change pools: the actions for a plan's labels, which workloads may start on a node, and expired graces."""

from __future__ import annotations

from collections.abc import Mapping

from springtide.control.records import JobRecord, PlatformState, ReplicaRecord, ReplicaState
from springtide.core.actions import Action, DrainNode, LabelNode
from springtide.core.decision import Plan, PoolAllocation, Relabel
from springtide.core.resources import DeviceId, Node, NodeId, admits
from springtide.core.workload import WorkloadId

NO_DEVICES = PoolAllocation(device_ids=())


class LabelRules:
    """Which devices the labels and drains of nodes allow for jobs or services, and which workers a reclaim removes.

    Valid for one round of reconciling: it is built again after labels or drains have changed.
    """

    def __init__(self, state: PlatformState, plan: Plan) -> None:
        topology = state.topology()
        self._drains = state.drains
        self._by_id = topology.by_id
        self._node_of = topology.node_of
        self._plan = plan
        # Every node is shared and no label changes: all checks pass.
        self._is_open = not topology.has_pools and not state.drains

    def admits(self, device_id: DeviceId, *, is_job: bool) -> bool:
        """Whether a job's worker, or else a service's replica, may start on the device. The device has to be alive."""
        if self._is_open:
            return True
        node = self._by_id[self._node_of[device_id]]
        drain = self._drains.get(node.node_id)
        return admits(node.pool, is_job=is_job) and (drain is None or admits(drain.pool, is_job=is_job))

    def reclaimed(self, record: JobRecord) -> list[tuple[ReplicaRecord, float]]:
        """The job's workers that have to leave a reclaimed node and are not stopping yet, each with the end of its
        grace."""
        if not self._drains:
            return []
        wanted = self._plan.allocations.get(record.workload_id, NO_DEVICES).device_ids
        found: list[tuple[ReplicaRecord, float]] = []
        for replica in record.replicas:
            node_id = self._node_of.get(replica.device_id)
            drain = self._drains.get(node_id) if node_id is not None else None
            if drain is None or drain.reclaim_since_s is None or admits(drain.pool, is_job=True):
                continue
            if replica.state is not ReplicaState.STOPPING and replica.device_id not in wanted:
                found.append((replica, drain.reclaim_since_s + record.job.grace_s))
        return found


def pool_actions(state: PlatformState, plan: Plan) -> list[Action]:
    """Return the actions that lead from the nodes' labels towards those that the plan wants. Does not change `state`.

    A node gets its new label once no workload that the label does not admit holds one of its devices; until then the
    node drains.
    """
    if not plan.pools and not state.drains:
        return []
    actions: list[Action] = []
    kept: frozenset[DeviceId] | None = None
    for node_id, wish in plan.pools.items():
        node = state.nodes.get(node_id)
        if node is None or wish.pool == node.pool:
            continue
        staying = _inadmissible(state, node, wish)
        if not staying:
            actions.append(LabelNode(node_id=node_id, pool=wish.pool, cause="plan", reason=wish.reason))
            continue
        drain = state.drains.get(node_id)
        is_same = drain is not None and drain.pool == wish.pool
        was_reclaim = drain is not None and is_same and drain.reclaim_since_s is not None
        is_reclaim = False
        if staying & state.jobs.held:
            kept = _kept_by_jobs(state, plan) if kept is None else kept
            leaving = (staying & state.jobs.held) - kept
            # A reclaim lasts until these workers are gone. Workers that have to leave after it get a new grace.
            is_reclaim = bool(leaving) if was_reclaim else _is_reclaiming(state, leaving)
        if not is_same or is_reclaim != was_reclaim:
            actions.append(
                DrainNode(
                    node_id=node_id,
                    pool=wish.pool,
                    is_reclaim=is_reclaim,
                    cost_s=wish.cost_s,
                    cause="plan",
                    reason=wish.reason,
                )
            )
    for node_id in state.drains:
        node = state.nodes[node_id]
        wanted = plan.pools.get(node_id)
        if wanted is None or wanted.pool == node.pool:
            actions.append(
                LabelNode(node_id=node_id, pool=node.pool, cause="plan", reason=f"it stays with {node.pool} after all")
            )
    return actions


def _inadmissible(state: PlatformState, node: Node, wish: Relabel) -> set[DeviceId]:
    """The node's devices that are held by workloads which the new label does not admit."""
    devices = {device.device_id for device in node.devices}
    found: set[DeviceId] = set()
    if not admits(wish.pool, is_job=True):
        found |= devices & state.jobs.held
    if not admits(wish.pool, is_job=False):
        found |= devices & state.services.held
    return found


def _kept_by_jobs(state: PlatformState, plan: Plan) -> frozenset[DeviceId]:
    jobs = state.jobs
    return frozenset().union(*[given.device_ids for who, given in plan.allocations.items() if who in jobs])


def _is_reclaiming(state: PlatformState, devices: set[DeviceId]) -> bool:
    """Whether a job that wants to go on has to give up any of the devices. Ended jobs release theirs anyway."""
    return bool(devices) and any(
        replica.device_id in devices and replica.state is not ReplicaState.STOPPING
        for record in state.jobs.live.values()
        if record.lifecycle.outcome is None and not record.bounds.is_paused and not record.state.is_terminal
        for replica in record.replicas
    )


def graces_over_at_s(state: PlatformState, now_s: float) -> list[float]:
    """The future instants at which the grace of a worker on a reclaimed node ends, ascending."""
    since = {
        device.device_id: drain.reclaim_since_s
        for node_id, drain in state.drains.items()
        if drain.reclaim_since_s is not None and not admits(drain.pool, is_job=True)
        for device in state.nodes[node_id].devices
    }
    if not since:
        return []
    moments = {
        since[replica.device_id] + record.job.grace_s
        for record in state.jobs.live.values()
        for replica in record.replicas
        if replica.device_id in since
    }
    return sorted(moment for moment in moments if moment > now_s)


def wanted_pools(plan_pools: Mapping[NodeId, Relabel], nodes: Mapping[NodeId, Node]) -> dict[NodeId, str]:
    """The label that the plan wants for each node."""
    return {
        node_id: plan_pools[node_id].pool if node_id in plan_pools else node.pool for node_id, node in nodes.items()
    }


def misplaced(
    plan: Plan, nodes: Mapping[NodeId, Node], node_of: Mapping[DeviceId, NodeId], jobs: frozenset[WorkloadId]
) -> list[tuple[WorkloadId, DeviceId]]:
    """The workload and device of each grant on a node whose wanted label does not admit the workload."""
    pools = wanted_pools(plan.pools, nodes)
    open_to = {
        is_job: {
            node_id for node_id, pool in pools.items() if pool in ("shared", "training" if is_job else "inference")
        }
        for is_job in (True, False)
    }
    return [
        (workload_id, device_id)
        for workload_id, given in plan.allocations.items()
        for device_id in given.device_ids
        if node_of[device_id] not in open_to[workload_id in jobs]
    ]
