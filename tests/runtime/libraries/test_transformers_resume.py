"""A checkpoint that cannot be read, as while the leader writes it, ends no worker that joins a group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from springtide.runtime.libraries.loop import LOOP
from springtide.runtime.libraries.transformers import TrainerFit, patch_trainer


@pytest.fixture
def trainer(monkeypatch):
    """A stand-in for the Trainer of transformers, whose checkpoint lacks a file."""

    class Trainer:
        optimizer = model = None

        def _inner_training_loop(self):
            """The loop of the library."""

        def train(self, resume_from_checkpoint=None):
            if resume_from_checkpoint:
                raise FileNotFoundError("trainer_state.json")
            return "trained"

        def create_optimizer(self):
            """It is made already."""

    monkeypatch.setattr(LOOP, "loop", SimpleNamespace(is_attached=False, attach=lambda *parts: None))
    patch_trainer(SimpleNamespace(Trainer=Trainer, skip_first_batches=None))
    made = Trainer()
    made.callback_handler = SimpleNamespace(callbacks=[])
    return made


def test_a_worker_that_joins_does_without_it_and_a_first_one_says_what_was_wrong(trainer):
    assert trainer.train("checkpoint-41") == "trained"
    fit = TrainerFit(trainer, LOOP.loop)
    with pytest.raises(FileNotFoundError, match=r"trainer_state\.json"):
        fit._begin(lambda *parts: (0, 0), 10, 5, 2, None, None)


def test_what_fails_in_a_group_is_raised(trainer):
    LOOP.loop.is_attached = True
    with pytest.raises(FileNotFoundError):
        trainer.train("checkpoint-41")
