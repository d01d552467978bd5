"""Losses that compare samples, and sums over samples, are told from the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from springtide.runtime.libraries.loss_graph import compares_samples, reads_data

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
