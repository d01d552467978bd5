"""Steps as data parallelism does them: one pass over this member's slice of the batch, exchanged while it runs.

The same sequence of groups gives the same bits. Another one gives sums in another order, equal to within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from springtide.runtime.data.shards import GlobalBatch
from springtide.runtime.elastic.catchup import Lease
from springtide.runtime.elastic.group import Group
from springtide.runtime.elastic.step_vector import StepVector
from springtide.runtime.elastic.steps.buffers import BufferChanges
from springtide.runtime.elastic.steps.half_pass import HALF, HalfPass, half_of, square_norm
from springtide.runtime.elastic.steps.method import Feed, Flags, Reduced
from springtide.runtime.elastic.steps.reducer import Reducer, dense
from springtide.runtime.elastic.steps.tail import Tail
from springtide.runtime.elastic.training_cursor import is_measured_step
from springtide.runtime.models.named_tensors import TrainingState


class OverlappedSteps:
    """A StepMethod with one part for each member, or several of at most `max_samples` that are exchanged together.

    Alone, a step is that of a plain loop: nothing is copied. Where gradient noise is measured, it is from the members'
    own gradients, before they are added; alone, from those of its passes, or of another one over half of the batch.
    """

    def __init__(self, state: TrainingState, max_samples: int = 0, *, measures_noise: bool = False) -> None:
        """`max_samples` is the most samples of one pass; 0: no limit."""
        self._state = state
        self._max_samples = max_samples
        self._measures_noise = measures_noise
        self._is_measured = False
        self._buffers = BufferChanges(state, replaces=len(state.optimizers) > 1)
        # Allocates nothing until a joiner is fed.
        self.payload = StepVector(state, 1)
        self._parameters = self.payload.parameters
        # By optimizer, the places of its parameters; with one optimizer also of those that it does not have.
        places = [state.places.get(name, 0) for name in self.payload.names]
        self._owned = [[at for at, own in enumerate(places) if own == place] for place in range(len(state.optimizers))]
        self._reducers = [Reducer([self._parameters[at] for at in owned]) for owned in self._owned]
        self._place = 0
        self._group: Group | None = None
        self._tail: Tail | None = None
        self._rank, self._world_size = 0, 1
        self._half = HalfPass(self._parameters, state.device)
        # Number and (first, end) samples of the passes that are left; those of the present one.
        self._parts: list[tuple[int, tuple[int, int]]] = []
        self._part: tuple[int, int] = (0, 0)
        # In how many parts noise is seen, and of the passes of a measured step alone, if there are several, the sum of
        # square norms of their gradients over their weights.
        self._num_parts = 1
        self._square = 0.0
        self._num_samples = 1
        self._weight = 0.0
        self._loss = 0.0
        self._given_weight = 0.0
        self._is_begun = False
        self._has_gradient: list[bool] = []
        self.exact_obstacle = ""

    @property
    def can_discard(self) -> bool:
        """Alone there is no peer that could fail, so a step that was begun is completed."""
        return self._tail is not None

    def warm(self, rank: int, world_size: int, feeds_joiners: bool) -> None:
        if world_size > 1:
            for reducer in self._reducers:
                reducer.reserve()
        if feeds_joiners:
            self.payload.pool.warm(1)

    def begin(self, batch: GlobalBatch, group: Group | None, *, is_measured: bool) -> None:
        if group is not self._group:
            self._group = group
            self._tail = None
            if group is not None and group.world_size > 1:
                self._tail = Tail(self._state, self._buffers, len(self._parameters), group)
        self._rank, self._world_size = (0, 1) if group is None else (group.rank, group.world_size)
        low, high = batch.rank_bounds(self._rank, self._world_size)
        self._num_samples, self._loss = len(batch.ids), 0.0
        self._weight, self._given_weight = (high - low) / self._num_samples, 0.0
        self._is_measured, self._square = is_measured, 0.0
        self._parts = self.parts(batch, group)
        filled = (batch.rank_bounds(rank, self._world_size) for rank in range(self._world_size))
        self._num_parts = len(self._parts) if self._world_size == 1 else sum(end > first for first, end in filled)
        self._is_begun = True
        self._drop_gradients()
        if self._tail is not None or self._is_alternating or self._parts[0][0] == HALF:
            self._buffers.begin_step()

    def parts(self, batch: GlobalBatch, group: Group | None) -> list[tuple[int, tuple[int, int]]]:
        rank, world_size = (0, 1) if group is None else (group.rank, group.world_size)
        low, high = batch.rank_bounds(rank, world_size)
        # Rank 0 has samples in every batch: who has none goes through its first part, for nothing.
        cut = self._cut(low, high) if high > low else self._cut(*batch.rank_bounds(0, world_size))[:1]
        parts = [(rank + number * world_size, bounds) for number, bounds in enumerate(cut)]
        has_half = self._measures_noise and world_size == len(parts) == 1 and is_measured_step(batch.step)
        return [*(half_of(low, high) if has_half else []), *parts]

    def has_part(self) -> bool:
        return bool(self._parts)

    def begin_part(self) -> tuple[int, tuple[int, int]]:
        return self._parts[0]

    def backward(
        self, loss: torch.Tensor, root: torch.Tensor | None = None, place: int = 0, weight: float | None = None
    ) -> None:
        self._place = place
        number = 0
        if self._parts:
            number, self._part = self._parts.pop(0)
        low, high = self._part
        if not self._weight:
            return
        root = loss if root is None else root
        if number == HALF:
            torch.autograd.backward(root)
            self._half.keep(high - low, self._num_samples)
            self._drop_gradients()
            self._buffers.reset()
            return
        self._given_weight += high - low if weight is None else weight
        part = (high - low) / self._num_samples
        if self._tail is not None and not self._parts:
            # The last pass: gradients of those before it are in what is exchanged.
            self._reducers[place].begin(self._members, is_measured=self._is_measured)
        # Weighting the root weights every gradient, without a pass over them and without another loss.
        gradient = None if part == 1.0 else torch.full_like(root, part)
        if not self._is_measured or self._tail is not None:
            torch.autograd.backward(root, gradient)
        elif part < 1.0:
            self._backward_of_part(root, gradient, part)
        else:
            if self._num_parts > 1:
                self._half.compare()
            torch.autograd.backward(root, gradient)
        self._loss += float(loss.detach()) * (part / self._weight)

    def exchange(self, step: float, flags: Flags, last_square: float) -> Reduced:
        reducer, owned = self._reducers[self._place], self._owned[self._place]
        self._drop_gradients(but=owned)
        loss, self._loss = self._loss, 0.0
        flags = replace(flags, weight=self._given_weight)
        self._given_weight = 0.0
        if self._tail is None:
            self._make_dense()
            self._has_gradient = [parameter.grad is not None for parameter in self._parameters]
            return Reduced(loss, flags, self._has_gradient, self._squares_alone(), last_square, self._num_parts)
        if not self._weight:
            reducer.begin(self._members, is_measured=self._is_measured)
        own = [False] * len(self._parameters)
        for at, has in zip(owned, reducer.send_rest(), strict=True):
            own[at] = has
        square = reducer.square / self._weight if self._weight else 0.0
        summed = self._tail.exchange(
            step, loss, self._weight, own, flags, reducer.works, square=square, last_square=last_square
        )
        self._has_gradient = summed.has_gradient
        reducer.attach([self._has_gradient[at] for at in owned])
        self._make_dense()
        squares = (summed.square, self._mean_square()) if self._is_measured else None
        return Reduced(summed.loss, summed.flags, self._has_gradient, squares, summed.rank0_square, self._num_parts)

    def update(self, factor: float, feed: Feed | None, *, is_skipped: bool = False) -> None:
        if feed is not None:
            lease = Lease(self._flat(), self.payload.pool)
            # Without gradients the optimizers of joiners change nothing.
            feed(lease, [has and not is_skipped for has in self._has_gradient])
            lease.release()
        if not is_skipped:
            self._state.update(factor, [self._place])
        self._drop_gradients()
        if self._is_alternating:
            # The next update of the step begins with the buffers of this one.
            self._buffers.begin_step()
        else:
            self._is_begun = False

    def rewind(self) -> None:
        self._buffers.reset()

    def discard(self) -> None:
        if self._tail is not None and self._is_begun:
            self._buffers.reset()
        for reducer in self._reducers:
            reducer.abandon()
        self.payload.forget_views()
        self._drop_gradients()
        self._group = self._tail = None
        self._is_begun = False

    def leave_loop(self) -> None:
        """Nothing is to be done."""

    @property
    def _is_alternating(self) -> bool:
        return len(self._reducers) > 1

    @property
    def _members(self) -> Group:
        assert self._group is not None
        return self._group

    def _cut(self, low: int, high: int) -> list[tuple[int, int]]:
        """These samples in parts that differ by one sample at most."""
        size = high - low
        num_parts = -(-size // (self._max_samples or size))
        ends = [low + size * part // num_parts for part in range(num_parts + 1)]
        return list(pairwise(ends))

    def _backward_of_part(self, root: torch.Tensor, gradient: torch.Tensor | None, part: float) -> None:
        """One of several passes, whose gradients are measured before they are added to those of the passes before."""
        before = [parameter.grad for parameter in self._parameters]
        self._drop_gradients()
        torch.autograd.backward(root, gradient)
        self._square += self._mean_square() / part
        with torch.no_grad():
            for parameter, earlier in zip(self._parameters, before, strict=True):
                if earlier is not None:
                    # In this order, as a backward pass adds.
                    parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def _squares_alone(self) -> tuple[float, float] | None:
        if not self._is_measured:
            return None
        mean_square = self._mean_square()
        if self._part != (0, self._num_samples):
            return self._square, mean_square
        return mean_square + (self._half.spread() if self._num_parts > 1 else 0.0), mean_square

    def _mean_square(self) -> float:
        return square_norm(parameter.grad for parameter in self._parameters)

    def _make_dense(self) -> None:
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad = dense(parameter.grad)

    def _flat(self) -> torch.Tensor:
        """The gradients in a vector, as joiners get them."""
        vector = self.payload.pool.take()
        with torch.no_grad():
            for view, parameter in zip(self.payload.gradient_views(vector), self._parameters, strict=True):
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
        return vector

    def _drop_gradients(self, but: Sequence[int] = ()) -> None:
        kept = set(but)
        for at, parameter in enumerate(self._parameters):
            if at not in kept:
                parameter.grad = None
