"""Nodes that change pools: the actions for a plan's labels, expired graces, and plans that do not fit the labels."""

from __future__ import annotations

from collections.abc import Mapping

from springtide.control.records import PlatformState, ReplicaState
from springtide.core.actions import Action, DrainNode, LabelNode
from springtide.core.decision import Plan, Relabel
from springtide.core.resources import DeviceId, Node, NodeId, admits
from springtide.core.workload import WorkloadId


def pool_actions(state: PlatformState, plan: Plan) -> list[Action]:
    """Return the actions that lead from the nodes' labels towards those that the plan wants. Does not change `state`.

    A node gets its new label once no workload that the label does not admit holds one of its devices; until then the
    node drains.
    """
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
    """The node's devices that are held as a whole by workloads which the new label does not admit."""
    devices = {device.device_id for device in node.devices}
    found: set[DeviceId] = set()
    for table, is_job in ((state.jobs, True), (state.services, False)):
        if not admits(wish.pool, is_job=is_job):
            found |= (devices & table.held) - table.shares.keys()
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
        if replica.device_id in since and replica.share is None
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
    """The workload and device of each grant of a whole device on a node whose wanted label does not admit it."""
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
        if given.share is None
        for device_id in given.device_ids
        if node_of[device_id] not in open_to[workload_id in jobs]
    ]
