"""Device-seconds by model."""

from __future__ import annotations

from springtide.core.actions import StartReplica
from springtide.core.events import ReplicaStopped
from springtide.core.ports import Step
from springtide.core.resources import DeviceId
from springtide.core.workload import Entrypoint, InferenceService, ReplicaId, TrainingJob, WorkloadId
from springtide_studies.one_plan.device_seconds import DeviceSeconds

SOURCE = Entrypoint(source_path="world", object_name="fit")
JOB = TrainingJob(job_id=WorkloadId("j"), name="j", entrypoint=SOURCE)
SERVICE = InferenceService(service_id=WorkloadId("s"), name="s", entrypoint=SOURCE)


def start(workload: TrainingJob | InferenceService, number: int, device: str) -> StartReplica:
    name = workload.job_id if isinstance(workload, TrainingJob) else workload.service_id
    return StartReplica(
        replica_id=ReplicaId(f"{name}-{number}"),
        device_id=DeviceId(device),
        workload=workload,
        generation=1,
    )


def stopped(name: str) -> ReplicaStopped:
    return ReplicaStopped(workload_id=WorkloadId(name[0]), replica_id=ReplicaId(name))


def test_a_shared_device_counts_once_and_services_count_until_the_end_of_the_world() -> None:
    held = DeviceSeconds({DeviceId("a"): "fast", DeviceId("b"): "slow"}, until_s=100.0)
    held.note(Step(now_s=10.0, actions=(start(JOB, 0, "a"), start(SERVICE, 0, "a"), start(SERVICE, 1, "b"))))
    held.note(Step(now_s=30.0, events=(stopped("j-0"),)))
    held.note(Step(now_s=50.0, events=(stopped("s-0"), stopped("s-0"))))
    held.note(Step(now_s=90.0, actions=(start(JOB, 1, "a"),)))
    assert held.device_s(150.0) == {"fast": 40.0 + 60.0, "slow": 90.0}
