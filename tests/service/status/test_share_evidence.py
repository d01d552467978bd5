"""What `why` says of shared devices: who sits beside a workload, what it is granted, what is left for others."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from springtide.control.records import (
    JobRecord,
    Lifecycle,
    ReplicaRecord,
    ReplicaState,
    ServiceRecord,
    ServiceState,
    StateReason,
)
from springtide.core.job_parts import JobBounds
from springtide.core.resources import make_node
from springtide.core.shares import Share
from springtide.core.status.shares import SharingStatus, TenantStatus
from springtide.core.workload import Entrypoint, InferenceService, JobState, TrainingJob
from springtide.service.status.explain import explain
from springtide.service.status.share_evidence import MAX_NAMED, share_evidence

CODE = Entrypoint(source_path="x.py", object_name="x")
SMALL, LARGE = Share(request=0.3, limit=0.5), Share(request=0.4, limit=0.6)


@dataclass(frozen=True)
class View:
    jobs: dict = field(default_factory=dict)
    services: dict = field(default_factory=dict)
    nodes: tuple = (make_node("local", 2),)
    future: dict = field(default_factory=dict)
    claims: dict = field(default_factory=dict)
    conditions: dict = field(default_factory=dict)
    price_s: float | None = None
    prices_s: dict = field(default_factory=dict)


def replicas(name: str, share: Share | None, *devices: str) -> tuple[ReplicaRecord, ...]:
    return tuple(
        ReplicaRecord(
            replica_id=f"{name}-{index}", device_id=device, state=ReplicaState.READY, started_at_s=1.0, share=share
        )
        for index, device in enumerate(devices)
    )


def a_service(share: Share | None, *devices: str) -> ServiceRecord:
    return ServiceRecord(
        service=InferenceService(service_id="reader", name="reader", entrypoint=CODE, share=share),
        state=ServiceState.READY,
        reason="1 replica answers",
        deployed_at_s=0.0,
        min_replicas=0,
        max_replicas=4,
        replicas=replicas("reader", share, *devices),
    )


def a_job(share: Share | None, *devices: str) -> JobRecord:
    return JobRecord(
        job=TrainingJob(job_id="digits-1", name="digits", entrypoint=CODE, share=share),
        replicas=replicas("digits-1", share, *devices),
        lifecycle=Lifecycle(
            state=JobState.RUNNING if devices else JobState.PENDING, reason=StateReason(""), submitted_at_s=0.0
        ),
        bounds=JobBounds(min_workers=1, max_workers=1),
    )


def view_of(*records) -> View:
    return View(
        jobs={record.workload_id: record for record in records if isinstance(record, JobRecord)},
        services={record.workload_id: record for record in records if isinstance(record, ServiceRecord)},
    )


SHARING = SharingStatus(
    mechanism="cgroup-v1",
    enforced="CPU time, not memory",
    tenants=(
        TenantStatus(
            workload_id="reader", replica_id="reader-0", device_id="local/0", request=0.3, limit=0.5, granted=0.5,
            used=0.41, state="EMERGENCY", reason="a batch of 4 has run for 50 ms, 25 ms is usual",
        ),
    ),
)  # fmt: skip


def test_who_shares_a_device_is_told_with_whom_and_what_it_is_granted_now():
    service, job = a_service(SMALL, "local/0"), a_job(LARGE, "local/0")
    told = share_evidence(service, view_of(service, job), SHARING)
    assert told == [
        "holds 0.3 of a device (up to 0.5) on local/0, beside digits (0.4 to 0.6)",
        "is granted 0.50 there now and uses 0.41, EMERGENCY: a batch of 4 has run for 50 ms, 25 ms is usual",
        "shares are enforced by cgroup-v1: CPU time, not memory",
    ]


def test_who_shares_a_gpu_is_told_what_it_launches_and_holds_there():
    service = a_service(SMALL, "local/0")
    (reader,) = SHARING.tenants
    quiet = replace(reader, num_launches=810, memory_mb=1000, memory_used_mb=900)
    told = share_evidence(service, view_of(service), replace(SHARING, tenants=(quiet,)))
    assert told[2:-1] == [
        "has launched 810 kernels and graphs since it started and holds 900 of its 1000 MB of the GPU's memory"
    ]
    loud = replace(quiet, memory_mb=0, num_open=3, num_denied=1)
    told = share_evidence(service, view_of(service), replace(SHARING, tenants=(loud,)))
    assert told[2:-1] == [
        "has launched 810 kernels and graphs since it started and holds 900 MB of the GPU's memory",
        "launches let through because its limit was not known: 3",
        "allocations refused because of its memory limit (--memory): 1",
    ]


def test_who_is_alone_on_a_device_is_told_so():
    service = a_service(SMALL, "local/0")
    told = share_evidence(service, view_of(service, a_job(LARGE, "local/1")), SharingStatus())
    assert told[0].endswith("on local/0, and is alone there")
    assert told[1].startswith("shares are enforced by none")


def test_what_an_ended_job_asked_for_is_not_told():
    ended = a_job(Share(request=0.9, limit=1.0))
    ended = replace(ended, lifecycle=replace(ended.lifecycle, state=JobState.FAILED))
    assert share_evidence(ended, view_of(ended), SharingStatus()) == []


def test_who_waits_is_told_what_the_roomiest_device_has_left():
    waiting, service = a_job(Share(request=0.9, limit=1.0)), a_service(SMALL, "local/0", "local/1")
    assert share_evidence(waiting, view_of(service, waiting), SharingStatus()) == [
        "asks for 0.9 of a device (up to 1); the most that is left is 0.7 of local/0"
    ]
    whole = a_service(None, "local/0", "local/1")
    (told,) = share_evidence(waiting, view_of(whole, waiting), SharingStatus())
    assert told.endswith("every device is held as a whole")


def test_whole_devices_are_not_talked_about():
    service = a_service(None, "local/0")
    assert share_evidence(service, view_of(service), SHARING) == []


def test_of_many_replicas_a_few_are_told():
    service = a_service(SMALL, *(f"local/{number}" for number in range(MAX_NAMED + 2)))
    told = share_evidence(service, view_of(service), SharingStatus())
    assert any("and 2 more replicas" in line for line in told)


def test_why_has_it_among_what_a_state_rests_on():
    service, job = a_service(SMALL, "local/0"), a_job(LARGE, "local/0")
    view = view_of(service, job)
    answer = explain(service, view, (), 10.0, sharing=SHARING)
    assert any("beside digits" in line for line in answer.evidence)
    assert any("beside reader" in line for line in explain(job, view, (), 10.0, sharing=SHARING).evidence)
