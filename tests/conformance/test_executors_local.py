"""The executor on real processes keeps the contract of executors: the same kit that the one made of models passes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from springtide.backends.local import LocalExecutor
from springtide.backends.sharing.table import STATUS_NAME, DaemonStatus, read_whole
from springtide.backends.sockets import socket_directory
from springtide.core.resources import make_node
from springtide.core.shares import Share
from springtide.core.workload import Entrypoint, InferenceService, ReplicaId, TrainingJob
from springtide.testing.executor import CHECKS, SHARE_CHECKS, check_drain_leaves_replicas_alone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TRAINING = """
import time, torch
def fit(ctx):
    torch.manual_seed(1)
    x, y = torch.randn(64, 4), torch.randn(64, 1)
    model, optimizer = ctx.prepare(torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.01))
    for batch in ctx.batches((x, y)):
        time.sleep(0.005)
        ctx.step(torch.nn.functional.mse_loss(model(batch.x), batch.y))
"""
SERVING = """
class Echo:
    def predict(self, numbers: list[float]) -> list[float]:
        return numbers
"""


class WallClock:
    def __init__(self) -> None:
        self._began = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._began


class MachineWorld:
    """One machine with two slots: its zygote and its workers outlive an executor that is dropped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = WallClock()
        self.node = make_node("local", 2, pool="inference")
        self.pooled_node = self.node.node_id
        self.devices = [device.device_id for device in self.node.devices]
        self.long_job = self._job("long", num_epochs=100_000)
        self.short_job = self._job("short", num_epochs=5)
        self.service = InferenceService(
            service_id="service", name="service", entrypoint=self._source("service", SERVING)
        )
        self.executor = self._open()

    def restart(self) -> LocalExecutor:
        self.executor.close(stop_workers=False)
        self.executor = self._open()
        return self.executor

    def kill(self, replica_id: str) -> None:
        record = json.loads((self.folder / "workers" / f"{replica_id}.json").read_text())
        os.kill(record["process"]["pid"], signal.SIGKILL)

    def share_of(self, replica_id: ReplicaId) -> Share | None:
        """What the share daemon says it holds the replica to, once it has taken in all that was asked."""
        begin_s = time.monotonic()
        taken_in: list[float] = []
        self.executor._reactor.call(lambda: taken_in.append(time.monotonic()))
        while not taken_in and time.monotonic() < begin_s + 60.0:
            time.sleep(0.005)
        path = socket_directory(self.folder) / STATUS_NAME
        while self.executor.sharing().tenants and time.monotonic() < begin_s + 60.0:
            status = read_whole(path, DaemonStatus)
            if status is not None and status.written_at_s > taken_in[0]:
                for tenant in status.sharing.tenants:
                    if tenant.replica_id == replica_id:
                        return Share(request=tenant.request, limit=tenant.limit, memory_mb=tenant.memory_mb)
                return None
            time.sleep(0.005)
        return None

    def _open(self) -> LocalExecutor:
        executor = LocalExecutor(self.folder, self.clock, nodes=[self.node])
        executor.open()
        return executor

    def _job(self, name: str, *, num_epochs: int) -> TrainingJob:
        return TrainingJob(
            job_id=name,
            name=name,
            entrypoint=self._source(name, TRAINING),
            global_batch_size=16,
            num_epochs=num_epochs,
            max_workers=2,
        )

    def _source(self, name: str, text: str) -> Entrypoint:
        path = self.folder / "workloads" / name / "source" / "job.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        is_service = text is SERVING
        return Entrypoint(
            source_path=str(path),
            object_name="Echo" if is_service else "fit",
            kind="class" if is_service else "function",
        )


@pytest.fixture
def world(tmp_path: Path) -> Iterator[MachineWorld]:
    machine = MachineWorld(tmp_path / "state")
    try:
        yield machine
    finally:
        machine.executor.close(stop_workers=True)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_executor_of_local_processes(check, world) -> None:
    check(world)


@pytest.mark.parametrize("check", SHARE_CHECKS, ids=lambda check: check.__name__)
def test_local_processes_share_devices(check, world) -> None:
    check(world)


def test_who_is_on_a_node_that_drains(world) -> None:
    # The checks of labels that machines keep by themselves are not for this executor: its labels are the journal's.
    check_drain_leaves_replicas_alone(world)
