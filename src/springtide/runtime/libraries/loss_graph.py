"""What the autograd graph of a loss tells: whether it compares the samples of a batch with each other, or adds them up.

The mean of the losses of parts is the loss of the whole batch only where each sample has a loss of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from springtide.runtime.elastic.steps.loss_means import nodes_from

# Fewer samples are a number that other sizes are multiples of by chance.
_MIN_SAMPLES = 3
_PAIRS = ("MmBackward0", "CdistBackward0", "BmmBackward0")
_LAYERS = (*_PAIRS, "AddmmBackward0", "ConvolutionBackward0", "EmbeddingBackward0")
# Layers that are not used on weights.
_READING = ("ConvolutionBackward0", "EmbeddingBackward0", "MkldnnRnnLayerBackward0")
_REDUCTIONS = ("MeanBackward", "SumBackward", "VarBackward", "StdBackward")


def compares_samples(loss: torch.Tensor, num_samples: int) -> bool:
    """Whether the loss has a product or a distance of each of `num_samples` with each, as with in-batch negatives.

    Of compiled code nothing is seen.
    """
    return num_samples >= _MIN_SAMPLES and any(_pairs(node, num_samples) for node in nodes_from(loss.grad_fn))


def reads_data(root: Any) -> bool:
    """Whether what a node sums up is one of layers with samples, each for itself, not of weights or of means."""
    waiting, seen = [node for node, _ in root.next_functions], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or _mixes(node):
            continue
        seen.add(node)
        below = [one for one, _ in node.next_functions]
        if node.name() in _READING or (node.name() in _LAYERS and None in below):
            return True
        waiting += below
    return False


def _mixes(node: Any) -> bool:
    return node.name().startswith(_REDUCTIONS) and 0 in getattr(node, "_saved_dim", (0,))


def _pairs(node: Any, num_samples: int) -> bool:
    if node.name() not in _PAIRS:
        return False
    *batches, rows, columns = node._input_metadata[0].shape
    if batches not in ([], [1]) or rows % num_samples or columns % num_samples:
        return False
    # Not a layer's weights: both come of layers.
    return all(any(one.name() in _LAYERS for one in nodes_from(operand)) for operand, _ in node.next_functions)
