"""The means and sums over samples of which a loss is made, and what those of one part of a batch count for.

A part's loss counts for its part of the samples. A mean in it over something else (weights of classes, targets that are
not ignored, tokens) counts for its part of these instead, and a sum for all of itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from springtide.runtime.elastic.steps.library_turns import NUM_TOTALS
from springtide.runtime.elastic.steps.loss_graph import reads_data
from springtide.runtime.elastic.steps.loss_means import ignored_index

# A loss of more terms is weighted by samples.
_MAX_TERMS = (NUM_TOTALS - 3) // 3
# Of torch's losses.
_MEAN, _SUM = 1, 2
# Of a number these are the number.
_LIKE_BEFORE = ("ToCopyBackward0", "ViewBackward0", "SqueezeBackward0", "UnsqueezeBackward0", "AliasBackward0")
_REDUCTIONS = ("MeanBackward0", "SumBackward0")
_TINY, _ROUNDED = 1e-9, 1e-6
# One of so many samples or more may be what a sum is multiplied by; a half is a weight.
_MIN_INVERSE = 5


@dataclass
class _Term:
    """A mean or a sum over samples that a loss has `coefficient` times.

    `amount` is the number that it is a mean over, or that the program divides it by; None: a sum that is not divided.
    `is_known`: the amount is one of samples, elements or targets by itself. `value` is None if the graph has it not.
    """

    node: Any
    coefficient: float
    amount: float | None
    is_known: bool = True
    value: float | None = None


@dataclass
class _Place:
    """Where in a graph the terms are looked for: by what the number there is multiplied and divided."""

    node: Any
    coefficient: float = 1.0
    divisors: tuple[float, ...] = ()
    multipliers: tuple[float, ...] = ()


class LossTerms:
    """The terms of a part's loss. Members add up what each has `said`; then each weighs its terms by the sums."""

    def __init__(self, loss: torch.Tensor, num_samples: int, batch_size: int, *, counts: bool) -> None:
        """`num_samples` are the part's, `batch_size` those of the batch. Without `counts` the part has none of it."""
        self._loss = float(loss.detach())
        self._counts = counts
        self._num_samples = num_samples
        self._batch_size = batch_size
        # Whether the loss is the sum of its terms.
        self._is_whole = True
        self._terms = list(self._found(loss.grad_fn, num_samples)) if loss.grad_fn is not None else []

    @property
    def said(self) -> list[float]:
        """What members add up: as many numbers for any loss."""
        said = [0.0] * NUM_TOTALS
        if self._counts:
            said[:3] = (1.0, len(self._terms), len(self._terms) ** 2)
            for place, term in enumerate(self._terms[:_MAX_TERMS]):
                amount = term.amount or 0.0
                is_constant = not term.is_known and amount == self._batch_size
                said[3 + 3 * place : 6 + 3 * place] = (amount, amount**2, is_constant)
        return said

    def constant_divisor(self, sums: Sequence[float], earlier: Iterable[Sequence[float]]) -> float | None:
        """A number by which a sum over samples is divided that seems to be none of them; None if there is none.

        `earlier` are the sums of passes before.
        """
        for place, (term, (amount, squares, _)) in enumerate(self._weighable(sums)):
            if term.is_known or not amount or term.amount in (0.0, self._batch_size):
                continue
            # As many of each sample are a number of them, too.
            is_same = sums[0] > 1 and abs(squares * sums[0] - amount**2) <= _TINY * amount**2
            is_same &= all((one[0], one[3 + 3 * place]) == (sums[0], amount) for one in earlier)
            if is_same and term.amount is not None and term.amount % self._num_samples:
                return term.amount
        return None

    def weigh(self, share: float, sums: Sequence[float]) -> float:
        """Before the backward pass of the loss, whose root is weighted by `share`; what the part adds to the loss."""
        if not self._counts:
            return 0.0
        factors = [self._factor(term, share, sums[0], of_term) for term, of_term in self._weighable(sums)]
        for term, factor in zip(self._terms, factors, strict=False):
            if abs(factor - 1.0) > _TINY:
                _weigh(term.node, factor)
        return share * self._told(factors)

    def _factor(self, term: _Term, share: float, num_members: float, of_term: Sequence[float]) -> float:
        amount, _, num_constant = of_term
        if term.amount is None or num_constant == num_members:
            return 1.0 / share
        # A mean over nothing on all members stays what it is.
        return term.amount / amount / share if amount else 1.0

    def _told(self, factors: list[float]) -> float:
        """The loss with its terms weighted, as far as their values are known."""
        told = left = self._loss
        unknown = []
        for term, factor in zip(self._terms, factors, strict=False):
            if term.value is None:
                unknown.append(factor)
            elif factor:
                told += term.coefficient * term.value * (factor - 1.0)
                left -= term.coefficient * term.value
        if self._is_whole and unknown and max(unknown) - min(unknown) < _TINY:
            told += left * (unknown[0] - 1.0)
        # The loss of a part that has nothing of what a mean is over is NaN.
        return 0.0 if told != told and not all(factors) else told

    def _weighable(self, sums: Sequence[float]) -> Iterator[tuple[_Term, Sequence[float]]]:
        """The terms with what is said of each; none where members have other terms, as one for each sample."""
        num_members, num_terms, squares = sums[:3]
        if len(self._terms) <= _MAX_TERMS and num_terms**2 == squares * num_members:
            for place, term in enumerate(self._terms):
                yield term, sums[3 + 3 * place : 6 + 3 * place]

    def _found(self, root: Any, num_samples: int) -> Iterator[_Term]:
        waiting = [_Place(root)]
        found: dict[Any, _Term] = {}
        while waiting:
            place = waiting.pop()
            if place.node in found:
                found[place.node].coefficient += place.coefficient
            elif (below := _below(place)) is not None:
                self._is_whole &= all(one is not None for one in below)
                waiting += [one for one in below if one is not None]
            elif (term := _term(place, num_samples)) is not None:
                found[place.node] = term
            else:
                self._is_whole = False
        _value_smoothing(list(found.values()))
        yield from found.values()


def _below(place: _Place) -> list[_Place | None] | None:
    """The numbers of which the one at `place` is a sum or a multiple, None among them for constants; None: neither."""
    node, name = place.node, place.node.name()
    operands = [operand for operand, _ in node.next_functions]
    if not operands or not all(operand is None or _is_number(operand) for operand in operands):
        return None
    if name in _LIKE_BEFORE or (name in _REDUCTIONS and _is_scalar(operands[0])):
        factors = [1.0]
    elif name == "AddBackward0":
        factors = [1.0, float(node._saved_alpha)]
    elif name == "SubBackward0":
        factors = [1.0, -float(node._saved_alpha)]
    elif name in ("NegBackward0", "RsubBackward1"):
        factors = [-1.0]
    else:
        return _multiplied(place, operands)
    return [
        None if operand is None else replace(place, node=operand, coefficient=place.coefficient * factor)
        for operand, factor in zip(operands, factors, strict=True)
    ]


def _multiplied(place: _Place, operands: list[Any]) -> list[_Place | None] | None:
    """The number that the one at `place` is a multiple or a quotient of; None if it is none by a constant."""
    node, name = place.node, place.node.name()
    numbers = [operand for operand in operands if operand is not None]
    saved = [getattr(node, side, None) for side in ("_saved_other", "_saved_self")]
    constants = [float(one) for one in saved if one is not None]
    if not name.startswith(("MulBackward", "DivBackward")) or len(numbers) != 1 or len(constants) != 1:
        return None
    (constant,) = constants
    if name.startswith("Mul"):
        multipliers = (*place.multipliers, constant)
        return [replace(place, node=numbers[0], coefficient=place.coefficient * constant, multipliers=multipliers)]
    coefficient, divisors = place.coefficient / constant if constant else 0.0, (*place.divisors, constant)
    return [replace(place, node=numbers[0], coefficient=coefficient, divisors=divisors)]


def _term(place: _Place, num_samples: int) -> _Term | None:
    node, name = place.node, place.node.name()
    reduction = getattr(node, "_saved_reduction", None)
    if name.startswith("NllLoss") and reduction == _MEAN:
        found, target, weight = node._saved_self.detach(), node._saved_target, node._saved_weight
        value = functional.nll_loss(found, target, weight, ignore_index=ignored_index(node))
        return _Term(node, place.coefficient, float(node._saved_total_weight), value=float(value))
    if reduction == _MEAN:
        return _Term(node, place.coefficient, float(node._saved_self.numel()))
    is_of_list = name in _REDUCTIONS and node.next_functions[0][0].name() == "StackBackward0"
    if name == "MeanBackward0" and not is_of_list:
        return _Term(node, place.coefficient, float(node._saved_self_sym_numel))
    if is_of_list or (name != "SumBackward0" and reduction != _SUM) or not reads_data(node):
        return None
    size = node._saved_self_sym_sizes if name == "SumBackward0" else node._saved_self.shape
    for number in (num_samples, torch.Size(size).numel()):
        multipliers = () if place.divisors or number < _MIN_INVERSE else place.multipliers
        if number in place.divisors or any(abs(one * number - 1.0) < _ROUNDED for one in multipliers):
            return _Term(node, place.coefficient, float(number))
    if place.divisors:
        return _Term(node, place.coefficient, place.divisors[-1], is_known=False)
    return _Term(node, place.coefficient, None)


def _value_smoothing(terms: list[_Term]) -> None:
    """Set the values of those terms that torch adds to a loss by classes for its smoothed labels."""
    of_classes = [term for term in terms if term.node.name().startswith("NllLoss") and term.value is not None]
    for term in terms:
        for one in of_classes if term.value is None and term.amount else ():
            is_alike = one.amount and abs(term.amount / one.amount - 1.0) < _ROUNDED  # type: ignore[operator]
            if is_alike and _log_softmax(one.node) == _log_softmax(term.node) is not None:
                summed = _smoothed_sum(one.node)
                term.value = summed if term.node.name() == "SumBackward0" else summed / one.amount  # type: ignore[operator]


def _smoothed_sum(node: Any) -> float:
    found, weight = node._saved_self.detach(), node._saved_weight
    if weight is not None:
        found = found * weight.view(-1, *[1] * (found.dim() - 2))
    return float(-found.sum(1).masked_fill(node._saved_target == ignored_index(node), 0.0).sum())


def _log_softmax(root: Any) -> Any:
    """The logarithm of probabilities that is the first below a node; None if there is another layer before."""
    node = root
    while node is not None and node.name() != "LogSoftmaxBackward0":
        below = [one for one, _ in node.next_functions if one is not None]
        node = below[0] if len(below) == 1 else None
    return node


def _is_number(node: Any) -> bool:
    return torch.Size(node._input_metadata[0].shape).numel() == 1


def _is_scalar(node: Any) -> bool:
    """Whether the node gives a single number of no sample, as a loss, rather than a batch of one."""
    if node.name() in _LIKE_BEFORE:
        return _is_scalar(node.next_functions[0][0])
    return not node._input_metadata[0].shape


def _weigh(node: Any, factor: float) -> None:
    def weighted(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(None if one is None else one * factor for one in gradients)

    def without(found: tuple[Any, ...], gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(None if one is None else torch.zeros_like(one) for one in found)

    node.register_prehook(weighted)
    if not factor:
        # The gradient of a mean over nothing is NaN.
        node.register_hook(without)
