"""Losses that are means over something else than samples, or sums: parts of a batch add up to the whole one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from springtide.runtime.libraries.loss_terms import LossTerms

BATCH = 12
CLASSES = torch.tensor([0.2, 1.0, 5.0])
IMAGES = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(0))
# No sample of a part of the first two has a target, the last class is rare.
LABELS = torch.tensor([0, 0, 0, 1, 1, 2, 1, 0, 1, 1, 0, 0])
TOKENS = torch.randint(1, 3, (BATCH, 5), generator=torch.Generator().manual_seed(1))
TOKENS[:2] = -100
TOKENS[4:7, 2:] = -100
IS_TOKEN = TOKENS != -100
MODEL = nn.Linear(4, 15)


def logits(part):
    return MODEL(IMAGES[part])


def classes(part):
    return functional.cross_entropy(logits(part)[:, :3], LABELS[part], weight=CLASSES)


def smoothed_classes(part):
    return functional.cross_entropy(logits(part)[:, :3], LABELS[part], weight=CLASSES, label_smoothing=0.1)


def smoothed_tokens(part):
    found = logits(part).view(-1, 5, 3).transpose(1, 2)
    loss = functional.cross_entropy(found, TOKENS[part], weight=CLASSES, label_smoothing=0.05)
    loss = loss + functional.cross_entropy(found, TOKENS[part].clamp(min=0), label_smoothing=0.2)
    return loss + 0.5 * (found.square().mean(1) * IS_TOKEN[part]).sum() / IS_TOKEN[part].sum()


def padded(part):
    return functional.cross_entropy(logits(part).view(-1, 3), TOKENS[part].flatten())


def two_heads(part):
    penalty = 0.01 * MODEL.weight.square().sum() + (MODEL.weight[:, :BATCH] ** 2).sum() / 2
    return (padded(part) + 0.5 * classes(part) + 0.3 * logits(part).square().mean() + penalty) / 2


def by_mask(part):
    losses = functional.cross_entropy(logits(part).view(-1, 3), TOKENS[part].flatten(), reduction="none")
    return (losses * IS_TOKEN[part].flatten()).sum() / IS_TOKEN[part].sum()


def by_number(part):
    found = functional.cross_entropy(logits(part).view(-1, 3), TOKENS[part].flatten(), reduction="sum")
    return found / IS_TOKEN[part].sum().item()


def selected(part):
    return logits(part)[:, :5][IS_TOKEN[part]].square().mean()


def summed(part):
    # As of variational autoencoders.
    found = logits(part)
    divergence = -0.5 * (1 + found - found.square() - found.exp()).sum()
    return 0.01 * functional.mse_loss(found[:, :4], IMAGES[part], reduction="sum") + divergence


def by_batch(part):
    return functional.mse_loss(logits(part)[:, :4], IMAGES[part], reduction="sum") / BATCH


def by_samples(part):
    found = logits(part).square().sum(1).sum() / len(found_ids(part))
    return found + functional.binary_cross_entropy_with_logits(logits(part)[:, :3], IMAGES[part][:, :3].sigmoid())


def found_ids(part):
    return range(BATCH)[part]


def one_by_one(part):
    ids = found_ids(part)
    return sum(functional.cross_entropy(logits(slice(at, at + 1))[:, :3], LABELS[at : at + 1]) for at in ids) / len(ids)


def gradients(loss):
    MODEL.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in MODEL.parameters()]


def weighted(loss, parts):
    """The gradients and the loss that the parts add up to."""
    losses = [loss(part) for part in parts]
    terms = [
        LossTerms(one, len(found_ids(part)) or 2, BATCH, counts=bool(found_ids(part)))
        for one, part in zip(losses, parts, strict=True)
    ]
    sums = torch.tensor([one.said for one in terms], dtype=torch.float64).sum(0).tolist()
    told, found = 0.0, []
    for one, own, part in zip(losses, terms, parts, strict=True):
        share = len(found_ids(part)) / BATCH
        told += own.weigh(share, sums)
        found.append(gradients(one * share if share else one * 0))
    return [sum(of_part) for of_part in zip(*found, strict=True)], told


@pytest.mark.parametrize(
    "loss",
    [
        *(
            classes,
            smoothed_classes,
            smoothed_tokens,
            padded,
            two_heads,
            by_mask,
            by_number,
            selected,
            summed,
            by_batch,
            by_samples,
        ),
        one_by_one,
    ],
)
@pytest.mark.parametrize("ends", [(6,), (2,), (5, 7), (11,)])
def test_parts_add_up_to_the_whole_batch(loss, ends):
    parts = [slice(low, high) for low, high in zip((0, *ends), (*ends, BATCH), strict=True)]
    found, told = weighted(loss, parts)
    whole = loss(slice(0, BATCH))
    expected = gradients(whole)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # Of a part that has no token the rest of the loss is not known.
    assert (loss in (two_heads, smoothed_tokens) and 2 in ends) or told == pytest.approx(whole.item(), rel=1e-5)


def test_a_sum_times_one_by_the_samples_is_a_mean_and_half_a_sum_is_a_sum():
    def by_factor(part):
        return logits(part).square().sum() * (1 / len(found_ids(part)))

    def half(part):
        return 0.5 * logits(part).square().sum()

    for loss, parts in ((by_factor, [slice(0, 5), slice(5, 12)]), (half, [slice(0, 2), slice(2, 12)])):
        found, _ = weighted(loss, parts)
        torch.testing.assert_close(found, gradients(loss(slice(0, BATCH))), rtol=1e-5, atol=1e-6)


def constant_divisor(loss, ends=(6,)):
    parts = [slice(low, high) for low, high in zip((0, *ends), (*ends, BATCH), strict=True)]
    terms = [LossTerms(loss(part), len(found_ids(part)), BATCH, counts=True) for part in parts]
    sums = torch.tensor([one.said for one in terms], dtype=torch.float64).sum(0).tolist()
    other = [2 * one for one in sums]
    assert not any(one.constant_divisor(sums, [sums, other]) for one in terms)
    # One member is enough to say so.
    return max((one.constant_divisor(sums, [sums]) for one in terms), key=lambda found: found or 0.0)


def test_a_sum_that_is_divided_by_a_constant_is_found():
    for ends in ((6,), (5,), (3, 7)):
        assert constant_divisor(lambda part: logits(part).sum() / 100, ends) == 100.0
        for loss in (by_samples, by_batch, summed, classes, two_heads):
            assert constant_divisor(loss, ends) is None
    assert constant_divisor(by_mask) is None
