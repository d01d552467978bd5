"""The figures of each sharer of a GPU for Prometheus: only here can anybody tell who of them uses what of it.

The labels name the device and the workload. A sharer's figures are there for as long as it shares, so that no more are
shown than sit on the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from springtide.core.resources import DeviceId
from springtide.core.status.shares import SharingStatus, TenantStatus

_MB = 1_000_000
_GAUGES: tuple[tuple[str, str, dict[str, Callable[[TenantStatus], float]]], ...] = (
    (
        "gpu_share",
        "Fractions of the GPU: what it is sure of, may use at most, is granted now and used over the last second.",
        {
            "request": lambda tenant: tenant.request,
            "limit": lambda tenant: tenant.limit,
            "granted": lambda tenant: tenant.granted,
            "used": lambda tenant: tenant.used,
        },
    ),
    (
        "gpu_memory_bytes",
        "What it holds of the GPU's memory, and may hold at most (0: no limit).",
        {
            "limit": lambda tenant: tenant.memory_mb * _MB,
            "used": lambda tenant: tenant.memory_used_mb * _MB,
        },
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[TenantStatus], float]], ...] = (
    ("gpu_launches", "Kernels and graphs launched since it started.", lambda tenant: tenant.num_launches),
    ("gpu_open_launches", "Of these, those that nothing held back.", lambda tenant: tenant.num_open),
    ("gpu_denied_allocations", "Allocations refused for its memory limit.", lambda tenant: tenant.num_denied),
    ("gpu_throttled_seconds", "For how long its threads were held back.", lambda tenant: tenant.throttled_s),
)


def gpu_families(sharing: SharingStatus, gpu_ids: Collection[DeviceId]) -> Iterator[Metric]:
    """Every figure of this moment; nothing on a machine without GPUs."""
    if not gpu_ids:
        return
    tenants = [tenant for tenant in sharing.tenants if tenant.device_id in gpu_ids]
    for name, text, figures in _GAUGES:
        gauge = GaugeMetricFamily(f"springtide_{name}", text, labels=("device", "workload", "what"))
        for tenant in tenants:
            for what, value in figures.items():
                gauge.add_metric((tenant.device_id, tenant.workload_id, what), value(tenant))
        yield gauge
    for name, text, count in _COUNTERS:
        counter = CounterMetricFamily(f"springtide_{name}", text, labels=("device", "workload"))
        for tenant in tenants:
            counter.add_metric((tenant.device_id, tenant.workload_id), count(tenant))
        yield counter
