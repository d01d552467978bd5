"""What the autograd graph of a loss tells: whether it compares the samples of a batch with each other, or weights them.

The mean of the losses of parts is the loss of the whole batch only where each sample has a loss of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# Fewer samples are a number that other sizes are multiples of by chance.
_MIN_SAMPLES = 3
_PAIRS = ("MmBackward0", "CdistBackward0", "BmmBackward0")
_LAYERS = (*_PAIRS, "AddmmBackward0", "ConvolutionBackward0", "EmbeddingBackward0")
# Of torch's losses: a mean, not a sum.
_MEAN = 1


def compares_samples(loss: torch.Tensor, num_samples: int) -> bool:
    """Whether the loss has a product or a distance of each of `num_samples` with each, as with in-batch negatives.

    Of compiled code nothing is seen.
    """
    return num_samples >= _MIN_SAMPLES and any(_pairs(node, num_samples) for node in _nodes(loss.grad_fn))


def is_weighted_mean(loss: torch.Tensor) -> bool:
    """Whether the loss has a mean over weights of classes, or one that leaves out targets, as those of padding."""
    return any(_is_weighted(node) for node in _nodes(loss.grad_fn) if node.name().startswith("NllLoss"))


def _is_weighted(node: Any) -> bool:
    if node._saved_reduction != _MEAN:
        return False
    # The graph has an index below 0 as a number without a sign.
    ignored = torch.tensor(node._saved_ignore_index, dtype=torch.uint64).view(torch.int64)
    return node._saved_weight is not None or bool((node._saved_target == ignored).any())


def _pairs(node: Any, num_samples: int) -> bool:
    if node.name() not in _PAIRS:
        return False
    *batches, rows, columns = node._input_metadata[0].shape
    if batches not in ([], [1]) or rows % num_samples or columns % num_samples:
        return False
    # Not a layer's weights: both come of layers.
    return all(any(one.name() in _LAYERS for one in _nodes(operand)) for operand, _ in node.next_functions)


def _nodes(root: Any) -> Iterator[Any]:
    """All nodes of a graph from this one on."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [one for one, _ in node.next_functions]
