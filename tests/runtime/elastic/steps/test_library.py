"""What the passes of a library exchange: the gradient of the whole batch, and that all have the same samples."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from springtide.core.errors import InvalidRequest
from springtide.runtime.data.shards import GlobalBatch
from springtide.runtime.elastic.steps.library import LibrarySteps
from springtide.runtime.elastic.steps.method import Flags
from springtide.runtime.models.named_tensors import TrainingState

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 1)).eval()


def loss_of(model, ids):
    return model(X[ids]).square().mean()


def steps_of(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return LibrarySteps(TrainingState(model, optimizer, torch.device("cpu")))


def ours(group, ids, passes):
    """Two passes, of which this member has the given parts."""
    model = copy.deepcopy(NET)
    steps = steps_of(model)
    steps.begin(GlobalBatch(step=0, epoch=0, ids=np.asarray(ids), global_batch_size=12), group, is_measured=False)
    for number, (part, of_pass, of_step) in enumerate(passes[group.rank]):
        loss = loss_of(model, part)
        steps.passes(loss.detach() * (of_pass / 2), of_step, is_last=number == 1)
        (loss * (of_pass / 2)).backward()
    reduced = steps.exchange(0, Flags(ready=3), 0.0)
    return reduced, [parameter.grad.clone() for parameter in model.parameters()]


def test_the_last_pass_of_a_step_sends_the_gradients_of_all(together):
    model = copy.deepcopy(NET)
    loss = (loss_of(model, range(6)) + loss_of(model, range(6, 12))) / 2
    loss.backward()
    passes = [
        [(range(4), 4 / 6, 1 / 3), (range(6, 9), 1 / 2, 1 / 4)],
        [(range(4, 6), 2 / 6, 1 / 6), (range(9, 12), 1 / 2, 1 / 4)],
    ]
    for reduced, gradients in together(2, lambda group: ours(group, range(12), passes)):
        assert reduced.loss == pytest.approx(float(loss.detach()), rel=1e-6)
        assert (reduced.flags.ready, reduced.flags.weight) == (3, 0.0)
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def test_members_with_other_samples_in_a_step_say_so(together):
    passes = [[(range(4), 1.0, 0.25), (range(4), 1.0, 0.25)]] * 2
    for error in together(2, lambda group: ours(group, np.roll(np.arange(12), group.rank), passes)):
        assert isinstance(error, InvalidRequest)
        assert "the same order on every worker" in str(error)


def test_a_sum_of_numbers_is_that_of_all_members(together):
    def act(group):
        steps = steps_of(copy.deepcopy(NET))
        steps.begin(GlobalBatch(step=0, epoch=0, ids=np.arange(3), global_batch_size=3), group, is_measured=False)
        return steps.totals([group.rank + 1.0])[0]

    assert together(3, act) == [6.0, 6.0, 6.0]
    assert together(1, act) == [1.0]
