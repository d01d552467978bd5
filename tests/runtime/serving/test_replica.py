"""The serving replica: real sockets, the real control link, and the user's class from a file."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from kits.runtime.replica_plane import Plane, make_spec
from springtide.core.errors import InvalidRequest
from springtide.core.wire.workers import (
    Failed,
    FrameDecoder,
    Left,
    Ready,
    Stop,
)
from springtide.runtime.process.start_phases import StartPhases
from springtide.runtime.serving.replica import ServedUserModel, load_served_class, run_replica
from springtide.serving.frames import (
    MAX_FRAME_BYTES,
    Answered,
    BatchOutcome,
    Draining,
    Ping,
    Pong,
    Predict,
    Reply,
    Welcome,
    encode_frame,
)


class Gate:
    """The gateway's end of a replica's socket."""

    def __init__(self, address):
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(30)
        self.connection.connect(address.removeprefix("unix://"))
        self.reader: FrameDecoder[Reply] = FrameDecoder(Reply, MAX_FRAME_BYTES)
        self.pending = []

    def send(self, question):
        self.connection.sendall(encode_frame(question))

    def predict(self, batch_id, *calls):
        self.send(Predict(batch_id=batch_id, calls=tuple(json.dumps(call).encode() for call in calls)))

    def next(self):
        while not self.pending:
            data = self.connection.recv(65536)
            assert data, "the replica hung up"
            self.pending.extend(self.reader.feed(data))
        return self.pending.pop(0)

    def close(self):
        self.connection.close()


RUNNER = """
import sys, msgspec
from springtide.core.wire.workers import WorkerSpec
from springtide.runtime.process.control_link import ControlLink
from springtide.runtime.serving.replica import run_replica
spec = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSpec)
link = ControlLink(spec)
link.start()
code = run_replica(spec, link)
link.close()
assert "torch" not in sys.modules
sys.exit(code)
"""


class Replica:
    """A real replica process with its control plane and a gateway's connection."""

    def __init__(self, tmp_path, runner=RUNNER, **changes):
        self.spec = make_spec(tmp_path, **changes)
        self.plane = Plane(tmp_path / "c.sock")
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", runner], stdin=subprocess.PIPE, env=environment
        )
        self.process.stdin.write(msgspec.json.encode(self.spec))
        self.process.stdin.close()

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        self.plane.close()


def test_a_real_process_loads_serves_drains_and_exits_0(tmp_path):
    with closing(Replica(tmp_path)) as replica:
        address = replica.plane.next(Ready).address
        path = Path(address.removeprefix("unix://"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with closing(Gate(address)) as gate:
            welcome = gate.next()
            assert isinstance(welcome, Welcome)
            assert welcome.schema.is_batchable
            assert welcome.schema.doc.startswith("Doubles numbers")
            gate.predict(1, {"values": [1, 2]}, {"values": [3]}, {"values": ["x"]}, {"values": [4, 5, 6]})
            answered = gate.next()
            assert [outcome.status for outcome in answered.outcomes] == ["ok", "ok", "invalid", "ok"]
            assert [json.loads(outcome.body) for outcome in answered.outcomes if outcome.status == "ok"] == [
                [2, 4],
                [6],
                [8, 10, 12],
            ]
            fifo = tmp_path / "fifo"
            os.mkfifo(fifo)
            gate.predict(2, {"values": [7], "pause": str(fifo)})
            gate.send(Ping(nonce=9))
            assert gate.next() == Pong(nonce=9, num_outstanding=1)
            replica.plane.order(Stop(grace_s=20.0))
            assert gate.next() == Pong(nonce=0, num_outstanding=1, is_draining=True)
            gate.predict(3, {"values": [8]})
            assert gate.next() == Draining(batch_id=3)
            fifo.write_text("go")
            answered = gate.next()
            assert isinstance(answered, Answered)
            assert (answered.batch_id, answered.outcomes[0].body) == (2, b"[14]")
            replica.plane.next(Left)
        assert replica.process.wait(30) == 0
        assert not path.exists()


def test_sigterm_drains_like_a_stop(tmp_path):
    with closing(Replica(tmp_path)) as replica:
        replica.plane.next(Ready)
        replica.process.send_signal(signal.SIGTERM)
        replica.plane.next(Left)
        assert replica.process.wait(30) == 0


# The main thread, which waits for batches, is not interrupted by this.
SIGTERM_ELSEWHERE = """
import signal, threading, time
def later():
    time.sleep(1.0)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=later, daemon=True).start()
"""


def test_sigterm_on_another_thread_drains_too(tmp_path):
    with closing(Replica(tmp_path, SIGTERM_ELSEWHERE + RUNNER)) as replica:
        replica.plane.next(Ready)
        replica.plane.next(Left)
        assert replica.process.wait(30) == 0


FORKS = """
import os, signal, threading, time
def later():
    child = os.fork() or time.sleep(60)
    # It has just been born, and forgets what its parent does at a signal.
    time.sleep(0.5)
    os.kill(child, signal.SIGTERM)
    print(os.waitpid(child, 0)[1], flush=True)
threading.Thread(target=later, daemon=True).start()
"""


def test_sigterm_of_a_process_that_user_code_forked_ends_that_one(tmp_path, capfd):
    with closing(Replica(tmp_path, FORKS + RUNNER)) as replica:
        with closing(Gate(replica.plane.next(Ready).address)) as gate:
            gate.next()
            until_s = time.monotonic() + 30.0
            while not (said := capfd.readouterr().out) and time.monotonic() < until_s:
                time.sleep(0.05)
            assert said.strip() == str(int(signal.SIGTERM))
            gate.send(Ping(nonce=1))
            assert not gate.next().is_draining
        replica.plane.order(Stop(grace_s=5.0))
        assert replica.process.wait(30) == 0


def test_a_hanging_prediction_ends_within_the_grace(tmp_path):
    with closing(Replica(tmp_path)) as replica, closing(Gate(replica.plane.next(Ready).address)) as gate:
        gate.next()
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        gate.predict(1, {"values": [1], "pause": str(fifo)})
        gate.send(Ping(nonce=1))
        assert gate.next().num_outstanding == 1
        replica.plane.order(Stop(grace_s=0.2))
        assert replica.process.wait(30) == 0


def test_a_class_that_does_not_load_is_reported_with_its_sentence(tmp_path):
    with closing(Replica(tmp_path, name="Broken")) as replica:
        failed = replica.plane.next(Failed)
        assert failed.error == "the service does not load: RuntimeError: no weights here (served.py:26)"
        assert replica.process.wait(30) == 1


class StillLink:
    """Named double of a control link nobody is at the other end of: keeps what is sent."""

    def __init__(self):
        self.sent = []
        self.phases = StartPhases(0.0)
        self.orders = queue.SimpleQueue()
        self.ready = threading.Event()

    def send(self, report):
        self.sent.append(report)
        if isinstance(report, Ready):
            self.ready.set()
        return len(self.sent)

    def update(self, **standing):
        self.standing = standing

    def wait_acknowledged(self, seq, timeout_s):
        return True


def test_a_stop_during_loading_and_a_long_directory(tmp_path):
    link = StillLink()
    link.orders.put(Stop(grace_s=30.0))
    spec = make_spec(tmp_path, work_dir="w" * 120)
    assert run_replica(spec, link, terminate=lambda code: None) == 0
    ready, left = link.sent
    assert isinstance(left, Left)
    path = Path(ready.address.removeprefix("unix://"))
    assert len(os.fsencode(path)) < 100
    assert not path.parent.exists()


def test_garbage_on_the_socket_ends_only_that_connection(tmp_path):
    link = StillLink()
    codes = []
    spec = make_spec(tmp_path)
    thread = threading.Thread(target=lambda: codes.append(run_replica(spec, link, terminate=codes.append)))
    thread.start()
    assert link.ready.wait(30)
    address = link.sent[0].address
    with closing(Gate(address)) as bad, closing(Gate(address)) as good:
        assert isinstance(bad.next(), Welcome)
        assert isinstance(good.next(), Welcome)
        bad.connection.sendall(b"\xff" * 100)
        try:
            assert bad.connection.recv(100) == b""
        except ConnectionResetError:
            pass
        good.predict(1, {"values": [21]})
        assert good.next().outcomes[0].body == b"[42]"
        link.on_order(Stop(grace_s=30.0))
        assert good.next().is_draining
    thread.join(30)
    assert codes == [0]


class Picky:
    def __init__(self):
        self.sizes = []

    def predict(self, values: list[int]) -> list[int]:
        self.sizes.append(len(values))
        if 14 in values:
            sys.exit("enough")
        if 13 in values:
            raise ValueError("13 brings bad luck")
        return values


def calls(*values):
    return [json.dumps({"values": list(each)}).encode() for each in values]


def test_one_bad_input_does_not_fail_its_neighbours():
    model = ServedUserModel(Picky, 8, {})
    outcomes = model.answer(calls([1], [13], [2]))
    assert [outcome.status for outcome in outcomes] == ["ok", "error", "ok"]
    assert outcomes[1].body == b"ValueError: 13 brings bad luck"


def test_exit_in_predict_does_not_end_the_replica():
    assert ServedUserModel(Picky, 8, {}).answer(calls([14])) == (BatchOutcome("error", b"SystemExit: enough"),)


def test_no_call_of_predict_is_larger_than_the_limit():
    model = ServedUserModel(Picky, 4, {})
    (outcome,) = model.answer(calls(range(20, 30)))
    assert json.loads(outcome.body) == list(range(20, 30))
    assert model._instance.sizes == [4, 4, 2]
    assert model.answer(calls([])) == (BatchOutcome("ok", b"[]"),)


def test_a_wrong_output_length_is_an_error_for_all():
    class Short:
        def predict(self, values: list[int]) -> list[int]:
            return values[1:]

    outcomes = ServedUserModel(Short, 8, {}).answer(calls([1], [2, 3]))
    assert {outcome.status for outcome in outcomes} == {"error"}
    assert b"3 items and returned 2" in outcomes[0].body


def test_what_is_not_json_is_an_error_and_arrays_become_lists():
    import numpy

    class Arrays:
        def predict(self, values: list[float]) -> list[float]:
            return numpy.asarray(values, dtype=numpy.float32) * 2

    class Objects:
        def predict(self, key: str) -> object:
            return {"s": {1, 2}, "o": object()}

    assert ServedUserModel(Arrays, 8, {}).answer(calls([1.5], [2])) == (
        BatchOutcome("ok", b"[3.0]"),
        BatchOutcome("ok", b"[4.0]"),
    )
    (outcome,) = ServedUserModel(Objects, 8, {}).answer([b'{"key": "k"}'])
    assert outcome.status == "error"
    assert b"cannot be written as JSON" in outcome.body


def test_params_reach_the_object_before_it_loads():
    class Tuned:
        def load(self):
            self.seen = self.params["k"]

        def predict(self, value: str) -> str:
            return self.seen + value

    assert ServedUserModel(Tuned, 8, {"k": "v"}).answer([b'{"value": "!"}']) == (BatchOutcome("ok", b'"v!"'),)


@pytest.mark.parametrize(("name", "told"), [("absent", "has no 'absent'"), ("constant", "not a class")])
def test_a_missing_object_is_told(tmp_path, name, told):
    with pytest.raises(InvalidRequest, match=told):
        load_served_class(make_spec(tmp_path, name=name).workload.entrypoint)
