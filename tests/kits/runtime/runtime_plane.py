"""A control plane made by hand: a real control socket, real workers from a real zygote, orders as the test says."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from safetensors.torch import load_file

from springtide.core.wire.workers import (
    Acknowledge,
    ChildExited,
    Finished,
    FormGroup,
    FrameDecoder,
    Heartbeat,
    Hello,
    Ready,
    Report,
    Spawned,
    SpawnRequest,
    Switched,
    WorkerSpec,
    ZygoteMessage,
    encode_frame,
)
from springtide.core.workload import Entrypoint, ReplicaId, TrainingJob, WorkloadId
from springtide.storage.fence import Fence

WAIT_S = 60.0
_NUMBERS = itertools.count()


class ZygoteProcess:
    """One zygote for a whole test run; a zygote that was idle for long ends by itself, and another one is started."""

    def __init__(self, directory):
        self._socket = directory / "z.sock"
        self._start()

    @property
    def path(self):
        if self.process.poll() is not None or not self._socket.exists():
            self.close()
            self._start()
        return self._socket

    def _start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "springtide.runtime", "zygote", "--socket", str(self._socket)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        deadline = time.monotonic() + WAIT_S
        while not self._socket.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                # Else it would be found by later tests, as a child of this process.
                self.close()
                raise AssertionError(f"no zygote: it ended with code {self.process.returncode}, or took too long")
            time.sleep(0.02)

    def close(self):
        self.process.terminate()
        self.process.wait()


class Plane:
    """Drives one job. `reports` holds everything that workers said, by replica, in order."""

    def __init__(self, zygote_path, work_dir, job, *, num_threads=1, lease_s=30.0, environment=None):
        self.job, self.work_dir = job, work_dir
        self.num_threads, self.lease_s = num_threads, lease_s
        self.environment = environment or {}
        self.condition = threading.Condition()
        self.reports: list[tuple[str, Report]] = []
        self.connections: dict[str, socket.socket] = {}
        self.exits: dict[str, int] = {}
        self.pids: dict[str, int] = {}
        self.generation = 0
        self.members: tuple[str, ...] = ()
        # What the batch was in each generation, for whoever does the same steps again.
        self.batch_sizes: dict[int, int] = {}
        self.acknowledges = True
        self.on_report = lambda name, report: None
        (work_dir / "rendezvous").mkdir(parents=True, exist_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.socket_path = f"{tempfile.gettempdir()}/springtide-test-{os.getpid()}-{next(_NUMBERS)}.sock"
        self.listener.bind(self.socket_path)
        self.listener.listen()
        self.zygote = socket.socket(socket.AF_UNIX)
        self.zygote.connect(str(zygote_path))
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, None)
        self.zygote_decoder: FrameDecoder[ZygoteMessage] = FrameDecoder(ZygoteMessage)
        self.selector.register(self.zygote, selectors.EVENT_READ, "zygote")
        self.closed = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    # --- the socket side

    def _run(self):
        while not self.closed:
            for key, _ in self.selector.select(0.05):
                if key.fileobj is self.listener:
                    connection, _ = self.listener.accept()
                    self.selector.register(connection, selectors.EVENT_READ, [None, FrameDecoder(Report)])
                    continue
                try:
                    data = key.fileobj.recv(1 << 16)
                except OSError:
                    data = b""
                if key.data == "zygote":
                    self._from_zygote(data)
                else:
                    self._from_worker(key, data)

    def _from_zygote(self, data):
        with self.condition:
            for message in self.zygote_decoder.feed(data):
                if isinstance(message, Spawned):
                    self.pids[message.replica_id] = message.pid
                elif isinstance(message, ChildExited):
                    self.exits[message.replica_id] = message.exit_code
            self.condition.notify_all()

    def _from_worker(self, key, data):
        if not data:
            self.selector.unregister(key.fileobj)
            key.fileobj.close()
            return
        for report in key.data[1].feed(data):
            if isinstance(report, Hello):
                key.data[0] = report.replica_id
                with self.condition:
                    self.connections[report.replica_id] = key.fileobj
            name = key.data[0]
            with self.condition:
                if not isinstance(report, Heartbeat):
                    self.reports.append((name, report))
                self.condition.notify_all()
            self.on_report(name, report)
            if self.acknowledges and report.seq:
                with contextlib.suppress(OSError):
                    key.fileobj.sendall(encode_frame(Acknowledge(seq=report.seq)))

    # --- the test's side

    def start(self, *names, restore=None):
        if self.generation == 0:
            self.generation = max(1, Fence(self.work_dir).generation() + 1)
        for name in names:
            spec = WorkerSpec(
                workload=self.job,
                replica_id=ReplicaId(name),
                generation=self.generation,
                control_address=f"unix://{self.socket_path}",
                token="t",
                work_dir=str(self.work_dir),
                log_path=str(self.work_dir / "logs" / f"{name}.log"),
                num_threads=self.num_threads,
                lease_s=self.lease_s,
                restore=restore,
                environment=self.environment,
            )
            self.zygote.sendall(encode_frame(SpawnRequest(spec=spec)))

    def wait(self, predicate, what="a condition"):
        with self.condition:
            done = self.condition.wait_for(predicate, WAIT_S)
        if not done:
            raise AssertionError(f"no {what}; {self.reports[-8:]}; exits {self.exits}\n{self.logs()}")

    def of(self, kind, name=None, **fields):
        return [
            report
            for who, report in list(self.reports)
            if isinstance(report, kind)
            and (name is None or who == name)
            and all(getattr(report, key) == value for key, value in fields.items())
        ]

    def wait_ready(self, *names):
        self.wait(lambda: all(self.of(Ready, name) for name in names), f"Ready of {names}")

    def order(self, order, *names):
        for name in names:
            with contextlib.suppress(OSError, KeyError):
                self.connections[name].sendall(encode_frame(order))

    def form(self, *members, forced=False, wait=True, batch=0, untold=()):
        previous, self.generation = self.generation if self.members else 0, self.generation + 1
        if forced:
            Fence(self.work_dir).raise_to(self.generation)
        order = FormGroup(
            generation=self.generation,
            members=tuple(ReplicaId(name) for name in members),
            rendezvous=f"file://{self.work_dir}/rendezvous",
            previous=previous,
            forced=forced,
            global_batch_size=batch,
        )
        self.batch_sizes[self.generation] = batch or self.batch_sizes.get(previous, self.job.global_batch_size)
        leavers = [name for name in self.members if name not in self.exits and name not in untold]
        recipients = dict.fromkeys((*members, *leavers))
        self.members = members
        self.order(order, *recipients)
        if wait:
            self.wait_switched(*members)

    def wait_switched(self, *members):
        generation = self.generation
        self.wait(
            lambda: all(self.of(Switched, name, generation=generation) for name in members),
            f"Switched of {members} to {generation}",
        )

    def start_group(self, *names, batch=0):
        self.start(*names)
        self.wait_ready(*names)
        self.form(*names, batch=batch)

    def grow(self, *joiners, batch=0):
        self.start(*joiners)
        self.wait_ready(*joiners)
        self.form(*self.members, *joiners, batch=batch)

    def signal(self, name, number=signal.SIGKILL):
        os.kill(self.pids[name], number)

    def kill(self, *names):
        for name in names:
            self.signal(name)
        self.wait(lambda: all(name in self.exits for name in names), "exit")

    def wait_exit(self, *names, code=0):
        self.wait(lambda: all(name in self.exits for name in names), f"exit of {names}")
        for name in names:
            assert self.exits[name] == code, f"{name} ended with {self.exits[name]}\n{self.logs()}"

    def wait_step(self, step):
        """Wait until a step is in the log."""
        deadline = time.monotonic() + WAIT_S
        path = self.work_dir / "steps.jsonl"
        # Lines are counted, not decoded: this asks two hundred times a second.
        while not path.exists() or path.read_bytes().count(b"\n") < step:
            assert time.monotonic() < deadline, f"step {step} was not reached\n{self.logs()}"
            assert not (self.exits and not set(self.members) - set(self.exits)), f"all ended\n{self.logs()}"
            time.sleep(0.005)

    def wait_finished(self):
        self.wait(lambda: all(self.of(Finished, name) for name in self.members), "Finished")
        self.wait_exit(*self.members)

    def steps(self):
        path = self.work_dir / "steps.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def result_hash(self):
        return artifact_hash(self.work_dir)

    def logs(self):
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2500:]}" for path in self.work_dir.glob("logs/*"))

    def close(self):
        for name, pid in self.pids.items():
            if name not in self.exits:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(AssertionError):
            self.wait(lambda: set(self.exits) >= set(self.pids))
        self.closed = True
        self.thread.join()
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()
        self.selector.close()
        with contextlib.suppress(OSError):
            os.unlink(self.socket_path)


def artifact_hash(work_dir):
    """The sha256 over every tensor of the final model."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(work_dir / "artifacts" / "model.safetensors").items()):
        digest.update(name.encode() + tensor.contiguous().reshape(-1).view(__import__("torch").uint8).numpy().tobytes())
    return digest.hexdigest()


def make_job(directory, source, **fields):
    """A job whose source is the given text."""
    path = directory / "user_code.py"
    path.write_text(source)
    defaults = {"global_batch_size": 16, "num_epochs": 2, "num_virtual_shards": 4, "max_workers": 4, "seed": 7}
    return TrainingJob(
        job_id=WorkloadId("job"),
        name="job",
        entrypoint=Entrypoint(source_path=str(path), object_name="fit"),
        **{**defaults, **fields},
    )


TRAIN = """
import os, time
import torch
from torch import nn

def make_net():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

def make_optimizer(parameters):
    if os.environ.get("OPTIMIZER") == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

def make_data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 8, generator=generator)
    return x, (x.sum(1) > 0).long()

def fit(ctx):
    data = make_data()
    model, optimizer = ctx.prepare(make_net(), make_optimizer)
    model.train()
    pause_s = float(os.environ.get("STEP_S", "0"))
    for batch in ctx.batches(data):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + 0.01 * ctx.step_number)
        loss = nn.functional.cross_entropy(model(batch.x + 0.01 * torch.randn_like(batch.x)), batch.y)
        if pause_s:
            time.sleep(pause_s)
        ctx.step(loss)
"""

# Training stands still while joiners come up, so that they find it under way however slow the machine is.
HELD_TRAIN = TRAIN.replace(
    "        ctx.step(loss)",
    "        while os.path.exists(os.environ['HOLD']):\n            time.sleep(0.01)\n        ctx.step(loss)",
)
assert HELD_TRAIN != TRAIN
