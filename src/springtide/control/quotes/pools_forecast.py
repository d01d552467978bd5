"""Pools in a forecast: nodes get their new labels, and services need as many devices as the tide forecast says."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from springtide.core.decision import Drain, Plan, PoolAllocation, ServiceView, Snapshot
from springtide.core.resources import Node, NodeId, admits
from springtide.core.workload import WorkloadId

# After this many days the needs of services are assumed to stay constant.
FOLLOWED_DAYS = 1.0


class PoolForecast:
    """How labels of nodes and needs of services change while a forecast applies one plan after the other.

    A node gets its new label as soon as no workload that the label does not admit is on it. The total load of the
    services follows the forecast of the tide, and each service keeps its fraction of it, within its bounds. With less
    than a day of history the services keep their present load.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._served = {view.service.service_id for view in snapshot.services}
        self._first = {view.service.service_id: view.needed_replicas for view in snapshot.services}
        self._needs = _forecast_needs(snapshot) if snapshot.cluster.has_pools and snapshot.services else []
        self._moments = [from_s for from_s, _ in self._needs]

    def next_change_s(self, now_s: float) -> float | None:
        """When the needs of services change next."""
        return next((moment_s for moment_s in self._moments if moment_s > now_s), None)

    def at(self, snapshot: Snapshot, now_s: float, held: Mapping[WorkloadId, PoolAllocation]) -> Snapshot:
        """The snapshot with the services as of `now_s`: their replicas run on what they hold, under the load that is
        forecast for then, and the tide contains it."""
        if not self._served:
            return snapshot
        factor = self._factor(now_s)
        views = tuple([self._view(view, factor, held) for view in snapshot.services])
        tide = snapshot.tide
        if self._needs:
            tide = tide.noted(now_s, sum(view.needed_replicas for view in views))
        return replace(snapshot, services=views, tide=tide)

    def _factor(self, now_s: float) -> float | None:
        """The forecast need at `now_s` over the need at the start of the forecast; None without a forecast."""
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
        """The snapshot after a plan's labels: applied where the node's workloads allow it, a drain elsewhere."""
        if not plan.pools and not snapshot.drains:
            return snapshot
        kinds: dict[NodeId, set[bool]] = {}
        for who, given in held.items():
            for device_id in given.device_ids if given.share is None else ():
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
    """(from_s, devices): the devices that services are expected to need from then on; empty if not known."""
    # Imported here: only forecasts over pools need it.
    from springtide.perf.tide import forecast

    tide, now_s = snapshot.tide, snapshot.now_s
    prediction = forecast(tide, now_s, tide.day_s * FOLLOWED_DAYS)
    if not prediction.is_known:
        return []
    # The bin that has already begun keeps the present need.
    return [(prediction.until_s(index), devices) for index, devices in enumerate(prediction.expected[1:])]
