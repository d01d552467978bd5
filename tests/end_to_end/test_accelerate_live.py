"""A loop by Accelerate on a real platform: as the undisturbed run, when it is resized and when a worker is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from typing import Any

import pytest

from kits.end_to_end.live_platform import LivePlatform, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"),
]
PROGRAM = """
import os, sys, time
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

def main(num_epochs=20):
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(0)
    x = torch.randn(156, 16)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs * 10)
    model, optimizer, train, held_back, schedule = accelerator.prepare(
        model, optimizer, DataLoader(data, 8, shuffle=True), DataLoader(data, 52), schedule
    )
    num_done, best = 0, 1e9
    for epoch in range(num_epochs):
        model.train()
        for x, y in train:
            time.sleep(STEP_S)
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                num_done += 1
                print(f"rate {num_done} {schedule.get_last_lr()[0]!r}", flush=True)
        model.eval()
        with torch.no_grad():
            found = [torch.stack(accelerator.gather_for_metrics((model(x), y))) for x, y in held_back]
        loss = sum((one[0] - one[1]).square().mean().item() for one in found) / len(found)
        best = min(best, loss)
        accelerator.log({"held_back": loss})
        accelerator.print(f"epoch {epoch} held back {loss:.4f} best {best:.4f}", flush=True)
    accelerator.wait_for_everyone()
    accelerator.save_model(model, os.environ["SPRINGTIDE_OUT"])

main()
"""
NUM_STEPS = 200


def run(platform: LivePlatform, disturb: Any = None, **options: Any) -> dict[str, Any]:
    """What a job has come to: its status, samples and losses by step, rates by step and lines that were printed."""
    text = PROGRAM.replace("STEP_S", "0.02" if disturb else "0")
    source = {"filename": "train.py", "text": text, "kind": "script", "library": "accelerate"}
    body = {"name": "loop", "source": source, "options": {"max_restarts": 3, "min_workers": 1, **options}}
    job_id = str(platform.request("POST", "/v1/jobs", body)["job_id"])
    if disturb:
        disturb(job_id)
    assert platform.wait_job(job_id, 240.0)["state"] == "SUCCEEDED", platform.job(job_id)["reason"]
    folder = platform.workload(job_id)
    logs = "".join(path.read_text() for path in sorted((folder / "logs").iterdir()))
    rates: dict[int, set[str]] = {}
    for step, rate in re.findall(r"(?m)^rate (\d+) (\S+)$", logs):
        rates.setdefault(int(step), set()).add(rate)
    steps = {one["step"]: one for one in map(json.loads, (folder / "steps.jsonl").read_text().splitlines())}
    return {
        "status": platform.job(job_id),
        "rates": rates,
        "ids": [steps[step]["ids_digest"] for step in sorted(steps)],
        "losses": [steps[step]["loss"] for step in sorted(steps)],
        "epochs": sorted(set(re.findall(r"(?m)^epoch .*$", logs))),
        "models": list((folder / "artifacts").glob("**/model.safetensors")),
    }


def assert_as(found: dict[str, Any], expected: dict[str, Any], *, num_unsaid: int = 0) -> None:
    """The run went as the other one did. A worker that is killed may not have printed `num_unsaid` of its lines."""
    assert (found["status"]["step"], found["status"]["total_steps"]) == (NUM_STEPS, NUM_STEPS)
    assert found["status"]["metrics"]["held_back"] == pytest.approx(
        expected["status"]["metrics"]["held_back"], rel=1e-4
    )
    assert found["rates"] == expected["rates"]
    assert found["ids"] == expected["ids"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4, abs=1e-6)
    assert set(found["epochs"]) <= set(expected["epochs"])
    assert len(found["epochs"]) >= len(expected["epochs"]) - num_unsaid
    assert found["models"]


def test_a_resized_loop_and_one_that_loses_a_worker_are_as_the_undisturbed(platform: LivePlatform) -> None:
    platform.start(policy="springtide")

    def workers(job_id: str, number: int) -> None:
        platform.request("POST", f"/v1/workloads/{job_id}/scale", {"minimum": number, "maximum": number})
        wait_for(lambda: platform.job(job_id)["num_workers"] == number, 60.0, f"{number} workers")
        step = platform.job(job_id)["step"]
        wait_for(lambda: platform.job(job_id)["step"] > step + 5, 60.0, f"steps on {number} workers")

    def resize(job_id: str) -> None:
        wait_for(lambda: platform.job(job_id)["step"] > 20, 120.0, "steps on one worker")
        workers(job_id, 2)
        workers(job_id, 1)

    def kill(job_id: str) -> None:
        wait_for(lambda: platform.job(job_id)["step"] > 20, 120.0, "steps on two workers")
        pids = platform.worker_pids()
        os.kill(pids[min(pids)], signal.SIGKILL)

    expected = run(platform, max_workers=1)
    resized = run(platform, resize, max_workers=1)
    assert_as(resized, expected)
    assert (resized["status"]["num_resizes"], resized["status"]["num_restarts"]) == (2, 0)
    assert_as(run(platform, kill, min_workers=2, max_workers=2), expected, num_unsaid=1)
    # All of its workers are lost: it goes on from its checkpoint.
    restarted = run(platform, kill, max_workers=1, checkpoint_interval_s=0.2)
    assert_as(restarted, expected, num_unsaid=1)
    assert restarted["status"]["num_restarts"] == 1
