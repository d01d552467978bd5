"""Unchanged Lightning programs in real workers: as the undisturbed run, whatever happens to the group."""

from __future__ import annotations

import csv
import importlib.util
import json

import pytest

from kits.runtime.library_plane import (
    FAILS_AFTER_THE_EXCHANGE,
    UndisturbedRuns,
    assert_as,
    churn,
    go_on,
    join,
    of_library,
)
from kits.simulation.sweeps import only_in_full
from springtide.core.wire.workers import CheckpointWritten, Failed, GroupBrokenReport, Preempt, Ready

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed"),
]

PROGRAM = """
import json, os, sys, time
import torch
import lightning as L
from torch.utils.data import DataLoader, TensorDataset

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        num_steps = self.trainer.estimated_stepping_batches
        if os.environ.get("SCHEDULE") == "cosine":
            # Computes each rate from the one before.
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
        else:
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

class Look(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        while os.path.exists(os.path.join(folder, "hold")):
            time.sleep(0.01)
        #place
        time.sleep(float(os.environ["STEP_S"]))

    def on_before_backward(self, trainer, module, loss):
        path = os.path.join(folder, "kill-leader" if trainer.is_global_zero else "kill-follower")
        if os.path.exists(path):
            os.unlink(path)
            module.net[0].weight.register_hook(lambda gradient: os.kill(os.getpid(), 9))

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        line = {"step": trainer.global_step, "rate": rate, "leads": trainer.is_global_zero, "pid": os.getpid()}
        lines.write(json.dumps(line) + "\\n")

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            line = {"after": trainer.global_step, "val": float(trainer.callback_metrics["val_loss"])}
            lines.write(json.dumps(line) + "\\n")

folder = os.path.dirname(os.path.abspath(__file__))
lines = open(os.path.join(folder, f"lines-{os.getpid()}"), "a", buffering=1)
L.seed_everything(0)
x = torch.randn(212, 16)
y = x.sum(1, keepdim=True)
train = DataLoader(TensorDataset(x, y), 16, shuffle=True, num_workers=int(os.environ.get("LOADERS", "0")))
trainer = L.Trainer(
    max_epochs=4, accelerator="cpu", devices=1, default_root_dir=folder, enable_progress_bar=False,
    gradient_clip_val=0.5, callbacks=[Look()], **json.loads(os.environ.get("OPTIONS", "{}")),
)
trainer.fit(Module(), train, DataLoader(TensorDataset(x, y), 32))
print("done", trainer.global_step, flush=True)
"""


@pytest.fixture
def make_program(make_plane):
    def make(source=PROGRAM, **options):
        return of_library(make_plane(source, **options), "lightning")

    return make


OPTIONS = {
    "plain": {},
    "accumulating, with processes that load": {
        "LOADERS": "2",
        "SCHEDULE": "cosine",
        "OPTIONS": json.dumps({"accumulate_grad_batches": 2, "val_check_interval": 0.5}),
    },
}


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory):
    return UndisturbedRuns(zygote, lambda: tmp_path_factory.mktemp("undisturbed"), "lightning")


@pytest.mark.parametrize("options", [pytest.param("plain", marks=only_in_full), *list(OPTIONS)[1:]])
def test_no_rate_loss_or_sample_changes_whatever_happens_to_the_group(make_program, undisturbed, options):
    environment = OPTIONS[options]
    expected = undisturbed.of(PROGRAM, environment)
    plane = make_program(step_s=0.03, environment=environment)
    churn(plane)
    assert_as(plane, expected)


# What is kept beside weights, optimizer and schedulers, and what is done where an epoch begins and ends.
BESIDE = """
class Average(L.Callback):
    average, num_seen = None, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.num_seen += 1
        weights = {name: one.detach().clone() for name, one in module.named_parameters()}
        if self.average is None:
            self.average = weights
        for name, one in weights.items():
            self.average[name].lerp_(one, 0.1)

    def value(self):
        return self.num_seen + float(sum(one.abs().sum() for one in self.average.values()))

class Look(L.Callback):"""
AVERAGING = PROGRAM
for old, new in (
    ("class Look(L.Callback):", BESIDE.strip()),
    (
        "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=num_steps)",
        "schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)",
    ),
    ('"interval": "step"', '"interval": "epoch", "monitor": "val_loss"'),
    (
        "torch.optim.AdamW(self.parameters(), 1e-2)",
        """torch.optim.AdamW(
            [{"params": self.net[0].parameters()}, {"params": self.net[2].parameters(), "lr": 2e-2}], 1e-2
        )""",
    ),
    ('float(trainer.callback_metrics["val_loss"])', 'float(trainer.callback_metrics["val_loss"]) + average.value()'),
    ("callbacks=[Look()]", "callbacks=[Look(), average, EMAWeightAveraging(decay=0.9), by_epochs]"),
    ("folder = os.path", "average, by_epochs = Average(), GradientAccumulationScheduler({1: 2})\nfolder = os.path"),
    (
        "import lightning as L",
        "import lightning as L\nfrom lightning.pytorch.callbacks import EMAWeightAveraging, "
        "GradientAccumulationScheduler",
    ),
    ("16, shuffle=True", "16, sampler=torch.utils.data.WeightedRandomSampler(x[:, 0].abs(), 212)"),
):
    assert AVERAGING.count(old) == 1, old
    AVERAGING = AVERAGING.replace(old, new)


def test_averages_attributes_and_what_belongs_to_epochs_move_to_workers_that_join(make_program, undisturbed):
    expected = undisturbed.of(AVERAGING, {})
    plane = make_program(AVERAGING, step_s=0.03)
    churn(plane)
    assert_as(plane, expected)
    assert plane.steps()[-1]["step"] == expected.steps()[-1]["step"] == 14 + 3 * 7


# The second member fails once the others have the step: it is one step behind them, and takes their state.
BEHIND = PROGRAM.replace("        #place", FAILS_AFTER_THE_EXCHANGE.replace("STEP", "20"))
assert BEHIND != PROGRAM


def test_a_member_that_missed_a_step_steps_nothing_twice(make_program, undisturbed):
    environment = {"SCHEDULE": "cosine"}
    expected = undisturbed.of(PROGRAM, environment)
    plane = make_program(BEHIND, step_s=0.02, environment=environment)
    plane.start_group("a", "b")
    plane.wait(lambda: plane.of(GroupBrokenReport), "GroupBroken")
    plane.form("a", "b", forced=True)
    plane.wait_finished()
    assert_as(plane, expected)


def test_a_restart_goes_on_from_the_checkpoint(make_program, undisturbed):
    expected = undisturbed.of(PROGRAM, {})
    plane = make_program(step_s=0.03, checkpoint_interval_s=0.3)
    plane.start_group("a", "b")
    plane.wait(lambda: len(plane.of(CheckpointWritten)) >= 2, "two checkpoints")
    plane.kill("a", "b")
    second = make_program(step_s=0.03, work_dir=plane.work_dir)
    second.start_group("c")
    go_on(second, 3)
    second.generation += 1
    second.order(Preempt(generation=second.generation), "c")
    second.wait_exit("c")
    assert second.of(CheckpointWritten)
    third = make_program(work_dir=plane.work_dir)
    third.start_group("d", "e")
    third.wait_finished()
    assert_as(third, expected)


SAVES = """
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

class Files(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        dying = os.path.join(folder, "dying")
        if checkpoint["epoch"] == 1 and not os.path.exists(dying):
            open(dying, "w").close()
            os.kill(os.getpid(), 9)
        super().save_checkpoint(checkpoint, path, storage_options)

best = ModelCheckpoint(os.path.join(folder, "saved"), "{epoch}", monitor="val_loss", save_top_k=-1)
"""
# Its first leader dies as it begins to save what the second epoch has learned.
SAVING = PROGRAM.replace("callbacks=[Look()]", "callbacks=[Look(), best], plugins=[Files()]").replace(
    "trainer = L.Trainer(", SAVES + "trainer = L.Trainer("
)


def test_what_a_leader_was_lost_in_saving_is_saved(make_program):
    plane = make_program(SAVING, step_s=0.02)
    plane.start_group("a", "b")
    plane.wait(lambda: "a" in plane.exits, "the end of the leader")
    plane.form("b", forced=True)
    plane.wait_finished()
    assert (plane.work_dir / "dying").exists()
    saved = sorted(path.name for path in (plane.work_dir / "saved").iterdir())
    assert saved == [f"epoch={number}.ckpt" for number in range(4)]


def test_loggers_of_the_program_note_each_resize(make_program):
    plane = make_program(
        PROGRAM.replace("enable_progress", "logger=CSVLogger(folder), enable_progress").replace(
            "import lightning as L", "import lightning as L\nfrom lightning.pytorch.loggers import CSVLogger"
        ),
        step_s=0.03,
    )
    plane.start_group("a")
    plane.wait_step(2)
    join(plane, "b")
    go_on(plane)
    plane.form("a")
    plane.wait_exit("b")
    plane.wait_finished()
    [table] = plane.work_dir.glob("lightning_logs/*/metrics.csv")
    with table.open(newline="") as file:
        rows = [
            (int(row["step"]), float(row["springtide_workers"]))
            for row in csv.DictReader(file)
            if row["springtide_workers"]
        ]
    assert [workers for _, workers in rows] == [1.0, 2.0, 1.0]
    assert [step for step, _ in rows] == sorted({step for step, _ in rows})


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            "devices=1,",
            'devices=2, strategy="ddp",',
            "the Trainer uses DDPStrategy, and the platform divides the work itself; leave out strategy and devices",
        ),
        (
            "max_epochs=4,",
            'max_epochs=4, max_time="00:00:01:00",',
            "max_time and Timer end each worker at another step; use max_steps or max_epochs",
        ),
        (
            "callbacks=[Look()]",
            "callbacks=[Look(), L.pytorch.callbacks.LearningRateFinder()]",
            "LearningRateFinder trains by itself before the training; find the value in a run of its own, and write it "
            "into the program",
        ),
        (
            "callbacks=[Look()]",
            'callbacks=[type("Mine", (L.pytorch.callbacks.BaseFinetuning,), {"freeze_before_training": print})()]',
            "BackboneFinetuning and other kinds of BaseFinetuning give the optimizer parameters as it trains; give it "
            "all at the beginning, in a group whose rate is 0 until then",
        ),
        (
            "def configure_optimizers(self):",
            "def configure_optimizers(self):\n        return None",
            "configure_optimizers() has returned no optimizer",
        ),
    ],
)
def test_what_cannot_be_resized_asks_for_one_worker_with_the_reason(make_program, before, after, told):
    assert PROGRAM.count(before) == 1
    plane = make_program(PROGRAM.replace(before, after))
    plane.start("a")
    plane.wait(lambda: plane.of(Failed, "a"), "Failed")
    [failed] = plane.of(Failed, "a")
    assert failed.is_fixed_size
    assert failed.error == told
    assert f"springtide: {told}; it runs as a plain script with one worker" in plane.logs()


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("trainer.fit(Module()", "trainer.fit(Module(), train); trainer.fit(Module()", "trains several times"),
        ("optimizer = torch.optim.AdamW(self", "return torch.optim.LBFGS(self", "computed several times in a step"),
        ("loss = torch", "next(iter(train))\n        loss = torch", "batches of several DataLoaders at once"),
    ],
)
def test_what_shows_only_in_training_asks_for_one_worker_too(make_program, before, after, told):
    assert PROGRAM.count(before) == 1
    plane = make_program(PROGRAM.replace(before, after))
    plane.start("a")
    plane.wait(lambda: plane.of(Ready), "Ready")
    plane.form("a", wait=False)
    plane.wait(lambda: plane.of(Failed, "a"), "Failed")
    [failed] = plane.of(Failed, "a")
    assert told in failed.error
    assert failed.is_fixed_size
