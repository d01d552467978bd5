"""Gradient noise where one worker computes a batch in one pass: from another pass over half of the batch, before it.

The step is that of an unmeasured one, bit for bit: gradients and changes of buffers of the pass over half are kept from
it, and both passes begin with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from springtide.runtime.elastic.steps.reducer import dense

# The number of the part that the pass is over.
HALF = -1
# Batch normalisation needs two samples in a pass.
_LEAST_SAMPLES = 2


def half_of(low: int, high: int) -> list[tuple[int, tuple[int, int]]]:
    """Number and (first, end) of the half of these samples that has a pass of its own; none if they are too few."""
    middle = low + (high - low) // 2
    return [(HALF, (low, middle))] if middle - low >= _LEAST_SAMPLES else []


class HalfPass:
    """What is known of a half of the batch while the whole is computed: `keep`, then `compare` and `spread`."""

    def __init__(self, parameters: Sequence[torch.Tensor], device: torch.device) -> None:
        self._parameters = parameters
        self._device = device
        self._gradients: list[torch.Tensor | None] = []
        # The weight of the half over that of the rest.
        self._ratio = 1.0
        self._random_state: list[torch.Tensor] = []
        self._has_same_numbers = True

    def keep(self, num_samples: int, num_all: int) -> None:
        """Take over the gradients that a pass over `num_samples` of `num_all` samples has left."""
        self._gradients = [None if own.grad is None else dense(own.grad) for own in self._parameters]
        self._ratio = num_samples / (num_all - num_samples)
        self._random_state = self._random_states()

    def compare(self) -> None:
        """Note whether the forward pass over the whole batch has drawn the random numbers of that over half of it."""
        states = zip(self._random_states(), self._random_state, strict=True)
        self._has_same_numbers = all(torch.equal(now, then) for now, then in states)

    def spread(self) -> float:
        """By how much the mean square norm of both halves' gradients exceeds that of the whole's, by expectation.

        The gradient of the rest follows from those of the half and of the whole, and so does the spread: the square
        norm of their difference. Where the passes have drawn other random numbers (dropout), the difference holds
        noise of both draws, and the spread is that of square norms: unbiased, but more scattered.
        """
        kept, self._gradients = self._gradients, []
        if not self._has_same_numbers:
            whole = square_norm(own.grad for own in self._parameters)
            return self._ratio * (square_norm(kept) - whole)
        differences = []
        for half, own in zip(kept, self._parameters, strict=True):
            if half is None or own.grad is None:
                differences.append(own.grad if half is None else half)
            else:
                differences.append(half.sub_(own.grad))
        return self._ratio * square_norm(differences)

    def _random_states(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states


def square_norm(gradients: Iterable[torch.Tensor | None]) -> float:
    """The square norm of gradients as one vector; those that are None count as zeros."""
    known = (gradient.detach() for gradient in gradients if gradient is not None)
    # The squares of halves soon overflow.
    as_floats = [gradient.float() if gradient.dtype.itemsize < 4 else gradient for gradient in map(dense, known)]
    return float(torch.nn.utils.get_total_norm(as_floats)) ** 2
