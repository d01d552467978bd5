"""Lightning programs that update by themselves, with several optimizers: as the undisturbed run, whatever happens."""

from __future__ import annotations

import importlib.util

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
from springtide.core.wire.workers import CheckpointWritten, Failed, GroupBrokenReport, Progress

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed"),
]

# The noise is a part of the data, so that a sample has the same one on every worker.
PROGRAM = """
import json, os, time
import torch
import lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def log_loss(logits, is_real):
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

class Gan(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
        if not os.environ.get("NORM"):
            self.generator[1] = nn.Identity()

    def training_step(self, batch, index):
        points, noise = batch
        of_generator, of_critic = self.optimizers()
        schedules = self.lr_schedulers()

        self.toggle_optimizer(of_critic)
        loss = log_loss(self.critic(points), True) + log_loss(self.critic(self.generator(noise).detach()), False)
        of_critic.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_critic, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        of_critic.step()
        schedules[1].step()
        self.untoggle_optimizer(of_critic)
        self.log("critic_loss", loss)

        look(index)
        #place
        if index % 3 != 2:
            self.toggle_optimizer(of_generator)
            of_generator.zero_grad()
            self.manual_backward(log_loss(self.critic(self.generator(noise)), True))
            torch.nn.utils.clip_grad_norm_(self.generator.parameters(), 1.0)
            of_generator.step()
            self.untoggle_optimizer(of_generator)
            schedules[0].step()

    def validation_step(self, batch, index):
        self.log("val_loss", self.critic(self.generator(batch[1])).square().mean())

    def configure_optimizers(self):
        of_generator = torch.optim.Adam(self.generator.parameters(), 1e-2)
        of_critic = torch.optim.SGD(self.critic.parameters(), 5e-2, momentum=0.9)
        num_steps = self.trainer.estimated_stepping_batches
        return [of_generator, of_critic], [
            torch.optim.lr_scheduler.CosineAnnealingLR(of_generator, num_steps),
            torch.optim.lr_scheduler.OneCycleLR(of_critic, 5e-2, total_steps=num_steps),
        ]

def look(index):
    while os.path.exists(os.path.join(folder, "hold")):
        time.sleep(0.01)
    time.sleep(float(os.environ["STEP_S"]))
    path = os.path.join(folder, "kill-leader" if trainer.is_global_zero else "kill-follower")
    if os.path.exists(path) and index % 3 != 2:
        os.unlink(path)
        # In the second turn of the step: the first one has updated.
        module.generator[0].weight.register_hook(lambda gradient: os.kill(os.getpid(), 9))

class Look(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
        count = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        lines.write(json.dumps({"step": count, "rate": repr((rates, trainer.global_step))}) + "\\n")

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            line = {"after": trainer.global_step, "val": float(trainer.callback_metrics["val_loss"])}
            lines.write(json.dumps(line) + "\\n")

folder = os.path.dirname(os.path.abspath(__file__))
lines = open(os.path.join(folder, f"lines-{os.getpid()}"), "a", buffering=1)
L.seed_everything(0)
angle = torch.rand(212) * 6.283
data = TensorDataset(torch.stack([angle.cos(), angle.sin()], 1), torch.randn(212, 4))
trainer = L.Trainer(
    max_epochs=4, accelerator="cpu", devices=1, default_root_dir=folder, enable_progress_bar=False,
    callbacks=[Look()], **json.loads(os.environ.get("OPTIONS", "{}")),
)
module = Gan()
trainer.fit(module, DataLoader(data, 16, shuffle=True), DataLoader(data, 32))
print("done", trainer.global_step, flush=True)
"""


@pytest.fixture
def make_program(make_plane):
    def make(source=PROGRAM, **options):
        return of_library(make_plane(source, **options), "lightning")

    return make


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory):
    return UndisturbedRuns(zygote, lambda: tmp_path_factory.mktemp("undisturbed"), "lightning")


def test_no_rate_loss_or_sample_changes_whatever_happens_to_the_group(make_program, undisturbed):
    expected = undisturbed.of(PROGRAM, {})
    plane = make_program(step_s=0.03)
    churn(plane)
    assert_as(plane, expected)
    last = plane.of(Progress)[-1]
    assert (last.step, last.total_steps) == (56, 56)
    assert "critic_loss" in last.metrics


# One optimizer for both, which updates after every second batch; the fourth of an epoch of 14 is left over.
ACCUMULATING = (
    PROGRAM.replace("of_generator, of_critic = self.optimizers()", "both = self.optimizers()")
    .replace("schedules = self.lr_schedulers()", "schedule = self.lr_schedulers()")
    .replace(
        "return [of_generator, of_critic], [",
        "both = torch.optim.AdamW(self.parameters(), 1e-2)\n        return [both], [",
    )
    .replace("            torch.optim.lr_scheduler.OneCycleLR(of_critic, 5e-2, total_steps=num_steps),\n", "")
    .replace("CosineAnnealingLR(of_generator", "CosineAnnealingLR(both")
)
ACCUMULATING = (
    ACCUMULATING[: ACCUMULATING.index("        self.toggle_optimizer")]
    + """
        loss = log_loss(self.critic(points), True) - 0.1 * self.critic(self.generator(noise)).mean()
        self.log("critic_loss", loss)
        look(index)
        self.manual_backward(loss / 2)
        if index % 2:
            both.step()
            schedule.step()
            both.zero_grad()
"""
    + ACCUMULATING[ACCUMULATING.index("\n    def validation_step") :]
)


def test_a_step_has_the_batches_up_to_an_update(make_program, undisturbed):
    expected = undisturbed.of(ACCUMULATING, {"NORM": "1"})
    assert len(expected.steps()) == 28
    plane = make_program(ACCUMULATING, step_s=0.02, environment={"NORM": "1"})
    plane.start_group("a")
    plane.wait_step(2)
    join(plane, "b")
    go_on(plane)
    lose(plane, "leader", "a", "b")
    plane.wait_finished()
    # Normalised by the samples of a worker's own part, so that losses are others; rates and samples are not.
    assert seen_in(plane)[0] == seen_in(expected)[0]
    assert [one["ids_digest"] for one in plane.steps()] == [one["ids_digest"] for one in expected.steps()]
    last = plane.of(Progress)[-1]
    assert (last.step, last.total_steps) == (28, 28)


# The second member fails once the others have the step: it is one step behind them, and takes their state.
BEHIND = PROGRAM.replace("        #place", FAILS_AFTER_THE_EXCHANGE.replace("STEP", "21"))
assert BEHIND != PROGRAM


@only_in_full
def test_a_member_that_missed_an_update_steps_nothing_twice(make_program, undisturbed):
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
    plane.wait(lambda: len(plane.of(CheckpointWritten)) >= 2, "two checkpoints")
    plane.kill("a", "b")
    second = make_program(work_dir=plane.work_dir)
    second.start_group("c", "d")
    second.wait_finished()
    assert_as(second, expected)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("if index % 3 != 2:", "if index % 3 != 2 + self.global_rank + trainer.is_global_zero:", "at other updates"),
        (
            "            of_generator.zero_grad()\n",
            "            if index % 3 == 0: of_generator.zero_grad()\n",
            "earlier batch",
        ),
    ],
)
def test_updates_that_cannot_be_divided_are_told(make_program, before, after, told):
    assert PROGRAM.count(before) == 1
    plane = make_program(PROGRAM.replace(before, after))
    plane.start("a", "b")
    plane.wait_ready("a", "b")
    plane.form("a", "b", wait=False)
    plane.wait(lambda: plane.of(Failed), "Failed")
    failed = plane.of(Failed)[0]
    assert told in failed.error
    # What shows in the first steps has the job begin anew with one worker.
    assert failed.is_fixed_size or "--workers 1" in failed.error
