"""A test double at the wire: speaks core.wire like a worker, trains nothing, and does what its job's params say.

params: `ready=no` never reports Ready; `stop=ignore` ignores orders and SIGTERM; `say=...` comma-separated script run
once connected: `hang`, `exit:<code>`, `garbage`, `oversize`, `badtoken`, `finish`, `fail:<text>`, `progress:<n>`.
`then=finish` with `never_finishes=<replicas>`: the function returns on all others; the result is the first rank's.
A FormGroup is answered by Switched at once; a Preempt by CheckpointWritten, Left and exit 0; Stop by Left and exit 0.
Reports are repeated after a reconnect until acknowledged. A Fence ends it with code 7.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import msgspec

from springtide.core.wire import workers as wire
from springtide.core.workload import Checkpoint


class FakeWorker:
    def __init__(self, spec: wire.WorkerSpec) -> None:
        self.spec = spec
        self.params = spec.workload.params
        self.seq = 0
        self.kept: list[wire.Report] = []
        self.generation = 0
        self.step = 0
        self.is_ready = False
        self.link: socket.socket | None = None
        self.exits_when_acknowledged: int | None = None
        self.sends_duplicates = self.params.get("duplicates") == "yes"

    def report(self, report: wire.Report, *, numbered: bool = True) -> None:
        if numbered:
            self.seq += 1
            report = msgspec.structs.replace(report, seq=self.seq)
            self.kept.append(report)
        self.send(report)
        if numbered and self.sends_duplicates:
            self.send(report)

    def send(self, report: wire.Report) -> None:
        if self.link is not None:
            try:
                self.link.sendall(wire.encode_frame(report))
            except OSError:
                pass

    def run(self) -> None:
        if self.params.get("stop") == "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(f"fake worker {self.spec.replica_id} lives", flush=True)
        absent_since_s = time.monotonic()
        while True:
            try:
                self.link = self.connect()
            except OSError:
                if time.monotonic() - absent_since_s > self.spec.lease_s:
                    sys.exit(9)
                time.sleep(0.02)
                continue
            with self.link:
                self.serve()
            self.link = None
            absent_since_s = time.monotonic()

    def connect(self) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(self.spec.control_address.removeprefix("unix://"))
        except OSError:
            link.close()
            raise
        link.settimeout(0.1)
        return link

    def serve(self) -> None:
        spec = self.spec
        token = "wrong" if self.params.get("say") == "badtoken" else spec.token
        self.send(
            wire.Hello(
                workload_id=spec.workload_id,
                replica_id=spec.replica_id,
                token=token,
                pid=os.getpid(),
                generation=self.generation,
                step=self.step,
                is_ready=self.is_ready,
            )
        )
        for report in self.kept:
            self.send(report)
        if not self.is_ready and self.params.get("ready") != "no":
            self.is_ready = True
            self.report(wire.Ready(address="tcp://127.0.0.1:1", device_seen=self.params.get("sees", "")))
            self.say()
        decoder: wire.FrameDecoder[wire.Order] = wire.FrameDecoder(wire.Order)
        beat_at_s = 0.0
        while True:
            if time.monotonic() >= beat_at_s:
                beat_at_s = time.monotonic() + 0.2
                self.send(wire.Heartbeat(step=self.step))
            assert self.link is not None
            try:
                data = self.link.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                return
            if not data:
                return
            for order in decoder.feed(data):
                self.obey(order)

    def say(self) -> None:
        assert self.link is not None
        for word in filter(None, self.params.get("say", "").split(",")):
            name, _, value = word.partition(":")
            if name == "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif name == "exit":
                print("a last word", flush=True)
                os._exit(int(value))
            elif name == "garbage":
                self.link.sendall(struct.pack(">I", 5) + b"\xff\xfe\xfd\xfc\xfb")
            elif name == "oversize":
                self.link.sendall(struct.pack(">I", wire.MAX_FRAME_BYTES + 1) + b"x")
            elif name == "fail":
                self.report(wire.Failed(generation=self.generation, error=value))
                self.exits_when_acknowledged = 1
            elif name == "progress":
                for step in range(int(value)):
                    progress = wire.Progress(generation=1, step=step + 1, total_steps=int(value), world_size=1)
                    self.report(progress, numbered=False)

    def obey(self, order: wire.Order) -> None:
        if isinstance(order, wire.Acknowledge):
            self.kept = [report for report in self.kept if report.seq > order.seq]
            if self.exits_when_acknowledged is not None and not self.kept:
                sys.exit(self.exits_when_acknowledged)
            return
        print(f"order {type(order).__name__} {msgspec.json.encode(order).decode()}", flush=True)
        if self.params.get("stop") == "ignore" and isinstance(order, wire.Stop | wire.Preempt | wire.FenceOrder):
            return
        if isinstance(order, wire.FenceOrder):
            sys.exit(7)
        if isinstance(order, wire.FormGroup):
            self.form(order)
        elif isinstance(order, wire.Preempt):
            path = Path(self.spec.work_dir) / "checkpoints" / f"{order.generation}-{self.step}"
            path.mkdir(parents=True, exist_ok=True)
            (path / "manifest.json").write_text("{}")
            checkpoint = Checkpoint(generation=order.generation, step=self.step, path=str(path), num_bytes=2)
            self.report(wire.CheckpointWritten(checkpoint=checkpoint))
            self.report(wire.Left(generation=order.generation, step=self.step))
            sys.exit(0)
        elif isinstance(order, wire.Stop):
            self.report(wire.Left(generation=self.generation, step=self.step))
            sys.exit(0)

    def form(self, order: wire.FormGroup) -> None:
        if order.generation <= self.generation:
            return
        if self.spec.replica_id not in order.members:
            self.report(wire.Left(generation=order.generation))
            sys.exit(0)
        self.generation = order.generation
        self.step += 10
        self.report(
            wire.Switched(
                generation=order.generation,
                rank=order.members.index(self.spec.replica_id),
                world_size=len(order.members),
                step=self.step,
                pause_s=0.125,
                direction="start" if order.previous == 0 else "grow",
            )
        )
        if self.params.get("then") == "finish" and self.spec.replica_id not in self.params.get("never_finishes", ""):
            leads = order.members[0] == self.spec.replica_id
            self.report(wire.Finished(generation=self.generation, step=self.step, has_result=leads))
            self.exits_when_acknowledged = 0
        if self.params.get("then") == "break" and order.generation == 1:
            self.report(
                wire.GroupBrokenReport(generation=self.generation, detail="the all-reduce ran into its deadline")
            )


def main() -> None:
    spec = msgspec.json.decode(Path(sys.argv[sys.argv.index("--spec") + 1]).read_bytes(), type=wire.WorkerSpec)
    FakeWorker(spec).run()


if __name__ == "__main__":
    main()
