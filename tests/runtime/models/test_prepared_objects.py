"""Prepared objects: every scheduler of torch's arrives as it was, and what cannot travel is refused at once."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel

from springtide.core.errors import InvalidRequest
from springtide.runtime.models.prepared_objects import PreparedObjects

CPU = torch.device("cpu")

MAKERS = {
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 3),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 6, 6]),
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
    "MultiplicativeLR": lambda optimizer: schedulers.MultiplicativeLR(optimizer, lambda step: 0.9),
    "ConstantLR": lambda optimizer: schedulers.ConstantLR(optimizer, total_iters=7),
    "LinearLR": lambda optimizer: schedulers.LinearLR(optimizer, total_iters=7),
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer: schedulers.PolynomialLR(optimizer, 9),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 9),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.2, 3),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.2, total_steps=20),
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=1),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.ConstantLR(optimizer), schedulers.MultiStepLR(optimizer, [3])], [4]
    ),
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)]
    ),
}


def move(source, target):
    """What another worker or a restart gets: JSON and tensors."""
    packed, tensors = source.pack()
    landing, load = target.unpack(json.loads(json.dumps(packed)))
    assert landing.keys() == tensors.keys()
    for name, tensor in landing.items():
        tensor.copy_(tensors[name])
    load()


def scheduled(name):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    return optimizer, MAKERS[name](optimizer)


def go_on(optimizer, scheduler, num_steps):
    rates = []
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
        rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
    return rates


@pytest.mark.parametrize("name", MAKERS)
def test_a_scheduler_goes_on_elsewhere_as_it_would_have_here(name):
    optimizer, scheduler = scheduled(name)
    go_on(optimizer, scheduler, 5)
    other_optimizer, other = scheduled(name)
    move(PreparedObjects([scheduler], CPU), PreparedObjects([other], CPU))
    # Hyperparameters travel by themselves.
    other_optimizer.param_groups[0].update({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
    assert go_on(other_optimizer, other, 8) == go_on(optimizer, scheduler, 8)


def test_a_dict_arrives_in_the_dict_that_the_code_holds():
    source = {"best": np.float32(0.5), "bad": np.int64(2), "losses": [1.0, 2.0], "sums": torch.ones(3), 7: None}
    counts = {"best": 1e9, "sums": torch.zeros(3), "gone": 1}
    move(PreparedObjects([source], CPU), PreparedObjects([counts], CPU))
    assert torch.equal(counts.pop("sums"), torch.ones(3))
    assert counts == {"best": 0.5, "bad": 2, "losses": [1.0, 2.0], 7: None}
    assert type(counts["bad"]) is int


def test_an_average_and_a_scaler_arrive():
    torch.manual_seed(0)
    average, other = (AveragedModel(torch.nn.Linear(3, 2)) for _ in range(2))
    average.update_parameters(torch.nn.Linear(3, 2))
    scaler, other_scaler = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 64.0))
    move(PreparedObjects([average, scaler], CPU), PreparedObjects([other, other_scaler], CPU))
    for name, tensor in average.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert other_scaler.get_scale() == 8.0


def test_an_object_that_the_stored_state_lacks_stays_fresh_and_both_sides_are_told(capsys):
    _, scheduler = scheduled("StepLR")
    _, other = scheduled("ExponentialLR")
    _, load = PreparedObjects([scheduler], CPU).unpack(PreparedObjects([other], CPU).pack()[0])
    load()
    assert scheduler.state_dict() == scheduled("StepLR")[1].state_dict()
    told = capsys.readouterr().err
    assert "StepLR, object 0 keeps its fresh state" in told
    assert "ExponentialLR, object 0 is not prepared" in told


class Odd:
    """An own object whose state the test chooses."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        raise KeyError("history")


def test_what_cannot_travel_is_refused_when_it_is_prepared():
    with pytest.raises(InvalidRequest, match=r"'object.0.Odd.seen' is a set"):
        PreparedObjects([Odd({"seen": {1}})], CPU)
    odd = Odd({})
    with pytest.raises(InvalidRequest, match="the same object twice"):
        PreparedObjects([odd, odd], CPU)


def test_an_object_that_refuses_its_state_is_named():
    objects = PreparedObjects([Odd({"history": [1]})], CPU)
    _, load = objects.unpack(objects.pack()[0])
    with pytest.raises(InvalidRequest, match=r"Odd.load_state_dict\(\) refuses .* KeyError: 'history'"):
        load()
