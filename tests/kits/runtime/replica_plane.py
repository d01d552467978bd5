"""A control plane's side of one service replica."""

from __future__ import annotations

import socket

from springtide.core.wire.workers import (
    Acknowledge,
    FrameDecoder,
    Heartbeat,
    Hello,
    Report,
    WorkerSpec,
)
from springtide.core.wire.workers import encode_frame as encode_order
from springtide.core.workload import Entrypoint, InferenceService, ReplicaId, WorkloadId

SOURCE = '''
class Decorated:
    def __init__(self, cls):
        self.cls = cls

class Slow:
    """Doubles numbers, slowly if told so."""

    def load(self):
        self.factor = 2

    def predict(self, values: list[int], pause: str = "") -> list[int]:
        if pause:
            import os
            with open(pause + ".entered", "w"):
                pass
            with open(pause) as fifo:
                fifo.read()
        return [value * self.factor for value in values]

slow = Decorated(Slow)
constant = 3

class Broken:
    def load(self):
        raise RuntimeError("no weights here")

    def predict(self, values: list[int]) -> list[int]:
        return values
'''


class Plane:
    """Named double of the control plane's end of the link: acknowledges everything, sends what it is told to."""

    def __init__(self, path):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.listener.settimeout(30)
        self.decoder: FrameDecoder[Report] = FrameDecoder(Report)
        self.pending = []
        self.connection = None

    def next(self, kind):
        if self.connection is None:
            self.connection, _ = self.listener.accept()
            self.connection.settimeout(30)
        while True:
            while not self.pending:
                data = self.connection.recv(65536)
                assert data, "the worker hung up"
                self.pending.extend(self.decoder.feed(data))
            report = self.pending.pop(0)
            if not isinstance(report, Hello | Heartbeat):
                self.order(Acknowledge(seq=report.seq))
            if isinstance(report, kind):
                return report

    def order(self, order):
        self.connection.sendall(encode_order(order))

    def close(self):
        if self.connection is not None:
            self.connection.close()
        self.listener.close()


def make_spec(tmp_path, name="slow", **changes):
    source = tmp_path / "served.py"
    source.write_text(SOURCE)
    service = InferenceService(
        service_id=WorkloadId("s1"),
        name="s1",
        entrypoint=Entrypoint(source_path=str(source), object_name=name, kind="class"),
        max_batch_size=4,
    )
    return WorkerSpec(
        workload=service,
        replica_id=ReplicaId("s1-r1"),
        generation=1,
        control_address=f"unix://{tmp_path / 'c.sock'}",
        token="secret",
        work_dir=str(tmp_path / changes.pop("work_dir", "w")),
        log_path="",
        **changes,
    )
