"""The executor with the real zygote, the real trainer and a model that learns."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kits.local.local_platform import Platform
from springtide.core.actions import EndJob, PreemptJob, ResizeJob, StartReplica
from springtide.core.events import (
    CheckpointCommitted,
    JobFinished,
    JobResized,
    ProgressReported,
    ReplicaLost,
    ReplicaReady,
    ReplicaStopped,
)
from springtide.core.ports import Standing
from springtide.core.resources import DeviceId
from springtide.core.workload import Checkpoint, Entrypoint, JobState, ReplicaId, TrainingJob, WorkloadId

pytestmark = pytest.mark.slow
JOB = WorkloadId("job")
LONG_S = 90.0

SOURCE = """
import time
import torch

def train(ctx):
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = x.sum(dim=1, keepdim=True)
    model = torch.nn.Linear(4, 1)
    model, _ = ctx.prepare(model, lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    for batch in ctx.batches((x, y)):
        time.sleep(float(ctx.params["pause_s"]))
        ctx.step(torch.nn.functional.mse_loss(model(batch.x), batch.y))
    ctx.save()
"""


class RealJob:
    """One job on real workers, its actions given by hand."""

    def __init__(self, platform: Platform, directory: Path, *, num_epochs: int, pause_s: float) -> None:
        source = directory / "train.py"
        source.write_text(SOURCE)
        self.platform = platform
        self.job = TrainingJob(
            job_id=JOB,
            name="job",
            entrypoint=Entrypoint(source_path=str(source), object_name="train"),
            global_batch_size=16,
            num_epochs=num_epochs,
            max_workers=4,
            params={"pause_s": str(pause_s)},
        )

    def action(self, name: str, generation: int, restore: Checkpoint | None = None) -> StartReplica:
        device = DeviceId(f"local/{name[1:]}")
        replica_id = ReplicaId(name)
        return StartReplica(
            workload=self.job, replica_id=replica_id, device_id=device, generation=generation, restore=restore
        )

    def start(self, *names: str, generation: int = 1, restore: Checkpoint | None = None) -> None:
        for name in names:
            self.platform.executor.start(self.action(name, generation, restore))
        for name in names:
            self.platform.until(ReplicaReady, lambda event, name=name: event.replica_id == name, timeout_s=LONG_S)

    def form(self, generation: int, *names: str, forced: bool = False) -> JobResized:
        members = tuple(ReplicaId(name) for name in names)
        action = ResizeJob(job_id=JOB, generation=generation, replica_ids=members, global_batch_size=16, forced=forced)
        self.platform.executor.start(action)
        return self.platform.until(JobResized, lambda event: event.generation == generation, timeout_s=LONG_S)


def test_a_job_grows_survives_a_kill_and_finishes(platform_of: Callable[..., Platform], tmp_path: Path) -> None:
    platform = platform_of(worker_command=None)
    platform.executor.recover(Standing())
    job = RealJob(platform, tmp_path, num_epochs=40, pause_s=0.02)
    job.start("r0")
    assert job.form(1, "r0").direction == "start"
    job.start("r1")
    grown = job.form(2, "r0", "r1")
    assert (grown.direction, grown.world_size) == ("grow", 2)
    os.kill(platform.pid("r1"), signal.SIGKILL)
    lost = platform.until(ReplicaLost, timeout_s=LONG_S)
    assert (lost.replica_id, lost.exit_code) == ("r1", -9)
    recovered = job.form(3, "r0", forced=True)
    assert recovered.direction == "recover"
    assert recovered.step >= grown.step
    finished = platform.until(JobFinished, timeout_s=LONG_S)
    assert finished.step == 160
    assert Path(finished.artifact_path).exists()
    platform.until(ReplicaStopped, lambda event: event.replica_id == "r0", timeout_s=LONG_S)
    platform.executor.start(EndJob(job_id=JOB, state=JobState.SUCCEEDED))
    assert platform.of(ProgressReported)[-1].step == 160
    assert len(platform.of(ReplicaLost)) == 1


def test_training_outlives_its_executor_and_is_preempted_by_the_next(
    platform_of: Callable[..., Platform], tmp_path: Path
) -> None:
    first = platform_of(worker_command=None)
    first.executor.recover(Standing())
    job = RealJob(first, tmp_path, num_epochs=5000, pause_s=0.01)
    job.start("r0", "r1")
    job.form(1, "r0", "r1")
    reached = first.until(ProgressReported, lambda event: event.step > 0, timeout_s=LONG_S).step
    pids = {first.pid("r0"), first.pid("r1")}
    first.executor.close()

    second = platform_of(worker_command=None)
    job.platform = second
    second.executor.recover(Standing(replicas=(job.action("r0", 1), job.action("r1", 1)), generations={JOB: 1}))
    second.until(ProgressReported, lambda event: event.step > reached + 5, timeout_s=LONG_S)
    assert {second.pid("r0"), second.pid("r1")} == pids
    names = (ReplicaId("r0"), ReplicaId("r1"))
    second.executor.start(PreemptJob(job_id=JOB, generation=2, replica_ids=names))
    committed = second.until(CheckpointCommitted, lambda event: event.generation == 2, timeout_s=LONG_S)
    for name in names:
        second.until(ReplicaStopped, lambda event, name=name: event.replica_id == name, timeout_s=LONG_S)
    assert not second.of(ReplicaLost)

    restore = Checkpoint(generation=committed.generation, step=committed.step, path=committed.path)
    job.start("r2", generation=3, restore=restore)
    resumed = job.form(3, "r2")
    assert resumed.step >= committed.step > reached
    assert resumed.direction == "resume"
