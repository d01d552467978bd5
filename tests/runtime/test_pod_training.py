"""Workers that share no file system: the same bits, the same guarantees, over tcp and a real S3 API."""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal

import pytest
from pod_plane import PodPlane, kill_worker
from runtime_plane import TRAIN, make_job

from springtide.core.wire import CheckpointWritten, Failed, Finished, Left, Preempt, Switched
from springtide.core.workload import ReplicaId
from springtide.testing.servers import running_s3

pytestmark = pytest.mark.slow
NUM_STEPS = 39


@pytest.fixture(scope="module")
def s3():
    with running_s3(buckets=("tests",)) as server:
        yield server


@pytest.fixture
def make_pods(s3, tmp_path, monkeypatch):
    """A function that makes a plane whose job's source is in the store."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    planes = []

    def make(source=TRAIN, *, step_s=0.05, optimizer="adamw", store_url="", lease_s=30.0, **fields):
        directory = tmp_path / f"p{len(planes)}"
        directory.mkdir()
        job = make_job(directory, source, **{"num_epochs": 3, **fields})
        url = store_url or s3.s3_url("tests", secrets.token_hex(6))
        plane = PodPlane(
            directory, url, job, lease_s=lease_s, environment={"STEP_S": str(step_s), "OPTIMIZER": optimizer}
        )
        key = plane.store.put_source("main.py", source.encode())
        entrypoint = dataclasses.replace if False else None
        del entrypoint
        from msgspec.structs import replace

        plane.job = replace(job, entrypoint=replace(job.entrypoint, source_path=key))
        planes.append(plane)
        return plane

    yield make
    for plane in planes:
        plane.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one worker on one machine makes of the same job."""
    return {}


def check_steps(plane, num_steps=NUM_STEPS):
    steps = plane.steps()
    assert [record["step"] for record in steps] == list(range(1, num_steps + 1)), plane.logs()
    return [(record["step"], record["loss"], record["ids_digest"]) for record in steps]


def finish(plane):
    plane.wait_finished()
    return plane.result_hash(), check_steps(plane)


def test_pods_grow_shrink_and_lose_members_and_the_result_is_the_same_bits(make_pods):
    single = make_pods(step_s=0.0)
    single.start_group("job.0")
    expected, losses = finish(single)

    plane = make_pods(step_s=0.15)
    plane.start_group("job.0", "job.1")
    pids = {name: plane.worker_pid(name) for name in ("job.0", "job.1")}
    plane.wait_step(3)
    plane.grow("job.2")
    assert plane.of(Switched, "job.2", direction="grow")
    assert {name: plane.worker_pid(name) for name in pids} == pids
    plane.wait_step(8)
    # The first member, in whose pod the others meet, leaves; then another one dies.
    plane.form("job.1", "job.2")
    plane.wait_exit("job.0")
    assert plane.of(Left, "job.0")
    plane.wait_step(12)
    kill_worker(plane, "job.2")
    plane.wait_exit("job.2", code=137)
    plane.form("job.1", forced=True)
    assert plane.worker_pid("job.1") == pids["job.1"]
    assert finish(plane) == (expected, losses)
    (finished,) = plane.of(Finished, "job.1")
    assert finished.artifact_path == plane.store.artifacts()["model.safetensors"]
    for name in ("job.0", "job.1", "job.2"):
        plane.store.read_log(ReplicaId(name))


def test_a_hook_takes_one_member_away_and_the_others_go_on(make_pods):
    plane = make_pods(step_s=0.15)
    plane.start_group("job.0", "job.1", "job.2")
    survivor = plane.worker_pid("job.1")
    plane.wait_step(3)
    hook = plane.prestop("job.0")
    plane.wait_exit("job.0")
    assert hook.wait(30) == 0
    assert plane.of(Left, "job.0")
    assert plane.of(CheckpointWritten, "job.0")
    plane.form("job.1", "job.2", forced=True)
    assert plane.of(Switched, "job.1", direction="recover")
    # The same by the signal alone.
    plane.signal("job.2", signal.SIGTERM)
    plane.wait_exit("job.2")
    plane.form("job.1", forced=True)
    assert plane.worker_pid("job.1") == survivor
    assert not plane.of(Failed)
    finish(plane)


def test_the_last_member_saves_before_it_leaves_and_another_one_goes_on_from_there(make_pods):
    plane = make_pods(step_s=0.1)
    plane.start_group("job.0")
    plane.wait_step(5)
    hook = plane.prestop("job.0")
    plane.wait_exit("job.0")
    assert hook.wait(30) == 0
    (checkpoint,) = plane.store.checkpoints()
    assert checkpoint.step >= 5
    assert [report.checkpoint for report in plane.of(CheckpointWritten)] == [checkpoint]
    plane.members = ()
    plane.generation += 1
    plane.store.raise_fence(plane.generation)
    plane.start_group("job.1")
    assert plane.of(Switched, "job.1", direction="resume")[0].step >= checkpoint.step
    finish(plane)


def test_all_members_are_taken_away_at_once_and_the_newest_state_is_kept(make_pods):
    plane = make_pods(step_s=0.1)
    plane.start_group("job.0", "job.1")
    plane.wait_step(5)
    hooks = [plane.prestop(name) for name in ("job.0", "job.1")]
    plane.wait_exit("job.0", "job.1")
    assert [hook.wait(30) for hook in hooks] == [0, 0]
    newest = plane.store.checkpoints()[0]
    assert newest.step == max(left.step for left in plane.of(Left))
    assert [record["step"] for record in plane.steps()] == list(range(1, newest.step + 1))


def test_a_preempted_group_commits_one_checkpoint_as_the_new_generation(make_pods):
    plane = make_pods(step_s=0.1)
    plane.start_group("job.0", "job.1")
    plane.wait_step(4)
    plane.generation += 1
    plane.order(Preempt(generation=plane.generation, grace_s=30.0), "job.0", "job.1")
    plane.wait_exit("job.0", "job.1")
    (checkpoint,) = plane.store.checkpoints()
    assert checkpoint.generation == plane.generation
    assert plane.store.head().generation == plane.generation
    plane.members = ()
    plane.start("job.2", "job.3")
    plane.wait_ready("job.2", "job.3")
    plane.form("job.2", "job.3")
    finish(plane)


def test_a_leader_that_was_stopped_until_it_was_fenced_writes_nothing(make_pods):
    plane = make_pods(step_s=0.15, checkpoint_interval_s=0.2)
    plane.start_group("job.0", "job.1")
    plane.wait_step(3)
    kill_worker(plane, "job.0", signal.SIGSTOP)
    plane.form("job.1", forced=True, untold=("job.0",))
    plane.wait_step(plane.step() + 5)
    kill_worker(plane, "job.0", signal.SIGCONT)
    generations_then = {kept.generation for kept in plane.store.head().checkpoints}
    finish(plane)
    assert plane.store.head().generation == plane.generation
    assert {kept.generation for kept in plane.store.head().checkpoints} <= generations_then | {plane.generation}
    assert "job.0" not in plane.exits
