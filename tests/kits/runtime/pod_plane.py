"""A control plane made by hand for workers that share nothing with it but an object store and tcp."""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import torch
from safetensors.torch import load

from kits.runtime.runtime_plane import WAIT_S, Plane
from springtide.core.tokens import group_key, replica_token, workload_key
from springtide.core.wire.workers import FormGroup, FrameDecoder, Progress, Report, WorkerSpec
from springtide.core.workload import ReplicaId
from springtide.storage.workloads.store import open_workload_store

MASTER_KEY = b"a master key"


class PodPlane(Plane):
    """Each worker is the process tree of a container: a directory, an address and an environment of its own."""

    def __init__(self, directory, store_url, job, *, lease_s=30.0, environment=None):
        self.job, self.directory, self.store_url = job, directory, store_url
        self.lease_s, self.environment = lease_s, environment or {}
        self.condition = threading.Condition()
        self.reports, self.connections, self.exits, self.pids = [], {}, {}, {}
        self.processes: dict[str, subprocess.Popen] = {}
        self.addresses: dict[str, str] = {}
        self.hellos: dict[str, str] = {}
        self.generation = 0
        self.members = ()
        self.rendezvous = ""
        self.batch_sizes = {}
        self.acknowledges = True
        self.on_report = lambda name, report: None
        self.key = workload_key(MASTER_KEY, job.job_id)
        self.store = open_workload_store(store_url, job.job_id)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, None)
        self.closed = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def spec_of(self, name):
        return WorkerSpec(
            workload=self.job,
            replica_id=ReplicaId(name),
            generation=self.generation,
            control_address=f"tcp://127.0.0.1:{self.listener.getsockname()[1]}",
            token="",
            work_dir=str(self.directory / name / "work"),
            log_path="",
            lease_s=self.lease_s,
            environment=self.environment,
            store_url=self.store_url,
        )

    def environment_of(self, name, **variables):
        home = self.directory / name
        home.mkdir(parents=True, exist_ok=True)
        (home / "key").write_text(self.key + "\n")
        (home / "termination").touch()
        self.addresses.setdefault(name, f"127.0.0.{2 + len(self.addresses)}")
        return {
            **os.environ,
            "SPRINGTIDE_SPEC": msgspec.json.encode(self.spec_of(name)).decode(),
            "SPRINGTIDE_KEY_FILE": str(home / "key"),
            "SPRINGTIDE_TERMINATION_LOG": str(home / "termination"),
            "POD_IP": self.addresses[name],
            "OMP_NUM_THREADS": "1",
            **variables,
        }

    def start(self, *names, restore=None):
        if self.generation == 0:
            self.generation = max(1, self.store.head().generation + 1)
        for name in names:
            with (self.directory / f"{name}.out").open("wb") as output:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "springtide.runtime", "pod"],
                    env=self.environment_of(name),
                    cwd=self.directory,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self.pids[name] = self.processes[name].pid
            threading.Thread(target=self._watch, args=(name,), daemon=True).start()

    def _watch(self, name):
        code = self.processes[name].wait()
        with self.condition:
            self.exits[name] = code
            self.condition.notify_all()

    def _from_worker(self, key, data):
        if key.data[0] is None and data:
            # A worker proves who it is before anything else that it says counts.
            (hello, *_) = FrameDecoder(Report).feed(data)
            assert hello.token == replica_token(self.key, hello.replica_id)
        super()._from_worker(key, data)

    def form(self, *members, forced=False, wait=True, batch=0, untold=()):
        previous, self.generation = self.generation if self.members else 0, self.generation + 1
        if forced:
            self.store.raise_fence(self.generation)
        host = self.addresses[members[0]]
        self.rendezvous = f"tcp://{host}:{free_port(host)}"
        order = FormGroup(
            generation=self.generation,
            members=tuple(ReplicaId(name) for name in members),
            rendezvous=self.rendezvous,
            previous=previous,
            forced=forced,
            global_batch_size=batch,
            key=group_key(self.key, self.generation),
        )
        leavers = [name for name in self.members if name not in self.exits and name not in untold]
        self.members = members
        self.order(order, *dict.fromkeys((*members, *leavers)))
        if wait:
            self.wait_switched(*members)

    @contextlib.contextmanager
    def held(self):
        """Meanwhile no step ends, in functions that look for the file that HOLD names."""
        hold = self.directory / "hold"
        hold.touch()
        yield
        hold.unlink()

    def grow(self, *joiners, batch=0):
        with self.held():
            self.start(*joiners)
            self.wait_ready(*joiners)
        self.form(*self.members, *joiners, batch=batch)

    def worker_pid(self, name):
        """The worker proper: the one child of the container's first process."""
        pid = self.pids[name]
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as children:
            return int(children.read().split()[0])

    def prestop(self, name):
        return subprocess.Popen(
            [sys.executable, "-m", "springtide.runtime", "prestop"], env=self.environment_of(name), cwd=self.directory
        )

    def step(self):
        return max((report.step for report in self.of(Progress)), default=0)

    def wait_step(self, step):
        self.wait(lambda: self.step() >= step, f"step {step}")

    def steps(self):
        return self.store.steps()

    def result(self):
        return load(self.store.read_artifact("model.safetensors"))

    def result_hash(self):
        digest = hashlib.sha256()
        for name, tensor in sorted(self.result().items()):
            digest.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def logs(self):
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.directory.glob("*.out"))

    def close(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        deadline = time.monotonic() + WAIT_S
        while set(self.exits) != set(self.pids):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.closed = True
        self.thread.join()
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()
        self.selector.close()
        self.store.close()


def free_port(host):
    with socket.create_server((host, 0)) as probe:
        return probe.getsockname()[1]


def kill_worker(plane, name, number=signal.SIGKILL):
    os.kill(plane.worker_pid(name), number)
