"""A journal in the schema of the release before: all that its state says, or a sentence that names what it cannot."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from springtide.control.journal.export import OlderExport, export_older
from springtide.control.journal.retention import Retention
from springtide.control.journal.sqlite import SqliteJournal
from springtide.control.records import PlatformState
from springtide.control.state_data import PlatformSnapshot, data_of, encode_snapshot
from springtide.core.actions import Action, EndJob, ResizeJob, StartReplica
from springtide.core.errors import InvalidRequest
from springtide.core.events import (
    CancelRequested,
    ClockAnchored,
    DecisionsResumed,
    Event,
    FenceFound,
    JobsArchived,
    JobStalled,
    JobSubmitted,
    NodeJoined,
    ProgressReported,
    ReplicaLost,
    ReplicaStopped,
    ServiceDeployed,
)
from springtide.core.ports import Step
from springtide.core.reasons import GroupChange
from springtide.core.resources import HostResources, NodeRoom, make_node
from springtide.core.workload import Entrypoint, InferenceService, JobState, TrainingJob

SOURCE = Entrypoint(source_path="job.py", object_name="fit")
# As a submission that asks for nothing makes it.
JOB = TrainingJob(
    job_id="job", name="job", entrypoint=SOURCE, stall_timeout_s=None, start_timeout_s=1800.0, params={"change": "0.1"}
)
RUN = (
    StartReplica(
        workload=JOB,
        replica_id="job.0",
        device_id="n/0",
        generation=1,
        reason="started on 1 worker",
        change=GroupChange(code="start", after=1),
    ),
    ResizeJob(job_id="job", generation=1, replica_ids=("job.0",), global_batch_size=32),
)


def anchor(at_s: float, **changes: Any) -> ClockAnchored:
    return ClockAnchored(**{"boot_id": "b", "boot_s": at_s, "unix_s": 5_000.0 + at_s, "at_s": at_s, **changes})


class Written:
    """A journal with these steps, two seconds apart, and its export."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now_s = folder, 0.0
        self.journal = SqliteJournal(folder / "journal.db")
        self.journal.take_term()
        self.journal.set_meta("clock_began_unix_s", "4000.0")
        self.journal.set_meta("midnight_s", "-77.0")

    def add(self, *events: Event, acted: Sequence[Action] = (), memory: Any = None) -> Written:
        self.now_s += 2.0
        self.journal.append(Step(now_s=self.now_s, events=events, actions=tuple(acted), memory=memory))
        return self

    def running(self) -> Written:
        """A job that trains on one device."""
        return self.add(NodeJoined(node=make_node("n", 2))).add(JobSubmitted(job=JOB), acted=RUN)

    def ended(self) -> Written:
        done = EndJob(job_id="job", state=JobState.SUCCEEDED, reason="done")
        return self.add(ReplicaStopped(workload_id="job", replica_id="job.0"), acted=(done,))

    def export(self) -> tuple[OlderExport, list[Any], dict[str, str]]:
        (file := self.folder / "older.db").unlink(missing_ok=True)
        found = export_older(self.journal, 1, file)
        with sqlite3.connect(file) as older:
            steps = older.execute("SELECT seq, now_s, step FROM steps ORDER BY seq").fetchall()
            meta = dict(older.execute("SELECT key, value FROM meta"))
        older.close()
        assert [seq for seq, _, _ in steps] == list(range(1, found.num_steps + 1))
        assert file.stat().st_mode & 0o777 == 0o600
        told = [json.loads(step) for _, _, step in steps]
        assert [now_s for _, now_s, _ in steps] == [step["now_s"] for step in told]
        return found, told, meta


@pytest.fixture
def written(tmp_path: Path):
    written = Written(tmp_path)
    yield written
    written.journal.close()


def test_what_decides_nothing_there_is_left_out_and_said(written: Written) -> None:
    memory = {"book": [1]}
    node = replace(make_node("n", 2), room=NodeRoom(total=HostResources(cpu_m=1)))
    written.add(anchor(2.0), DecisionsResumed(), NodeJoined(node=node), memory=memory)
    written.running().ended()
    written.add(JobsArchived(job_ids=("job",)), memory=memory).add(DecisionsResumed(), memory=memory)
    found, steps, meta = written.export()
    assert found.left_out == {"ClockAnchored": 1, "DecisionsResumed": 2, "JobsArchived": 1}
    assert [event["event"] for event in steps[0]["events"]] == ["NodeJoined"]
    assert "room" not in steps[0]["events"][0]["node"]
    job = steps[2]["events"][0]["job"]
    assert {"stall_timeout_s", "on_stall", "start_timeout_s", "on_nan"}.isdisjoint(job)
    assert job["params"] == {"change": "0.1"}
    start, resize = steps[2]["actions"]
    assert ("change" in start, "change" in resize, start["reason"]) == (False, False, "started on 1 worker")
    # Each step has its memory there.
    assert [step["memory"] for step in (steps[0], steps[4], steps[5])] == [memory] * 3
    assert meta == {"schema": "1", "term": "1", "clock_began_unix_s": "5000.0", "midnight_s": "-77.0"}


def wish(**changes: Any) -> TrainingJob:
    return TrainingJob(job_id="wish", name="wish", entrypoint=SOURCE, **changes)


@pytest.mark.parametrize(
    ("happened", "named"),
    [
        (JobSubmitted(job=wish(on_stall="restart")), "wish: on_stall 'restart' (step 3)"),
        (JobSubmitted(job=wish(stall_timeout_s=60.0)), "wish: stall_timeout_s 60.0 (step 3)"),
        (
            ServiceDeployed(
                service=InferenceService(service_id="echo", name="echo", entrypoint=SOURCE, start_timeout_s=5.0)
            ),
            "echo: start_timeout_s 5.0 (step 3)",
        ),
        (FenceFound(job_id="job", generation=9), "job: FenceFound (step 3)"),
        (JobStalled(job_id="job", generation=1, since_s=1.0, timeout_s=2.0), "job: JobStalled (step 3)"),
        (
            ProgressReported(job_id="job", generation=1, step=1, total_steps=9, world_size=1, is_diverged=True),
            "job: is_diverged True (step 3)",
        ),
        (ReplicaLost(workload_id="job", replica_id="job.0", is_refused=True), "job: is_refused True (step 3)"),
        (anchor(6.0, skipped_s=60.0), "job: workers that are not charged for the time in which the machine was off"),
        (anchor(6.0, is_in_doubt=True), "the clock is in doubt (step 3)"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_what_the_state_would_lose_is_refused_and_named(written: Written, happened: Event, named: str) -> None:
    written.running()
    written.export()
    written.add(happened)
    with pytest.raises(InvalidRequest) as refused:
        written.export()
    assert f"schema 1 has no words for {named}" in str(refused.value)
    assert not (written.folder / "older.db").exists()


def test_what_concerns_a_workload_that_has_ended_is_no_hindrance(written: Written) -> None:
    written.running().add(JobStalled(job_id="job", generation=1, since_s=1.0, timeout_s=2.0))
    written.add(anchor(8.0, skipped_s=60.0)).ended()
    found, steps, _ = written.export()
    assert found.left_out == {"ClockAnchored": 1, "JobStalled": 1}
    assert steps[2]["events"] == steps[3]["events"] == []
    written.add(JobSubmitted(job=wish(on_nan="fail")))
    with pytest.raises(InvalidRequest, match="has no words for wish: on_nan 'fail' "):
        written.export()
    written.add(
        CancelRequested(workload_id="wish"), acted=(EndJob(job_id="wish", state=JobState.CANCELLED, reason=""),)
    )
    assert written.export()[0].left_out == {"ClockAnchored": 1, "JobStalled": 1, "TrainingJob.on_nan": 1}


def test_a_journal_whose_first_steps_were_dropped_is_refused(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide.control.journal.archive.SEGMENT_STEPS", 1)
    snapshot = encode_snapshot(PlatformSnapshot(state=data_of(PlatformState())))
    for _ in range(4):
        written.running()
        written.journal.cut(snapshot, written.now_s, Retention(steps_bytes=1))
    with pytest.raises(InvalidRequest, match="were dropped by retention, and schema 1 has no snapshots"):
        written.export()


def test_a_file_that_is_there_is_left_alone_and_other_schemas_are_not_known(written: Written) -> None:
    written.running()
    (written.folder / "mine").write_text("mine")
    with pytest.raises(FileExistsError):
        export_older(written.journal, 1, written.folder / "mine")
    assert (written.folder / "mine").read_text() == "mine"
    with pytest.raises(InvalidRequest, match="cannot be exported in schema 2"):
        export_older(written.journal, 2, written.folder / "other")
    assert not (written.folder / "other").exists()
