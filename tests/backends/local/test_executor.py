"""Each action on real processes, each of them twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from kits.local.local_platform import Platform, open_descriptors, start
from springtide.backends.local import split_node, watch
from springtide.backends.sockets import socket_directory
from springtide.core.actions import DrainNode, EndJob, LabelNode, PreemptJob, ResizeJob, StopReplica
from springtide.core.errors import BackendError
from springtide.core.events import (
    CancelRequested,
    CheckpointCommitted,
    GroupBroken,
    JobFailed,
    JobFinished,
    JobResized,
    ProgressReported,
    ReplicaLost,
    ReplicaReady,
    ReplicaStopped,
)
from springtide.core.ports import Standing
from springtide.core.resources import DeviceId, NodeId, make_node
from springtide.core.workload import JobState, ReplicaId, WorkloadId
from springtide.storage.fence import Fence

JOB = WorkloadId("job")


def resize(generation: int, *names: str, forced: bool = False) -> ResizeJob:
    members = tuple(ReplicaId(name) for name in names)
    return ResizeJob(job_id=JOB, generation=generation, replica_ids=members, global_batch_size=32, forced=forced)


def stop(name: str = "r0", grace_s: float = 4.0) -> StopReplica:
    return StopReplica(workload_id=JOB, replica_id=ReplicaId(name), grace_s=grace_s)


def form(platform: Platform, *names: str, **params: str) -> JobResized:
    """Start these replicas and form generation 1 of them."""
    for name in names:
        platform.executor.start(start(name, **params))
    for name in names:
        platform.until(ReplicaReady, lambda event, name=name: event.replica_id == name)
    platform.executor.start(resize(1, *names))
    return platform.until(JobResized, lambda event: event.generation == 1)


def test_a_started_replica_becomes_ready_once(platform: Platform) -> None:
    action = start("r0")
    platform.executor.start(action)
    platform.executor.start(action)
    ready = platform.until(ReplicaReady)
    platform.executor.start(action)
    platform.barrier()
    platform.take()
    assert (ready.workload_id, ready.replica_id, ready.address) == ("job", "r0", "tcp://127.0.0.1:1")
    assert len(platform.of(ReplicaReady)) == 1
    assert platform.executor.counts()["spawns"] == 1


def test_a_fresh_start_raises_the_fence_before_anything_runs(platform: Platform) -> None:
    platform.executor.start(start("r0", generation=4))
    platform.barrier()
    fence = Fence(platform.state_dir / "workloads" / "job")
    assert fence.generation() == 4
    platform.executor.start(start("r1", generation=4))
    platform.barrier()
    assert fence.generation() == 4


def test_a_joiner_of_a_running_job_does_not_raise_the_fence(platform: Platform) -> None:
    form(platform, "r0")
    platform.executor.start(start("r1", generation=2))
    platform.until(ReplicaReady, lambda event: event.replica_id == "r1")
    assert Fence(platform.state_dir / "workloads" / "job").generation() == 1


def test_the_record_names_the_process_and_no_secret(platform: Platform) -> None:
    platform.executor.start(start("r0"))
    platform.until(ReplicaReady)
    directory = platform.state_dir / "workers"
    text = (directory / "r0.json").read_text()
    assert f'"pid":{platform.pid("r0")}' in text
    assert not list(directory.glob("*.spec")), "the spec holds the token and goes away with the first Hello"
    assert socket_directory(platform.state_dir).stat().st_mode & 0o777 == 0o700
    assert (socket_directory(platform.state_dir) / "control.sock").stat().st_mode & 0o777 == 0o600


def test_a_resize_is_reported_once_with_the_pause_of_rank_0(platform: Platform) -> None:
    resized = form(platform, "r0", "r1", duplicates="yes")
    assert (resized.world_size, resized.step, resized.pause_s, resized.direction) == (2, 10, 0.125, "start")
    platform.executor.start(resize(1, "r0", "r1"))
    platform.barrier()
    platform.take(0.2)
    assert len(platform.of(JobResized)) == 1
    platform.until_logged("r0", '"rendezvous":"file://')


def test_growing_orders_all_members_and_shrinking_releases_the_leaver(platform: Platform) -> None:
    form(platform, "r0")
    platform.executor.start(start("r1"))
    platform.until(ReplicaReady, lambda event: event.replica_id == "r1")
    platform.executor.start(resize(2, "r0", "r1"))
    assert platform.until(JobResized, lambda event: event.generation == 2).direction == "grow"
    platform.until_logged("r1", '"previous":1')
    platform.executor.start(resize(3, "r1"))
    platform.until(JobResized, lambda event: event.generation == 3)
    assert platform.until(ReplicaStopped).replica_id == "r0"
    platform.executor.start(stop("r0"))
    platform.barrier()
    platform.take()
    assert len(platform.of(ReplicaStopped)) == 1
    assert not platform.of(ReplicaLost)


def test_a_forced_resize_raises_the_fence_and_an_older_one_is_ignored(platform: Platform) -> None:
    form(platform, "r0", "r1")
    platform.executor.start(resize(3, "r0", forced=True))
    platform.until(JobResized, lambda event: event.generation == 3)
    assert Fence(platform.state_dir / "workloads" / "job").generation() == 3
    platform.executor.start(resize(2, "r0", "r1"))
    platform.barrier()
    assert platform.executor.counts()["stale_actions"] == 1
    assert '"generation":2' not in platform.log("r0")


def test_a_script_is_resized_as_soon_as_all_are_told(platform: Platform) -> None:
    resized = form(platform, "r0", "r1", kind="script")
    assert resized.world_size == 2
    platform.until_logged("r0", '"rendezvous":"tcp://127.0.0.1:')
    assert len(platform.of(JobResized)) == 1


def test_preemption_commits_a_checkpoint_and_ends_every_replica(platform: Platform) -> None:
    form(platform, "r0", "r1")
    names = (ReplicaId("r0"), ReplicaId("r1"))
    action = PreemptJob(job_id=JOB, generation=2, replica_ids=names, grace_s=5.0)
    platform.executor.start(action)
    platform.executor.start(action)
    committed = platform.until(CheckpointCommitted)
    assert (committed.generation, committed.step) == (2, 10)
    for name in names:
        platform.until(ReplicaStopped, lambda event, name=name: event.replica_id == name)
    platform.executor.start(action)
    platform.barrier()
    platform.take()
    assert len(platform.of(ReplicaStopped)) == 2
    assert not list((platform.state_dir / "workers").iterdir())


def test_who_ignores_stop_is_killed_at_the_end_of_its_grace(platform: Platform) -> None:
    form(platform, "r0", stop="ignore")
    pid = platform.pid("r0")
    platform.executor.start(stop("r0", grace_s=0.4))
    platform.executor.start(stop("r0", grace_s=50.0))
    assert platform.until(ReplicaStopped).replica_id == "r0"
    assert not Path(f"/proc/{pid}").exists()
    assert platform.executor.counts()["grace_kills"] == 1


def test_a_replica_that_never_connected_is_just_killed(platform_of: Callable[..., Platform]) -> None:
    platform = platform_of(worker_command=["sh", "-c", "sleep 60; true"])
    platform.executor.recover(Standing())
    platform.executor.start(start("r0"))
    platform.pid("r0")
    platform.executor.start(stop("r0", grace_s=60.0))
    platform.until(ReplicaStopped)


def test_stopping_what_never_was_is_answered(platform: Platform) -> None:
    platform.executor.start(stop("r9"))
    platform.executor.start(stop("r9"))
    platform.until(ReplicaStopped)
    platform.barrier()
    platform.take()
    assert len(platform.of(ReplicaStopped)) == 1


def test_a_killed_worker_is_lost_with_a_reason(platform: Platform) -> None:
    form(platform, "r0", "r1")
    os.kill(platform.pid("r0"), signal.SIGKILL)
    lost = platform.until(ReplicaLost)
    assert (lost.replica_id, lost.exit_code) == ("r0", -9)
    assert "SIGKILL" in lost.reason
    assert "memory" in lost.reason


def test_a_worker_that_exits_is_lost_with_its_last_words(platform: Platform) -> None:
    platform.executor.start(start("r0", say="exit:3"))
    lost = platform.until(ReplicaLost)
    assert lost.exit_code == 3
    assert lost.reason == "the worker exited with code 3; the last line of its log: a last word"


def test_a_command_that_does_not_exist_is_a_loss(platform_of: Callable[..., Platform]) -> None:
    platform = platform_of(worker_command=["/nonexistent/program"])
    platform.executor.recover(Standing())
    platform.executor.start(start("r0"))
    assert "could not be started" in platform.until(ReplicaLost).reason


@pytest.mark.slow
def test_a_stopped_process_is_lost_and_killed(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SUSPECT_AFTER_S", 0.4)
    monkeypatch.setattr(watch, "LOST_AFTER_S", 0.8)
    form(platform, "r0", "r1")
    pid = platform.pid("r1")
    os.kill(pid, signal.SIGSTOP)
    lost = platform.until(ReplicaLost)
    assert lost.replica_id == "r1"
    assert "silent" in lost.reason
    assert not Path(f"/proc/{pid}").exists()
    assert not platform.of(ReplicaStopped)


def test_a_job_is_finished_when_every_member_is(platform: Platform) -> None:
    form(platform, "r0", "r1", then="finish")
    finished = platform.until(JobFinished)
    assert (finished.generation, finished.step) == (1, 10)
    for name in ("r0", "r1"):
        platform.until(ReplicaStopped, lambda event, name=name: event.replica_id == name)
    platform.executor.start(EndJob(job_id=JOB, state=JobState.SUCCEEDED))
    platform.executor.start(EndJob(job_id=JOB, state=JobState.SUCCEEDED))
    platform.barrier()
    assert not platform.of(ReplicaLost)
    assert len(platform.of(JobFinished)) == 1
    assert not list((platform.state_dir / "workloads" / "job" / "rendezvous").iterdir())


def test_a_leader_that_dies_before_the_result_is_written_has_not_finished_the_job(platform: Platform) -> None:
    form(platform, "r0", "r1", then="finish", never_finishes="r0")
    os.kill(platform.pid("r0"), signal.SIGKILL)
    platform.until(ReplicaLost)
    platform.take(0.3)
    assert not platform.of(JobFinished)
    platform.executor.start(resize(2, "r1", forced=True))
    assert platform.until(JobFinished).generation == 2


def test_nobody_exits_before_the_end_is_in_the_journal(platform: Platform) -> None:
    platform.acknowledges = False
    form(platform, "r0", then="finish")
    finished = platform.until(JobFinished)
    platform.take(0.3)
    assert not platform.of(ReplicaStopped)
    platform.executor.acknowledge(platform.events)
    platform.until(ReplicaStopped)
    assert finished.step == 10


def test_a_failure_of_the_users_code_fails_the_job(platform: Platform) -> None:
    platform.executor.start(start("r0", say="fail:ValueError"))
    assert platform.until(JobFailed).error == "ValueError"
    platform.until(ReplicaStopped)
    assert not platform.of(ReplicaLost)


def test_ending_a_job_ends_its_workers(platform: Platform) -> None:
    form(platform, "r0", "r1")
    platform.executor.start(EndJob(job_id=JOB, state=JobState.CANCELLED))
    for name in ("r0", "r1"):
        platform.until(ReplicaStopped, lambda event, name=name: event.replica_id == name)
    platform.executor.start(start("r2"))
    platform.barrier()


@pytest.mark.slow
def test_a_broken_group_whose_members_all_live_is_reported(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide.backends.control_channel.reports.LOST_AFTER_S", 0.2)
    monkeypatch.setattr("springtide.backends.control_channel.reports._BREAK_CHECK_S", 0.1)
    form(platform, "r0", "r1", then="break")
    broken = platform.until(GroupBroken)
    assert (broken.generation, broken.detail) == (1, "the all-reduce ran into its deadline")
    platform.executor.start(resize(2, "r0", "r1", forced=True))
    platform.until(JobResized, lambda event: event.generation == 2)
    platform.take(0.3)
    assert len(platform.of(GroupBroken)) == 1


def test_progress_is_thinned_and_the_newest_survives(platform: Platform) -> None:
    platform.executor.start(start("r0", say="progress:400"))
    last = platform.until(ProgressReported, lambda event: event.step == 400)
    assert last.total_steps == 400
    assert len(platform.of(ProgressReported)) < 40


def test_outside_events_wake_the_loop(platform: Platform) -> None:
    event = CancelRequested(workload_id=JOB)
    platform.executor.post(event)
    assert list(platform.executor.wait(None)) == [event]


@pytest.mark.slow
def test_spawns_are_limited_at_once(platform_of: Callable[..., Platform], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide.backends.local.launcher.MAX_SPAWNS_AT_ONCE", 2)
    platform = platform_of()
    for index in range(5):
        platform.executor.start(start(f"r{index}"))
    platform.barrier()
    assert platform.executor.counts()["spawns"] == 2
    for index in range(5):
        platform.until(ReplicaReady, lambda event, index=index: event.replica_id == f"r{index}")


def test_a_log_that_grows_without_end_is_cut(platform_of: Callable[..., Platform]) -> None:
    platform = platform_of(max_log_bytes=1000)
    form(platform, "r0")
    log = platform.state_dir / "workloads" / "job" / "logs" / "r0.log"
    with log.open("a") as file:
        file.write("x" * 5000)
    end_s = time.monotonic() + 10
    while log.stat().st_size > 1000 and time.monotonic() < end_s:
        time.sleep(0.02)
    assert log.stat().st_size <= 1000
    assert log.with_name("r0.log.1").stat().st_size == 1000


def test_a_second_executor_is_refused_on_the_same_state_directory(
    platform: Platform, platform_of: Callable[..., Platform]
) -> None:
    before = open_descriptors()
    with pytest.raises(BackendError, match="another platform"):
        platform_of()
    assert open_descriptors() == before


def test_a_full_disk_loses_the_start_and_not_the_executor(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes, **options: object) -> None:
        from springtide.core.errors import StorageError

        raise StorageError("cannot write: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("springtide.backends.local.records.write_durable", refuse)
        platform.executor.start(start("r0"))
        assert "No space" in platform.until(ReplicaLost).reason
    platform.executor.start(start("r1"))
    platform.until(ReplicaReady, lambda event: event.replica_id == "r1")


def test_labels_are_the_control_planes_alone(platform):
    platform.executor.start(start())
    platform.until(ReplicaReady)
    before = platform.executor.counts()
    for _ in range(2):
        platform.executor.start(DrainNode(node_id=NodeId("local"), pool="inference", is_reclaim=True))
        platform.executor.start(LabelNode(node_id=NodeId("local"), pool="inference"))
    platform.barrier()
    assert platform.take(0.2) == []
    assert platform.executor.counts() == before


def test_the_devices_of_a_machine_cut_into_nodes_keep_the_drivers_numbers(platform_of):
    nodes = split_node(make_node("local", 4, kind="gpu"), {"inference": 2})
    platform = platform_of(nodes=nodes)
    platform.executor.recover(Standing())
    for number in (1, 3):
        action = replace(start(f"r{number}"), device_id=DeviceId(f"local-{number}/0"))
        platform.executor.start(action)
        platform.until(ReplicaReady, lambda event, action=action: event.replica_id == action.replica_id)
        environment = Path(f"/proc/{platform.pid(action.replica_id)}/environ").read_bytes().split(b"\0")
        assert f"CUDA_VISIBLE_DEVICES={number}".encode() in environment


def test_the_end_of_a_worker_is_reported_though_its_files_cannot_be_removed(platform: Platform) -> None:
    platform.executor.recover(Standing())
    platform.executor.start(start("r0"))
    platform.until(ReplicaReady)
    spec = platform.executor._driver.records.spec_path(ReplicaId("r0"))
    spec.unlink(missing_ok=True)
    # As on a disk that takes no changes, it cannot be unlinked.
    spec.mkdir()
    os.kill(platform.pid("r0"), signal.SIGKILL)
    assert platform.until(ReplicaLost).replica_id == "r0"
