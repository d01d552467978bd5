"""What the autograd graph of a loss tells: whether it compares the samples of a batch with each other, or adds them up.

The mean of the losses of parts is the loss of the whole batch only where each sample has a loss of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# Fewer samples are a number that other sizes are multiples of by chance.
_MIN_SAMPLES = 3
_PRODUCTS = ("MmBackward0", "BmmBackward0")
_PAIRS = ("MmBackward0", "CdistBackward0", "BmmBackward0")
# What is done to each element of an operand that was expanded, as for a cosine.
_AS_EXPANDED = ("ExpandBackward0", "DivBackward0", "MulBackward0", "ToCopyBackward0", "CloneBackward0")
_BY_ELEMENT = ("AddBackward", "SubBackward", "MulBackward", "DivBackward")
_LAYERS = (*_PAIRS, "AddmmBackward0", "ConvolutionBackward0", "EmbeddingBackward0")
# Layers that are not used on weights.
_READING = ("ConvolutionBackward0", "EmbeddingBackward0", "MkldnnRnnLayerBackward0")
_REDUCTIONS = ("MeanBackward", "SumBackward", "VarBackward", "StdBackward")
# What gives one value for many, or for each of many one that depends on the others.
_MIXING = (
    *_REDUCTIONS,
    *("VarMeanBackward", "StdMeanBackward", "NansumBackward", "LinalgVectorNormBackward", "NormBackward"),
    *("ProdBackward", "LogsumexpBackward", "MaxBackward", "MinBackward", "AmaxBackward", "AminBackward"),
    *("MedianBackward", "TopkBackward", "SortBackward", "KthvalueBackward", "CumsumBackward", "LogcumsumexpBackward"),
    *("SoftmaxBackward", "LogSoftmaxBackward", "DotBackward"),
)
# A sum of what is below them, each of which may be multiplied by a constant.
_LINEAR = (
    *("AddBackward", "SubBackward", "RsubBackward", "NegBackward", "MeanBackward", "SumBackward", "NansumBackward"),
    *("ViewBackward", "ReshapeAliasBackward", "UnsafeViewBackward", "AliasBackward", "ToCopyBackward", "CloneBackward"),
    *("SqueezeBackward", "UnsqueezeBackward", "ExpandBackward", "PermuteBackward", "TransposeBackward", "TBackward"),
    *("StackBackward", "CatBackward", "SelectBackward", "SliceBackward", "IndexBackward", "GatherBackward"),
    *("WhereBackward", "MaskedFillBackward", "MaskedSelectBackward", "NanToNumBackward", "RepeatBackward"),
)


def not_by_samples(loss: torch.Tensor, num_samples: int) -> str:
    """Why the losses of parts do not add up to that of the whole batch; empty if they do, as far as the graph tells."""
    if compares_samples(loss, num_samples):
        return (
            "the loss compares the samples of a batch with each other, as with in-batch negatives, and workers would "
            "compare those of their parts only"
        )
    if mixes_samples(loss, num_samples):
        return (
            "the loss is no sum over samples: it is computed from means, sums or the largest values of the whole "
            "batch, as a quotient of sums, a covariance or a root of a mean, and workers would have those of their "
            "parts only"
        )
    return ""


def compares_samples(loss: torch.Tensor, num_samples: int) -> bool:
    """Whether the loss has a product or a distance of each of `num_samples` with each, as with in-batch negatives.

    Of compiled code nothing is seen.
    """
    return num_samples >= _MIN_SAMPLES and any(_pairs(node, num_samples) for node in nodes_from(loss.grad_fn))


def _is_outer(node: Any, num_samples: int) -> bool:
    """Whether an operand has one row for each sample and the other one column, so that each meets each."""
    if len(node.next_functions) != 2 or any(below is None for below, _ in node.next_functions):
        return False
    (first, second) = sides = [_before_expand(node, place) for place in (0, 1)]
    shapes = sorted((shape[:2] for _, shape in sides), reverse=True)
    is_outer = len(first[1]) == len(second[1]) and _is_each_with_each(shapes, num_samples)
    return is_outer and all(reads_data(below) for below, _ in sides)


def _is_each_with_each(shapes: list[tuple[int, ...]], num_samples: int) -> bool:
    return (
        shapes[0] == shapes[1][::-1] and shapes[1][:1] == (1,) and shapes[0][0] > 1 and not shapes[0][0] % num_samples
    )


def _before_expand(node: Any, place: int) -> tuple[Any, tuple[int, ...]]:
    """What a node gets at `place`, and its shape before it was expanded to that of the other."""
    below, _ = node.next_functions[place]
    while True:
        shape = _shape_below(node, place)
        if shape[:1] == (1,) or shape[1:2] == (1,) or below.name() not in _AS_EXPANDED:
            return below, shape
        node, place = below, 0
        below = node.next_functions[0][0]
        if below is None:
            return node, shape


def mixes_samples(loss: torch.Tensor, num_samples: int) -> bool:
    """Whether the loss is no sum over samples: a function of what it computes over all of `num_samples`.

    The square of a mean, a quotient of two sums and the largest losses are such; means of parts do not give them.
    Batch normalisation of torch is none. Of compiled code nothing is seen.
    """
    if num_samples < _MIN_SAMPLES:
        return False
    mixing = {node for node in nodes_from(loss.grad_fn) if _mixes_all(node, num_samples)}
    if any(node.name() in _PRODUCTS for node in mixing):
        return True
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        below = [one for one, _ in node.next_functions if _has(mixing, one)]
        name = node.name()
        if getattr(node, "_saved_reduction", None):
            # Each sample has a loss of its own here.
            if below:
                return True
        elif name.startswith(_LINEAR):
            waiting += below
        elif name.startswith(("MulBackward", "DivBackward")) and len(below) <= 1:
            if below and name.startswith("Div") and below[0] is not node.next_functions[0][0]:
                return True
            waiting += below
        elif node in mixing or below:
            return True
    return False


def _has(mixing: set[Any], root: Any) -> bool:
    return bool(mixing) and any(node in mixing for node in nodes_from(root))


def _mixes_all(node: Any, num_samples: int) -> bool:
    """Whether a node gives a value that is of all samples of a batch."""
    name = node.name()
    if name in _PRODUCTS:
        return _adds_up_products(node, num_samples)
    is_loss = bool(getattr(node, "_saved_reduction", None))
    if not (is_loss or name.startswith(_MIXING)) or not node.next_functions:
        return False
    shape = _shape_below(node, 0)
    dim = getattr(node, "_saved_dim", None)
    dims = (dim,) if isinstance(dim, int) else dim
    first = shape[0] if shape else 0
    is_first = first > 0 and not first % num_samples and (first == num_samples or num_samples not in shape[1:2])
    if dims and not is_loss:
        # The graph has an index below 0 as a number without a sign.
        is_of_all = is_first and 0 in [one - 2**64 + len(shape) if one >= 2**63 else one % len(shape) for one in dims]
    else:
        is_of_all = is_first or num_samples in shape
    return is_of_all and reads_data(node)


def _adds_up_products(node: Any, num_samples: int) -> bool:
    """Whether it is a product of two matrices of samples that adds up over them, as of a covariance."""
    (one, _), (other, _) = node.next_functions
    if one is None or other is None:
        return False
    *batches, inner = _shape_below(node, 0)
    is_single = node.name() == "MmBackward0" or batches[0] == 1
    return is_single and not inner % num_samples and reads_data(one) and reads_data(other)


def _shape_below(node: Any, place: int) -> tuple[int, ...]:
    """The shape of what a node got from the one below it at `place`."""
    below, number = node.next_functions[place]
    return () if below is None else tuple(below._input_metadata[number].shape)


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


def nodes_from(root: Any) -> Iterator[Any]:
    """All nodes of a graph from this one on."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [one for one, _ in node.next_functions]


def _mixes(node: Any) -> bool:
    return node.name().startswith(_REDUCTIONS) and 0 in getattr(node, "_saved_dim", (0,))


def _pairs(node: Any, num_samples: int) -> bool:
    if node.name() not in _PAIRS:
        return node.name().startswith(_BY_ELEMENT) and _is_outer(node, num_samples)
    *batches, rows, columns = node._input_metadata[0].shape
    if batches not in ([], [1]) or rows % num_samples or columns % num_samples:
        return False
    # Not a layer's weights: both come of layers.
    return all(any(one.name() in _LAYERS for one in nodes_from(operand)) for operand, _ in node.next_functions)
