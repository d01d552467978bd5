"""Figures of each sharer of a GPU: by device and workload, for as long as it shares, and nowhere else."""

from __future__ import annotations

from prometheus_client.core import CollectorRegistry

from springtide.core.resources import DeviceId
from springtide.core.status.shares import SharingStatus, TenantStatus
from springtide.service.metrics.shares import gpu_families

GPU = DeviceId("local/0")
TENANT = TenantStatus(
    workload_id="scorer",
    replica_id="scorer.0",
    device_id=GPU,
    request=0.3,
    limit=0.6,
    memory_mb=1000,
    granted=0.5,
    used=0.25,
    throttled_s=1.5,
    num_launches=810,
    num_open=3,
    num_denied=1,
    memory_used_mb=900,
)


class Shown:
    def __init__(self, told, gpus):
        self.told, self.gpus = told, gpus
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def describe(self):
        return iter(())

    def collect(self):
        return gpu_families(self.told, self.gpus)

    def value(self, name, **labels):
        return self.registry.get_sample_value(f"springtide_gpu_{name}", {"device": GPU, "workload": "scorer", **labels})


def test_every_sharer_of_a_gpu_has_its_figures():
    shown = Shown(SharingStatus(tenants=(TENANT,)), {GPU})
    assert {what: shown.value("share", what=what) for what in ("request", "limit", "granted", "used")} == {
        "request": 0.3,
        "limit": 0.6,
        "granted": 0.5,
        "used": 0.25,
    }
    assert shown.value("memory_bytes", what="limit") == 1e9
    assert shown.value("memory_bytes", what="used") == 9e8
    assert shown.value("launches_total") == 810
    assert shown.value("open_launches_total") == 3
    assert shown.value("denied_allocations_total") == 1
    assert shown.value("throttled_seconds_total") == 1.5


def test_who_has_left_has_no_figures():
    shown = Shown(SharingStatus(tenants=(TENANT,)), {GPU})
    shown.told = SharingStatus()
    assert shown.value("launches_total") is None
    assert [family.samples for family in shown.registry.collect()] == [[]] * 6


def test_a_cpu_device_has_none():
    assert list(Shown(SharingStatus(tenants=(TENANT,)), set()).registry.collect()) == []
    assert Shown(SharingStatus(tenants=(TENANT,)), {DeviceId("local/1")}).value("launches_total") is None
