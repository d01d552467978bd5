"""What has left the platform's state is found again, and not forgotten while an object of the cluster stands for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from springtide.control.journal.ended import EndedJob, EndedService
from springtide.control.journal.retention import DAY_S, Retention
from springtide.control.journal.sqlite import SqliteJournal
from springtide.control.records import JobRecord, Lifecycle, ServiceRecord, ServiceState, StateReason
from springtide.core.containers import ContainerSettings
from springtide.core.errors import JournalError
from springtide.core.job_parts import JobBounds
from springtide.core.workload import Entrypoint, InferenceService, JobState, TrainingJob, WorkloadId

SOURCE = Entrypoint(source_path="job.py", object_name="fit")


def ended_job(name: str, uid: str = "", family: str = "", at_s: float = 9.0) -> EndedJob:
    container = ContainerSettings(namespace="ml", owner_kind="TrainingFunction", owner_name=name, owner_uid=uid)
    where = container if uid else None
    job = TrainingJob(job_id=WorkloadId(name), name=name, entrypoint=SOURCE, container=where, family=family)
    over = Lifecycle(state=JobState.FAILED, reason=StateReason("it failed"), submitted_at_s=1.0, ended_at_s=at_s)
    return EndedJob(record=JobRecord(job=job, bounds=JobBounds(min_workers=1, max_workers=1), lifecycle=over))


def removed_service(name: str, revision: int = 1) -> EndedService:
    service = InferenceService(service_id=WorkloadId(name), name=name, entrypoint=SOURCE, revision=revision)
    record = ServiceRecord(
        service=service,
        state=ServiceState.REMOVED,
        reason="removed by its owner",
        deployed_at_s=1.0,
        min_replicas=0,
        max_replicas=1,
        is_removed=True,
        removed_at_s=9.0,
    )
    return EndedService(record=record, kept={"history": b"told"})


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[SqliteJournal]:
    journal = SqliteJournal(tmp_path / "journal.db")
    yield journal
    journal.close()


def test_a_job_is_kept_for_as_long_as_its_object_may_be_there(journal: SqliteJournal) -> None:
    ended = journal.ended
    ended.put([ended_job("bare"), ended_job("owned", "uid-1")])
    ended.drop(Retention().ended_s, 100 * DAY_S)
    assert ended.get(WorkloadId("bare")) is None
    assert ended.owned() == [("owned", "uid-1")]
    found = ended.of_owner("uid-1")
    assert found is not None
    assert found.job.job_id == "owned"
    assert ended.of_owner("uid-2") is ended.of_owner("") is None
    ended.release(WorkloadId("owned"))
    assert ended.owned() == []
    assert ended.of_owner("uid-1") is None
    assert ended.get(WorkloadId("owned")) is not None
    ended.drop(Retention().ended_s, 100 * DAY_S)
    assert ended.get(WorkloadId("owned")) is None
    assert ended.dropped_at_s(WorkloadId("owned")) == 9.0


def test_an_object_whose_jobs_row_was_changed_is_not_taken_for_a_new_one(journal: SqliteJournal) -> None:
    journal.ended.put([ended_job("owned", "uid-1")])
    journal.query("UPDATE ended SET record = substr(record, 1, 40)")
    with pytest.raises(JournalError, match="the record of owned, which has ended, was changed"):
        journal.ended.of_owner("uid-1")


def test_jobs_of_one_code_are_found_whatever_their_names(journal: SqliteJournal) -> None:
    ended = journal.ended
    families = {"fit": "fit-c0de", "other": "fit-c0de", "late": "late-c0de", "alone": "", "last": "fit-0ddc0de"}
    ended.put([ended_job(name, "", family, at_s) for at_s, (name, family) in enumerate(families.items())])
    ended.put([ended_job("fit", "", "fit-c0de", 0.5)])
    assert [job.job.name for job in ended.of_code("c0de", 9)] == ["late", "other", "fit"]
    assert [job.job.name for job in ended.of_code("c0de", 2)] == ["late", "other"]
    assert list(ended.of_code("", 9)) == [], "jobs without a family have no code in common"
    ended.drop(1.0, 2.5)
    assert [job.job.name for job in ended.of_code("c0de", 9)] == ["late"]
    assert journal.query("SELECT id FROM @ended_code ORDER BY id") == [("last",), ("late",)]


def test_a_removed_service_is_in_no_list_of_jobs(journal: SqliteJournal) -> None:
    ended = journal.ended
    ended.put([removed_service("echo"), ended_job("bare")])
    ended.put([removed_service("echo", revision=3)])
    found = ended.service(WorkloadId("echo"))
    assert found is not None
    assert (found.record.service.revision, found.kept) == (3, {"history": b"told"})
    assert ended.service(WorkloadId("bare")) is None
    assert ended.get(WorkloadId("echo")) is None
    assert [job.workload_id for job in ended.newest(9)] == ["bare"]
    assert (ended.count(), list(ended.named("echo", 9)), list(ended.named("", 9))) == (1, [], [])
    assert ended.damaged() == []
    ended.drop(Retention().ended_s, 100 * DAY_S)
    assert ended.service(WorkloadId("echo")) is None
