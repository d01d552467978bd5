"""A serving replica with an address of its own: real processes and TCP, its secret, its health, its drain."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest

from kits.runtime.replica_plane import Plane, make_spec
from springtide.core.errors import BackendError
from springtide.core.tokens import gateway_token
from springtide.core.wire.workers import Failed, FrameDecoder, Left, Ready, Stop
from springtide.core.workload import ReplicaId
from springtide.runtime.serving.listeners import HandshakeGuard, TcpListener, tcp_address
from springtide.runtime.serving.pod import run_serving_pod
from springtide.serving.frames import (
    MAX_FRAME_BYTES,
    Answered,
    Challenge,
    Draining,
    Greet,
    Ping,
    Pong,
    Predict,
    Reply,
    Welcome,
    encode_frame,
    gateway_proof,
    new_nonce,
    replica_proof,
)

KEY = "5eed" * 16
TOKEN = gateway_token(KEY)
REPLICA = ReplicaId("s1-r1")
RUNNER = """
import sys, msgspec
from springtide.core.wire.workers import WorkerSpec
from springtide.runtime.serving.listeners import TcpListener, HandshakeGuard, tcp_address
from springtide.runtime.serving.pod import run_serving_pod
spec = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSpec)
code = run_serving_pod(spec, sys.argv[1])
assert "torch" not in sys.modules
sys.exit(code)
"""
# Each replica has a loopback address of its own, as a pod has, so that they all use the same ports.
_hosts = (f"127.77.{os.getpid() % 250}.{number}" for number in itertools.count(1))


class Pod:
    """A real replica process with an address of its own, and its control plane."""

    def __init__(self, tmp_path, **changes):
        self.host = next(_hosts)
        self.spec = make_spec(tmp_path, listen_host=self.host, **changes)
        self.plane = Plane(tmp_path / "c.sock")
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", RUNNER, KEY], stdin=subprocess.PIPE, env=environment
        )
        self.process.stdin.write(msgspec.json.encode(self.spec))
        self.process.stdin.close()

    def health(self, path):
        try:
            with urllib.request.urlopen(f"http://{self.host}:8790{path}", timeout=20) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        self.plane.close()


class Caller:
    """Somebody who connects to a replica; `greet` proves to know a secret."""

    def __init__(self, address):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.connection = socket.create_connection((host, int(port)), timeout=30)
        self.reader: FrameDecoder[Reply] = FrameDecoder(Reply, MAX_FRAME_BYTES)
        self.pending = []

    def send(self, question):
        self.connection.sendall(encode_frame(question))

    def next(self):
        """The next message; None once the replica has hung up."""
        while not self.pending:
            try:
                data = self.connection.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.pending.extend(self.reader.feed(data))
        return self.pending.pop(0)

    def greet(self, token=TOKEN, replica_id=REPLICA):
        challenge = self.next()
        assert isinstance(challenge, Challenge)
        self.challenge, self.nonce = challenge.nonce, new_nonce()
        proof = gateway_proof(token, replica_id, self.challenge, self.nonce)
        self.send(Greet(nonce=self.nonce, proof=proof))
        return self

    def close(self):
        self.connection.close()


@pytest.mark.slow
def test_who_knows_the_secret_is_served_and_drained(tmp_path):
    with closing(Pod(tmp_path)) as pod:
        address = pod.plane.next(Ready).address
        assert address == f"tcp://{pod.host}:8789"
        with closing(Caller(address).greet()) as gateway:
            welcome = gateway.next()
            assert isinstance(welcome, Welcome)
            assert welcome.proof == replica_proof(TOKEN, REPLICA, gateway.challenge, gateway.nonce)
            fifo = tmp_path / "fifo"
            os.mkfifo(fifo)
            gateway.send(Predict(batch_id=1, calls=(json.dumps({"values": [7], "pause": str(fifo)}).encode(),)))
            gateway.send(Ping(nonce=3))
            assert gateway.next() == Pong(nonce=3, num_outstanding=1)
            assert pod.health("/v2/health/ready") == (200, {"ready": True})
            pod.plane.order(Stop(grace_s=20.0))
            assert gateway.next() == Pong(nonce=0, num_outstanding=1, is_draining=True)
            assert pod.health("/v2/health/ready") == (503, {"ready": False})
            assert pod.health("/v2/health/live") == (200, {"live": True}), "it drains, it is not dead"
            gateway.send(Predict(batch_id=2, calls=(b'{"values": [8]}',)))
            assert gateway.next() == Draining(batch_id=2)
            fifo.write_text("go")
            answered = gateway.next()
            assert isinstance(answered, Answered)
            assert (answered.batch_id, answered.outcomes[0].body) == (1, b"[14]")
            pod.plane.next(Left)
        assert pod.process.wait(30) == 0


@pytest.mark.slow
def test_term_drains_as_a_deleted_pod_does(tmp_path):
    with closing(Pod(tmp_path)) as pod, closing(Caller(pod.plane.next(Ready).address).greet()) as gateway:
        assert isinstance(gateway.next(), Welcome)
        pod.process.send_signal(signal.SIGTERM)
        assert gateway.next() == Pong(nonce=0, is_draining=True)
        pod.plane.next(Left)
        assert pod.process.wait(30) == 0


def test_whoever_does_not_know_the_secret_gets_nothing(tmp_path):
    with closing(Pod(tmp_path)) as pod, ExitStack() as stack:
        address = pod.plane.next(Ready).address

        def caller():
            return stack.enter_context(closing(Caller(address)))

        assert caller().greet(gateway_token("0" * 64)).next() is None, "the secret of another service"
        assert caller().greet(replica_id=ReplicaId("s1-r2")).next() is None, "a proof meant for another replica"
        hasty = caller()
        hasty.send(Predict(batch_id=1, calls=(b'{"values": [1]}',)))
        assert isinstance(hasty.next(), Challenge)
        assert hasty.next() is None, "a question before a proof"
        large = caller()
        assert isinstance(large.next(), Challenge)
        large.connection.sendall((1 << 20).to_bytes(4, "big"))
        assert large.next() is None, "a frame that a greeting never is"
        recorded = caller().greet()
        assert isinstance(recorded.next(), Welcome)
        again = caller()
        assert isinstance(again.next(), Challenge)
        again.send(Greet(nonce=recorded.nonce, proof=gateway_proof(TOKEN, REPLICA, recorded.challenge, recorded.nonce)))
        assert again.next() is None, "a proof that was recorded"
        mirrored = caller()
        challenge = mirrored.next()
        mirrored.send(Greet(nonce=new_nonce(), proof=replica_proof(TOKEN, REPLICA, challenge.nonce, new_nonce())))
        assert mirrored.next() is None, "what a replica proves is no proof of a gateway"
        recorded.send(Greet(nonce=b"", proof=b""))
        assert recorded.next() is None, "nobody proves themselves twice"


@pytest.mark.slow
def test_unauthenticated_peers_cannot_keep_the_gateway_out(tmp_path):
    with closing(Pod(tmp_path)) as pod, ExitStack() as stack:
        address = pod.plane.next(Ready).address
        unauthenticated = [stack.enter_context(closing(Caller(address))) for _ in range(40)]
        assert all(isinstance(peer.next(), Challenge) for peer in unauthenticated[8:])
        gateway = stack.enter_context(closing(Caller(address).greet()))
        assert isinstance(gateway.next(), Welcome)
        assert isinstance(unauthenticated[0].next(), Challenge | None), "the oldest had to go"
        gateway.send(Predict(batch_id=1, calls=(b'{"values": [4]}',)))
        assert gateway.next().outcomes[0].body == b"[8]"
        assert unauthenticated[-1].next() is None, "a peer may not stay silent for long"


def test_health_speaks_the_open_inference_protocol(tmp_path):
    with closing(Pod(tmp_path)) as pod:
        pod.plane.next(Ready)
        assert pod.health("/v2/models/s1/ready") == (200, {"name": "s1", "ready": True})
        assert pod.health("/v2/models/s1/versions/1/ready") == (200, {"name": "s1", "ready": True})
        status, told = pod.health("/v2/models/s1")
        assert (status, told["name"], [one["name"] for one in told["inputs"]]) == (200, "s1", ["values", "pause"])
        for path in ("/v2/models/other/ready", "/v2/models/s1/versions/2/ready", "/", "/v2/models/s1/infer"):
            assert pod.health(path)[0] == 404, path
        with socket.create_connection((pod.host, 8790), timeout=30) as client:
            client.sendall(b"POST /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.0 501")
        with socket.create_connection((pod.host, 8790), timeout=30) as client:
            client.sendall(b"HEAD /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(4096), b""))
            assert answer.startswith(b"HTTP/1.0 200")
            assert answer.endswith(b"\r\n\r\n")


@pytest.mark.slow
def test_a_model_that_does_not_load_is_never_ready(tmp_path):
    with closing(Pod(tmp_path, name="Broken")) as pod:
        assert "no weights here" in pod.plane.next(Failed).error
        assert pod.process.wait(30) == 1


@pytest.mark.slow
def test_health_is_there_while_the_source_is_fetched(tmp_path, monkeypatch):
    host = next(_hosts)
    spec = make_spec(tmp_path, listen_host=host)
    seen = []

    def prepare():
        for path in ("live", "ready"):
            with socket.create_connection((host, 8790), timeout=30) as client:
                client.sendall(f"GET /v2/health/{path} HTTP/1.0\r\n\r\n".encode())
                seen.append(client.recv(64).split()[1])
        raise BackendError("the store is unreachable")

    with pytest.raises(BackendError, match="unreachable"):
        run_serving_pod(spec, KEY, prepare=prepare)
    assert seen == [b"200", b"503"]
    with pytest.raises(BackendError, match="address and its service's key"):
        run_serving_pod(spec, "")
    monkeypatch.setenv("SPRINGTIDE_HEALTH_PORT", "http")
    with pytest.raises(BackendError, match="no port"):
        run_serving_pod(spec, KEY)


def test_a_replica_may_have_an_address_of_either_kind():
    assert tcp_address("10.1.2.3", 8789) == "tcp://10.1.2.3:8789"
    assert tcp_address("fd00::7", 8789) == "tcp://[fd00::7]:8789"
    try:
        listener = TcpListener(HandshakeGuard("::1", 0, "secret"))
    except OSError:
        pytest.skip("this machine has no address of that kind")
    with closing(listener.socket):
        assert listener.address == f"tcp://[::1]:{listener.socket.getsockname()[1]}"
