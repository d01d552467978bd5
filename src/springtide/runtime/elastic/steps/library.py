"""Steps whose passes and whose update a library makes: here only what they exchange.

The library's last backward pass of a step is the one in which gradients are summed over the group; those of earlier
passes of the same step are in what it exchanges.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from springtide.core.errors import InvalidRequest
from springtide.runtime.data.shards import GlobalBatch
from springtide.runtime.elastic.group import Group
from springtide.runtime.elastic.step_vector import StepVector
from springtide.runtime.elastic.steps.buffers import BufferChanges
from springtide.runtime.elastic.steps.method import Feed, Flags, Reduced
from springtide.runtime.elastic.steps.reducer import Reducer
from springtide.runtime.elastic.steps.tail import Tail
from springtide.runtime.models.named_tensors import TrainingState


class LibrarySteps:
    """A StepMethod for a library's loop: `begin`; for its passes `passes`; `exchange`. It never updates the model."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._buffers = BufferChanges(state)
        self.payload = StepVector(state, 1)
        self._parameters = self.payload.parameters
        self._reducer = Reducer(self._parameters)
        self._group: Group | None = None
        self._tail: Tail | None = None
        self._is_begun = False
        # This member's part of the mean loss, and of the batch.
        self._loss: torch.Tensor | float = 0.0
        # A number that follows from the step's ids, the same on all members.
        self._mark = 0.0
        self._weight = 0.0
        self.exact_obstacle = ""

    @property
    def can_discard(self) -> bool:
        """Alone there is no peer that could fail, so a step that was begun is completed."""
        return self._tail is not None

    def warm(self, rank: int, world_size: int, feeds_joiners: bool) -> None:
        if world_size > 1:
            self._reducer.reserve()

    def begin(self, batch: GlobalBatch, group: Group | None, *, is_measured: bool) -> None:
        if group is not self._group:
            self._group, self._tail = group, None
            if group is not None and group.world_size > 1:
                self._tail = Tail(self._state, self._buffers, len(self._parameters), group)
        self._loss, self._weight, self._is_begun = 0.0, 0.0, True
        self._mark = float(int(batch.ids_digest[:6], 16))
        self._drop_gradients()
        if self._tail is not None:
            self._buffers.begin_step()

    def totals(self, values: list[float]) -> list[float]:
        """The sums over the members, each of which gives as many numbers. Raises CollectiveError."""
        if self._tail is None:
            return values
        assert self._group is not None
        return self._group.sums(values, self._state.device)

    def passes(self, loss: torch.Tensor, weight: float, *, is_last: bool) -> None:
        """Say that a backward pass comes next: what it adds to the step's loss, and its part of the batch.

        `is_last`: it is the last pass of the step, whose gradients are exchanged while it runs.
        """
        self._loss = self._loss + loss.detach()
        self._weight += weight
        if is_last and self._tail is not None:
            assert self._group is not None
            self._reducer.begin(self._group)

    def exchange(self, step: float, flags: Flags, last_square: float) -> Reduced:
        loss = float(self._loss)
        if self._tail is None:
            return Reduced(loss=loss, flags=flags, has_gradient=[])
        own = self._reducer.send_rest()
        mean = loss / self._weight if self._weight else 0.0
        # What is added up for parts of a batch is no weight here: the library's parts have theirs already.
        said = replace(flags, weight=self._mark)
        summed = self._tail.exchange(step, mean, self._weight, own, said, self._reducer.works)
        assert self._group is not None
        if summed.flags.weight != self._mark * self._group.world_size:
            raise InvalidRequest(
                "workers have other samples in the same step: the program's sampler does not give the same order on "
                "every worker (have it draw from torch's generator, as shuffle=True does), or one of them has left its "
                "loop by something that only it knows; or give the job one worker: --workers 1"
            )
        self._reducer.attach(summed.has_gradient)
        agreed = replace(summed.flags, weight=0.0)
        return Reduced(loss=summed.loss, flags=agreed, has_gradient=summed.has_gradient)

    def update(self, factor: float, feed: Feed | None, *, is_skipped: bool = False) -> None:
        """Does nothing: the library has updated the model when its step is committed."""
        self._is_begun = False

    def discard(self) -> None:
        if self._tail is not None and self._is_begun:
            self._buffers.reset()
        self._reducer.abandon()
        self._drop_gradients()
        self._group = self._tail = None
        self._is_begun = False

    def parts(self, batch: GlobalBatch, group: Group | None) -> list[tuple[int, tuple[int, int]]]:
        """None: the passes are the library's."""
        return []

    def has_part(self) -> bool:
        return False

    def begin_part(self) -> tuple[int, tuple[int, int]]:
        raise AssertionError("the passes are the library's")

    def backward(
        self, loss: torch.Tensor, root: torch.Tensor | None = None, place: int = 0, weight: float | None = None
    ) -> None:
        raise AssertionError("the passes are the library's")

    def rewind(self) -> None:
        """Does nothing: there is one update in a step."""

    def leave_loop(self) -> None:
        """Nothing is to be done."""

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
