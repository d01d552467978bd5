"""Losses that compare samples, and sums over samples, are told from the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from springtide.runtime.elastic.steps.loss_graph import compares_samples, mixes_samples, not_by_samples, reads_data

SAMPLES = 8
ONE, OTHER = nn.Linear(5, 7), nn.Linear(6, 7)
X, Y = torch.randn(SAMPLES, 5), torch.randn(SAMPLES, 6)
LABELS = torch.arange(SAMPLES) % 7


def contrastive():
    return functional.cross_entropy(ONE(X) @ OTHER(Y).T, torch.arange(SAMPLES))


def two_views():
    # As of SimCLR: each of 16 with each.
    both = functional.normalize(torch.cat([ONE(X), OTHER(Y)]), dim=1)
    return torch.logsumexp(both @ both.T, dim=1).mean()


def summed_by_name():
    return torch.einsum("id,jd->ij", ONE(X), OTHER(Y)).square().mean()


def distances():
    return torch.cdist(ONE(X), OTHER(Y)).mean()


def in_half_precision():
    with torch.autocast("cpu", torch.bfloat16):
        return (ONE(X) @ OTHER(Y).T).float().mean()


def cosines():
    # As of SimCLR, without a product of matrices.
    both = torch.cat([ONE(X), ONE(X + 0.1)])
    return torch.logsumexp(functional.cosine_similarity(both[:, None], both[None], dim=-1), dim=-1).mean()


def squared_distances():
    return ((ONE(X)[:, None] - ONE(X)[None]) ** 2).sum(-1).exp().neg().mean()


def classifier():
    return functional.cross_entropy(nn.Linear(7, SAMPLES)(ONE(X).relu()), LABELS)


def with_normalized_weights():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(7, SAMPLES, bias=False))
    return functional.cross_entropy(layer(ONE(X)), LABELS)


def attention():
    queries = ONE(X)[None].expand(3, -1, -1)
    return nn.MultiheadAttention(7, 1, batch_first=True)(queries, queries, queries, need_weights=True)[0].mean()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (contrastive, True),
        (two_views, True),
        (summed_by_name, True),
        (distances, True),
        (in_half_precision, True),
        (cosines, True),
        (squared_distances, True),
        (classifier, False),
        (with_normalized_weights, False),
        (attention, False),
    ],
)
def test_a_loss_that_compares_samples_is_known_by_its_graph(loss, expected):
    assert compares_samples(loss(), SAMPLES) == expected


def test_a_loss_that_compares_others_than_samples_is_not_taken_for_one():
    assert not compares_samples(contrastive(), SAMPLES - 3)
    assert not compares_samples(torch.ones(()), SAMPLES)


def test_sums_over_samples_are_told_from_those_of_weights_and_means():
    assert reads_data(ONE(X).square().sum().grad_fn)
    assert reads_data(functional.cross_entropy(ONE(X), LABELS, reduction="none").sum().grad_fn)
    assert reads_data(nn.Embedding(7, 3)(LABELS).sum(1).sum().grad_fn)
    assert not reads_data(ONE.weight.square().sum().grad_fn)
    assert not reads_data((ONE.weight.T @ ONE.weight - torch.eye(5)).square().sum().grad_fn)
    # As of experts, how many samples each gets.
    assert not reads_data(ONE(X).softmax(1).mean(0).square().sum().grad_fn)


def targets():
    return functional.one_hot(LABELS, 7).float()


def redundancy():
    # As of Barlow Twins.
    norm = nn.BatchNorm1d(7, affine=False)
    return (norm(ONE(X)).T @ norm(OTHER(Y)) / SAMPLES - torch.eye(7)).square().sum()


def deviation():
    # As of VICReg.
    return functional.mse_loss(ONE(X), OTHER(Y)) + functional.relu(1 - (ONE(X).var(0) + 1e-4).sqrt()).mean()


def dice():
    found = ONE(X).sigmoid()
    overlap = 2 * (found * targets()).sum() / (found.sum() + targets().sum())
    return functional.binary_cross_entropy_with_logits(ONE(X), targets()) + 1 - overlap


def dice_of_each():
    found = ONE(X).sigmoid()
    return (1 - 2 * (found * targets()).sum(1) / (found.sum(1) + targets().sum(1))).mean()


def hardest():
    return functional.cross_entropy(ONE(X), LABELS, reduction="none").topk(3).values.mean()


def focal():
    mean = functional.cross_entropy(ONE(X), LABELS)
    return (1 - torch.exp(-mean)) ** 2 * mean


def root():
    return functional.mse_loss(ONE(X), targets()).sqrt()


def centred():
    return (ONE(X) - ONE(X).mean(0)).square().mean()


def rank_loss():
    scores = ONE(X)[:, 0]
    return (scores.logcumsumexp(0) - scores).mean()


def learnt_factors():
    factors = nn.Parameter(torch.zeros(2))
    smooth = functional.cross_entropy(ONE(X), LABELS, label_smoothing=0.1)
    return factors[0].exp() * smooth + functional.mse_loss(ONE(X), targets()) / factors[1].exp() + factors.sum()


def gradient_penalty():
    points = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(ONE(points).square().sum(), points, create_graph=True)
    return ONE(X).mean() - ONE(X + 1).mean() + (slope.norm(2, dim=1) - 1).square().mean()


def normalised_images():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return functional.cross_entropy(net(torch.randn(SAMPLES, 3, 9, 9)), LABELS)


def sequences():
    # Their means are over time, which comes first.
    return functional.cross_entropy(nn.LSTM(5, 7)(torch.randn(16, SAMPLES, 5))[0].mean(0), LABELS)


def masked():
    is_known = (LABELS > 1).float()
    losses = functional.cross_entropy(ONE(X), LABELS, reduction="none")
    penalty = sum(parameter.norm() for parameter in ONE.parameters())
    return (losses * is_known).sum() / is_known.sum() + torch.stack([losses.mean(), losses.sum()]).mean() + penalty


@pytest.mark.parametrize("loss", [redundancy, deviation, dice, hardest, focal, root, centred, rank_loss])
def test_a_loss_of_values_over_all_samples_is_known_by_its_graph(loss):
    assert mixes_samples(loss(), SAMPLES)
    assert "no sum over samples" in not_by_samples(loss(), SAMPLES)


@pytest.mark.parametrize(
    "loss",
    [classifier, dice_of_each, learnt_factors, gradient_penalty, normalised_images, sequences, masked, attention],
)
def test_a_sum_over_samples_is_not_taken_for_one(loss):
    assert not not_by_samples(loss(), SAMPLES)
