"""What comes over the wire from those who should not speak, or speak badly."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from kits.local.local_platform import Platform, start
from springtide.backends.sockets import socket_directory
from springtide.core.actions import ResizeJob
from springtide.core.events import CheckpointCommitted, JobResized, ReplicaLost, ReplicaReady
from springtide.core.wire import workers as wire
from springtide.core.workload import Checkpoint, ReplicaId, WorkloadId

GARBAGE = {
    "not msgpack": struct.pack(">I", 5) + b"\xff\xfe\xfd\xfc\xfb",
    "bad utf-8": struct.pack(">I", 5) + b"\xa4\xff\xfe\xfd\xfc",
    "an unknown report": wire.encode_frame(wire.Preempt(generation=1)),
    "too long": struct.pack(">I", wire.MAX_FRAME_BYTES + 1),
    "no hello": wire.encode_frame(wire.Heartbeat()),
    "deeply nested": struct.pack(">I", 100_000) + b"\x91" * 100_000,
}


@pytest.fixture
def stranger(platform: Platform) -> Iterator[socket.socket]:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(10)
    link.connect(str(socket_directory(platform.state_dir) / "control.sock"))
    with link:
        yield link


def read_all(link: socket.socket) -> list[wire.Order]:
    """Everything until the other end closes."""
    decoder: wire.FrameDecoder[wire.Order] = wire.FrameDecoder(wire.Order)
    orders: list[wire.Order] = []
    while True:
        try:
            data = link.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            return orders
        orders += decoder.feed(data)


@pytest.mark.parametrize("name", GARBAGE)
def test_a_malformed_frame_closes_the_connection(platform: Platform, stranger: socket.socket, name: str) -> None:
    stranger.sendall(GARBAGE[name])
    assert read_all(stranger) == []
    platform.executor.start(start("r0"))
    platform.until(ReplicaReady)
    assert platform.executor.counts()["closed_connections"] == 1


@pytest.mark.parametrize("change", ["token", "replica_id", "workload_id", "pid"])
def test_a_hello_that_proves_nothing_is_fenced(platform: Platform, stranger: socket.socket, change: str) -> None:
    platform.executor.start(start("r0"))
    platform.until(ReplicaReady)
    right = {"token": "x", "replica_id": "r0", "workload_id": "job", "pid": platform.pid("r0")}
    wrong = {"token": "y", "replica_id": "r7", "workload_id": "other", "pid": os.getpid()}
    hello = wire.Hello(**{**right, change: wrong[change]})  # type: ignore[arg-type]
    stranger.sendall(wire.encode_frame(hello))
    assert [type(order) for order in read_all(stranger)] == [wire.FenceOrder]
    assert platform.executor.counts()["refused_hellos"] == 1
    assert platform.executor._table.replicas[ReplicaId("r0")].connection is not None


def test_a_worker_names_the_device_that_it_sees(platform: Platform) -> None:
    platform.executor.start(start("r0", sees="MIG-7a (NVIDIA H100)"))
    assert platform.until(ReplicaReady).device_seen == "MIG-7a (NVIDIA H100)"


def test_a_worker_with_the_wrong_token_is_sent_away_for_good(platform: Platform) -> None:
    platform.executor.start(start("r0", say="badtoken"))
    lost = platform.until(ReplicaLost)
    assert lost.exit_code == 7
    assert not platform.of(ReplicaReady)


@pytest.mark.parametrize("word", ["garbage", "oversize"])
def test_a_worker_that_garbles_a_frame_comes_back_with_a_clean_stream(platform: Platform, word: str) -> None:
    platform.executor.start(start("r0", say=word))
    platform.until(ReplicaReady)
    end_s = time.monotonic() + 10
    while not platform.executor.counts().get("closed_connections") and time.monotonic() < end_s:
        time.sleep(0.01)
    action = ResizeJob(job_id=WorkloadId("job"), generation=1, replica_ids=(ReplicaId("r0"),), global_batch_size=8)
    platform.executor.start(action)
    platform.until(JobResized)
    assert len(platform.of(ReplicaReady)) == 1


def deliver(platform: Platform, *reports: wire.Report) -> None:
    """Hand reports to the executor as if r0 had sent them on its own connection."""
    replica = platform.executor._table.replicas[ReplicaId("r0")]
    done: list[bool] = []

    def take() -> None:
        for report in reports:
            assert replica.connection is not None
            platform.executor._reports.on_message(replica.connection, report)
        done.append(True)

    platform.executor._reactor.call(take)
    while not done:
        time.sleep(0.001)


def test_stale_duplicate_and_stray_reports_change_nothing(platform: Platform) -> None:
    platform.executor.start(start("r0"))
    platform.until(ReplicaReady)
    action = ResizeJob(job_id=WorkloadId("job"), generation=5, replica_ids=(ReplicaId("r0"),), global_batch_size=8)
    platform.executor.start(action)
    platform.until(JobResized)
    stray = Checkpoint(generation=5, step=3, path="/etc")
    switched = wire.Switched(generation=3, rank=0, world_size=1, step=1, pause_s=0, direction="grow", seq=102)
    broken = wire.GroupBrokenReport(generation=3, detail="late", seq=103)
    before = len(platform.events)
    deliver(platform, wire.CheckpointWritten(checkpoint=stray, seq=101), switched, switched, broken)
    platform.take(0.1)
    assert platform.events[before:] == []
    counts = platform.executor.counts()
    assert (counts["stray_paths"], counts["stale_reports"], counts["repeated_reports"]) == (1, 2, 1)


def test_a_switch_to_an_earlier_group_says_nothing_of_the_one_that_forms(platform: Platform) -> None:
    members = (ReplicaId("r0"), ReplicaId("r1"))
    for name in members:
        platform.executor.start(start(name))
        platform.until(ReplicaReady, lambda event, name=name: event.replica_id == name)
    late = platform.pid("r1")
    os.kill(late, signal.SIGSTOP)
    try:
        platform.executor.start(
            ResizeJob(job_id=WorkloadId("job"), generation=5, replica_ids=members, global_batch_size=8)
        )
        platform.barrier()
        group = platform.executor._table.jobs[WorkloadId("job")].group
        assert group is not None
        end_s = time.monotonic() + 30.0
        while not group.switched and time.monotonic() < end_s:
            time.sleep(0.01)
        assert list(group.switched) == ["r0"]
        stale = wire.Switched(generation=3, rank=0, world_size=1, step=999, pause_s=9.0, direction="replace", seq=102)
        deliver(platform, stale)
    finally:
        os.kill(late, signal.SIGCONT)
    resized = platform.until(JobResized)
    assert (resized.generation, resized.step, resized.pause_s) == (5, 10, 0.125)
    assert platform.executor.counts()["stale_reports"] == 1


def test_an_acknowledgement_never_overtakes_an_open_report(platform: Platform) -> None:
    platform.acknowledges = False
    platform.executor.start(start("r0"))
    platform.until(ReplicaReady)
    replica = platform.executor._table.replicas[ReplicaId("r0")]
    inside = Checkpoint(generation=1, step=3, path=str(replica.work_dir / "checkpoints" / "1-3"))
    deliver(platform, wire.CheckpointWritten(checkpoint=inside, seq=2))
    committed = platform.until(CheckpointCommitted)
    platform.executor.acknowledge([committed])
    platform.barrier()
    assert (replica.acknowledged_seq, replica.open_seqs) == (0, {1})
    platform.executor.acknowledge(platform.of(ReplicaReady))
    platform.barrier()
    assert (replica.acknowledged_seq, replica.open_seqs) == (2, set())
