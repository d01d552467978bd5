"""Prometheus metrics of pools: loans, reclaims with their times and cost, the tide. No label names a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from springtide.core.resources import Node
from springtide.core.status.pools import ReclaimKind, TideBand
from springtide.core.tide import Tide
from springtide.service.history.pools import PoolTotals
from springtide.service.status.pools import POOLS

RECLAIM_KINDS: tuple[ReclaimKind, ...] = ("interrupting", "shrinking", "idle")


def pool_families(
    nodes: Sequence[Node], num_draining: int, tide: Tide, coming: Sequence[TideBand], totals: PoolTotals
) -> Iterator[Metric]:
    """Yield the metrics of pools. Of the forecast `coming`, the highest values are reported."""
    devices = GaugeMetricFamily("springtide_pool_devices", "Devices labelled for each pool.", labels=("pool",))
    for pool in POOLS:
        devices.add_metric((pool,), sum(len(node.devices) for node in nodes if node.pool == pool))
    yield devices
    loaned = GaugeMetricFamily(
        "springtide_loaned_servers", "Servers labelled for another pool than their owner.", labels=("from", "to")
    )
    for owner in POOLS:
        for pool in POOLS:
            if owner != pool:
                loaned.add_metric((owner, pool), sum(node.owner == owner and node.pool == pool for node in nodes))
    yield loaned
    yield GaugeMetricFamily("springtide_draining_servers", "Servers on their way into another pool.", num_draining)
    yield CounterMetricFamily("springtide_loans", "Servers labelled towards training.", value=totals.num_loans)
    yield CounterMetricFamily(
        "springtide_drains_called_off",
        "Drains of servers that kept their label after all.",
        value=totals.num_called_off,
    )
    reclaims = CounterMetricFamily(
        "springtide_reclaims",
        "Servers labelled towards services: jobs were stopped there, only shrank or moved, or none was there.",
        labels=("kind",),
    )
    for kind in RECLAIM_KINDS:
        reclaims.add_metric((kind,), totals.num_reclaims.get(kind, 0))
    yield reclaims
    yield HistogramMetricFamily(
        "springtide_reclaim_seconds",
        "From the moment training had to leave a server to its label for services.",
        buckets=totals.reclaim_s.buckets(),
        sum_value=totals.reclaim_s.sum_s,
    )
    yield CounterMetricFamily(
        "springtide_reclaim_cost_device_seconds",
        "What reclaims cost training, as the policy reckoned.",
        value=totals.reclaim_cost_s,
    )
    yield GaugeMetricFamily("springtide_tide_needed_devices", "Devices that services need now.", float(tide.level or 0))
    if coming:
        forecast = GaugeMetricFamily(
            "springtide_tide_forecast_devices",
            "The most devices that services will need within a twenty-fourth of a day: expected, and its band.",
            labels=("bound",),
        )
        for bound, values in (
            ("lower", [band.lower for band in coming]),
            ("expected", [band.expected for band in coming]),
            ("upper", [band.upper for band in coming]),
        ):
            forecast.add_metric((bound,), max(values))
        yield forecast
