"""Unchanged programs with a Trainer of transformers: as the undisturbed run, whatever happens to the group."""

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
    of_library,
    seen_in,
)
from kits.simulation.sweeps import only_in_full
from springtide.core.wire.workers import CheckpointWritten, GroupBrokenReport

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")),
        reason="transformers or accelerate is not installed",
    ),
]

PROGRAM = """
import json, os, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        ids = torch.tensor(self.rows[index])
        labels = ids.clone()
        # Another number of tokens counts in each row.
        labels[: 1 + index % 9] = -100
        return {"input_ids": ids, "labels": labels}

class Look(TrainerCallback):
    def on_step_begin(self, args, state, control, **more):
        while os.path.exists(os.path.join(folder, "hold")):
            time.sleep(0.01)
        #place
        time.sleep(float(os.environ["STEP_S"]))

    def on_substep_end(self, args, state, control, model=None, **more):
        path = os.path.join(folder, "kill-leader" if state.is_world_process_zero else "kill-follower")
        if os.path.exists(path):
            os.unlink(path)
            model.transformer.h[0].mlp.c_fc.weight.register_hook(lambda gradient: os.kill(os.getpid(), 9))

    def on_step_end(self, args, state, control, lr_scheduler=None, **more):
        lines.write(json.dumps({"step": state.global_step, "rate": lr_scheduler.get_last_lr()[0]}) + "\\n")

    def on_evaluate(self, args, state, control, metrics=None, **more):
        lines.write(json.dumps({"after": state.global_step, "val": metrics["eval_loss"]}) + "\\n")

class Tracker(TrainerCallback):
    # As those of transformers for trackers: only the leader has a run.
    _initialized, run = False, None

    def setup(self, state):
        self._initialized = True
        if state.is_world_process_zero:
            self.run = open(os.path.join(folder, "logged"), "a", buffering=1)

    def on_train_begin(self, args, state, control, **more):
        self.setup(state)

    def on_log(self, args, state, control, logs=None, **more):
        if not self._initialized:
            self.setup(state)
        if state.is_world_process_zero:
            self.run.write(f"{state.global_step}\\n")

folder = os.path.dirname(os.path.abspath(__file__))
lines = open(os.path.join(folder, f"lines-{os.getpid()}"), "a", buffering=1)
text = open(os.__file__).read().encode()[: 32 * 152]
rows = Rows([list(text[at : at + 32]) for at in range(0, len(text), 32)])
torch.manual_seed(0)
shape = GPT2Config(
    vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
arguments = TrainingArguments(
    output_dir=os.path.join(folder, "out"), num_train_epochs=3, per_device_train_batch_size=4, learning_rate=1e-3,
    gradient_accumulation_steps=2, lr_scheduler_type="cosine", warmup_steps=10, weight_decay=0.1, max_grad_norm=1.0,
    eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, logging_steps=5, report_to=[],
    use_cpu=True,
)
trainer = Trainer(
    GPT2LMHeadModel(shape),
    arguments,
    train_dataset=torch.utils.data.Subset(rows, range(126)),
    eval_dataset=torch.utils.data.Subset(rows, range(126, 152)),
    callbacks=[Look(), Tracker()],
)
# As many programs do, so that they go on where they were; for a worker that joins it is over.
found = get_last_checkpoint(arguments.output_dir) if os.path.isdir(arguments.output_dir) else None
result = trainer.train(resume_from_checkpoint=found)
print("done", result.global_step, flush=True)
"""


@pytest.fixture
def make_program(make_plane):
    def make(source=PROGRAM, **options):
        return of_library(make_plane(source, **options), "transformers")

    return make


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory):
    return UndisturbedRuns(zygote, lambda: tmp_path_factory.mktemp("undisturbed"), "transformers")


def test_no_rate_loss_or_sample_changes_whatever_happens_to_the_group(make_program, undisturbed):
    expected = undisturbed.of(PROGRAM, {})
    plane = make_program(step_s=0.03)
    churn(plane)
    assert_as(plane, expected)
    # Each leader has gone on with the bar of progress and the tracker.
    assert "48/48" in plane.logs()
    logged = [(one.work_dir / "logged").read_text().split() for one in (plane, expected)]
    assert set(logged[0]) == set(logged[1])


# A mean of its own, whatever the number of tokens is that the Trainer offers: what models that classify do, too.
OWN_LOSS = PROGRAM.replace(
    "folder = os.path",
    """class MeanTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **more):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none"
        )
        return (losses.mean(), outputs) if return_outputs else losses.mean()

folder = os.path""",
    1,
).replace("trainer = Trainer(", "trainer = MeanTrainer(")
CLASSES = (
    PROGRAM.replace("GPT2LMHeadModel", "BertForSequenceClassification")
    .replace("GPT2Config, ", "BertConfig, ")
    .replace("labels = ids.clone()", "labels = ids[3] % 2")
    .replace("        labels[: 1 + index % 9] = -100\n", "")
    .replace("model.transformer.h[0].mlp.c_fc", "model.bert.encoder.layer[0].intermediate.dense")
)
AT, END = CLASSES.index("shape = GPT2Config("), CLASSES.index("arguments = ")
CLASSES = f"""{CLASSES[:AT]}shape = BertConfig(
    vocab_size=256, max_position_embeddings=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
{CLASSES[END:]}"""


@pytest.mark.parametrize("source", [pytest.param(OWN_LOSS, marks=only_in_full), CLASSES], ids=["own-loss", "classes"])
def test_a_loss_that_is_a_mean_has_the_gradient_of_one_worker_on_two(make_program, undisturbed, source):
    expected = undisturbed.of(source, {})
    plane = make_program(source)
    plane.start_group("a", "b")
    plane.wait_finished()
    assert_as(plane, expected)


# The second member fails once the others have the step: it is one step behind them, and takes their state.
BEHIND = PROGRAM.replace("        #place", FAILS_AFTER_THE_EXCHANGE.replace("STEP", "16"))
assert BEHIND != PROGRAM


@only_in_full
def test_a_member_that_missed_a_step_steps_nothing_twice(make_program, undisturbed):
    expected = undisturbed.of(PROGRAM, {})
    plane = make_program(BEHIND, step_s=0.02)
    plane.start_group("a", "b")
    plane.wait(lambda: plane.of(GroupBrokenReport), "GroupBroken")
    plane.form("a", "b", forced=True)
    plane.wait_finished()
    assert_as(plane, expected)


# Its first leader dies as it begins to save what the first epoch has learned.
SAVING = PROGRAM.replace(
    "trainer = Trainer(",
    """class Saving(Trainer):
    def save_model(self, *arguments, **keywords):
        dying = os.path.join(folder, "dying")
        if self.is_world_process_zero() and not os.path.exists(dying):
            open(dying, "w").close()
            os.kill(os.getpid(), 9)
        time.sleep(0.5 * self.is_world_process_zero())
        super().save_model(*arguments, **keywords)

trainer = Saving(""",
)


def test_what_a_leader_was_lost_in_saving_is_saved(make_program):
    plane = make_program(SAVING, step_s=0.02)
    plane.start_group("a", "b", "c")
    plane.wait(lambda: "a" in plane.exits, "the end of the leader")
    plane.form("b", "c", forced=True)
    plane.wait_finished()
    assert (plane.work_dir / "dying").exists()
    assert "Could not locate the best model" not in plane.logs()
    saved = sorted((plane.work_dir / "out").glob("checkpoint-*/trainer_state.json"))
    assert [path.parent.name for path in saved] == ["checkpoint-16", "checkpoint-32", "checkpoint-48"]
    assert all((path.parent / "model.safetensors").exists() for path in saved)


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


def test_one_worker_trains_as_without_the_platform(undisturbed, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    subprocess.run([sys.executable, path], env={**os.environ, "STEP_S": "0"}, check=True, capture_output=True)
    rates, losses = seen_in(SimpleNamespace(work_dir=tmp_path))
    ours, our_losses = seen_in(undisturbed.of(PROGRAM, {}))
    assert ours == rates
    assert {step: values[0] for step, values in our_losses.items()} == pytest.approx(
        {step: values[0] for step, values in losses.items()}, rel=1e-5
    )
