"""Pools in a forecast: nodes take their new labels, and services need what the tide is forecast to be."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from springtide.core.decision import Drain, Plan, PoolAllocation, ServiceView, Snapshot
from springtide.core.resources import Node, NodeId, admits
from springtide.core.workload import WorkloadId

# Needs are followed for so many days; then they stay.
FOLLOWED_DAYS = 1.0


class PoolPlay:
    """What becomes of labels and needs while one plan after the other is applied.

    A node takes its label as soon as no replica of the other kind is on it, which here is at once or when they end. The
    load of the services together goes where the tide is forecast to go, between their minimums and their maximums: each
    keeps its share of it. Where less than a day of the tide is known they keep the load that they have.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._served = {view.service.service_id for view in snapshot.services}
        self._first = {view.service.service_id: view.needed_replicas for view in snapshot.services}
        self._needs = _forecast_needs(snapshot) if snapshot.cluster.has_pools and snapshot.services else []
        self._moments = [from_s for from_s, _ in self._needs]

    def next_change_s(self, now_s: float) -> float | None:
        """When services will need something else."""
        return next((moment_s for moment_s in self._moments if moment_s > now_s), None)

    def at(self, snapshot: Snapshot, now_s: float, held: Mapping[WorkloadId, PoolAllocation]) -> Snapshot:
        """The snapshot with services as they are at a moment: replicas run where they are given, under the load of
        that moment; the tide has been noted."""
        if not self._served:
            return snapshot
        factor = self._factor(now_s)
        views = tuple([self._view(view, factor, held) for view in snapshot.services])
        tide = snapshot.tide
        if self._needs:
            tide = tide.noted(now_s, sum(view.needed_replicas for view in views))
        return replace(snapshot, services=views, tide=tide)

    def _factor(self, now_s: float) -> float | None:
        """What services need now over what they needed at first; None where that is not forecast."""
        needed = next((devices for from_s, devices in reversed(self._needs) if from_s <= now_s), None)
        return None if needed is None else needed / max(1, sum(self._first.values()))

    def _view(self, view: ServiceView, factor: float | None, held: Mapping[WorkloadId, PoolAllocation]) -> ServiceView:
        service = view.service
        given = held.get(service.service_id)
        changed = replace(view, num_ready=0 if given is None else given.num_devices, num_starting=0)
        if factor is not None:
            asked = round(self._first[service.service_id] * factor)
            changed = replace(changed, in_flight=min(asked, view.max_replicas) * service.target_in_flight, queued=0)
        return view if changed == view else changed

    def relabelled(self, snapshot: Snapshot, plan: Plan, held: Mapping[WorkloadId, PoolAllocation]) -> Snapshot:
        """The snapshot after a plan's labels: applied where no replica is in the way, a drain where one is."""
        if not plan.pools and not snapshot.drains:
            return snapshot
        kinds: dict[NodeId, set[bool]] = {}
        for who, given in held.items():
            for device_id in given.device_ids:
                kinds.setdefault(snapshot.cluster.node_of[device_id], set()).add(who not in self._served)
        nodes: list[Node] = []
        drains: dict[NodeId, Drain] = {}
        for node in snapshot.cluster.nodes:
            wish = plan.pools.get(node.node_id)
            if wish is None or wish.pool == node.pool:
                nodes.append(node)
            elif all(admits(wish.pool, is_job=is_job) for is_job in kinds.get(node.node_id, ())):
                nodes.append(replace(node, pool=wish.pool, home=node.owner))
            else:
                nodes.append(node)
                known = snapshot.drains.get(node.node_id)
                same = known is not None and known.pool == wish.pool
                since_s = known.since_s if known is not None and same else snapshot.now_s
                drains[node.node_id] = Drain(pool=wish.pool, since_s=since_s, reason=wish.reason, cost_s=wish.cost_s)
        is_moved = any(node is not old for node, old in zip(nodes, snapshot.cluster.nodes, strict=True))
        cluster = replace(snapshot.cluster, nodes=tuple(nodes)) if is_moved else snapshot.cluster
        return replace(snapshot, cluster=cluster, drains=drains)


def _forecast_needs(snapshot: Snapshot) -> list[tuple[float, float]]:
    """From each moment on the devices that services are expected to need; empty where that is not known."""
    # Imported here: only forecasts over pools need it.
    from springtide.perf.tide import forecast

    tide, now_s = snapshot.tide, snapshot.now_s
    told = forecast(tide, now_s, tide.day_s * FOLLOWED_DAYS)
    if not told.is_known:
        return []
    # The bin that has begun is as it is now.
    return [(told.until_s(index), devices) for index, devices in enumerate(told.expected[1:])]
