"""A Lightning program on a real platform: resized in place, restarted, and promised from its second run on."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kits.end_to_end.live_platform import LivePlatform, wait_for
from kits.simulation.sweeps import only_in_full

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed"),
]
PROGRAM = """
import os, time
import torch
import lightning as L
from torch.utils.data import DataLoader, TensorDataset

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 1)

    def training_step(self, batch, index):
        time.sleep(0.05)
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("squares", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

x = torch.randn(160, 16)
trainer = L.Trainer(
    max_epochs=30, accelerator="cpu", default_root_dir=os.environ["SPRINGTIDE_OUT"], logger=False,
    enable_progress_bar=False,
)
trainer.fit(Module(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 16, shuffle=True))
"""
NUM_STEPS = 300


def submit(platform: LivePlatform, **options: Any) -> str:
    source = {"filename": "train.py", "text": PROGRAM, "kind": "script", "library": "lightning"}
    body = {"name": "program", "source": source, "options": {"max_restarts": 3, "max_workers": 2, **options}}
    return str(platform.request("POST", "/v1/jobs", body)["job_id"])


@only_in_full
def test_a_release_that_is_not_tested_runs_with_one_worker(platform: LivePlatform, tmp_path: Path) -> None:
    # A stand-in for another release: the installed one, under a version that metadata of ours give it.
    about = tmp_path / "stand-in" / "lightning-2.7.0.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: lightning\nVersion: 2.7.0\n", encoding="utf-8")
    platform.start(policy="springtide", env={"PYTHONPATH": str(about.parent.parent)})
    job_id = submit(platform, min_workers=2)
    told = "it runs with one worker: lightning 2.7.0 is not tested for resizing in place; tested: 2.6.*"
    wait_for(lambda: platform.job(job_id)["state"] == "RUNNING", 120.0, "a start with one worker")
    status = platform.job(job_id)
    assert (status["num_workers"], status["max_workers"], status["library"]) == (1, 1, "")
    assert told in status["reason"]
    assert told in platform.request("GET", f"/v1/workloads/{job_id}/why")["reason"]
    with pytest.raises(AssertionError, match=r"has one worker until it ends: lightning 2\.7\.0"):
        platform.request("POST", f"/v1/workloads/{job_id}/scale", {"minimum": 1, "maximum": 2})
    assert platform.wait_job(job_id, 180.0)["state"] == "SUCCEEDED"
    status = platform.job(job_id)
    assert (status["num_restarts"], status["num_resizes"]) == (0, 0)
    logs = "".join(path.read_text() for path in (platform.workload(job_id) / "logs").iterdir())
    assert "lightning 2.7.0 is not tested for resizing in place" in logs
    assert list((platform.workload(job_id) / "artifacts").glob("**/*.ckpt"))


def test_a_program_that_cannot_be_divided_runs_with_one_worker(platform: LivePlatform) -> None:
    text = PROGRAM.replace("max_epochs=30", 'max_epochs=30, max_time="00:01:00:00"')
    assert text != PROGRAM
    platform.start(policy="springtide")
    source = {"filename": "train.py", "text": text, "kind": "script", "library": "lightning"}
    body = {"name": "program", "source": source, "options": {"min_workers": 1, "max_workers": 2}}
    job_id = str(platform.request("POST", "/v1/jobs", body)["job_id"])
    wait_for(lambda: platform.job(job_id)["state"] == "RUNNING", 120.0, "a start with one worker")
    told = "it runs with one worker: max_time and Timer end each worker at another step; use max_steps or max_epochs"
    assert told in platform.job(job_id)["reason"]
    assert told in platform.request("GET", f"/v1/workloads/{job_id}/why")["reason"]
    assert platform.wait_job(job_id, 180.0)["state"] == "SUCCEEDED"


def test_a_library_program_is_a_job_like_a_training_function(platform: LivePlatform) -> None:
    platform.start(policy="springtide")
    job_id = submit(platform, min_workers=2)
    wait_for(lambda: platform.job(job_id)["step"] > 20, 120.0, "steps on two workers")
    status = platform.job(job_id)
    assert (status["kind"], status["library"], status["num_workers"]) == ("script", "lightning", 2)
    assert (status["total_steps"], status["metrics"].keys()) == (NUM_STEPS, {"squares"})
    platform.request("POST", f"/v1/workloads/{job_id}/scale", {"minimum": 1, "maximum": 1})
    wait_for(lambda: len(platform.worker_pids()) == 1, 60.0, "one worker")
    [pid] = platform.worker_pids().values()
    os.kill(pid, signal.SIGKILL)
    assert platform.wait_job(job_id, 180.0)["state"] == "SUCCEEDED"
    status = platform.job(job_id)
    assert (status["step"], status["num_restarts"]) == (NUM_STEPS, 1)
    assert list((platform.workload(job_id) / "artifacts").glob("**/*.ckpt"))
    again = submit(platform, min_workers=1, deadline_s=600.0)
    assert platform.job(again)["is_promised"]
    platform.request("POST", f"/v1/jobs/{again}/cancel")
