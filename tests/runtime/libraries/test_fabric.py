"""Unchanged programs with a loop by Lightning Fabric: as the undisturbed run, whatever happens to the group."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kits.runtime.library_plane import UndisturbedRuns, assert_as, churn, go_on, join, lose, of_library, seen_in
from kits.simulation.sweeps import only_in_full
from springtide.core.wire.workers import CheckpointWritten, Failed, Progress, Ready

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed"),
]

PROGRAM = """
import json, os, time
import torch
import lightning as L
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

class Meter:
    def __init__(self):
        self.num_updates = 0

def look(step, model, fabric):
    while os.path.exists(os.path.join(folder, "hold")):
        time.sleep(0.01)
    time.sleep(float(os.environ["STEP_S"]))
    path = os.path.join(folder, "kill-leader" if fabric.is_global_zero else "kill-follower")
    if os.path.exists(path):
        os.unlink(path)
        model[0].weight.register_hook(lambda gradient: os.kill(os.getpid(), 9))

def evaluate(model, loader):
    model.eval()
    losses = []
    for x, y in loader:
        with torch.no_grad():
            losses.append(torch.nn.functional.mse_loss(model(x), y).item())
    return sum(losses) / len(losses)

folder = os.path.dirname(os.path.abspath(__file__))
lines = open(os.path.join(folder, f"lines-{os.getpid()}"), "a", buffering=1)

def main(num_epochs=3):
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(0)
    x = torch.randn(126, 16)
    y = x.sum(1, keepdim=True) + torch.randn(126, 1)
    rows, held_back = TensorDataset(x, y), TensorDataset(x[:30], y[:30])
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=num_epochs * 16 + 1)
    model, optimizer = fabric.setup(model, optimizer)
    train, held_back = fabric.setup_dataloaders(DataLoader(rows, 4, shuffle=True), DataLoader(held_back, 8))
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    num_done, num_batches, best, waited, seen, meter = 0, 0, 1e9, 0, [], Meter()
    for epoch in range(num_epochs):
        model.train()
        for number, (x, y) in enumerate(train):
            look(number % 2 == 0, model, fabric)
            num_batches += 1
            is_accumulating = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = torch.nn.functional.mse_loss(model(x), y)
                fabric.backward(loss / 2)
            if not is_accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                num_done += 1
                seen.append((epoch, number))
                average.update_parameters(model.module)
                meter.num_updates += 1
                rate = f"{schedule.get_last_lr()[0]!r} at batch {number}"
                lines.write(json.dumps({"step": num_done, "rate": rate}) + "\\n")
                fabric.log("train_loss", loss)
        found = evaluate(average, held_back)
        best, waited = (found, 0) if found < best else (best, waited + 1)
        fabric.print(f"epoch {epoch} held back {found:.3f} best {best:.3f} waited {waited}", flush=True)
        if fabric.is_global_zero:
            lines.write(json.dumps({"after": num_done, "val": found}) + "\\n")
    fabric.save(os.path.join(folder, "last.ckpt"), {"model": model, "optimizer": optimizer, "step": num_done})
    fabric.print("done", num_done, num_batches, len(seen), meter.num_updates, flush=True)

main()
"""

# A step for each batch, by a closure, within a function that Fabric calls.
BY_CLOSURE = (
    PROGRAM.replace("is_accumulating = number % 2 == 0", "is_accumulating = False")
    .replace("                fabric.backward(loss / 2)\n", "")
    .replace(
        "fabric.clip_gradients(model, optimizer, max_norm=1.0)",
        "def closure():\n                    fabric.backward(loss)",
    )
    .replace(
        "optimizer.step()\n                optimizer.zero_grad()",
        "optimizer.zero_grad()\n                optimizer.step(closure)",
    )
    .replace("num_epochs * 16", "num_epochs * 32")
    .replace("def main(num_epochs=3):", "def main(fabric, num_epochs=3):")
    .replace('    fabric = L.Fabric(accelerator="cpu", devices=1)\n    fabric.launch()\n', "")
    .replace("\nmain()\n", '\nL.Fabric(accelerator="cpu", devices=1).launch(main)\n')
)


@pytest.fixture
def make_program(make_plane):
    def make(source=PROGRAM, **options):
        return of_library(make_plane(source, **options), "lightning")

    return make


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory):
    return UndisturbedRuns(zygote, lambda: tmp_path_factory.mktemp("undisturbed"), "lightning")


def printed(plane):
    """What the leaders have printed after each epoch."""
    return sorted(line for line in plane.logs().splitlines() if line.startswith(("epoch", "done")))


@pytest.mark.parametrize("source", [pytest.param(PROGRAM, marks=only_in_full), BY_CLOSURE])
def test_no_rate_loss_or_sample_changes_whatever_happens_to_the_group(make_program, undisturbed, source):
    expected = undisturbed.of(source, {})
    plane = make_program(source, step_s=0.02)
    churn(plane)
    assert_as(plane, expected)
    assert printed(plane) == printed(expected)
    assert (plane.work_dir / "last.ckpt").exists()
    last, num_steps = plane.of(Progress)[-1], len(expected.steps())
    assert (last.step, last.total_steps) == (num_steps, num_steps)
    assert "train_loss" in last.metrics


def test_a_late_joiner_has_the_counters_of_the_others(make_program, undisturbed):
    expected = undisturbed.of(PROGRAM, {})
    plane = make_program(step_s=0.02)
    plane.start_group("a")
    plane.wait_step(35)
    join(plane, "b")
    go_on(plane)
    lose(plane, "leader", "a", "b")
    plane.wait_finished()
    assert_as(plane, expected)
    # What it had been through was printed by the leader before it, once.
    assert printed(plane) == printed(expected)
    assert "done 48 96 48" in plane.logs()


@only_in_full
def test_a_restart_goes_on_from_the_checkpoint(make_program, undisturbed):
    expected = undisturbed.of(PROGRAM, {})
    plane = make_program(step_s=0.03, checkpoint_interval_s=0.3)
    plane.start_group("a", "b")
    plane.wait(lambda: len(plane.of(CheckpointWritten)) >= 3, "three checkpoints")
    plane.kill("a", "b")
    second = make_program(work_dir=plane.work_dir)
    second.start_group("c", "d")
    second.wait_finished()
    assert_as(second, expected)


def test_one_worker_trains_as_without_the_platform(undisturbed, tmp_path):
    # The order of samples is the sampler's own.
    source = PROGRAM.replace("shuffle=True", "sampler=[(5 * index) % 126 for index in range(126)]")
    path = tmp_path / "program.py"
    path.write_text(source)
    subprocess.run([sys.executable, path], env={**os.environ, "STEP_S": "0"}, check=True, capture_output=True)
    rates, losses = seen_in(SimpleNamespace(work_dir=tmp_path))
    ours, our_losses = seen_in(undisturbed.of(source, {}))
    assert ours == rates
    assert our_losses == {step: pytest.approx(values, rel=1e-5) for step, values in losses.items()}


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("fabric.backward(loss / 2)", "(loss / 2).backward()", "not of this batch"),
        ("        found = evaluate", "        optimizer.step()\n        found = evaluate", "outside of the loop"),
        ("model.train()", "model.eval()", "not of a batch of the training loader"),
    ],
)
def test_a_loop_that_cannot_be_divided_is_told(make_program, before, after, told):
    assert PROGRAM.count(before) == 1
    plane = make_program(PROGRAM.replace(before, after))
    plane.start("a")
    plane.wait(lambda: plane.of(Ready) or plane.of(Failed), "Ready or Failed")
    if plane.of(Ready):
        plane.form("a", wait=False)
    plane.wait(lambda: plane.of(Failed), "Failed")
    assert told in plane.of(Failed)[0].error
