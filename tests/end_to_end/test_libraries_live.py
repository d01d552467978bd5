"""A Lightning program on a real platform: resized in place, restarted, and promised from its second run on."""

from __future__ import annotations

import importlib.util
import os
import signal
from typing import Any

import pytest

from kits.end_to_end.live_platform import LivePlatform, wait_for

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
