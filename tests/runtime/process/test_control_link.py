"""The control link against a real socket: introduction, heartbeats, repetition, lease."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import pytest

from springtide.core.wire.workers import (
    Acknowledge,
    FrameDecoder,
    Heartbeat,
    Hello,
    Progress,
    Ready,
    Report,
    Stop,
    WorkerSpec,
    encode_frame,
)
from springtide.core.workload import Entrypoint, ReplicaId, TrainingJob, WorkloadId
from springtide.runtime.process.control_link import ControlLink


class Plane:
    """One end of the control socket, driven by hand."""

    def __init__(self, path):
        self.path = str(path)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.listener.settimeout(10)
        self.connection = None

    def accept(self):
        self.drop()
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(10)
        self.decoder: FrameDecoder[Report] = FrameDecoder(Report)
        self.pending = []

    def next(self, kind=None):
        while True:
            while not self.pending:
                data = self.connection.recv(65536)
                assert data, "the worker closed the connection"
                self.pending.extend(self.decoder.feed(data))
            report = self.pending.pop(0)
            if kind is None or isinstance(report, kind):
                return report

    def order(self, order):
        self.connection.sendall(encode_frame(order))

    def drop(self):
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def close(self):
        self.drop()
        self.listener.close()


def make_spec(path, lease_s=30.0):
    job = TrainingJob(job_id=WorkloadId("j1"), name="j1", entrypoint=Entrypoint(source_path="x.py"))
    return WorkerSpec(
        workload=job,
        replica_id=ReplicaId("r1"),
        generation=1,
        control_address=f"unix://{path}",
        token="secret",
        work_dir=str(path.parent),
        log_path="",
        lease_s=lease_s,
    )


@pytest.fixture
def plane(tmp_path):
    with closing(Plane(tmp_path / "c.sock")) as plane:
        yield plane


@pytest.mark.slow
def test_hello_comes_first_and_heartbeats_follow(plane, tmp_path):
    with closing(ControlLink(make_spec(tmp_path / "c.sock"))) as link:
        link.update(generation=3, step=7, is_ready=True, address="a")
        link.start()
        plane.accept()
        hello = plane.next()
        assert isinstance(hello, Hello)
        assert (hello.generation, hello.step, hello.is_ready, hello.address, hello.token) == (3, 7, True, "a", "secret")
        assert hello.proves_keys
        link.update(step=8)
        assert plane.next(Heartbeat).step == 8


def test_unacknowledged_reports_are_repeated_on_a_new_connection_and_acknowledged_ones_are_not(plane, tmp_path):
    with closing(ControlLink(make_spec(tmp_path / "c.sock"))) as link:
        first = link.send(Ready(address="one"))
        link.start()
        plane.accept()
        assert plane.next(Ready).address == "one"
        second = link.send(Ready(address="two"))
        assert plane.next(Ready).seq == second
        plane.order(Acknowledge(seq=first))
        assert link.wait_acknowledged(first, 10)
        assert not link.wait_acknowledged(second, 0.01)
        plane.accept()
        assert isinstance(plane.next(), Hello)
        assert plane.next(Ready) == Ready(address="two", seq=second)
        plane.order(Acknowledge(seq=second))
        assert link.wait_acknowledged(second, 10)


def test_progress_is_not_kept_for_repetition(plane, tmp_path):
    with closing(ControlLink(make_spec(tmp_path / "c.sock"))) as link:
        assert link.send(Progress(generation=1, step=1, total_steps=2, world_size=1)) == 0
        link.send(Ready())
        link.start()
        plane.accept()
        assert isinstance(plane.next(), Hello)
        assert isinstance(plane.next(), Ready)


@pytest.mark.slow
def test_held_progress_is_sent_once_no_other_follows(plane, tmp_path):
    told = [Progress(generation=1, step=step, total_steps=9, world_size=1) for step in (3, 4, 5)]
    with closing(ControlLink(make_spec(tmp_path / "c.sock"))) as link:
        link.start()
        plane.accept()
        plane.next(Hello)
        link.hold(told[0])
        link.send(told[1])
        link.hold(told[2])
        assert [plane.next(Progress).step for _ in range(2)] == [4, 5]
        plane.next(Heartbeat)
        assert isinstance(plane.next(), Heartbeat)


def test_orders_reach_the_callback_or_the_queue(plane, tmp_path):
    with closing(ControlLink(make_spec(tmp_path / "c.sock"))) as link:
        link.start()
        plane.accept()
        plane.order(Stop(grace_s=1.0))
        assert link.orders.get(timeout=10) == Stop(grace_s=1.0)


def test_garbage_from_the_plane_leads_to_a_new_connection(plane, tmp_path):
    with closing(ControlLink(make_spec(tmp_path / "c.sock"))) as link:
        link.start()
        plane.accept()
        plane.next(Hello)
        plane.connection.sendall(b"\xff" * 64)
        plane.accept()
        assert isinstance(plane.next(), Hello)


def test_the_lease_expires_once_without_a_plane(tmp_path):
    expired = threading.Event()
    spec = make_spec(tmp_path / "absent.sock", lease_s=0.05)
    with closing(ControlLink(spec, on_lease_expired=expired.set)) as link:
        link.start()
        assert expired.wait(10)
