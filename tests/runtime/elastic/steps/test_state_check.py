"""Members that differ are told apart by the first tensor that does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kits.runtime.runtime_plane import TRAIN
from springtide.core.errors import CollectiveError, PeerLost
from springtide.core.wire.workers import Progress
from springtide.runtime.elastic.meeting import MeetingPlace
from springtide.runtime.elastic.steps.state_check import first_difference
from springtide.runtime.models.named_tensors import TrainingState

CPU = torch.device("cpu")


def state_of(change=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    if change is not None:
        with torch.no_grad():
            change(model, optimizer)
    return TrainingState(model, optimizer, CPU)


def weight(model, optimizer):
    model[2].weight[0, 0] += 1e-6


def average(model, optimizer):
    optimizer.state[model[0].bias]["exp_avg"][1] += 1e-6


def mean(model, optimizer):
    model[1].running_mean[4] += 1e-6


def rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (None, ""),
        (weight, "2.weight of rank 1"),
        (average, "state.0.bias.exp_avg of rank 1"),
        (mean, "1.running_mean of rank 1"),
        (rate, "hyperparameters of rank 1"),
    ],
)
def test_the_first_tensor_that_differs_is_named(together, change, named):
    # Made before: the threads of this test share one random generator.
    states = [state_of(), state_of(change), state_of()]

    def act(group):
        return first_difference(group, states[group.rank], lambda: True)

    assert together(3, act) == [named] * 3


def test_a_group_that_was_given_up_is_not_waited_for(together):
    def act(group):
        return "" if group.rank else first_difference(group, state_of(), lambda: False)

    error, _ = together(2, act)
    assert isinstance(error, CollectiveError)


def test_a_store_that_is_gone_is_told(tmp_path):
    place = MeetingPlace(tmp_path / "meeting", 1.0)
    (tmp_path / "meeting").rmdir()
    with pytest.raises(PeerLost, match="is gone"):
        first_difference(SimpleNamespace(rank=0, world_size=2, store=place), state_of(), lambda: True)


@pytest.mark.slow
@pytest.mark.parametrize("drifts", [False, True])
def test_a_change_of_the_group_says_who_differs(make_plane, drifts):
    # Dead weights that one member changes beside its steps: nothing else shows it.
    source = TRAIN.replace(
        "        ctx.step(loss)",
        f"        ctx.step(loss)\n        if {drifts} and ctx.step_number == 3 and not ctx.is_leader:\n"
        "            with torch.no_grad():\n                model[1].bias += 1e-3",
    )
    plane = make_plane(source, step_s=0.02, num_epochs=3, exact=False, environment={"SPRINGTIDE_DEBUG_STATE": "1"})
    plane.start_group("a", "b")
    plane.wait_step(5)
    plane.grow("c")
    plane.wait_finished()
    assert ("members differ" in plane.logs()) is drifts
    if drifts:
        assert "1.bias of rank 1" in plane.logs()
    assert plane.of(Progress)[-1].metrics["state_differs"] == float(drifts)
