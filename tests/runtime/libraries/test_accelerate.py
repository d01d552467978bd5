"""Unchanged programs with a loop over what Accelerate has prepared: as the undisturbed run, whatever happens to the group."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kits.runtime.library_plane import (
    FAILS_AFTER_THE_EXCHANGE,
    UndisturbedRuns,
    assert_as,
    churn,
    of_library,
    seen_in,
)
from springtide.core.wire.workers import CheckpointWritten, Failed, GroupBrokenReport

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"),
]

PROGRAM = """
import json, os, time
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

def look(step, model, accelerator):
    while os.path.exists(os.path.join(folder, "hold")):
        time.sleep(0.01)
    if step:
        #place
        pass
    time.sleep(float(os.environ["STEP_S"]))
    path = os.path.join(folder, "kill-leader" if accelerator.is_main_process else "kill-follower")
    if os.path.exists(path):
        os.unlink(path)
        model[0].weight.register_hook(lambda gradient: os.kill(os.getpid(), 9))

def evaluate(model, loader, accelerator):
    model.eval()
    losses = []
    for x, y in loader:
        with torch.no_grad():
            found, wanted = accelerator.gather_for_metrics((model(x), y))
        losses.append(torch.nn.functional.mse_loss(found, wanted).item())
    return sum(losses) / len(losses)

folder = os.path.dirname(os.path.abspath(__file__))
lines = open(os.path.join(folder, f"lines-{os.getpid()}"), "a", buffering=1)

def main(num_epochs=3):
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(0)
    x = torch.randn(126, 16)
    y = x.sum(1, keepdim=True) + torch.randn(126, 1)
    rows, held_back = TensorDataset(x, y), TensorDataset(x[:30], y[:30])
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train, held_back = DataLoader(rows, 4, shuffle=True), DataLoader(held_back, 8)
    num_steps = num_epochs * 16
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=num_steps + 1)
    model, optimizer, train, held_back, schedule = accelerator.prepare(model, optimizer, train, held_back, schedule)
    num_done, best, waited, seen = 0, 1e9, 0, []
    for epoch in range(num_epochs):
        model.train()
        total = 0.0
        for number, batch in enumerate(train):
            look(number % 2 == 0, model, accelerator)
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
                total += loss.item()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                num_done += 1
                seen.append((epoch, number))
                if num_done == num_steps + int(os.environ.get("MORE", "0")):
                    break
                lines.write(json.dumps({"step": num_done, "rate": schedule.get_last_lr()[0], "place": number}) + "\\n")
        found = evaluate(model, held_back, accelerator)
        best, waited = (found, 0) if found < best else (best, waited + 1)
        accelerator.log({"held_back": found})
        accelerator.print(f"epoch {epoch} held back {found:.6f} best {best:.6f} waited {waited} last {loss.item():.1f}")
        if accelerator.is_main_process:
            lines.write(json.dumps({"after": num_done, "val": found}) + "\\n")
    accelerator.wait_for_everyone()
    accelerator.save_state(os.path.join(folder, "out"))
    accelerator.print("done", num_done, len(seen), flush=True)

main()
"""


@pytest.fixture
def make_program(make_plane):
    def make(source=PROGRAM, **options):
        return of_library(make_plane(source, **options), "accelerate")

    return make


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory):
    return UndisturbedRuns(zygote, lambda: tmp_path_factory.mktemp("undisturbed"), "accelerate")


def test_no_rate_loss_or_sample_changes_whatever_happens_to_the_group(make_program, undisturbed):
    expected = undisturbed.of(PROGRAM, {})
    plane = make_program(step_s=0.02)
    churn(plane)
    assert_as(plane, expected)
