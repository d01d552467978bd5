"""The status of pools: nodes with labels and drains, what each pool holds, the tide and its forecast."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.decision import Drain
from springtide.core.resources import DeviceId, Node, NodeId, Pool
from springtide.core.status.pools import (
    DrainStatus,
    NodeStatus,
    PoolSize,
    PoolStatus,
    TideBand,
    TideStatus,
)
from springtide.core.tide import MAX_DAYS, Tide
from springtide.perf.tide import Forecaster
from springtide.service.ports import ViewLike

POOLS: tuple[Pool, ...] = ("training", "shared", "inference")
# A chart of the past has at most so many bins; of a longer past several bins become one, with the highest value.
MAX_BINS = 400
MAX_SIZES = 500


def has_pools(nodes: Sequence[Node]) -> bool:
    """Whether any node is labelled for one kind of workload, or owned by the pool of one."""
    return any(node.pool != "shared" or node.owner != "shared" for node in nodes)


def node_statuses(view: ViewLike, drains: Mapping[NodeId, Drain]) -> tuple[NodeStatus, ...]:
    """Return every living node, its label and what jobs and services hold of it; empty where all nodes are shared."""
    if not has_pools(view.nodes):
        return ()
    training = _held_by(view.jobs.values())
    serving = _held_by(view.services.values())
    return tuple(
        NodeStatus(
            node_id=node.node_id,
            pool=node.pool,
            owner=node.owner,
            is_loaned=node.is_loaned,
            num_devices=len(node.devices),
            num_training=sum(device.device_id in training for device in node.devices),
            num_serving=sum(device.device_id in serving for device in node.devices),
            isolates_devices=node.isolates_devices,
            drain=_drain_status(drains.get(node.node_id)),
        )
        for node in view.nodes
    )


def pool_statuses(nodes: Sequence[NodeStatus]) -> tuple[PoolStatus, ...]:
    """Return what each pool has; pools that neither have nor own a node are left out."""
    statuses = []
    for pool in POOLS:
        mine = [node for node in nodes if node.pool == pool]
        num_lent = sum(node.owner == pool != node.pool for node in nodes)
        if not mine and not num_lent:
            continue
        statuses.append(
            PoolStatus(
                pool=pool,
                num_nodes=len(mine),
                num_devices=sum(node.num_devices for node in mine),
                num_training=sum(node.num_training for node in mine),
                num_serving=sum(node.num_serving for node in mine),
                num_borrowed=sum(node.is_loaned for node in mine),
                num_lent=num_lent,
                num_draining=sum(node.drain is not None for node in mine),
            )
        )
    return tuple(statuses)


def tide_status(
    tide: Tide,
    past_days: int,
    sizes: Sequence[PoolSize] = (),
    forecast: Sequence[TideBand] = (),
) -> TideStatus:
    """Return the tide of the last `past_days` days (at most MAX_DAYS), thinned to MAX_BINS bins."""
    bins_wanted = min(max(past_days, 1), MAX_DAYS) * tide.bins_per_day
    known = (*tide.peaks, tide.peak) if tide.level is not None else ()
    shown = known[-bins_wanted:]
    first_bin = tide.open_bin - len(shown) + 1
    stride = -(-len(shown) // MAX_BINS) or 1
    return TideStatus(
        bin_s=tide.bin_s * stride,
        day_s=tide.day_s,
        from_at_s=first_bin * tide.bin_s,
        peaks=tuple(max(shown[start : start + stride]) for start in range(0, len(shown), stride)),
        level=tide.level,
        forecast_bin_s=tide.bin_s,
        forecast=tuple(forecast),
        sizes=_thinned(sizes),
    )


class TideForecasts:
    """Forecasts the tide for status pages. It keeps its last model, which only saves time."""

    def __init__(self) -> None:
        self._forecaster = Forecaster()
        self._lock = threading.Lock()

    def bands(self, tide: Tide, now_s: float, horizon_s: float, most: int) -> tuple[TideBand, ...]:
        """What services will need until `now_s + horizon_s`, at most `most` devices; empty before a day is known."""
        if tide.level is None:
            return ()
        with self._lock:
            found = self._forecaster.forecast(tide, now_s, horizon_s, float(most))
        if not found.is_known:
            return ()
        bins = zip(found.expected, found.lower, found.upper, strict=True)
        return tuple(
            TideBand(at_s=(found.first_bin + index) * found.bin_s, expected=expected, lower=lower, upper=upper)
            for index, (expected, lower, upper) in enumerate(bins)
        )


def most_needed(view: ViewLike) -> int:
    """How many devices the deployed services may ever need."""
    return sum(record.max_replicas for record in view.services.values() if record.is_served)


def _held_by(records: Iterable[JobRecord | ServiceRecord]) -> frozenset[DeviceId]:
    return frozenset(device for record in records for replica in record.replicas for device in replica.device_ids)


def _drain_status(drain: Drain | None) -> DrainStatus | None:
    if drain is None:
        return None
    return DrainStatus(
        pool=drain.pool,
        since_at_s=drain.since_s,
        reclaim_at_s=drain.reclaim_since_s,
        reason=drain.reason,
        cost_s=drain.cost_s,
    )


def _thinned(sizes: Sequence[PoolSize]) -> tuple[PoolSize, ...]:
    """As many as a chart can show, evenly spread, the newest among them."""
    if len(sizes) <= MAX_SIZES:
        return tuple(sizes)
    stride = -(-len(sizes) // MAX_SIZES)
    return (*sizes[:-1:stride], sizes[-1])
