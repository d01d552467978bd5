"""Optimizers of a library's program take turns in a step, which is taken back as a whole."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from springtide.core.errors import InvalidRequest
from springtide.runtime.data.shards import GlobalBatch
from springtide.runtime.elastic.steps.library_turns import LibraryTurns
from springtide.runtime.elastic.steps.method import Flags
from springtide.runtime.models.named_tensors import TrainingState

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
torch.manual_seed(0)
NET = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 1)])
BATCH = GlobalBatch(step=0, epoch=0, ids=np.arange(12), global_batch_size=12)


def optimizers_of(model):
    return [torch.optim.Adam(model[0].parameters(), 0.1), torch.optim.SGD(model[1].parameters(), 0.1, momentum=0.9)]


def begun(group, batch=BATCH):
    model = copy.deepcopy(NET)
    state = TrainingState(model, optimizers_of(model), torch.device("cpu"))
    steps = LibraryTurns(state)
    steps.begin(batch, group, is_measured=False)
    return model, state, steps


def backward(group, model, steps):
    """A pass over this member's half of the batch, or over all of it."""
    size = 12 // group.world_size
    part = X[group.rank * size : (group.rank + 1) * size]
    # As in training, but with statistics that do not depend on how the batch is divided.
    loss = model[1](model[0].eval()(part)).square().mean()
    steps.add_loss(loss / group.world_size)
    (loss / group.world_size).backward()


def test_each_turn_sends_the_gradients_of_its_optimizer(together):
    def act(group):
        model, state, steps = begun(group)
        found = []
        for place in (1, 0):
            backward(group, model, steps)
            steps.begin_turn(place, 1 / group.world_size)
            reduced = steps.exchange(0, Flags(ready=3), 0.0)
            found.append([parameter.grad.clone() for parameter in model[place].parameters()])
            state.optimizers[place].step()
            state.optimizers[place].zero_grad()
        assert reduced.flags.ready == 3
        assert steps.num_turns == 2
        return reduced.loss, found

    [(loss, alone)] = together(1, act)
    for other_loss, found in together(2, act):
        assert other_loss == pytest.approx(loss, rel=1e-6)
        for gradients, others in zip(found, alone, strict=True):
            torch.testing.assert_close(gradients, others)


def test_what_turns_have_updated_is_taken_back(together):
    def act(group):
        model, state, steps = begun(group)
        before = {name: tensor.clone() for name, tensor in state.model_tensors().items()}
        backward(group, model.train(), steps)
        model[0].train()(X)
        steps.begin_turn(0, 1 / group.world_size)
        steps.exchange(0, Flags(), 0.0)
        state.optimizers[0].step()
        state.optimizers[0].param_groups[0]["lr"] = 0.05
        assert not torch.equal(before["0.0.weight"], state.parameters["0.0.weight"])
        steps.discard()
        assert all(torch.equal(before[name], tensor) for name, tensor in state.model_tensors().items())
        assert not state.optimizers[0].state
        assert state.optimizers[0].param_groups[0]["lr"] == 0.1
        assert all(parameter.grad is None for parameter in state.parameters.values())
        return True

    assert together(2, act) == [True, True]


def test_a_step_that_is_committed_is_not_taken_back(together):
    def act(group):
        model, state, steps = begun(group)
        backward(group, model, steps)
        steps.begin_turn(1, 1 / group.world_size)
        steps.exchange(0, Flags(), 0.0)
        state.optimizers[1].step()
        steps.update(1.0, None)
        after = state.parameters["1.weight"].clone()
        steps.discard()
        return torch.equal(after, state.parameters["1.weight"])

    assert together(2, act) == [True, True]


@pytest.mark.parametrize("what", ["place", "turn", "samples"])
def test_members_at_other_turns_say_so(together, what):
    def act(group):
        batch = GlobalBatch(step=0, epoch=0, ids=np.arange(12) + group.rank, global_batch_size=12)
        _, _, steps = begun(group, batch if what == "samples" else BATCH)
        steps.begin_turn(group.rank if what == "place" else None, 0.5)
        if what == "turn" and group.rank == 0:
            steps._num_turns = 1
        return steps.exchange(0, Flags(), 0.0)

    for error in together(2, act):
        assert isinstance(error, InvalidRequest)
        assert "workers are at other updates or samples" in str(error)
