"""Figures of shared devices: bounded labels, and seconds that never run backwards."""

from __future__ import annotations

import pytest
from prometheus_client.core import CollectorRegistry

from springtide.core.resources import DeviceId
from springtide.core.status.shares import SharingStatus, TenantStatus
from springtide.service.metrics.shares import ShareMetrics, gpu_families


class Shown:
    def __init__(self):
        self.metrics = ShareMetrics()
        self.registry = CollectorRegistry()
        self.told = SharingStatus()
        self.registry.register(self)

    def describe(self):
        return iter(())

    def collect(self):
        return self.metrics.families(self.told, {"fit-1"})

    def value(self, name, **labels):
        return self.registry.get_sample_value(name, labels)


def tenant(workload_id, granted=0.0, used=0.0, throttled_s=0.0, state="NONE", replica=0):
    return TenantStatus(
        workload_id=workload_id,
        replica_id=f"{workload_id}.{replica}",
        device_id="local/0",
        request=0.3,
        limit=0.6,
        granted=granted,
        used=used,
        throttled_s=throttled_s,
        state=state,
    )


@pytest.fixture
def shown():
    return Shown()


def test_nothing_is_shown_before_a_device_was_shared(shown):
    assert list(shown.registry.collect()) == []


def test_grants_are_added_up_by_kind_and_state(shown):
    shown.told = SharingStatus(
        mechanism="cgroup-v1",
        late_p99_s=0.001,
        reaction_p99_s=0.006,
        tenants=(
            tenant("fit-1", granted=0.25, used=0.2, state="CONTENTION"),
            tenant("echo", granted=0.6, used=0.5),
            tenant("echo", granted=0.25, used=0.125, replica=1),
        ),
    )
    assert shown.value("springtide_share_granted_ratio", kind="training", state="CONTENTION") == 0.25
    assert shown.value("springtide_share_granted_ratio", kind="inference", state="NONE") == pytest.approx(0.85)
    assert shown.value("springtide_share_used_ratio", kind="inference", state="NONE") == 0.625
    assert shown.value("springtide_share_tenants", kind="inference", state="NONE") == 2
    assert shown.value("springtide_share_granted_ratio", kind="training", state="EMERGENCY") == 0.0
    assert shown.value("springtide_share_turn_late_seconds") == 0.001
    assert shown.value("springtide_share_reaction_seconds") == 0.006


def test_no_label_names_a_workload(shown):
    shown.told = SharingStatus(tenants=(tenant("fit-1"), tenant("echo")))
    labels = {
        name: value for family in shown.registry.collect() for s in family.samples for name, value in s.labels.items()
    }
    assert set(labels) == {"kind", "state"}


def test_seconds_held_back_only_grow_when_sharers_come_and_go(shown):
    name = "springtide_share_throttled_seconds_total"
    shown.told = SharingStatus(tenants=(tenant("fit-1", throttled_s=2.0), tenant("echo", throttled_s=1.0)))
    assert (shown.value(name, kind="training"), shown.value(name, kind="inference")) == (2.0, 1.0)
    shown.told = SharingStatus(tenants=(tenant("fit-1", throttled_s=2.5),))
    assert (shown.value(name, kind="training"), shown.value(name, kind="inference")) == (2.5, 1.0)
    shown.told = SharingStatus(tenants=(tenant("fit-1", throttled_s=0.5), tenant("echo", throttled_s=0.25)))
    assert (shown.value(name, kind="training"), shown.value(name, kind="inference")) == (3.0, 1.25)


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


class ShownGpus:
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
    shown = ShownGpus(SharingStatus(tenants=(TENANT,)), {GPU})
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
    shown = ShownGpus(SharingStatus(tenants=(TENANT,)), {GPU})
    shown.told = SharingStatus()
    assert shown.value("launches_total") is None
    assert [family.samples for family in shown.registry.collect()] == [[]] * 6


def test_a_cpu_device_has_none():
    assert list(ShownGpus(SharingStatus(tenants=(TENANT,)), set()).registry.collect()) == []
    assert ShownGpus(SharingStatus(tenants=(TENANT,)), {DeviceId("local/1")}).value("launches_total") is None
