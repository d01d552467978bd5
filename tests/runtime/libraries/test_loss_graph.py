"""Losses that compare samples, and means over something else than samples, are told from the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from springtide.runtime.libraries.loss_graph import compares_samples, is_weighted_mean

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


@pytest.mark.parametrize(
    ("keywords", "labels", "expected"),
    [
        ({}, LABELS, False),
        ({"weight": torch.rand(7)}, LABELS, True),
        ({"ignore_index": 0}, LABELS, True),
        ({}, LABELS.where(LABELS > 2, torch.tensor(-100)), True),
        ({"weight": torch.rand(7), "reduction": "sum"}, LABELS, False),
    ],
)
def test_a_mean_over_weights_or_over_some_targets_is_known(keywords, labels, expected):
    loss = functional.cross_entropy(ONE(X), labels, **keywords).sum() + 0.1 * ONE.weight.square().sum()
    assert is_weighted_mean(loss) == expected
