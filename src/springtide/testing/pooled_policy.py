"""The kit for policies that label nodes: random platforms with pools, and checks of every plan.

def test_my_policy():
    check_pooled_policy(lambda: MyPolicy())
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np
from msgspec.structs import replace

from springtide.core.decision import Allocation, Drain, JobView, Plan, Policy, PoolAllocation, ServiceView, Snapshot
from springtide.core.resources import DeviceId, Node, NodeId, Pool, Topology, admits, make_node
from springtide.core.workload import JobState, WorkloadId
from springtide.testing.policy import check_on_snapshots, check_plan_details, draw_job, draw_service

_OWNERS: tuple[Pool, ...] = ("inference", "training", "shared")

# Released devices may allow a larger plan each time; a plan that still changes after so many rounds counts as unstable.
MAX_CARRIED_OUT = 4


def draw_pooled_snapshot(rng: np.random.Generator) -> Snapshot:
    """Draw a platform with pools: some nodes on loan, some draining; labels admit the workloads on their nodes."""
    nodes = tuple(_draw_node(rng, index) for index in range(int(rng.integers(1, 6))))
    cluster = Topology(nodes=nodes)
    now_s = float(rng.uniform(100.0, 10_000.0))
    free: dict[bool, list[DeviceId]] = {True: [], False: []}
    for node in nodes:
        for device in node.devices:
            is_job = rng.random() < 0.5 if node.pool == "shared" else node.pool == "training"
            free[is_job].append(device.device_id)
    for devices in free.values():
        rng.shuffle(devices)
    allocations: dict[WorkloadId, Allocation] = {}
    jobs = tuple(draw_job(rng, index, now_s, free[True], allocations) for index in range(int(rng.integers(0, 9))))
    services = tuple(draw_service(rng, index, free[False], allocations) for index in range(int(rng.integers(0, 4))))
    held = {device for given in allocations.values() for device in given.device_ids}
    drains = {node.node_id: _draw_drain(rng, node, now_s) for node in nodes if _may_drain(node, held, rng)}
    return Snapshot(now_s=now_s, cluster=cluster, jobs=jobs, services=services, allocations=allocations, drains=drains)


def _draw_node(rng: np.random.Generator, index: int) -> Node:
    owner = _OWNERS[int(rng.integers(len(_OWNERS)))]
    node = make_node(f"node-{index}", int(rng.integers(1, 5)), pool=owner, isolates_devices=bool(rng.random() < 0.3))
    if owner != "shared" and rng.random() < 0.3:
        node = replace(node, pool="training" if owner == "inference" else "inference")
    return node


def _may_drain(node: Node, held: set[DeviceId], rng: np.random.Generator) -> bool:
    """Whether the node may be draining: only a node with held devices takes time to change its label."""
    return node.owner != "shared" and any(d.device_id in held for d in node.devices) and rng.random() < 0.3


def _draw_drain(rng: np.random.Generator, node: Node, now_s: float) -> Drain:
    since_s = now_s - float(rng.uniform(0.0, 60.0))
    is_reclaim = node.pool == "training" and rng.random() < 0.5
    return Drain(
        pool="inference" if node.pool == "training" else "training",
        since_s=since_s,
        reclaim_since_s=float(rng.uniform(since_s, now_s)) if is_reclaim else None,
        reason="decided before",
    )


def check_pooled_policy(make: Callable[[], Policy], *, num_snapshots: int = 100, seed: int = 0) -> None:
    """Check a policy against random platforms with pools. Raises PolicyError, or AssertionError with the number.

    Checks what `check_policy` does. Besides, a plan may label only living nodes, only to change their label, and as
    shared only if their devices are isolated; workloads get devices only where labels admit them; once the plan's
    drains have begun, the policy must want the same plan; and carrying out its plans a few times must lead to a stable
    one.
    """

    def check_more(number: int, snapshot: Snapshot, plan: Plan) -> None:
        check_plan_details(number, snapshot, plan)
        _check_labels(number, snapshot, plan)
        _check_stable(number, make, snapshot, plan)

    check_on_snapshots(make, draw_pooled_snapshot, num_snapshots, seed, check_more)


def _check_labels(number: int, snapshot: Snapshot, plan: Plan) -> None:
    for node_id, wish in plan.pools.items():
        node = snapshot.cluster.by_id[node_id]
        assert wish.pool != node.pool, f"snapshot {number}: {node_id} is to be {wish.pool}, which it is"
        assert wish.pool != "shared" or node.isolates_devices or node.owner == "shared", (
            f"snapshot {number}: {node_id} is to be shared, but its devices are not kept apart"
        )
        assert wish.reason, f"snapshot {number}: {node_id} is labelled for no reason"
        assert wish.cost_s >= 0.0, f"snapshot {number}: taking {node_id} costs {wish.cost_s}"


def _check_stable(number: int, make: Callable[[], Policy], snapshot: Snapshot, plan: Plan) -> None:
    memory = msgspec.json.decode(msgspec.json.encode(plan.memory))
    begun = replace(begin(snapshot, plan, snapshot.allocations), memory=memory)
    again = make().decide(begun)
    assert wanted(begun, again) == wanted(snapshot, plan), f"snapshot {number}: drains that began change the plan"
    for _ in range(MAX_CARRIED_OUT):
        done = replace(carry_out(snapshot, plan), memory=msgspec.json.decode(msgspec.json.encode(plan.memory)))
        last = make().decide(done)
        if wanted(done, last) == wanted(snapshot, plan):
            return
        # Services may have released more than the plan could count on.
        snapshot, plan = done, last
    raise AssertionError(f"snapshot {number}: however often it is carried out, another plan is wanted")


def wanted(snapshot: Snapshot, plan: Plan) -> tuple[Mapping[NodeId, Pool], Mapping[WorkloadId, frozenset[DeviceId]]]:
    """The label wanted for each node, and the devices wanted for each workload that gets any."""
    labels: dict[NodeId, Pool] = {node.node_id: node.pool for node in snapshot.cluster.nodes}
    labels |= {node_id: wish.pool for node_id, wish in plan.pools.items()}
    return labels, {who: frozenset(given.device_ids) for who, given in plan.allocations.items() if given.device_ids}


def begin(snapshot: Snapshot, plan: Plan, held: Mapping[WorkloadId, Allocation]) -> Snapshot:
    """The snapshot with labels changed where no workload in `held` prevents it, and drains for the other changes."""
    jobs = {view.job.job_id for view in snapshot.jobs}
    kinds: dict[NodeId, set[bool]] = {}
    for who, allocation in held.items():
        for device_id in allocation.device_ids if allocation.share is None else ():
            kinds.setdefault(snapshot.cluster.node_of[device_id], set()).add(who in jobs)
    drains: dict[NodeId, Drain] = {}
    nodes: list[Node] = []
    for node in snapshot.cluster.nodes:
        wish, known = plan.pools.get(node.node_id), snapshot.drains.get(node.node_id)
        if wish is None:
            nodes.append(node)
        elif all(admits(wish.pool, is_job=is_job) for is_job in kinds.get(node.node_id, ())):
            nodes.append(replace(node, pool=wish.pool, home=node.owner))
        else:
            nodes.append(node)
            fresh = Drain(pool=wish.pool, since_s=snapshot.now_s, reason=wish.reason, cost_s=wish.cost_s)
            drains[node.node_id] = known if known is not None and known.pool == wish.pool else fresh
    return replace(snapshot, cluster=Topology(nodes=tuple(nodes)), drains=drains)


def carry_out(snapshot: Snapshot, plan: Plan) -> Snapshot:
    """The snapshot after the plan was carried out: replicas left and started, and free nodes labelled."""
    given = {
        who: PoolAllocation(device_ids=allocation.device_ids)
        for who, allocation in plan.allocations.items()
        if allocation.device_ids
    }
    return replace(
        begin(snapshot, plan, given),
        allocations=given,
        jobs=tuple(_moved_on(view, given) for view in snapshot.jobs if view.job.job_id not in plan.rejected),
        services=tuple(_served(view, given) for view in snapshot.services),
    )


def _moved_on(view: JobView, given: Mapping[WorkloadId, Allocation]) -> JobView:
    held = given.get(view.job.job_id)
    return replace(
        view,
        state=JobState.PENDING if held is None else JobState.RUNNING,
        num_replicas=0 if held is None else held.num_devices,
    )


def _served(view: ServiceView, given: Mapping[WorkloadId, Allocation]) -> ServiceView:
    held = given.get(view.service.service_id)
    count = 0 if held is None else held.num_devices
    num_ready = min(view.num_ready, count)
    return replace(view, num_ready=num_ready, num_starting=count - num_ready)
