"""The flat vector that one step reduces: gradients, the loss, changes of buffers, and the members' control flags.

It also carries the numbers in the optimizer's parameter groups from rank 0, because user code may set a learning rate
in its loop, and a rank whose shards of a small batch are all empty does not run the loop. If gradient noise is
measured, it carries the square norms of the shards' gradients too. The first `num_summed` elements are summed over the
shards, each weighted by its part of the global batch; of the rest the maximum is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from springtide.core.errors import InvalidRequest
from springtide.runtime.data.shards import shards_of_rank
from springtide.runtime.elastic.reduce import BufferPool, num_vectors
from springtide.runtime.elastic.steps.buffers import BufferChanges
from springtide.runtime.elastic.steps.linear_by_shard import sum_into
from springtide.runtime.models.named_tensors import TrainingState

# Indices of the control flags, which are reduced by maximum. READY and MINUS_READY hold the generation whose group a
# member has connected, and its negative: after the maximum they cancel only if all members reported the same one.
READY, MINUS_READY, NEEDS_SYNC, PREEMPT = range(4)
_NUM_FLAGS = 4
_MAX_EXACT_INTEGER = 1 << 24


class StepVector:
    """The layout of one model's flat vector, with methods that fill it and apply it."""

    def __init__(self, state: TrainingState, num_shards: int, *, measures_noise: bool = False) -> None:
        self._state = state
        self._measures_noise = measures_noise
        self._num_shards = num_shards
        self.names = [name for name, parameter in state.parameters.items() if parameter.requires_grad]
        self.parameters = [state.parameters[name] for name in self.names]
        self._frozen = {name: one for name, one in state.parameters.items() if not one.requires_grad}
        wide = any(tensor.dtype == torch.float64 for tensor in self.parameters)
        self.dtype = torch.float64 if wide else torch.float32
        sizes = [parameter.numel() for parameter in self.parameters]
        self.ends: list[int] = []
        total = 0
        for size in sizes:
            total += size
            self.ends.append(total)
        self.num_gradients = total
        self._buffers = BufferChanges(state)
        self._counts_at = total + self._buffers.size(self._buffers.floats)
        self._loss_at = self._counts_at + len(self.parameters)
        self._weight_at = self._loss_at + 1
        self._numbers_at = self._weight_at + 1
        # The last number is not the optimizer's: rank 0's square norm of the previous step's mean gradient.
        self._square_at = self._numbers_at + 3 * (state.num_numbers + measures_noise)
        self.num_summed = self._square_at + measures_noise
        self._integers_at = self.num_summed
        self._flags_at = self._integers_at + self._buffers.size(self._buffers.integers)
        self.num_elements = self._flags_at + _NUM_FLAGS
        # Padding to equal chunks needs at most one element for each rank, of which there are at most `num_shards`.
        self.pool = BufferPool(self.num_elements + num_shards, self.dtype, state.device)
        self._views: dict[int, list[torch.Tensor]] = {}

    def check_frozen(self) -> None:
        """Raise InvalidRequest if a parameter is trained that was not when this vector was laid out."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise InvalidRequest(
                    f"the parameter {name} was frozen when the training began, and is trained now, so that workers do "
                    "not exchange its gradients; let it require gradients from the beginning, in a group of the "
                    "optimizer whose rate is 0 until then, or give the job one worker: --workers 1"
                )

    def warm(self, rank: int, world_size: int, feeds_joiners: bool) -> None:
        """Allocate the vectors that a rank of the next group needs, and one more to feed joiners. From any thread."""
        run = shards_of_rank(self._num_shards, rank, world_size)
        self.pool.warm(num_vectors(run.start, run.stop) + feeds_joiners)

    def forget_views(self) -> None:
        self._views.clear()

    def gradient_views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """The vector's parts in the shapes of the parameters."""
        views = self._views.get(vector.data_ptr())
        if views is None:
            parts = torch.split(vector[: self.num_gradients], [parameter.numel() for parameter in self.parameters])
            views = [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]
            self._views[vector.data_ptr()] = views
        return views

    def begin_step(self) -> None:
        """Remember the buffers: every shard of the step starts from them."""
        self._buffers.begin_step()

    def begin_shard(self) -> None:
        """Reset the model's buffers to the step's start, and clear its gradients."""
        self._buffers.reset()
        for parameter in self.parameters:
            parameter.grad = None

    def zeros(self) -> torch.Tensor:
        """What a shard without samples contributes."""
        return self._flagless(self.pool.take().zero_())

    def capture(
        self, loss: float, weight: float, given_weight: float = 0.0, *, is_measured: bool = False
    ) -> torch.Tensor:
        """A vector with the shard's gradients (already weighted), its loss and its changes of the buffers.

        `weight` is the shard's part of the batch, `given_weight` what user code lets it count for.
        With `is_measured` it also holds the gradients' square norm.
        """
        vector = self.pool.take()
        with torch.no_grad():
            vector[self.num_gradients :].zero_()
            has_gradient = []
            for view, parameter in zip(self.gradient_views(vector), self.parameters, strict=True):
                gradient = parameter.grad
                has_gradient.append(0.0 if gradient is None else 1.0)
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
                parameter.grad = None
            vector[self._counts_at : self._loss_at] = torch.tensor(has_gradient, dtype=self.dtype)
            vector[self._loss_at] = loss * weight
            vector[self._weight_at] = given_weight
            if is_measured:
                gradients = vector[: self.num_gradients]
                vector[self._square_at] = torch.dot(gradients, gradients) / weight
            self._capture_buffers(vector, weight)
        return self._flagless(vector)

    def capture_block(
        self,
        vector: torch.Tensor,
        gradients: Sequence[Sequence[torch.Tensor | None] | None],
        losses: Sequence[torch.Tensor],
        weight: float,
        given_weight: float,
    ) -> torch.Tensor:
        """Fill a vector with what the vectors of several shards, a power of two of equal size, add up to as a tree.

        Of each parameter the gradients of the shards (already weighted), or None where their sum is in the vector.
        `weight` and `given_weight` are those of each shard; none has changed buffers.
        """
        with torch.no_grad():
            vector[self.num_gradients :].zero_()
            counts = []
            for view, leaves in zip(self.gradient_views(vector), gradients, strict=True):
                counts.append(float(len(losses) if leaves is None else sum(leaf is not None for leaf in leaves)))
                if leaves is not None:
                    dense = [leaf.to_dense() if leaf is not None and leaf.is_sparse else leaf for leaf in leaves]
                    sum_into(view, [leaf if leaf is None else leaf.to(self.dtype) for leaf in dense])
            vector[self._counts_at : self._loss_at] = torch.tensor(counts, dtype=self.dtype)
            weighted = [torch.tensor(float(loss) * weight, dtype=self.dtype) for loss in losses]
            sum_into(vector[self._loss_at], weighted)
            vector[self._weight_at] = given_weight * len(losses)
        return self._flagless(vector)

    def first_difference(self, vector: torch.Tensor, other: torch.Tensor) -> str:
        """What differs first in two vectors, bit by bit; empty if nothing does."""
        kind = torch.int64 if self.dtype == torch.float64 else torch.int32
        differs = (vector.view(kind) != other.view(kind))[: self.num_elements]
        for name, begin, end in zip(self.names, (0, *self.ends), self.ends, strict=False):
            if differs[begin:end].any():
                return f"the gradient of {name}"
        return "the loss" if differs.any() else ""

    def has_changed_buffers(self) -> bool:
        """Whether a buffer is not as it was when the step began."""
        return any(self._buffers.changed())

    def _flagless(self, vector: torch.Tensor) -> torch.Tensor:
        vector[self._flags_at : self.num_elements] = torch.tensor([0.0, -_MAX_EXACT_INTEGER, 0.0, 0.0])
        return vector

    def _capture_buffers(self, vector: torch.Tensor, weight: float) -> None:
        self._buffers.write_floats(vector[self.num_gradients : self._counts_at], self._buffers.floats, weight)
        self._buffers.write_integers(vector[self._integers_at : self._flags_at], self._buffers.integers)

    def set_numbers(self, vector: torch.Tensor, square: float = 0.0) -> None:
        """Write the optimizer's numbers, each split so that no bit is lost; only into rank 0's first vector.

        `square` is the square norm of the last step's mean gradient; used only if noise is measured.
        """
        numbers = [*self._state.numbers(), square] if self._measures_noise else self._state.numbers()
        parts = [part for number in numbers for part in _split(number)]
        vector[self._numbers_at : self._square_at] = torch.tensor(parts, dtype=self.dtype)

    def apply_numbers(self, vector: torch.Tensor) -> float:
        """Set rank 0's numbers in this member's optimizer; returns rank 0's `square`, 0 if noise is not measured."""
        parts = vector[self._numbers_at : self._square_at].tolist()
        numbers = [sum(parts[at : at + 3]) for at in range(0, len(parts), 3)]
        square = numbers.pop() if self._measures_noise else 0.0
        self._state.set_numbers(numbers)
        return square

    def squares(self, vector: torch.Tensor) -> tuple[float, float]:
        """Of a measured step: the shards' mean square norm, weighted by samples, and that of their mean gradient.

        The first was reduced, so it is the same on every member. The second is computed locally and may differ in its
        last bits, so members use rank 0's.
        """
        assert self._measures_noise
        gradients = vector[: self.num_gradients]
        return float(vector[self._square_at]), float(torch.dot(gradients, gradients))

    def set_flags(self, vector: torch.Tensor, *, ready: int, needs_sync: bool, preempt: int) -> None:
        assert max(ready, preempt) < _MAX_EXACT_INTEGER
        vector[self._flags_at : self.num_elements] = torch.tensor(
            [float(ready), -float(ready), float(needs_sync), float(preempt)]
        )

    def flags(self, vector: torch.Tensor) -> tuple[int, bool, int]:
        """The generation that all members have ready (0: none), whether any needs a sync, the preempting generation."""
        values = vector[self._flags_at : self.num_elements].tolist()
        ready = int(values[READY]) if values[READY] == -values[MINUS_READY] else 0
        return ready, values[NEEDS_SYNC] > 0, int(values[PREEMPT])

    def loss(self, vector: torch.Tensor) -> float:
        """The mean loss over the global batch."""
        return float(vector[self._loss_at])

    def given_weight(self, vector: torch.Tensor) -> float:
        """The sum of what user code lets the shards count for."""
        return float(vector[self._weight_at])

    def has_gradient(self, vector: torch.Tensor) -> list[bool]:
        """For every parameter, whether any shard had a gradient for it."""
        return [count > 0 for count in vector[self._counts_at : self._loss_at].tolist()]

    def attach(self, vector: torch.Tensor, has_gradient: list[bool], num_held: int | None = None) -> None:
        """Make the vector's parts the gradients of the (first `num_held`) parameters that have one."""
        held = len(self.parameters) if num_held is None else num_held
        views = self.gradient_views(vector)
        for index, parameter in enumerate(self.parameters):
            if index < held and has_gradient[index]:
                view = views[index]
                parameter.grad = view if parameter.dtype == self.dtype else view.to(parameter.dtype)
            else:
                parameter.grad = None

    def write_back(self, vector: torch.Tensor) -> None:
        """Copy into the vector the gradients that `attach` has converted, since these may have been changed."""
        with torch.no_grad():
            for view, parameter in zip(self.gradient_views(vector), self.parameters, strict=True):
                if parameter.grad is not None and parameter.dtype != self.dtype:
                    view.copy_(parameter.grad)

    def detach(self) -> None:
        """Drop the gradients that `attach` set, so that the vector can be reused."""
        for parameter in self.parameters:
            parameter.grad = None

    def apply_buffers(self, vector: torch.Tensor) -> None:
        """Set the buffers to their values at the step's start plus the reduced change."""
        self._buffers.apply_floats(vector[self.num_gradients : self._counts_at], self._buffers.floats)
        self._buffers.apply_integers(vector[self._integers_at : self._flags_at], self._buffers.integers)


def _split(number: float) -> tuple[float, float, float]:
    """Three float32 values whose sum is exactly the float64 `number`, if that is within the range of float32."""
    high = _as_float32(number)
    middle = _as_float32(number - high)
    return high, middle, _as_float32(number - high - middle)


def _as_float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))
