"""A small policy of the tests' own that moves labels: as many servers for services as they need, the rest for jobs.

What services are guaranteed reclaims servers at once; what their load asks for beyond that waits for jobs to end.
"""

from __future__ import annotations

from collections.abc import Sequence

from springtide.core.decision import JobView, Plan, PoolAllocation, Relabel, Snapshot
from springtide.core.resources import DeviceId, Node, NodeId, Pool
from springtide.core.workload import WorkloadId


class Moving:
    """Services first, on whole nodes; jobs first in, first out on what is left. Shared nodes are for jobs."""

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        nodes = [node for node in snapshot.cluster.nodes if node.pool != "shared"]
        nodes.sort(
            key=lambda node: (
                node.pool != "inference",
                _heading(snapshot, node) != "inference",
                node.owner != "inference",
            )
        )
        guaranteed = sum(view.min_replicas for view in snapshot.services)
        needed = sum(view.needed_replicas for view in snapshot.services)
        hard, serving = _enough(nodes, guaranteed), _enough(nodes, needed)
        wanted: dict[NodeId, Pool] = {n.node_id: "inference" if n in serving else "training" for n in nodes}
        pools = {
            node.node_id: Relabel(pool=wanted[node.node_id], reason=f"{guaranteed} guaranteed, {needed} needed")
            for node in snapshot.cluster.nodes
            if node.node_id in wanted and wanted[node.node_id] != node.pool
        }
        given = _train(snapshot, serving, hard)
        given |= _serve(snapshot, serving, {device for devices in given.values() for device in devices})
        return Plan(
            allocations={who: PoolAllocation(device_ids=devices) for who, devices in given.items()}, pools=pools
        )


def _heading(snapshot: Snapshot, node: Node) -> Pool:
    drain = snapshot.drains.get(node.node_id)
    return node.pool if drain is None else drain.pool


def _enough(nodes: Sequence[Node], num_devices: int) -> list[Node]:
    chosen: list[Node] = []
    for node in nodes:
        if sum(len(one.devices) for one in chosen) >= num_devices:
            break
        chosen.append(node)
    return chosen


def _devices(nodes: Sequence[Node]) -> list[DeviceId]:
    return [device.device_id for node in nodes for device in node.devices]


def _serve(
    snapshot: Snapshot, serving: Sequence[Node], trained: set[DeviceId]
) -> dict[WorkloadId, tuple[DeviceId, ...]]:
    # A node that waits for a job to end serves nobody until then.
    places = [device for node in serving if not trained & set(_devices([node])) for device in _devices([node])]
    views = {view.service.service_id: view for view in snapshot.services}
    given: dict[WorkloadId, list[DeviceId]] = {}
    num_left = len(places)
    counts = {name: view.min_replicas for name, view in views.items()}
    for name in views:
        counts[name] = min(counts[name], num_left)
        num_left -= counts[name]
    for name, view in views.items():
        more = min(num_left, max(0, view.needed_replicas - counts[name]))
        counts[name] += more
        num_left -= more
    for name in views:
        held = snapshot.allocations.get(name)
        given[name] = [d for d in (held.device_ids if held else ()) if d in places][: counts[name]]
    taken = {device for devices in given.values() for device in devices}
    for name in views:
        free = [device for device in places if device not in taken]
        given[name] += free[: counts[name] - len(given[name])]
        taken.update(given[name])
    return {name: tuple(devices) for name, devices in given.items()}


def _train(snapshot: Snapshot, serving: Sequence[Node], hard: Sequence[Node]) -> dict[WorkloadId, tuple[DeviceId, ...]]:
    alive, closed = set(snapshot.cluster.device_ids()), set(_devices(serving))
    taken_away = set(_devices(hard)) | {
        device for node in serving if node.pool == "inference" for device in _devices([node])
    }
    given: dict[WorkloadId, tuple[DeviceId, ...]] = {}
    waiting: list[JobView] = []
    for view in snapshot.jobs:
        held = snapshot.allocations.get(view.job.job_id)
        mine = tuple(d for d in (held.device_ids if held else ()) if d in alive)[: view.bounds.max_workers]
        kept = tuple(device for device in mine if device not in taken_away)
        if kept and (len(kept) == len(mine) or view.job.elastic):
            given[view.job.job_id] = kept
        elif mine:
            # It has to leave whole, and starts again when its workers are gone.
            given[view.job.job_id] = ()
        else:
            waiting.append(view)
    taken = {device for devices in given.values() for device in devices}
    free = [device for device in snapshot.cluster.device_ids() if device not in taken and device not in closed]
    for view in waiting:
        count = min(view.bounds.max_workers, len(free)) if view.job.elastic else view.bounds.max_workers
        if count >= view.bounds.min_workers and len(free) >= count > 0:
            given[view.job.job_id], free = tuple(free[:count]), free[count:]
    return {who: devices for who, devices in given.items() if devices}
