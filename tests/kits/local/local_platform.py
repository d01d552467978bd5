"""A LocalExecutor on fake workers, driven by hand, with nothing left behind."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from springtide.backends.local import LocalExecutor
from springtide.core.actions import EndJob, StartReplica
from springtide.core.events import Event
from springtide.core.resources import DeviceId, make_node
from springtide.core.workload import Entrypoint, JobState, ReplicaId, TrainingJob, WorkloadId

# So much longer than anything should take it is waited for, since other things may keep the machine busy.
PATIENCE_S = 45.0
E = TypeVar("E")
FAKE_WORKER = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]
FAKE_ZYGOTE = [sys.executable, str(Path(__file__).with_name("fake_zygote.py"))]


class MonotonicClock:
    def now_s(self) -> float:
        return time.monotonic()


class Platform:
    """Drives an executor as the control loop does: every event is acknowledged as soon as it has been seen."""

    def __init__(self, state_dir: Path, **options: Any) -> None:
        options.setdefault("worker_command", FAKE_WORKER)
        options.setdefault("nodes", [make_node("local", 4)])
        options.setdefault("lease_s", 20.0)
        self.state_dir = state_dir
        self.executor = LocalExecutor(state_dir, MonotonicClock(), **options)
        self.events: list[Event] = []
        self.acknowledges = True
        self.executor.open()

    def until(
        self, kind: type[E], condition: Callable[[E], bool] = lambda event: True, *, timeout_s: float = 20.0
    ) -> E:
        """Return the first event of this kind, seen already or to come."""
        end_s = time.monotonic() + PATIENCE_S + timeout_s
        looked = 0
        while True:
            for event in self.events[looked:]:
                if isinstance(event, kind) and condition(event):
                    return event
            looked = len(self.events)
            assert time.monotonic() < end_s, f"no {kind.__name__} among {self.events}"
            self.take(0.5)

    def take(self, duration_s: float = 0.0) -> list[Event]:
        """Wait once and take what there is."""
        events = list(self.executor.wait(time.monotonic() + duration_s))
        self.events += events
        if self.acknowledges:
            self.executor.acknowledge(events)
        return events

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def barrier(self) -> None:
        """Return once the executor has taken in every action given before."""
        self.executor.start(EndJob(job_id=WorkloadId("no-such-job"), state=JobState.CANCELLED))
        done: list[bool] = []
        self.executor._reactor.call(lambda: done.append(True))
        while not done:
            time.sleep(0.001)

    def pid(self, replica_id: str) -> int:
        self.barrier()
        replica = self.executor._table.replicas[ReplicaId(replica_id)]
        while replica.handle.identity is None:
            time.sleep(0.005)
        return replica.handle.identity.pid

    def until_logged(self, replica_id: str, text: str) -> None:
        end_s = time.monotonic() + PATIENCE_S + 20.0
        while text not in self.log(replica_id):
            assert time.monotonic() < end_s, f"{text} is not in {self.log(replica_id)}"
            time.sleep(0.01)

    def log(self, replica_id: str, job_id: str = "job") -> str:
        return (self.state_dir / "workloads" / job_id / "logs" / f"{replica_id}.log").read_text()


def make_job(job_id: str = "job", **params: str) -> TrainingJob:
    kind = params.pop("kind", "function")
    return TrainingJob(
        job_id=WorkloadId(job_id),
        name=job_id,
        entrypoint=Entrypoint(source_path="train.py", object_name="train", kind=kind),  # type: ignore[arg-type]
        max_workers=4,
        params=params,
    )


def start(replica_id: str = "r0", generation: int = 1, job_id: str = "job", **params: str) -> StartReplica:
    index = int(replica_id.rpartition("r")[2])
    return StartReplica(
        workload=make_job(job_id, **params),
        replica_id=ReplicaId(replica_id),
        device_id=DeviceId(f"local/{index % 4}"),
        generation=generation,
    )


def children() -> set[int]:
    """Living descendants of this process (zombies count: they are leaks too)."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "stat").read_text()
        except OSError:
            continue
        parents[int(entry.name)] = int(text[text.rfind(")") + 2 :].split()[1])
    return {pid for pid, parent in parents.items() if parent == os.getpid()}


def living_workers(state_dir: Path) -> set[int]:
    """Living processes that were started for this state directory, whoever their parent is by now."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"--spec" in command and os.fsencode(state_dir) in command:
            found.add(int(entry.name))
    return found


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
