"""Loops by Accelerate in which several optimizers take turns: as the undisturbed run, whatever happens to the group."""

from __future__ import annotations

import importlib.util

import pytest

from kits.runtime.library_plane import UndisturbedRuns, assert_as, churn, of_library
from kits.simulation.sweeps import only_in_full
from springtide.core.wire.workers import CheckpointWritten, Failed, Progress

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"),
]

# The noise is a part of the data, so that a sample has the same one on every worker.
PROGRAM = """
import json, os, time
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def log_loss(logits, is_real):
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

def look(generator, accelerator):
    while os.path.exists(os.path.join(folder, "hold")):
        time.sleep(0.01)
    time.sleep(float(os.environ["STEP_S"]))
    path = os.path.join(folder, "kill-leader" if accelerator.is_main_process else "kill-follower")
    if os.path.exists(path) and accelerator.sync_gradients:
        os.unlink(path)
        # In the second turn of the step: the first one has updated.
        generator[0].weight.register_hook(lambda gradient: os.kill(os.getpid(), 9))

folder = os.path.dirname(os.path.abspath(__file__))
lines = open(os.path.join(folder, f"lines-{os.getpid()}"), "a", buffering=1)

def main(num_epochs=3):
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(0)
    angle = torch.rand(126) * 6.283
    rows = TensorDataset(torch.stack([angle.cos(), angle.sin()], 1), torch.randn(126, 4))
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    of_generator = torch.optim.Adam(generator.parameters(), 1e-2)
    of_critic = torch.optim.SGD(critic.parameters(), 5e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(of_generator, 2e-2, total_steps=num_epochs * 16 + 1)
    decay = torch.optim.lr_scheduler.ExponentialLR(of_critic, 0.5)
    generator, critic, of_generator, of_critic, train, schedule = accelerator.prepare(
        generator, critic, of_generator, of_critic, DataLoader(rows, 4, shuffle=True), schedule
    )
    num_done = 0
    for epoch in range(num_epochs):
        generator.train(), critic.train()
        for points, noise in train:
            with accelerator.accumulate(generator, critic):
                fake = generator(noise)
                loss = log_loss(critic(points), True) + log_loss(critic(fake.detach()), False)
                of_critic.zero_grad()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(critic.parameters(), 0.5)
                of_critic.step()
                look(generator, accelerator)
                of_generator.zero_grad()
                accelerator.backward(log_loss(critic(fake), True))
                of_generator.step()
                schedule.step()
            if accelerator.sync_gradients:
                num_done += 1
                rates = [optimizer.param_groups[0]["lr"] for optimizer in (of_generator, of_critic)]
                lines.write(json.dumps({"step": num_done, "rate": repr(rates)}) + "\\n")
        decay.step()
        with torch.no_grad():
            found = critic(generator(rows.tensors[1])).square().mean().item()
        accelerator.log({"held_back": found})
        if accelerator.is_main_process:
            lines.write(json.dumps({"after": num_done, "val": found}) + "\\n")
    accelerator.print("done", num_done, flush=True)

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
    assert "done 48" in plane.logs()
    last = plane.of(Progress)[-1]
    assert (last.step, last.total_steps) == (48, 48)


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


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("accelerator.backward(log_loss(critic(fake), True))", "log_loss(critic(fake), True).backward()", "changed"),
        ("                of_critic.zero_grad()\n", "", "earlier batch"),
    ],
)
def test_a_loop_that_cannot_be_divided_is_told(make_program, before, after, told):
    assert PROGRAM.count(before) == 1
    plane = make_program(PROGRAM.replace(before, after))
    plane.start("a", "b")
    plane.wait_ready("a", "b")
    plane.form("a", "b", wait=False)
    plane.wait(lambda: plane.of(Failed), "Failed")
    assert told in plane.of(Failed)[0].error
