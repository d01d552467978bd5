"""Prometheus metrics of shared devices: summed by kind and state, and for each sharer of a GPU.

Only those of a GPU's sharers have the workload as a label: no other exporter can tell sharers of a GPU apart, and
their number is bounded by what fits on the devices.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from springtide.core.resources import DeviceId
from springtide.core.status.shares import ShareState, SharingStatus, TenantStatus
from springtide.core.workload import WorkloadId

KINDS = ("training", "inference")
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


class ShareMetrics:
    """Makes metrics from the status of shared devices. There are none until a first device has been shared."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_shared = False
        self._throttled_s: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        # The throttled time of each sharer at the last scrape: its own count is lost when it ends.
        self._last_s: dict[tuple[str, str], float] = {}

    def families(self, sharing: SharingStatus, job_ids: Collection[WorkloadId]) -> Iterator[Metric]:
        """The metrics of this moment; `job_ids` tells training from inference."""
        with self._lock:
            self._has_shared = self._has_shared or bool(sharing.tenants)
            if not self._has_shared:
                return
            throttled_s = self._add_up(sharing, job_ids)
        tenants: dict[tuple[str, str], float] = defaultdict(float)
        granted: dict[tuple[str, str], float] = defaultdict(float)
        used: dict[tuple[str, str], float] = defaultdict(float)
        for tenant in sharing.tenants:
            key = (_kind(tenant.workload_id, job_ids), tenant.state)
            tenants[key] += 1
            granted[key] += tenant.granted
            used[key] += tenant.used
        for name, text, values in (
            ("share_tenants", "Workers and replicas that hold a share of a device.", tenants),
            ("share_granted_ratio", "Fractions of a device that they may use now, added up.", granted),
            ("share_used_ratio", "Fractions of a device that they have used over the last second, added up.", used),
        ):
            family = GaugeMetricFamily(f"springtide_{name}", text, labels=("kind", "state"))
            for kind in KINDS:
                for state in get_args(ShareState):
                    family.add_metric((kind, state), values.get((kind, state), 0))
            yield family
        throttled = CounterMetricFamily(
            "springtide_share_throttled_seconds", "For how long sharers were held back.", labels=("kind",)
        )
        for kind in KINDS:
            throttled.add_metric((kind,), throttled_s[kind])
        yield throttled
        yield GaugeMetricFamily(
            "springtide_share_turn_late_seconds", "By how much the control was late lately (p99).", sharing.late_p99_s
        )
        yield GaugeMetricFamily(
            "springtide_share_reaction_seconds", "From a new grant to its being in force (p99).", sharing.reaction_p99_s
        )

    def _add_up(self, sharing: SharingStatus, job_ids: Collection[WorkloadId]) -> dict[str, float]:
        now_s = {(tenant.replica_id, tenant.device_id): tenant.throttled_s for tenant in sharing.tenants}
        for tenant in sharing.tenants:
            before_s = self._last_s.get((tenant.replica_id, tenant.device_id), 0.0)
            # A smaller count means that another daemon has started again from zero.
            more_s = tenant.throttled_s - before_s if tenant.throttled_s >= before_s else tenant.throttled_s
            self._throttled_s[_kind(tenant.workload_id, job_ids)] += more_s
        self._last_s = now_s
        return dict(self._throttled_s)


def _kind(workload_id: str, job_ids: Collection[WorkloadId]) -> str:
    return "training" if workload_id in job_ids else "inference"


def gpu_families(sharing: SharingStatus, gpu_ids: Collection[DeviceId]) -> Iterator[Metric]:
    """The metrics of this moment; none on a machine without GPUs."""
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
