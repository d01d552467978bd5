"""What Accelerate prepared and cannot be divided or moved is refused, with what to do."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from springtide.core.errors import InvalidRequest
from springtide.runtime.libraries.accelerate import AccelerateFit, _checked, _length
from springtide.runtime.libraries.loop_state import schedulers_of


class LoopDouble:
    metrics: dict[str, float]

    def __init__(self):
        self.metrics = {}


def prepared(**changes):
    """As an Accelerator has prepared a model and its optimizer."""
    model = torch.nn.Linear(2, 1)
    optimizer = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), 0.1))
    fields = {
        "num_processes": 1,
        "distributed_type": SimpleNamespace(value="NO"),
        "scaler": None,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 2,
        "gradient_state": SimpleNamespace(sync_with_dataloader=True),
        "_optimizers": [optimizer],
        "_models": [torch.nn.Linear(3, 3), model],
        "_schedulers": [],
    }
    return SimpleNamespace(**{**fields, **changes})


def test_the_model_is_the_one_that_the_optimizer_trains():
    accelerator = prepared()
    assert _checked(accelerator) == (accelerator._models[1], [accelerator._optimizers[0].optimizer])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_processes": 2}, "DeepSpeed, FSDP or several devices"),
        ({"distributed_type": SimpleNamespace(value="FSDP")}, "DeepSpeed, FSDP or several devices"),
        ({"scaler": object(), "mixed_precision": "fp16"}, "mixed_precision='fp16'"),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8'"),
        ({"gradient_state": SimpleNamespace(sync_with_dataloader=False)}, "sync_with_dataloader=False"),
        ({"_optimizers": []}, "prepared no optimizer"),
        ({"_models": [torch.nn.Linear(2, 1)]}, "not those of one model"),
    ],
)
def test_what_cannot_move_is_refused(changes, told):
    with pytest.raises(InvalidRequest, match=f"{told}.*--workers 1"):
        _checked(prepared(**changes))


def test_schedulers_that_were_not_prepared_are_found():
    wrapper = prepared()._optimizers[0]
    optimizer = wrapper.optimizer

    def found(*known):
        return schedulers_of(known, [optimizer], [wrapper])

    assert found() == []
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    whole = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])
    assert found() == [whole]
    assert found(whole) == [whole]
    others = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for _ in range(2)]
    with pytest.raises(InvalidRequest, match="several schedulers"):
        found(whole)
    del others


def test_several_optimizers_train_several_models():
    models = [torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)]
    wrappers = [SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), 0.1)) for model in models]
    model, optimizers = _checked(prepared(_models=models, _optimizers=wrappers))
    assert list(model) == models
    assert optimizers == [wrapper.optimizer for wrapper in wrappers]
    with pytest.raises(InvalidRequest, match="not those of one model"):
        _checked(prepared(_models=models[:1], _optimizers=wrappers))


def test_a_loss_outside_of_the_loop_is_refused():
    fit = AccelerateFit(LoopDouble())
    accelerator = prepared()
    with pytest.raises(InvalidRequest, match="not of a batch of the training loader"):
        fit.backward(lambda loss: None, accelerator, torch.zeros(()))


def test_numbers_that_are_logged_are_metrics():
    loop = LoopDouble()
    values = {"loss": torch.tensor(0.5), "epoch": 2, "text": "a", "many": torch.zeros(2), "n" * 1000: 1.0}
    seen = []
    AccelerateFit(loop).log(lambda *told, **more: seen.append((told, more)), None, values, step=3)
    assert loop.metrics == {"loss": 0.5, "epoch": 2.0}
    assert seen == [((values,), {"step": 3})]


@pytest.mark.parametrize(
    ("keywords", "length"),
    [
        ({}, 40),
        # The loop ends within its last epoch.
        ({"num_training_steps": 33}, 33),
        # Counted in batches, in epochs, or of another length.
        ({"num_training_steps": 80}, 40),
        ({"num_training_steps": 4}, 40),
        ({"num_training_steps": 30}, 40),
    ],
)
def test_a_schedule_says_where_the_last_epoch_ends(keywords, length):
    rule = functools.partial(lambda step, num_training_steps=0: 1.0, **keywords)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rule)
    plain = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert _length(4, 10, [SimpleNamespace(scheduler=one) for one in (scheduler, plain)]) == length
