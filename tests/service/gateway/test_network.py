"""The gateway and replicas that have addresses of their own: real processes, real TCP, both sides prove themselves."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from kits.service.gateway_replicas import Doubler, make_service, run
from springtide.core.tokens import gateway_token, workload_key
from springtide.core.wire.workers import Acknowledge, FrameDecoder, Heartbeat, Hello, Ready, Report, WorkerSpec
from springtide.core.wire.workers import encode_frame as encode_order
from springtide.core.workload import Entrypoint, ReplicaId
from springtide.serving.frames import (
    MAX_FRAME_BYTES,
    Answered,
    BatchOutcome,
    Challenge,
    Greet,
    Question,
    Welcome,
    encode_frame,
    new_nonce,
)
from springtide.serving.router import ReplicaRoute, ServiceRoute
from springtide.serving.schema import derive_schema

KEY = workload_key(b"master", "double-1")
TOKEN = gateway_token(KEY)
SOURCE = """
import os, time

class Double:
    def predict(self, values: list[int], pause: str = "") -> list[int]:
        while pause and os.path.exists(pause):
            time.sleep(0.01)
        return [2 * value for value in values]
"""
RUNNER = """
import sys, msgspec
from springtide.core.wire.workers import WorkerSpec
from springtide.runtime.serving.pod import run_serving_pod
sys.exit(run_serving_pod(msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSpec), sys.argv[1]))
"""
_hosts = (f"127.78.{os.getpid() % 250}.{number}" for number in itertools.count(1))


class Pod:
    """A replica process at an address of its own; this test is its control plane."""

    def __init__(self, directory, name, host="", inside=()):
        self.replica_id = ReplicaId(name)
        self.host = host or next(_hosts)
        self.ready = asyncio.get_running_loop().create_future()
        self._directory, self._inside = directory, inside

    async def __aenter__(self):
        source = self._directory / "served.py"
        source.write_text(SOURCE)
        control = self._directory / f"{self.replica_id}.control"
        self._server = await asyncio.start_unix_server(self._control, str(control))
        spec = WorkerSpec(
            workload=replace(
                make_service(), entrypoint=Entrypoint(source_path=str(source), object_name="Double", kind="class")
            ),
            replica_id=self.replica_id,
            generation=1,
            control_address=f"unix://{control}",
            token="",
            work_dir=str(self._directory / self.replica_id),
            log_path="",
            listen_host=self.host,
        )
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
        self.process = subprocess.Popen(
            [*self._inside, sys.executable, "-c", RUNNER, KEY], stdin=subprocess.PIPE, env=environment
        )
        self.process.stdin.write(msgspec.json.encode(spec))
        self.process.stdin.close()
        async with asyncio.timeout(30):
            self.address = await self.ready
        return self

    async def __aexit__(self, *args):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        self._server.close()

    async def _control(self, reader, writer):
        frames: FrameDecoder[Report] = FrameDecoder(Report)
        try:
            while data := await reader.read(65536):
                for report in frames.feed(data):
                    if isinstance(report, Ready) and not self.ready.done():
                        self.ready.set_result(report.address)
                    if not isinstance(report, Hello | Heartbeat):
                        writer.write(encode_order(Acknowledge(seq=report.seq)))
        except ConnectionError:
            pass
        finally:
            writer.close()

    def route(self, token=TOKEN):
        return ReplicaRoute(replica_id=self.replica_id, address=self.address, is_ready=True, token=token)


class Impostor:
    """Named double: somebody who has got a replica's address, and shows what he can."""

    def __init__(self, shows_challenge, host=""):
        self.shows_challenge = shows_challenge
        self.host = host or next(_hosts)
        self.questions = []
        self.num_connections = 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, self.host, 8789)
        self.address = f"tcp://{self.host}:8789"
        return self

    async def __aexit__(self, *args):
        self.server.close()

    async def serve(self, reader, writer):
        self.num_connections += 1
        frames: FrameDecoder[Question] = FrameDecoder(Question, MAX_FRAME_BYTES)
        welcome = encode_frame(Welcome(replica_id=ReplicaId("r1"), schema=derive_schema(Doubler), proof=b"p" * 32))
        writer.write(encode_frame(Challenge(nonce=new_nonce())) if self.shows_challenge else welcome)
        try:
            while data := await reader.read(65536):
                for question in frames.feed(data):
                    self.questions.append(question)
                    if isinstance(question, Greet):
                        writer.write(welcome)
                    else:
                        stolen = Answered(batch_id=question.batch_id, outcomes=(BatchOutcome("ok", b"[0]"),))
                        writer.write(encode_frame(stolen))
        except ConnectionError:
            pass
        finally:
            writer.close()


def routes(*replicas):
    return [ServiceRoute(service=make_service(), replicas=replicas)]


async def serving(harness, *replicas):
    harness.gateway.update(routes(*replicas))
    await harness.until(lambda: harness.gateway.num_ready("double") == len(replicas))


@pytest.mark.slow
def test_a_call_over_the_network_and_a_drain_that_loses_nothing(tmp_path):
    async def scenario(harness):
        async with Pod(tmp_path, "r1") as one, Pod(tmp_path, "r2") as two:
            await serving(harness, one.route(), two.route())
            assert (await harness.call([1, 2])).json() == {"outputs": [2, 4]}
            pause = tmp_path / "pause"
            pause.touch()
            held = asyncio.create_task(harness.call([7], pause=str(pause)))
            queue = harness.gateway._queues["double"]
            await harness.until(lambda: queue.is_busy)
            busy = next(client for client in queue._clients.values() if client.outstanding)
            leaving = one if busy.replica_id == "r1" else two
            # As the kubelet does when somebody deletes the pod, before the platform has heard of it.
            leaving.process.send_signal(signal.SIGTERM)
            await harness.until(lambda: harness.gateway.num_ready("double") == 1)
            later = await asyncio.gather(*(harness.call([n]) for n in range(20)))
            assert [answer.json() for answer in later] == [{"outputs": [2 * n]} for n in range(20)]
            assert {answer.headers["x-springtide"].split("replica=")[1] for answer in later} == {
                (two if leaving is one else one).replica_id
            }
            pause.unlink()
            assert (await held).json() == {"outputs": [14]}
            await asyncio.to_thread(leaving.process.wait, 30)
            assert leaving.process.returncode == 0

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("shows_challenge", [True, False])
def test_whoever_has_a_replicas_address_gets_no_request(tmp_path, shows_challenge):
    async def scenario(harness):
        async with Impostor(shows_challenge) as impostor:
            route = ReplicaRoute(replica_id=ReplicaId("r1"), address=impostor.address, is_ready=True, token=TOKEN)
            harness.gateway.update(routes(route))
            answer = await harness.call([1], timeout="1s")
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert "is not r1" in answer.json()["error"]["message"]
            assert 2 <= impostor.num_connections <= 12, "it is tried less and less often"
            assert all(isinstance(question, Greet) for question in impostor.questions)
            assert all(TOKEN.encode() not in question.proof for question in impostor.questions)

    run(scenario)


@pytest.mark.slow
def test_a_gateway_without_the_right_secret_is_told_nothing(tmp_path):
    async def scenario(harness):
        async with Pod(tmp_path, "r1") as pod:
            harness.gateway.update(routes(pod.route(token="")))
            answer = await harness.call([1], timeout="500ms")
            assert (answer.status_code, "there is no secret" in answer.json()["error"]["message"]) == (503, True)
            harness.gateway.update(routes(pod.route(token=gateway_token("other"))))
            answer = await harness.call([1], timeout="500ms")
            assert answer.status_code == 503
            await serving(harness, pod.route())
            assert (await harness.call([1])).json() == {"outputs": [2]}

    run(scenario)


@pytest.fixture
def far_away():
    """A network of its own behind a wire that can be cut: (what runs a program there, its address, what cuts)."""
    number = os.getpid() % 250
    name, wire, host = f"stnet{os.getpid()}", f"st{os.getpid()}", f"10.213.{number}.2"

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0

    if not (os.geteuid() == 0 and ip("netns", "add", name)):
        pytest.skip("making a network of its own needs root")
    try:
        made = (
            ip("link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", name)
            and ip("addr", "add", f"10.213.{number}.1/24", "dev", wire)
            and ip("link", "set", wire, "up")
            and ip("-n", name, "addr", "add", f"{host}/24", "dev", "eth0")
            and ip("-n", name, "link", "set", "eth0", "up")
        )
        if not made:
            pytest.skip("this kernel has no virtual wires")
        yield ("ip", "netns", "exec", name), host, lambda: ip("-n", name, "link", "set", "eth0", "down")
    finally:
        ip("link", "del", wire)
        ip("netns", "del", name)


@pytest.mark.slow
def test_a_machine_that_vanishes_without_a_word_is_replaced(tmp_path, far_away):
    inside, host, cut = far_away

    async def scenario(harness):
        async with Pod(tmp_path, "r1", host, inside) as far, Pod(tmp_path, "r2") as near:
            await serving(harness, far.route())
            pause = tmp_path / "pause"
            pause.touch()
            held = asyncio.create_task(harness.call([21], pause=str(pause)))
            queue = harness.gateway._queues["double"]
            await harness.until(lambda: queue.is_busy)
            await serving(harness, far.route(), near.route())
            # No packet comes or goes any more; nobody closes anything.
            assert cut()
            await harness.until(lambda: queue._clients["r1"].is_connected is False)
            pause.unlink()
            answer = await held
            assert (answer.status_code, answer.json()) == (200, {"outputs": [42]})
            assert "replica=r2" in answer.headers["x-springtide"]

    run(scenario)
