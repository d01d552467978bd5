"""A script of DistributedDataParallel that calls `springtide.adopt`, on a real platform: resized, killed, promised."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from kits.end_to_end.live_platform import LivePlatform, wait_for

pytestmark = pytest.mark.slow
PROGRAM = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import springtide

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
x = torch.randn(160, 16, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(data, 16 // dist.get_world_size(), sampler=DistributedSampler(data))
job = springtide.adopt(model, optimizer, scheduler)
for epoch in job.epochs(30):
    for inputs, targets in job.batches(loader):
        time.sleep(0.05)
        job.step(torch.nn.functional.mse_loss(model(inputs), targets))
    scheduler.step()
    if job.is_leader:
        print(f"epoch {epoch} rate {scheduler.get_last_lr()[0]:.9f} workers {job.num_workers}", flush=True)
if job.is_leader:
    torch.save(model.module.state_dict(), os.path.join(os.environ["SPRINGTIDE_OUT"], "own.pt"))
dist.destroy_process_group()
"""
NUM_STEPS = 300


def submit(platform: LivePlatform, **options: Any) -> str:
    source = {"filename": "train.py", "text": PROGRAM, "kind": "script", "library": "springtide"}
    options = {"max_restarts": 3, "min_workers": 1, "max_workers": 2, "global_batch_size": 64, **options}
    return str(platform.request("POST", "/v1/jobs", {"name": "ddp", "source": source, "options": options})["job_id"])


def scale(platform: LivePlatform, job_id: str, workers: int) -> None:
    platform.request("POST", f"/v1/workloads/{job_id}/scale", {"minimum": workers, "maximum": workers})
    wait_for(lambda: platform.job(job_id)["num_workers"] == workers, 60.0, f"{workers} workers")
    step = platform.job(job_id)["step"]
    wait_for(lambda: platform.job(job_id)["step"] > step + 5, 60.0, f"steps on {workers} workers")


def assert_whole(platform: LivePlatform, job_id: str) -> None:
    """The job has made each of its steps, and the rate of each epoch is that of one undisturbed worker."""
    assert platform.wait_job(job_id, 180.0)["state"] == "SUCCEEDED"
    status = platform.job(job_id)
    assert (status["step"], status["total_steps"], status["library"]) == (NUM_STEPS, NUM_STEPS, "springtide")
    folder = platform.workload(job_id)
    logs = "".join(path.read_text() for path in (folder / "logs").iterdir())
    rates = {int(epoch): float(rate) for epoch, rate in re.findall(r"epoch (\d+) rate ([\d.]+)", logs)}
    assert rates == {epoch: pytest.approx(0.01 * 0.9 ** (epoch + 1), abs=1e-9) for epoch in range(30)}
    assert (folder / "artifacts" / "own.pt").is_file()
    assert (folder / "artifacts" / "model.safetensors").is_file()


def test_it_is_resized_in_place_and_promised_from_its_second_run_on(platform: LivePlatform) -> None:
    platform.start(policy="springtide")
    job_id = submit(platform, max_workers=1)
    wait_for(lambda: platform.job(job_id)["step"] > 5, 120.0, "steps on one worker")
    scale(platform, job_id, 2)
    scale(platform, job_id, 1)
    assert_whole(platform, job_id)
    status = platform.job(job_id)
    assert (status["num_resizes"], status["num_restarts"]) == (2, 0)
    again = submit(platform, deadline_s=600.0)
    assert platform.job(again)["is_promised"]
    platform.request("POST", f"/v1/jobs/{again}/cancel")


def test_the_others_go_on_when_a_worker_is_killed_and_a_checkpoint_when_all_are(platform: LivePlatform) -> None:
    platform.start(policy="springtide")
    job_id = submit(platform, min_workers=2, checkpoint_interval_s=1.0)
    wait_for(lambda: platform.job(job_id)["step"] > 20, 120.0, "steps on two workers")
    first = platform.worker_pids()
    for replica_id, pid in first.items():
        assert Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0") == f"springtide worker {replica_id}"
    os.kill(next(iter(first.values())), signal.SIGKILL)
    wait_for(lambda: len(platform.worker_pids().keys() - first.keys()) == 1, 60.0, "a worker in its place")
    step = platform.job(job_id)["step"]
    wait_for(lambda: platform.job(job_id)["step"] > step + 20, 60.0, "further steps")
    assert platform.job(job_id)["num_restarts"] == 0
    for pid in platform.worker_pids().values():
        os.kill(pid, signal.SIGKILL)
    assert_whole(platform, job_id)
    assert platform.job(job_id)["num_restarts"] == 1
