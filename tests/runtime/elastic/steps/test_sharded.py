"""Virtual shards in one pass: the bits of a pass for each, on any number of members, or a reason why not."""

from __future__ import annotations

import hashlib
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from springtide.runtime.data.shards import GlobalBatch, seed_everything, shards_of_rank
from springtide.runtime.elastic.reduce import aligned_blocks, reduce_blocks
from springtide.runtime.elastic.steps.gradients import clip_gradients
from springtide.runtime.elastic.steps.price import PriceMeter
from springtide.runtime.elastic.steps.sharded import ShardedSteps
from springtide.runtime.models.named_tensors import TrainingState

NUM_SHARDS, BATCH, SEED = 4, 16, 7
DRAWN = torch.Generator().manual_seed(1)
X, LABELS = torch.randn(64, 12, generator=DRAWN), torch.randint(3, (64,), generator=DRAWN)
TOKENS = torch.randint(20, (64, 6), generator=DRAWN)
IMAGES = torch.randn(64, 3, 8, 8, generator=DRAWN)


class Mlp(nn.Module):
    x = X

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), *layers, nn.Linear(40, 3))

    def loss(self, x, ids):
        return functional.cross_entropy(self.layers(x), LABELS[ids])


class Cnn(nn.Module):
    x = IMAGES

    def __init__(self, norm):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
        )

    def loss(self, x, ids):
        return functional.cross_entropy(self.layers(x), LABELS[ids])


class Gpt(nn.Module):
    """With tied weights, dropout, attention, and positions that are added as they are, or looked up once."""

    x = TOKENS

    def __init__(self, dropout=0.1, *, looks_up=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 16), nn.Embedding(6, 16)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.wide = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(dropout))
        self.dropout, self.looks_up = dropout, looks_up

    def loss(self, ids, _):
        places = self.places(torch.arange(6))[None] if self.looks_up else self.places.weight
        x = functional.dropout(self.tokens(ids) + places, self.dropout, self.training)
        heads = self.into(self.norms[0](x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=self.dropout)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.wide(self.norms[1](x))
        logits = functional.linear(x[:, :-1], self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Functional(nn.Module):
    """Weights that are used by functions, computed with before they meet samples, and not used at all."""

    x = X

    def __init__(self):
        super().__init__()
        self.weight, self.gain = nn.Parameter(X[:12].clone()), nn.Parameter(torch.tensor(0.5))
        self.token, self.unused = nn.Parameter(torch.ones(1, 12)), nn.Parameter(torch.ones(2))

    def loss(self, x, _):
        hidden = functional.linear(x + 0.01 * torch.randn_like(x), self.weight).tanh() * self.gain
        hidden = hidden @ functional.normalize(self.weight, dim=0).t() + self.token
        first, second = hidden.square().mean(), functional.smooth_l1_loss(hidden, x)
        return first + 0.1 * second


class Changed(Mlp):
    """An MLP whose loss is changed by a function."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def loss(self, x, ids):
        return self.change(self, x, ids)


def train(make, world_size=1, *, num_steps=8, passes=False, size=BATCH, clip=None):
    """Train with members one after another in this process; a digest of all parameters, and the members' methods."""
    torch.manual_seed(0)
    model = make()
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), torch.device("cpu"))
    methods = [ShardedSteps(state, NUM_SHARDS, measures_noise=False, seed=SEED) for _ in range(world_size)]
    runs = [shards_of_rank(NUM_SHARDS, rank, world_size) for rank in range(world_size)]
    parts, losses = [block for run in runs for block in aligned_blocks(run.start, run.stop)], []
    for method in methods:
        method._obstacle = "asked for" if passes else ""
    for step in range(num_steps):
        batch = GlobalBatch(step, 0, np.arange(step * 5, step * 5 + size) % 64, BATCH)
        for rank, method in enumerate(methods):
            method.begin(batch, SimpleNamespace(rank=rank, world_size=world_size), is_measured=False)
            while method.has_part():
                part, (low, high) = method.begin_part()
                seed_everything(SEED, step, part)
                ids = torch.as_tensor(batch.ids[low:high])
                method.backward(model.loss(model.x[ids], ids))
            method.payload.begin_shard()
        payload, vectors = methods[0].payload, [v.clone() for m in methods for _, v in m._accumulator.blocks]
        vector = reduce_blocks(parts, vectors, payload.num_summed)
        payload.apply_buffers(vector)
        payload.attach(vector, payload.has_gradient(vector))
        losses.append(payload.loss(vector))
        if clip:
            clip_gradients(payload.parameters, clip, None)
        state.update(1.0)
        payload.detach()
        payload.forget_views()
        for method in methods:
            method._price.end_step()
    data = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(data).hexdigest(), losses, methods


MODELS = {
    "mlp": Mlp,
    "mlp with dropout": lambda: Mlp(nn.Dropout(0.3)),
    "gpt": Gpt,
    "gpt that looks places up": lambda: Gpt(0.0, looks_up=True),
    "cnn with GroupNorm": lambda: Cnn(nn.GroupNorm(2, 8)),
    "functional": Functional,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_one_pass_has_the_bits_of_the_shards_own_passes_on_any_number_of_members(name, clip):
    expected, losses, _ = train(MODELS[name], passes=True, clip=clip)
    assert len(set(losses)) == len(losses)
    for world_size in (1, 2, 3, 4):
        digest, found, methods = train(MODELS[name], world_size, clip=clip)
        assert [method.obstacle for method in methods] == [""] * world_size
        assert (digest, found) == (expected, losses), world_size
        if world_size < NUM_SHARDS:
            assert any(count >= 3 for method in methods for count in method._num_checks.values())


def mixed(model, x, ids):
    return functional.cross_entropy(model.layers(x - x.mean(0)), LABELS[ids])


def read(model, x, ids):
    logits = model.layers(x)
    assert logits.abs().max().item() < 1e6
    return functional.cross_entropy(logits, LABELS[ids])


def masked(model, x, ids):
    chosen = x[:, 0] > -10
    return functional.cross_entropy(model.layers(x)[chosen], LABELS[ids][chosen])


def shuffled(model, x, ids):
    order = torch.randperm(len(x))
    return functional.cross_entropy(model.layers(0.5 * x + 0.5 * x[order]), LABELS[ids])


def of_numpy(model, x, ids):
    return functional.cross_entropy(model.layers(x * (1 + 0.1 * np.random.rand())), LABELS[ids])  # noqa: NPY002


def of_python(model, x, ids):
    return functional.cross_entropy(model.layers(x * (1 + 0.1 * random.random())), LABELS[ids])


def divided(model, x, ids):
    return functional.cross_entropy(model.layers(x), LABELS[ids], reduction="sum") / len(x)


def own_mean(model, x, ids):
    return torch.einsum("ij->", model.layers(x).square()) / x.numel()


OBSTACLES = {
    "BatchNorm (layers.1) mixes the samples": ("batch_norm", lambda: Cnn(nn.BatchNorm2d(8))),
    "samples are mixed: the gradient of layers.0.weight depends": ("mixed", lambda: Changed(mixed)),
    "values of a tensor are read (item)": ("read", lambda: Changed(read)),
    "samples are chosen by their values (a mask)": ("chosen", lambda: Changed(masked)),
    "random numbers are drawn": ("random", lambda: Changed(shuffled)),
    "random numbers are drawn in": ("random", lambda: Changed(of_numpy)),
    "random numbers are drawn in a": ("random", lambda: Changed(of_python)),
    "samples are mixed: ": ("mixed", lambda: Changed(divided)),
    "the loss is no sum": ("loss", lambda: Changed(own_mean)),
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_what_no_rule_covers_is_named_and_computed_shard_by_shard(reason, capsys):
    code, make = OBSTACLES[reason]
    expected, losses, _ = train(make, passes=True)
    capsys.readouterr()
    for world_size in (1, 2, 4):
        digest, found, methods = train(make, world_size)
        assert (digest, found) == (expected, losses)
        if world_size < NUM_SHARDS:
            assert [reason in method.obstacle for method in methods] == [True] * world_size, methods[0].obstacle
            assert {method.exact_obstacle for method in methods} == {code}
    # Once in the log of each member.
    assert capsys.readouterr().err.count(f"exact=4 computes shard by shard, since {reason}") == 3


@pytest.mark.parametrize("size", [8, 13, 3])
def test_a_batch_of_unequal_or_fewer_shards_is_computed_shard_by_shard(size):
    expected = train(Mlp, passes=True, size=size)[:2]
    assert all(train(Mlp, world_size, size=size)[:2] == expected for world_size in (1, 2, 4))


def late(model, x, ids):
    """Mixes samples only once the last layer is no longer zero, or in a late step."""
    logits = model.layers(x)
    return functional.cross_entropy(logits + 1e-3 * logits.mean(0) * model.layers[2].weight.sum(), LABELS[ids])


def test_a_layer_that_begins_with_zeros_hides_nothing():
    def make():
        model = Changed(late)
        nn.init.zeros_(model.layers[2].weight)
        nn.init.zeros_(model.layers[2].bias)
        return model

    expected = train(make, passes=True)[:2]
    for world_size in (1, 2, 4):
        assert train(make, world_size)[:2] == expected


def test_targets_that_are_ignored_count_in_their_shard():
    def ignoring(model, x, ids):
        return functional.cross_entropy(model.layers(x), torch.where(ids < 30, LABELS[ids], -100))

    expected = train(lambda: Changed(ignoring), passes=True, num_steps=4)[:2]
    for world_size in (1, 2, 4):
        digest, losses, methods = train(lambda: Changed(ignoring), world_size, num_steps=4)
        assert [method.obstacle for method in methods] == [""] * world_size
        assert (digest, losses) == expected


def test_no_rule_is_left_behind_after_a_loop_that_ends_within_a_batch():
    model = Mlp()
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))
    method = ShardedSteps(state, NUM_SHARDS, measures_noise=False, seed=SEED)
    method.begin(GlobalBatch(0, 0, np.arange(16), 16), None, is_measured=False)
    method.begin_part()
    assert torch.overrides._get_current_function_mode() is method._one_pass
    method.leave_loop()
    assert torch.overrides._get_current_function_mode() is None


def test_the_price_is_told_once_it_was_measured():
    metrics = {}
    meter = PriceMeter(metrics)
    for step in range(20):
        meter.begin_step()
        for way in (["plain"] if meter.wants_plain else []) + ["shard"] * 4:
            meter.begin_part()
            sum(range(200_000))
            meter.end_part(way)
        meter.begin_rest()
        if step == 7:
            meter.drop_step()
        meter.end_step()
        if step < 10:
            assert not metrics
    assert 2.0 < metrics["exact_cost"] < 6.0
