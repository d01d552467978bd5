"""Noise that one worker measures by a pass over half of the batch, which leaves no trace in the training."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from springtide.runtime.data.shards import GlobalBatch, seed_everything
from springtide.runtime.elastic.steps.half_pass import HALF, half_of, square_norm
from springtide.runtime.elastic.steps.method import Flags
from springtide.runtime.elastic.steps.overlapped import OverlappedSteps
from springtide.runtime.models.named_tensors import TrainingState

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


def batch_of(step, size):
    return GlobalBatch(step=step, epoch=0, ids=np.arange(step * 5, step * 5 + size) % 64, global_batch_size=size)


def trained(net, sizes, *, measures_noise, max_samples=0):
    """The numbers of the passes, what each step has reduced, and the state, without a group."""
    model = copy.deepcopy(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = TrainingState(model, optimizer, torch.device("cpu"))
    steps = OverlappedSteps(state, max_samples, measures_noise=measures_noise)
    numbers, outcomes = [], []
    for at, size in enumerate(sizes):
        batch = batch_of(at, size)
        steps.begin(batch, None, is_measured=measures_noise)
        while steps.has_part():
            number, (low, high) = steps.begin_part()
            seed_everything(0, at, max(number, 0))
            ids = torch.as_tensor(batch.ids[low:high])
            steps.backward((model(X[ids]) - Y[ids]).square().mean())
            numbers.append(number)
        outcomes.append(steps.exchange(at, Flags(), 5.5))
        steps.update(1.0, None)
    return numbers, outcomes, model.state_dict()


def mlp(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), *between, nn.Tanh(), nn.Linear(40, 1))


def square_of(net, ids):
    model = copy.deepcopy(net)
    (model(X[ids]) - Y[ids]).square().mean().backward()
    return square_norm(parameter.grad for parameter in model.parameters())


@pytest.mark.parametrize("size", [16, 13])
def test_the_squares_are_those_of_both_halves(size):
    net = mlp()
    numbers, (outcome,), _ = trained(net, [size], measures_noise=True)
    ids, middle = torch.arange(size), size // 2
    halves = (middle * square_of(net, ids[:middle]) + (size - middle) * square_of(net, ids[middle:])) / size
    assert numbers == [HALF, 0]
    assert outcome.squares == pytest.approx((halves, square_of(net, ids)), rel=1e-4)
    assert (outcome.num_parts, outcome.rank0_square, outcome.flags.weight) == (2, 5.5, size)


@pytest.mark.parametrize(
    "between", [[], [nn.BatchNorm1d(40)], [nn.Dropout(0.5)]], ids=["linear", "batch norm", "dropout"]
)
@pytest.mark.parametrize("max_samples", [0, 6])
def test_a_measured_step_has_the_bits_of_an_unmeasured_one(between, max_samples):
    net, sizes = mlp(*between), [16, 13, 3, 16]
    _, plain, expected = trained(net, sizes, measures_noise=False, max_samples=max_samples)
    _, measured, state = trained(net, sizes, measures_noise=True, max_samples=max_samples)
    assert [one.loss for one in measured] == [one.loss for one in plain]
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


def test_passes_that_there_are_anyway_are_the_parts():
    net = mlp()
    numbers, (outcome,), _ = trained(net, [16], measures_noise=True, max_samples=6)
    ids = torch.arange(16)
    parts = [ids[:5], ids[5:10], ids[10:]]
    assert numbers == [0, 1, 2]
    assert outcome.num_parts == 3
    mean_of_parts = sum(len(part) * square_of(net, part) for part in parts) / 16
    assert outcome.squares == pytest.approx((mean_of_parts, square_of(net, ids)), rel=1e-4)


def test_with_dropout_the_spread_is_that_of_square_norms():
    net = mlp(nn.Dropout(0.5))
    _, (outcome,), _ = trained(net, [16], measures_noise=True)
    squares = []
    for num_samples in (8, 16):
        seed_everything(0, 0, 0)
        squares.append(square_of(net, torch.arange(num_samples)))
    assert outcome.squares == pytest.approx((squares[0], squares[1]), rel=1e-4)


def test_sparse_gradients_are_measured():
    torch.manual_seed(0)
    tokens, model = torch.arange(16) % 5, nn.Embedding(8, 3, sparse=True)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))
    steps = OverlappedSteps(state, measures_noise=True)
    steps.begin(batch_of(0, 16), None, is_measured=True)
    while steps.has_part():
        _, (low, high) = steps.begin_part()
        steps.backward(model(tokens[low:high]).square().mean())
    spread, mean_square = steps.exchange(0, Flags(), 0.0).squares
    assert spread > mean_square > 0.0


def test_batches_of_few_samples_have_no_half():
    assert half_of(0, 3) == []
    assert half_of(0, 5) == [(HALF, (0, 2))]
    numbers, (outcome,), _ = trained(mlp(), [3], measures_noise=True)
    assert (numbers, outcome.num_parts) == ([0], 1)
