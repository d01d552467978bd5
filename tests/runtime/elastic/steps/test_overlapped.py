"""Steps of one pass a worker: what data parallelism computes, for any sizes, and nothing of a step that failed."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn

from springtide.core.errors import CollectiveError
from springtide.runtime.data.shards import GlobalBatch
from springtide.runtime.elastic.steps import reducer
from springtide.runtime.elastic.steps.half_pass import square_norm
from springtide.runtime.elastic.steps.method import Flags
from springtide.runtime.elastic.steps.overlapped import OverlappedSteps
from springtide.runtime.models.named_tensors import TrainingState

CPU = torch.device("cpu")
NO_FLAGS = Flags()
X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


class Net(nn.Module):
    """A module with a frozen parameter, one that is never used, and one that few samples use."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 40), nn.Linear(40, 1)
        self.unused, self.rare = nn.Linear(2, 2), nn.Linear(6, 1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mask", torch.tensor([0.5, float("-inf")]))
        self.register_buffer("num_batches", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.num_batches += 1
        self.mean.lerp_(x.mean(0), 0.1)
        out = self.last(torch.tanh(self.first(x)))
        rows = x[:, :1] > 1.5
        return torch.where(rows, out + self.rare(x), out) if rows.any() else out


def made(model):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return OverlappedSteps(TrainingState(model, optimizer, CPU)), model, optimizer


def batch_of(step, size=16):
    return GlobalBatch(step=step, epoch=0, ids=np.arange(step * 5, step * 5 + size) % 64, global_batch_size=16)


def one_step(steps, model, batch, group, flags=NO_FLAGS):
    steps.begin(batch, group, is_measured=False)
    if steps.has_part():
        _, (low, high) = steps.begin_part()
        ids = torch.as_tensor(batch.ids[low:high])
        steps.backward((model(X[ids]) - Y[ids]).square().mean())
    reduced = steps.exchange(batch.step, flags, 0.0)
    steps.update(1.0, None)
    return reduced


def trained(model, sizes, group=None):
    steps, model, _ = made(model)
    losses = [one_step(steps, model, batch_of(step, size), group).loss for step, size in enumerate(sizes)]
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture(params=["one bucket", "many buckets", "all in place"])
def cut(request, monkeypatch):
    if request.param == "many buckets":
        monkeypatch.setattr(reducer, "_FIRST_BUCKET_BYTES", 8)
        monkeypatch.setattr(reducer, "_BUCKET_BYTES", 200)
    if request.param == "all in place":
        monkeypatch.setattr(reducer, "_IN_PLACE_BYTES", 1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_members_trains_as_one_loop_does(together, cut, world_size):
    torch.manual_seed(0)
    net = Net()
    # A last batch that is cut unequally, and one with fewer samples than members.
    sizes = [16, 16, 17, 2, 16]
    losses, alone = trained(net, sizes)
    results = together(world_size, lambda group: trained(net, sizes, group))
    for its_losses, state in results:
        assert its_losses == pytest.approx(losses, rel=2e-6)
        for name, tensor in state.items():
            assert torch.equal(tensor, results[0][1][name]), name
            torch.testing.assert_close(tensor, alone[name], rtol=1e-5, atol=1e-6)
    assert int(results[0][1]["num_batches"]) == len(sizes)


def test_the_same_sequence_of_sizes_gives_the_same_bits(together):
    torch.manual_seed(0)
    net = Net()
    first, second = (together(2, lambda group: trained(net, [16] * 4, group)) for _ in range(2))
    for name, tensor in first[0][1].items():
        assert torch.equal(tensor, second[0][1][name]), name


def test_alone_a_step_is_that_of_a_plain_loop_bit_for_bit():
    torch.manual_seed(0)
    net = Net()
    _, state = trained(net, [16] * 3)
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        ids = torch.as_tensor(batch_of(step).ids)
        (plain(X[ids]) - Y[ids]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_buckets_are_sent_while_the_pass_runs(together, monkeypatch):
    monkeypatch.setattr(reducer, "_IN_PLACE_BYTES", 1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 1))

    def act(group):
        steps, model, _ = made(net)
        sent = []
        model[0].weight.register_hook(lambda _: sent.append(len(steps._reducers[0].works)))
        one_step(steps, model, batch_of(0), group)
        return sent

    assert together(2, act) == [[3], [3]]


def test_members_agree_on_what_all_said_and_take_rank_0s_rates(together):
    net = nn.Linear(6, 1)

    def act(group):
        steps, model, optimizer = made(net)
        optimizer.param_groups[0]["lr"] = 0.1 + group.rank
        ready = 7 if group.rank else 8
        apart = one_step(steps, model, batch_of(0), group, Flags(ready=ready, preempt=4 + group.rank)).flags
        agreed = one_step(steps, model, batch_of(1), group, Flags(ready=9, needs_sync=group.rank == 1)).flags
        return apart, agreed, optimizer.param_groups[0]["lr"]

    expected = (Flags(preempt=5, weight=16.0), Flags(ready=9, needs_sync=True, weight=16.0), 0.1)
    assert together(2, act) == [expected, expected]


def test_members_at_different_steps_are_found_before_anything_is_applied(together):
    torch.manual_seed(0)
    net = Net()

    def act(group):
        steps, model, _ = made(net)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(CollectiveError, match="not at the same exchange of step"):
            one_step(steps, model, batch_of(group.rank), group)
        steps.discard()
        return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    assert together(2, act) == [True, True]


def test_a_step_that_failed_leaves_nothing_and_is_done_again_in_another_group(together):
    torch.manual_seed(0)
    net = Net()
    expected = together(2, lambda group: trained(net, [16, 16], group))
    barrier = threading.Barrier(2)
    trainers = [made(net) for _ in range(2)]

    def broken(group):
        steps, model, _ = trainers[group.rank]
        one_step(steps, model, batch_of(0), group)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        barrier.wait()
        if group.rank == 1:
            # Within its backward pass, as when it is killed there.
            hook = model.first.weight.register_hook(lambda _: group.abort())
        with pytest.raises(CollectiveError):
            one_step(steps, model, batch_of(1), group)
        if group.rank == 1:
            hook.remove()
        steps.discard()
        assert all(parameter.grad is None for parameter in model.parameters())
        return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    assert together(2, broken) == [True, True]

    def again(group):
        steps, model, _ = trainers[group.rank]
        one_step(steps, model, batch_of(1), group)
        return model.state_dict()

    for state in together(2, again):
        for name, tensor in state.items():
            assert torch.equal(tensor, expected[0][1][name]), name


def test_what_joiners_get_are_the_gradients_that_are_applied(together):
    torch.manual_seed(0)
    net = Net()

    def act(group):
        steps, model, _ = made(net)
        fed = []

        def feed(lease, has_gradient):
            own = [parameter.grad for parameter in steps.payload.parameters]
            fed.extend(zip(steps.payload.gradient_views(lease.vector), own, has_gradient, strict=True))
            assert sum(has_gradient) in (4, 6)
            assert all(torch.equal(view, grad) if has else grad is None for view, grad, has in fed)

        steps.begin(batch_of(0), group, is_measured=False)
        _, (low, high) = steps.begin_part()
        steps.backward(model(X[low:high]).square().mean())
        steps.exchange(0, Flags(), 0.0)
        steps.update(1.0, feed)
        return len(fed)

    assert together(2, act) == [8, 8]


def test_a_parameter_that_gets_its_gradient_in_two_parts_is_refused(together, monkeypatch):
    monkeypatch.setattr(reducer, "_IN_PLACE_BYTES", 1)
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)

    def act(group):
        steps, model, _ = made(shared)
        steps.begin(batch_of(0), group, is_measured=False)
        _, (low, high) = steps.begin_part()
        checkpoint = torch.utils.checkpoint.checkpoint
        x = X[low:high].requires_grad_()
        for _ in range(2):
            x = checkpoint(model, x, use_reentrant=True)
        steps.backward(x.square().mean())

    assert all("use_reentrant=False" in str(error) for error in together(2, act))


def turns_of(model, group, sizes):
    """Two optimizers in turn on each batch, one for `first` and one for `last`; both losses depend on both."""
    model = copy.deepcopy(model)
    optimizers = [
        torch.optim.SGD([*model.first.parameters(), *model.rare.parameters()], lr=0.05, momentum=0.9),
        torch.optim.SGD(model.last.parameters(), lr=0.02),
    ]
    steps = OverlappedSteps(TrainingState(model, optimizers, CPU))
    for step, size in enumerate(sizes):
        batch = batch_of(step, size)
        steps.begin(batch, group, is_measured=False)
        _, (low, high) = steps.begin_part()
        ids = torch.as_tensor(batch.ids[low:high])
        for turn, place in enumerate((1, 0, 1)):
            steps.backward((model(X[ids]) - Y[ids] - place).square().mean(), None, place)
            assert all(has == (name.startswith("last") == bool(place)) for name, has in seen(steps, step, turn))
            steps.update(1.0, None)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def seen(steps, step, turn):
    """By name, whether a parameter has a gradient after the exchange; those that a few samples use are left out."""
    has = steps.exchange(step + turn / 1024, NO_FLAGS, 0.0).has_gradient
    pairs = zip(steps.payload.names, has, strict=True)
    return [(name, has) for name, has in pairs if not name.startswith(("rare", "unused"))]


@pytest.mark.parametrize("world_size", [2, 3])
def test_optimizers_that_take_turns_train_as_in_one_loop(together, cut, world_size):
    torch.manual_seed(0)
    net = Net()
    sizes = [16, 17, 2, 16]
    alone = turns_of(net, None, sizes)
    results = together(world_size, lambda group: turns_of(net, group, sizes))
    for state in results:
        for name, tensor in state.items():
            assert torch.equal(tensor, results[0][name]), name
            torch.testing.assert_close(tensor, alone[name], rtol=1e-5, atol=1e-6)
    assert int(results[0]["num_batches"]) == 3 * len(sizes)


def test_a_graph_outlives_the_turn_that_changed_its_buffers(together):
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 1)])

    def act(group):
        generator, critic = model = copy.deepcopy(net)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in model]
        steps = OverlappedSteps(TrainingState(model, optimizers, CPU))
        steps.begin(batch_of(0), group, is_measured=False)
        _, (low, high) = steps.begin_part()
        made = generator(X[low:high])
        for place in (1, 0):
            steps.backward(critic(made.detach() if place else made).square().mean(), place=place)
            steps.exchange(place / 1024, NO_FLAGS, 0.0)
            steps.update(1.0, None)
        return generator[1].running_mean, generator[1].num_batches_tracked

    (mean, count), (other_mean, other_count) = together(2, act)
    assert torch.equal(mean, other_mean)
    assert count == other_count == 1


def measured(net, group, size, max_samples):
    """What three measured steps have reduced, as one member of a group."""
    model = copy.deepcopy(net)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.05), CPU)
    steps, outcomes = OverlappedSteps(state, max_samples, measures_noise=True), []
    for at in range(3):
        batch = batch_of(at, size)
        steps.begin(batch, group, is_measured=True)
        while steps.has_part():
            _, (low, high) = steps.begin_part()
            ids = torch.as_tensor(batch.ids[low:high])
            steps.backward((model(X[ids]) - Y[ids]).square().mean())
        outcomes.append(steps.exchange(at, NO_FLAGS, 7.0 if group.rank else 5.5))
        steps.update(1.0, None)
    return outcomes


def square_of(net, low, high):
    model = copy.deepcopy(net)
    (model(X[low:high]) - Y[low:high]).square().mean().backward()
    return square_norm(parameter.grad for parameter in model.parameters())


@pytest.mark.parametrize(("size", "max_samples"), [(16, 0), (13, 0), (13, 3), (2, 0)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_noise_is_measured_from_the_gradients_of_members(together, cut, world_size, size, max_samples):
    torch.manual_seed(0)
    net = Net()
    results = together(world_size, lambda group: measured(net, group, size, max_samples))
    slices = [batch_of(0, size).rank_bounds(rank, world_size) for rank in range(world_size)]
    filled = [(low, high) for low, high in slices if high > low]
    for outcomes in results:
        # The sum is the same everywhere; of the other figure that of rank 0 counts, which comes with the next step.
        assert [one.squares[0] for one in outcomes] == [one.squares[0] for one in results[0]]
        assert {(one.rank0_square, one.num_parts) for one in outcomes} == {(5.5, len(filled))}
    of_parts = sum((high - low) * square_of(net, low, high) for low, high in filled) / size
    assert results[0][0].squares == pytest.approx((of_parts, square_of(net, 0, size)), rel=1e-4)
