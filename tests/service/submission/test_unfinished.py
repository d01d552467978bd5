"""One owner has at most so many unfinished workloads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from springtide.control.records import JobRecord, Lifecycle, ServiceRecord, ServiceState, StateReason
from springtide.core.containers import ContainerSettings
from springtide.core.job_parts import JobBounds
from springtide.core.workload import Entrypoint, InferenceService, JobState, TrainingJob
from springtide.service.submission.unfinished import TooManyUnfinished, check_unfinished

SOURCE = Entrypoint(source_path="a.py")


def record(number: int, state: JobState, container: ContainerSettings | None = None) -> JobRecord:
    job = TrainingJob(job_id=f"a-{number}", name="a", entrypoint=SOURCE, container=container)
    lifecycle = Lifecycle(state=state, reason=StateReason(""), submitted_at_s=0.0)
    return JobRecord(job=job, lifecycle=lifecycle, bounds=JobBounds(min_workers=1, max_workers=1))


def service(number: int, *, is_removed: bool = False) -> ServiceRecord:
    return ServiceRecord(
        service=InferenceService(service_id=f"s-{number}", name="s", entrypoint=SOURCE),
        state=ServiceState.IDLE,
        reason="",
        deployed_at_s=0.0,
        min_replicas=0,
        max_replicas=1,
        is_removed=is_removed,
    )


def view(*records: JobRecord | ServiceRecord) -> SimpleNamespace:
    jobs = {r.workload_id: r for r in records if isinstance(r, JobRecord)}
    return SimpleNamespace(jobs=jobs, services={r.workload_id: r for r in records if isinstance(r, ServiceRecord)})


def test_what_has_ended_does_not_count():
    ended = [record(n, JobState.SUCCEEDED) for n in range(9)]
    check_unfinished(view(*ended, record(10, JobState.PAUSED), service(1, is_removed=True)), None, 2)
    with pytest.raises(TooManyUnfinished, match=r"2 jobs and services are unfinished, and at most 2 may be") as refused:
        check_unfinished(view(*ended, record(10, JobState.PAUSED), service(1)), None, 2)
    assert refused.value.status == 429
    check_unfinished(view(*ended, record(10, JobState.PAUSED), service(1)), None, 0)


def test_what_is_being_taken_in_counts():
    check_unfinished(view(record(1, JobState.PENDING)), None, 3, [None])
    with pytest.raises(TooManyUnfinished, match="3 jobs"):
        check_unfinished(view(record(1, JobState.PENDING)), None, 3, [None, None])


def test_each_namespace_counts_for_itself():
    mine, other = ContainerSettings(namespace="ml"), ContainerSettings(namespace="web")
    held = view(record(1, JobState.RUNNING, mine), record(2, JobState.RUNNING, other))
    check_unfinished(held, other, 2, [mine])
    with pytest.raises(TooManyUnfinished, match="of namespace ml are unfinished"):
        check_unfinished(held, mine, 2, [mine])
