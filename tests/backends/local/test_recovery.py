"""A new executor on the state of an old one: adopting, reporting the dead, ending the foreign."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kits.local.local_platform import Platform, living_workers, start
from springtide.core.actions import PreemptJob, ResizeJob, StopReplica
from springtide.core.events import (
    CheckpointCommitted,
    JobFinished,
    JobResized,
    ReplicaLost,
    ReplicaReady,
    ReplicaStopped,
)
from springtide.core.ports import Standing
from springtide.core.workload import ReplicaId, WorkloadId
from springtide.storage.fence import Fence

JOB = WorkloadId("job")


def names(*replica_ids: str) -> tuple[ReplicaId, ...]:
    return tuple(ReplicaId(replica_id) for replica_id in replica_ids)


def start_all(platform: Platform, *replica_ids: str, **params: str) -> None:
    for replica_id in replica_ids:
        platform.executor.start(start(replica_id, **params))
    for replica_id in replica_ids:
        platform.until(ReplicaReady, lambda event, name=replica_id: event.replica_id == name)


def form(generation: int, *replica_ids: str, forced: bool = False) -> ResizeJob:
    return ResizeJob(
        job_id=JOB, generation=generation, replica_ids=names(*replica_ids), global_batch_size=8, forced=forced
    )


@pytest.mark.slow
def test_living_workers_are_adopted_and_go_on(platform_of: Callable[..., Platform]) -> None:
    first = platform_of()
    first.executor.recover(Standing())
    start_all(first, "r0", "r1")
    first.executor.start(form(1, "r0", "r1"))
    first.until(JobResized)
    pids = {first.pid("r0"), first.pid("r1")}
    first.executor.close()

    second = platform_of()
    second.executor.recover(Standing(replicas=(start("r0"), start("r1")), generations={JOB: 1}))
    for name in names("r0", "r1"):
        second.until(ReplicaReady, lambda event, name=name: event.replica_id == name)
    assert {second.pid("r0"), second.pid("r1")} == pids
    second.executor.start(start("r0"))
    second.executor.start(form(2, "r1", "r0"))
    assert second.until(JobResized).generation == 2
    assert second.executor.counts()["adopted"] == 2
    assert second.executor.counts().get("spawns", 0) == 0
    assert '"previous":1' in second.log("r0")
    assert not second.of(ReplicaLost)


def test_the_dead_are_reported_and_those_asked_to_stop_are_not_lost(platform_of: Callable[..., Platform]) -> None:
    first = platform_of()
    first.executor.recover(Standing())
    start_all(first, "r0", "r1")
    pids = first.pid("r0"), first.pid("r1")
    first.executor.close()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    second = platform_of()
    stop = StopReplica(workload_id=JOB, replica_id=ReplicaId("r1"))
    second.executor.recover(
        Standing(replicas=(start("r0"), start("r1")), generations={JOB: 1}, actions=(start("r0"), stop))
    )
    assert second.until(ReplicaLost).replica_id == "r0"
    assert second.until(ReplicaStopped).replica_id == "r1"
    second.barrier()
    second.take(0.1)
    assert len(second.events) == 2


@pytest.mark.slow
def test_a_foreign_worker_is_fenced(platform_of: Callable[..., Platform]) -> None:
    first = platform_of()
    first.executor.recover(Standing())
    start_all(first, "r0", "r1", stop="ignore")
    pid = first.pid("r1")
    first.executor.close()

    second = platform_of()
    second.executor.recover(Standing(replicas=(start("r0", stop="ignore"),), generations={JOB: 1}))
    second.until(ReplicaReady, lambda event: event.replica_id == "r0")
    end_s = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end_s:
        second.take(0.05)
    assert not Path(f"/proc/{pid}").exists()
    assert "order Fence" in second.log("r1")
    assert [event.replica_id for event in second.of(ReplicaReady)] == ["r0"]
    assert not second.of(ReplicaLost)


def test_a_start_that_never_began_is_begun(platform_of: Callable[..., Platform]) -> None:
    platform = platform_of()
    platform.executor.recover(Standing(replicas=(start("r0"),), generations={JOB: 1}, actions=(start("r0"),)))
    platform.until(ReplicaReady)
    assert not platform.of(ReplicaLost)


def test_a_process_number_that_was_reused_is_left_alone(platform_of: Callable[..., Platform]) -> None:
    first = platform_of()
    first.executor.recover(Standing())
    start_all(first, "r0")
    pid = first.pid("r0")
    first.executor.close()
    record = first.state_dir / "workers" / "r0.json"
    text = record.read_text()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    # The number now names this very test: only its start time tells that it is not the worker.
    record.write_text(text.replace(f'"pid":{pid}', f'"pid":{os.getpid()}'))

    second = platform_of()
    second.executor.recover(Standing(generations={JOB: 1}))
    second.barrier()
    assert not record.exists()
    assert second.executor.counts().get("fenced", 0) == 0


def test_reports_that_were_not_acknowledged_are_repeated_to_the_next(platform_of: Callable[..., Platform]) -> None:
    first = platform_of()
    first.executor.recover(Standing())
    first.acknowledges = False
    start_all(first, "r0", then="finish")
    first.executor.start(form(1, "r0"))
    first.until(JobFinished)
    first.executor.close()

    second = platform_of()
    action = start("r0", then="finish")
    second.executor.recover(Standing(replicas=(action,), generations={JOB: 1}, actions=(form(1, "r0"),)))
    assert second.until(JobResized).pause_s == 0.125
    assert second.until(JobFinished).step == 10
    second.until(ReplicaStopped)


def test_a_switch_known_from_hello_alone_confirms_the_resize(platform_of: Callable[..., Platform]) -> None:
    first = platform_of()
    first.executor.recover(Standing())
    start_all(first, "r0")
    first.executor.start(form(1, "r0"))
    first.until(JobResized)
    first.executor.close()

    second = platform_of()
    second.executor.recover(Standing(replicas=(start("r0"),), generations={JOB: 1}, actions=(form(1, "r0"),)))
    resized = second.until(JobResized)
    assert (resized.generation, resized.step) == (1, 10)


def test_a_member_that_missed_its_order_gets_it_when_it_is_back(platform_of: Callable[..., Platform]) -> None:
    first = platform_of()
    first.executor.recover(Standing())
    start_all(first, "r0", "r1")
    first.executor.start(form(1, "r0", "r1"))
    first.until(JobResized)
    os.kill(first.pid("r1"), signal.SIGKILL)
    first.until(ReplicaLost)
    first.executor.close()

    second = platform_of()
    order = form(2, "r0", forced=True)
    second.executor.recover(Standing(replicas=(start("r0"),), generations={JOB: 2}, actions=(order,)))
    assert second.until(JobResized).generation == 2
    assert Fence(second.state_dir / "workloads" / "job").generation() == 2
    second.executor.start(PreemptJob(job_id=JOB, generation=3, replica_ids=names("r0")))
    assert second.until(CheckpointCommitted).generation == 3
    second.until(ReplicaStopped)


def test_stopping_everything_saves_what_was_trained(platform_of: Callable[..., Platform]) -> None:
    first = platform_of()
    first.executor.recover(Standing())
    start_all(first, "r0")
    first.executor.start(form(1, "r0"))
    first.until(JobResized)
    first.executor.close(stop_workers=True)
    assert not living_workers(first.state_dir)

    second = platform_of()
    second.executor.recover(Standing(replicas=(start("r0"),), generations={JOB: 1}))
    committed = second.until(CheckpointCommitted)
    assert (committed.generation, committed.step, committed.num_bytes) == (1, 10, 2)
    second.until(ReplicaLost)


def test_an_orphan_ends_when_its_lease_does(platform_of: Callable[..., Platform]) -> None:
    platform = platform_of(lease_s=0.2)
    platform.executor.recover(Standing())
    start_all(platform, "r0")
    pid = platform.pid("r0")
    platform.executor.close()
    assert os.waitpid(pid, 0)[1] != 0
