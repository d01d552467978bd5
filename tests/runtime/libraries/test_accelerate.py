"""Unchanged programs with a loop by Accelerate: as the undisturbed run, whatever happens to the group."""

from __future__ import annotations

import importlib.util
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
    go_on,
    join,
    lose,
    of_library,
    seen_in,
)
from kits.simulation.sweeps import only_in_full
from springtide.core.wire.workers import CheckpointWritten, Failed, GroupBrokenReport, Progress, Ready

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"),
]

PROGRAM = """
import json, os, time
import torch
from accelerate import Accelerator
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

class Meter:
    def __init__(self):
        self.num_updates = 0

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
    # Within the last epoch.
    most_steps = num_steps - 3
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=num_steps + 1)
    model, optimizer, train, held_back, schedule = accelerator.prepare(model, optimizer, train, held_back, schedule)
    average = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.8))
    num_done, num_batches, best, waited, seen, meter = 0, 0, 1e9, 0, [], Meter()
    for epoch in range(num_epochs):
        model.train()
        total = 0.0
        for number, batch in enumerate(train):
            look(number % 2 == 0, model, accelerator)
            num_batches += 1
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
                average.update_parameters(accelerator.unwrap_model(model))
                meter.num_updates += 1
                rate = f"{schedule.get_last_lr()[0]!r} at batch {number}"
                lines.write(json.dumps({"step": num_done, "rate": rate}) + "\\n")
                if num_done == most_steps:
                    break
        found = evaluate(average, held_back, accelerator)
        best, waited = (found, 0) if found < best else (best, waited + 1)
        accelerator.log({"held_back": found})
        accelerator.print(f"epoch {epoch} held back {found:.3f} best {best:.3f} waited {waited} last {loss.item():.1f}")
        if accelerator.is_main_process:
            lines.write(json.dumps({"after": num_done, "val": found}) + "\\n")
    accelerator.wait_for_everyone()
    accelerator.save_state(os.path.join(folder, "out"))
    accelerator.print("done", num_done, num_batches, len(seen), meter.num_updates, flush=True)

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


def printed(plane):
    """What the leaders have printed after each epoch, without the last loss, which is of the leader's part."""
    lines = [line.partition(" last ")[0] for line in plane.logs().splitlines() if line.startswith(("epoch", "done"))]
    return sorted(lines)


# A step for each batch without accumulate(), a schedule that was not prepared and is stepped after each epoch, and a
# model that is also saved where it is best.
BY_EPOCHS = (
    PROGRAM.replace("gradient_accumulation_steps=2, ", "")
    .replace("with accelerator.accumulate(model):", "if True:")
    .replace("look(number % 2 == 0, ", "look(True, ")
    .replace("torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=num_steps + 1)", "None")
    .replace(
        "    num_done, num_batches",
        "    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.5)\n    num_done, num_batches",
    )
    .replace("                schedule.step()\n", "")
    .replace("        found = evaluate", "        schedule.step()\n        found = evaluate")
    .replace("num_epochs * 16", "num_epochs * 32")
)


@pytest.mark.parametrize("source", [PROGRAM, pytest.param(BY_EPOCHS, marks=only_in_full)])
def test_no_rate_loss_or_sample_changes_whatever_happens_to_the_group(make_program, undisturbed, source):
    expected = undisturbed.of(source, {})
    plane = make_program(source, step_s=0.02)
    churn(plane)
    assert_as(plane, expected)
    assert printed(plane) == printed(expected)
    assert (plane.work_dir / "out" / "model.safetensors").exists()


# A mean over weights of classes, one over the targets that are not ignored, and one by weights of samples.
OF_WEIGHTS = PROGRAM.replace(
    "loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])",
    """found, labels = model(batch[0]), (batch[1][:, 0] > 1).long()
                logits, weights = torch.cat([found, -found], 1), 1 + 4 * (batch[1] < 0)
                loss = torch.nn.functional.cross_entropy(logits, labels, weight=torch.tensor([0.2, 3.0]))
                some = torch.cat([labels, labels.where(batch[1][:, 0] < 2, -100)])
                loss = loss + torch.nn.functional.cross_entropy(torch.cat([logits, logits]), some)
                loss = loss + ((found - batch[1]) ** 2 * weights).sum() / weights.sum()""",
)


def test_losses_that_are_no_means_over_samples_are_those_of_one_worker(make_program, undisturbed):
    plane = make_program(OF_WEIGHTS, step_s=0.1)
    plane.start_group("a", "b", "c")
    go_on(plane, 4)
    lose(plane, "leader", "a", "b", "c")
    plane.wait_finished()
    assert_as(plane, undisturbed.of(OF_WEIGHTS, {}))


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
    assert "done 45 90 45" in plane.logs()


# The second member fails once the others have the step: it is one step behind them, and takes their state.
BEHIND = PROGRAM.replace("        #place", FAILS_AFTER_THE_EXCHANGE.replace("STEP", "16"))
assert BEHIND != PROGRAM


def test_a_member_that_missed_a_step_steps_nothing_twice(make_program, undisturbed):
    expected = undisturbed.of(PROGRAM, {})
    plane = make_program(BEHIND, step_s=0.02)
    plane.start_group("a", "b")
    plane.wait(lambda: plane.of(GroupBrokenReport), "GroupBroken")
    plane.form("a", "b", forced=True)
    plane.wait_finished()
    assert_as(plane, expected)


@only_in_full
def test_a_restart_goes_on_from_the_checkpoint(make_program, undisturbed):
    expected = undisturbed.of(PROGRAM, {})
    plane = make_program(step_s=0.03, checkpoint_interval_s=0.3)
    plane.start_group("a", "b")
    plane.wait(lambda: len(plane.of(CheckpointWritten)) >= 3, "three checkpoints")
    plane.wait(lambda: plane.of(CheckpointWritten)[-1].checkpoint.step > 20, "one of the second epoch")
    plane.kill("a", "b")
    second = make_program(work_dir=plane.work_dir)
    second.start_group("c", "d")
    second.wait_finished()
    assert_as(second, expected)
    # Nothing of the first epoch, which was over.
    lines = [line for line in printed(second) if line.startswith("epoch 0")]
    assert len(lines) == 1
    assert set(printed(second)) == set(printed(expected))


def test_one_worker_trains_as_without_the_platform(undisturbed, tmp_path):
    # The order of samples is Accelerate's own.
    source = PROGRAM.replace(
        "Accelerator(", "Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True), "
    ).replace("from torch.utils", "from accelerate.utils import DataLoaderConfiguration\nfrom torch.utils")
    path = tmp_path / "program.py"
    path.write_text(source)
    subprocess.run([sys.executable, path], env={**os.environ, "STEP_S": "0"}, check=True, capture_output=True)
    rates, losses = seen_in(SimpleNamespace(work_dir=tmp_path))
    ours, our_losses = seen_in(undisturbed.of(source, {}))
    assert ours == rates
    assert {step: values[0] for step, values in our_losses.items()} == pytest.approx(
        {step: values[0] for step, values in losses.items()}, rel=1e-5
    )


def test_workers_that_leave_their_loops_at_different_steps_are_told(make_program):
    # What only one worker knows: the others would wait for it.
    plane = make_program(PROGRAM.replace("num_done == most_steps", "num_done == 5 + 3 * accelerator.process_index"))
    plane.start_group("a", "b")
    plane.wait(lambda: plane.of(Failed), "Failed")
    assert "left its loop by something that only it knows" in plane.of(Failed)[0].error


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("accelerator.backward(loss)", "loss.backward()", "without accelerator.backward(loss)"),
        ("with accelerator.accumulate(model):", "if True:", "accumulates gradients in its own way"),
        ("                optimizer.step()\n", "", "step() was not called"),
        ("total += loss.item()", "accelerator.backward(loss * 0)", "two backward passes"),
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


def test_reports_say_length_loss_and_what_is_logged(make_program):
    plane = make_program()
    plane.start_group("a")
    plane.wait_finished()
    last = plane.of(Progress)[-1]
    assert (last.step, last.total_steps) == (45, 48)
    assert last.metrics.keys() >= {"held_back"}
    assert last.loss is not None
