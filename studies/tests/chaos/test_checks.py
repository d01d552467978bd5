"""Each check finds the loss that it is for, and finds nothing in a platform that kept its word."""

from __future__ import annotations

import contextlib
import json

import pytest
from msgspec.structs import replace

from kits.cli import fake_client
from springtide.control.controller import Controller
from springtide.control.journal.sqlite import SqliteJournal
from springtide.control.quotes.budget import WithinBudget
from springtide.core.actions import EndJob
from springtide.core.events import JobSubmitted, NodeJoined
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.core.status.platform import ReplicaStatus
from springtide.core.workload import JobState, WorkloadId
from springtide.scheduling.functions.policy import WithFunctions
from springtide.scheduling.registry import make_live_policy
from springtide.service.platform import LOCAL_OVERHEADS
from springtide_studies.chaos import checks
from springtide_studies.fault_seeds.workload import make_job

REPLICA = ReplicaStatus(replica_id="fit-3f2a.0", device_id="local/0", state="RUNNING", rank=0, started_at_s=1.0)
JOB = replace(fake_client.JOB, replicas=(REPLICA,))


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, ""),
        ({"reason": ""}, "a state without a reason"),
        ({"reason": "waiting for 2 of 4 devices"}, "it cannot wait and run"),
        ({"replicas": ()}, "it cannot wait and run"),
        ({"state": "PENDING", "reason": "resized 1 -> 2", "replicas": ()}, "it cannot work without devices"),
        ({"state": "SUCCEEDED", "replicas": ()}, "570 of 1000 steps"),
        ({"replicas": (*JOB.replicas, JOB.replicas[0])}, "two of its workers are on one device"),
    ],
)
def test_a_status_that_contradicts_itself_is_told(changes, wrong):
    found = checks.contradiction(replace(JOB, **changes))
    assert (wrong in found) if wrong else not found


def write_steps(folder, steps):
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps({"generation": generation, "step": step, "epoch": 0, "num_samples": 16, "ids_digest": digest})
        for generation, step, digest in steps
    ]
    (folder / "steps.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "artifacts").mkdir(exist_ok=True)
    (folder / "artifacts" / "model.safetensors").write_bytes(b"weights")


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ([(1, 1, "a"), (1, 2, "b"), (1, 3, "c")], ""),
        ([(1, 1, "a"), (1, 2, "b"), (2, 2, "b"), (2, 3, "c")], ""),
        ([(1, 1, "a"), (1, 2, "b"), (1, 2, "b"), (1, 3, "c")], "committed twice"),
        ([(1, 1, "a"), (1, 2, "b"), (2, 2, "x"), (2, 3, "c")], "other samples"),
        ([(1, 1, "a"), (1, 3, "c")], "the committed steps are [1, 3]"),
        ([(1, 1, "a"), (1, 2, "b")], "the committed steps are [1, 2]"),
    ],
)
def test_a_step_that_was_lost_or_done_twice_is_told(tmp_path, steps, wrong):
    write_steps(tmp_path, steps)
    digest = checks.artifact_digest(tmp_path)
    found = checks.wrong_with_results(tmp_path, 48, 16, 1, digest)
    assert (wrong in found[0]) if wrong else not found
    assert "other bits" in checks.wrong_with_results(tmp_path, 48, 16, 1, "0" * 64)[0] or wrong


def test_a_job_that_ended_twice_or_never_is_told(tmp_path):
    journal = SqliteJournal(tmp_path / "journal.db")
    for job_id in ("once", "twice", "twice", "stranger"):
        end = EndJob(cause="outcome", reason="done", job_id=WorkloadId(job_id), state=JobState.SUCCEEDED)
        journal.append(Step(now_s=1.0, events=(), actions=(end,)))
    journal.close()
    found = checks.wrong_with_ends(tmp_path / "journal.db", ["once", "twice", "never"])
    assert [sentence.split()[0] for sentence in found] == ["twice", "never", "stranger"]
    assert not checks.wrong_with_ends(tmp_path / "journal.db", ["once", "stranger"]) or "twice" in found[0]


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_journal_that_replays_to_other_decisions_is_told(tmp_path, is_changed):
    policy = WithFunctions(WithinBudget(make_live_policy("springtide"), 0.0))
    controller = Controller(policy, overheads=LOCAL_OVERHEADS)
    events = [
        NodeJoined(node=make_node("local", 2)),
        JobSubmitted(job=make_job("a", num_samples=64, samples_per_s=8.0)),
    ]
    with contextlib.closing(SqliteJournal(tmp_path / "journal.db")) as journal:
        for now_s, event in enumerate(events):
            step = controller.step(float(now_s), (event,))
            journal.append(replace(step, actions=()) if is_changed else step)
    found = checks.wrong_with_replay(tmp_path / "journal.db", "springtide", 0.0)
    assert bool(found) is is_changed


def test_figures_that_grow_are_told():
    first = {"descriptors": 30.0, "threads": 5.0, "resident_mib": 80.0}
    assert not checks.wrong_with_figures(first, {"descriptors": 40.0, "threads": 9.0, "resident_mib": 100.0})
    assert len(checks.wrong_with_figures(first, {name: value * 4 for name, value in first.items()})) == 2
    assert not checks.wrong_with_figures({}, first)
