"""Clipping and scaled losses: what a plain loop with torch's own functions computes, on any number of members."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from springtide.core.errors import InvalidRequest
from springtide.runtime.data.shards import GlobalBatch
from springtide.runtime.elastic.steps.gradients import LossScaling, clip_gradients
from springtide.runtime.elastic.steps.method import Flags
from springtide.runtime.elastic.steps.overlapped import OverlappedSteps
from springtide.runtime.elastic.steps.sharded import ShardedSteps
from springtide.runtime.models.named_tensors import TrainingState

CPU = torch.device("cpu")
X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = 3 * X.sum(1, keepdim=True)
# In this step the scaled loss overflows, so that it is skipped.
OVERFLOW = 2


torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 1))


def make_net():
    return copy.deepcopy(NET)


def make_optimizer(model):
    # A large epsilon, so that rounding in small gradients is not made large.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.1)


def loss_of(model, ids, step, scaler):
    loss = (model(X[ids]) - Y[ids]).square().mean()
    return loss * 1e35 if scaler is not None and step == OVERFLOW else loss


def batch_of(step, size=16):
    return GlobalBatch(step=step, epoch=0, ids=np.arange(step * 5, step * 5 + size) % 64, global_batch_size=16)


def plain(max_norm=None, scaler=None, sizes=(16,) * 5):
    model = make_net()
    optimizer = make_optimizer(model)
    norms = []
    for step, size in enumerate(sizes):
        loss = loss_of(model, torch.as_tensor(batch_of(step, size).ids), step, scaler)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return norms, model.state_dict()


def ours(group, max_norm=None, scaler=None, sizes=(16,) * 5, exact=0, max_samples=0, fed=None):
    model = make_net()
    optimizer = make_optimizer(model)
    state = TrainingState(model, optimizer, CPU, [] if scaler is None else [scaler])
    steps = ShardedSteps(state, exact, measures_noise=False) if exact else OverlappedSteps(state, max_samples)
    scaling, norms = LossScaling(state), []
    for step, size in enumerate(sizes):
        batch = batch_of(step, size)
        steps.begin(batch, group, is_measured=False)
        while steps.has_part():
            _, (low, high) = steps.begin_part()
            loss = loss_of(model, torch.as_tensor(batch.ids[low:high]), step, scaler)
            steps.backward(loss, scaling.scaled(loss))
        scaling.unscale(steps.exchange(step, Flags(), 0.0))
        if max_norm is not None:
            norms.append(clip_gradients(steps.payload.parameters, max_norm, group))
        feed = None if fed is None else lambda lease, has: fed.append((lease.vector.clone(), has))
        steps.update(1.0, feed, is_skipped=scaling.is_skipped)
        scaling.updated()
    return norms, model.state_dict()


def assert_equal(state, expected):
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def assert_close(state, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def scaler_of():
    return torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)


def test_alone_clipping_and_scaling_give_the_bits_of_a_plain_loop():
    expected_scaler, scaler = scaler_of(), scaler_of()
    expected_norms, expected = plain(5.0, expected_scaler)
    norms, state = ours(None, 5.0, scaler)
    assert norms == pytest.approx(expected_norms, nan_ok=True)
    assert not math.isfinite(norms[OVERFLOW])
    assert any(norm > 5.0 for norm in norms)
    assert_equal(state, expected)
    assert scaler.state_dict() == expected_scaler.state_dict()


@pytest.mark.parametrize("exact", [0, 4])
@pytest.mark.parametrize("world_size", [2, 3])
def test_members_clip_the_gradient_of_the_whole_batch_and_skip_the_same_step(together, world_size, exact):
    sizes = [16, 17, 16, 2, 16]
    expected_scaler = scaler_of()
    expected_norms, expected = plain(5.0, expected_scaler, sizes)
    scalers = [scaler_of() for _ in range(world_size)]
    results = together(world_size, lambda group: ours(group, 5.0, scalers[group.rank], sizes, exact))
    for norms, state in results:
        assert str(norms) == str(results[0][0])
        assert [norms[0], norms[1], norms[3]] == pytest.approx(
            [expected_norms[0], expected_norms[1], expected_norms[3]], rel=1e-4
        )
        assert_equal(state, results[0][1])
        assert_close(state, expected)
    assert {scaler.get_scale() for scaler in scalers} == {expected_scaler.get_scale()}


def test_on_several_machines_members_take_the_norm_of_rank_0(together):
    def act(group):
        group.is_local = False
        parameter = torch.nn.Parameter(torch.zeros(4))
        parameter.grad = torch.full((4,), 2.0 + group.rank)
        norm = clip_gradients([parameter], 1.0, group)
        return norm, parameter.grad.tolist()

    (norm, first), (other_norm, second) = together(2, act)
    assert norm == other_norm == 4.0
    assert first == pytest.approx([0.5] * 4)
    assert second == pytest.approx([0.75] * 4)


@pytest.mark.parametrize("exact", [0, 4])
def test_joiners_are_fed_what_is_applied_and_nothing_of_a_skipped_step(exact):
    fed = []
    _, state = ours(None, 5.0, scaler_of(), exact=exact, fed=fed)
    model = make_net()
    optimizer = make_optimizer(model)
    joined = TrainingState(model, optimizer, CPU)
    steps = ShardedSteps(joined, 4, measures_noise=False) if exact else OverlappedSteps(joined)
    assert [any(has) for _, has in fed] == [step != OVERFLOW for step in range(5)]
    for vector, has in fed:
        steps.payload.attach(vector, has)
        joined.update(1.0)
        steps.payload.detach()
    assert_equal(model.state_dict(), state)


def test_halves_are_fed_as_they_were_clipped():
    model = nn.Linear(6, 1).to(torch.bfloat16)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU)
    steps, fed = ShardedSteps(state, 1, measures_noise=False), []
    steps.begin(batch_of(0), None, is_measured=False)
    _, (low, high) = steps.begin_part()
    steps.backward((model(X[low:high].bfloat16()) - 9.0).square().mean())
    steps.exchange(0, Flags(), 0.0)
    clip_gradients(steps.payload.parameters, 0.5, None)
    clipped = [copy.deepcopy(parameter.grad) for parameter in steps.payload.parameters]
    steps.update(1.0, lambda lease, _: fed.extend(steps.payload.gradient_views(lease.vector)))
    assert all(torch.equal(view.bfloat16(), grad) for view, grad in zip(fed, clipped, strict=True))


def test_a_step_without_any_gradient_leaves_the_scaler_as_it_is():
    model = nn.Linear(6, 1)
    scaler = scaler_of()
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU, [scaler])
    scaling, steps = LossScaling(state), OverlappedSteps(state)
    steps.begin(batch_of(0), None, is_measured=False)
    steps.begin_part()
    loss = torch.ones((), requires_grad=True) * 1.0
    steps.backward(loss, scaling.scaled(loss))
    scaling.unscale(steps.exchange(0, Flags(), 0.0))
    steps.update(1.0, None, is_skipped=scaling.is_skipped)
    scaling.updated()
    assert scaler.get_scale() == 2.0**14


def test_a_step_that_is_done_again_is_unscaled_again():
    model = nn.Linear(6, 1)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU, [scaler_of()])
    scaling, steps = LossScaling(state), OverlappedSteps(state)
    for _ in range(2):
        steps.begin(batch_of(0), None, is_measured=False)
        steps.begin_part()
        loss = model(X).square().mean()
        steps.backward(loss, scaling.scaled(loss))
        scaling.unscale(steps.exchange(0, Flags(), 0.0))
        steps.discard()
        scaling.discard()


def test_two_scalers_are_refused():
    model = nn.Linear(6, 1)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU, [scaler_of(), scaler_of()])
    with pytest.raises(InvalidRequest, match="2 GradScalers"):
        LossScaling(state)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("max_samples", [3, 5])
def test_passes_of_few_samples_add_up_to_the_whole_batch(together, world_size, max_samples):
    sizes = [16, 17, 16, 2, 16]
    _, expected = plain(sizes=sizes)
    results = together(world_size, lambda group: ours(group, sizes=sizes, max_samples=max_samples))
    for _, state in results:
        assert_equal(state, results[0][1])
        assert_close(state, expected)
