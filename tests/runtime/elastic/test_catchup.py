"""The stream to a joiner: strangers who find where it listens neither stop it nor make it start over."""

from __future__ import annotations

import os
import secrets
import signal
import time

import pytest
from msgspec.structs import replace

from kits.runtime.pod_plane import PodPlane, kill_worker
from kits.runtime.runtime_plane import HELD_TRAIN, make_job
from kits.runtime.strangers import stranger
from kits.simulation.sweeps import only_in_full
from springtide.core.tokens import group_key
from springtide.core.wire.workers import Switched
from springtide.runtime.elastic.meeting import MeetingPlace
from springtide.runtime.elastic.tcp_meeting import TcpMeeting

pytestmark = pytest.mark.slow
NUM_STEPS = 130


def wait_for(found, what):
    deadline = time.monotonic() + 60
    while not (result := found()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return result


def num_held(pid):
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def listening_ports(pid):
    """The TCP ports at which a process listens."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{name}")
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    with open(f"/proc/{pid}/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def test_on_one_machine_a_thousand_silent_strangers_do_not_stop_a_joiner(make_plane, tmp_path):
    hold = tmp_path / "hold"
    plane = make_plane(HELD_TRAIN, step_s=0.05, num_epochs=10, environment={"HOLD": str(hold)})
    plane.start_group("a")
    hold.touch()
    plane.start("b")
    plane.wait_ready("b")
    with stranger(wait_s=1.0) as outsider:
        # The member that has the state comes later than the strangers.
        os.kill(plane.pids["a"], signal.SIGSTOP)
        plane.form("a", "b", wait=False)
        place = MeetingPlace(plane.work_dir / "rendezvous" / f"g{plane.generation}", 60.0)
        address, _, _ = place.get("catchup/1").decode().rpartition("#")
        held = num_held(plane.pids["b"])
        assert outsider.ask(address) == "0"
        assert num_held(plane.pids["b"]) <= held
        hold.unlink()
        os.kill(plane.pids["a"], signal.SIGCONT)
        plane.wait_switched("a", "b")
        assert place.check(["switched"])
        assert not place.check(["sync"]), "the state was moved in a pause of the training"
        plane.wait_finished()
    assert [record["step"] for record in plane.steps()] == list(range(1, NUM_STEPS + 1))


@pytest.fixture
def pods(tmp_path):
    job = make_job(tmp_path, HELD_TRAIN, num_epochs=10)
    environment = {"STEP_S": "0.05", "HOLD": str(tmp_path / "hold")}
    plane = PodPlane(tmp_path, f"file://{tmp_path}/store", job, environment=environment)
    source = plane.store.put_source("main.py", HELD_TRAIN.encode())
    plane.job = replace(job, entrypoint=replace(job.entrypoint, source_path=source))
    yield plane
    plane.close()


@pytest.mark.parametrize(
    "greeting",
    [pytest.param(b"", id="silent", marks=only_in_full), pytest.param(secrets.token_bytes(48), id="wrong-key")],
)
def test_over_a_network_a_thousand_strangers_do_not_stop_a_joiner(pods, greeting):
    pods.start_group("job.0")
    with pods.held():
        pods.start("job.1")
        pods.wait_ready("job.1")
        kill_worker(pods, "job.0", signal.SIGSTOP)
    joiner = pods.worker_pid("job.1")
    before = listening_ports(joiner)
    with stranger(greeting=greeting) as outsider, stranger(greeting=greeting) as another:
        # The joiner is the first member, so that the others meet at its place, and stream to it.
        pods.form("job.1", "job.0", wait=False)
        ports = wait_for(lambda: len(new := listening_ports(joiner) - before) == 2 and new, "a stream and a meeting")
        host = pods.addresses["job.1"]
        for process, port in zip((outsider, another), ports, strict=True):
            process.tell(f"{host}:{port}")
        for process in (outsider, another):
            process.answer()
        # They hold as many as may wait, and no threads.
        descriptors, threads = num_held(joiner)
        assert descriptors < 150
        assert threads < 30
        kill_worker(pods, "job.0", signal.SIGCONT)
        pods.wait_switched("job.1", "job.0")
        assert pods.of(Switched, "job.1", direction="grow")
        place, _, port = pods.rendezvous.removeprefix("tcp://").rpartition(":")
        key = group_key(pods.key, pods.generation)
        meeting = TcpMeeting(place, int(port), pods.generation, 5.0, key=key)
        assert meeting.check(["switched"])
        assert not meeting.check(["sync"]), "the state was moved in a pause of the training"
        pods.wait_finished()
    assert [record["step"] for record in pods.steps()] == list(range(1, NUM_STEPS + 1))
