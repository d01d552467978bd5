"""What the graph of a loss tells of the mean that it is, where user code names no weight for it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from springtide.runtime.elastic.steps.loss_graph import nodes_from, not_by_samples

# Of torch's losses: a mean, not a sum.
_MEAN = 1
_LIKE_BEFORE = ("ToCopyBackward0", "ViewBackward0", "AliasBackward0")
# In how many of the first losses a mean is looked for that has no weight.
_NUM_LOOKS = 3
_NO_WEIGHT = (
    "the loss has a mean over weights of classes, or over targets of which some are ignored, and parts of a batch "
    "count for their samples: say what it is a mean over, as in step(loss, weight=(labels != -100).sum())"
)


class LossWeights:
    """What losses count for: what user code gives, or the weights of classes that a loss is a mean over.

    A loss that should have a weight and has none is told of once, on standard error, and so is one that is no sum over
    samples.
    """

    def __init__(self) -> None:
        self._num_looks = _NUM_LOOKS

    def of(self, loss: torch.Tensor, given: float | None, num_samples: int) -> float | None:
        """The weight of a loss of so many samples; None: its samples count."""
        weight = class_weight(loss) if given is None else given
        if self._num_looks:
            self._num_looks -= 1
            told = _NO_WEIGHT if weight is None and has_weighted_mean(loss) else ""
            if reason := not_by_samples(loss, num_samples):
                told = f"{reason}; give the job one worker, --workers 1, if it is to be that of one"
            if told:
                self._num_looks = 0
                sys.stderr.write(f"springtide: {told}\n")
        return weight


def class_weight(loss: torch.Tensor) -> float | None:
    """What a mean over weights of classes is over, as of `cross_entropy(..., weight=...)`; None for another loss."""
    node: Any = loss.grad_fn
    while node is not None and node.name() in _LIKE_BEFORE:
        node = node.next_functions[0][0]
    if node is None or not _is_mean(node) or node._saved_weight is None:
        return None
    return float(node._saved_total_weight)


def has_weighted_mean(loss: torch.Tensor) -> bool:
    """Whether a part of the loss is a mean over weights of classes, or over targets of which some are ignored."""
    return any(
        node._saved_weight is not None or bool((node._saved_target == ignored_index(node)).any())
        for node in nodes_from(loss.grad_fn)
        if _is_mean(node)
    )


def ignored_index(node: Any) -> int:
    """The targets that one of torch's losses ignores."""
    # The graph has an index below 0 as a number without a sign.
    return int(torch.tensor(node._saved_ignore_index, dtype=torch.uint64).view(torch.int64))


def _is_mean(node: Any) -> bool:
    return bool(node.name().startswith("NllLoss") and node._saved_reduction == _MEAN)
