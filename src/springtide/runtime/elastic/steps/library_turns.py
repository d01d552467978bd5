"""Steps of a library's loop in which optimizers take turns: each turn exchanges its optimizer's gradients.

The program calls its optimizers when it likes, and several times in a step. A step is committed as a whole: if a member
is lost in the midst of it, what its turns have updated is taken back.
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
from springtide.runtime.elastic.steps.state_copy import StateCopy
from springtide.runtime.elastic.steps.tail import Tail
from springtide.runtime.models.named_tensors import TrainingState

# Ids of samples give a number below this one; what is added for a turn is a multiple of it.
_TURN = float(1 << 24)
# What members add up before a backward pass or a turn is of one size, as otherwise a process could end.
NUM_TOTALS = 51


class LibraryTurns:
    """A StepMethod for a library's loop: `begin`; `add_loss` in its passes; for each turn `begin_turn`, `exchange`.

    It never updates the model.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._buffers = BufferChanges(state, replaces=True)
        self._copy = StateCopy(state)
        self.payload = StepVector(state, 1)
        self._parameters = self.payload.parameters
        places = [state.places.get(name, -1) for name in self.payload.names]
        self._owned = [[at for at, own in enumerate(places) if own == place] for place in range(len(state.optimizers))]
        self._reducers = [Reducer([self._parameters[at] for at in owned]) for owned in self._owned]
        self._group: Group | None = None
        self._tail: Tail | None = None
        self._is_begun = False
        # The place of the optimizer whose turn it is, None for a turn of none; and the number of turns of this step.
        self._place: int | None = None
        self._num_turns = 0
        # This member's part of the losses since the last turn, and of the batch; what the turns before have told.
        self._loss: torch.Tensor | float = 0.0
        self._weight = 0.0
        self._told = 0.0
        self._mark = 0.0
        self.exact_obstacle = ""

    @property
    def can_discard(self) -> bool:
        """Alone there is no peer that could fail, so a step that was begun is completed."""
        return self._tail is not None

    @property
    def num_turns(self) -> int:
        """How many turns of the present step were exchanged."""
        return self._num_turns

    def warm(self, rank: int, world_size: int, feeds_joiners: bool) -> None:
        if world_size > 1:
            for reducer in self._reducers:
                reducer.reserve()

    def begin(self, batch: GlobalBatch, group: Group | None, *, is_measured: bool) -> None:
        if group is not self._group:
            self._group, self._tail = group, None
            if group is not None and group.world_size > 1:
                self._tail = Tail(self._state, self._buffers, len(self._parameters), group)
        self._loss, self._told, self._num_turns, self._is_begun = 0.0, 0.0, 0, True
        self.extend(batch)
        if self._tail is not None:
            self._buffers.begin_step()
            self._copy.keep()

    def extend(self, batch: GlobalBatch) -> None:
        """The step is on all samples of `batch`, which has more than the one that it was begun on."""
        self._mark = float(int(batch.ids_digest[:6], 16))

    def totals(self, values: list[float]) -> list[float]:
        """The sums over the members of at most NUM_TOTALS numbers of each, before a backward pass.

        Raises CollectiveError, InvalidRequest if members are elsewhere.
        """
        return values if self._tail is None else self._agreed(-1.0 - self._mark, values)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Say what a backward pass adds to the step's loss, as this member's part of it."""
        self._loss = self._loss + loss.detach()

    def begin_turn(self, place: int | None, weight: float) -> None:
        """The optimizer at `place` is about to update. `weight` is this member's part of the samples of the step.

        With None nothing is updated: only losses, buffers and what members say is exchanged.
        """
        self._place, self._weight = place, weight

    def exchange(self, step: float, flags: Flags, last_square: float) -> Reduced:
        """Sum the gradients of the turn. Raises CollectiveError, InvalidRequest if members are at other turns."""
        loss, self._loss = float(self._loss), 0.0
        if self._tail is None:
            self._num_turns += 1
            self._told += loss
            return Reduced(loss=self._told, flags=flags, has_gradient=[])
        assert self._group is not None
        # What follows has another size in another turn, which would end the process of a member.
        number = 0 if self._place is None else 1 + self._place
        mark = self._mark + _TURN * (1 + self._num_turns + (number << 16))
        self._agreed(mark, [])
        own, works = [False] * len(self._parameters), []
        if self._place is not None:
            reducer = self._reducers[self._place]
            reducer.begin(self._group)
            for at, has in zip(self._owned[self._place], reducer.send_rest(), strict=True):
                own[at] = has
            works = reducer.works
        mean = loss / self._weight if self._weight else 0.0
        summed = self._tail.exchange(step, mean, self._weight, own, replace(flags, weight=0.0), works)
        if self._place is not None:
            self._reducers[self._place].attach([summed.has_gradient[at] for at in self._owned[self._place]])
        # The next turn begins with the buffers of this one.
        self._buffers.begin_step()
        self._num_turns += 1
        self._told += summed.loss
        return Reduced(loss=self._told, flags=summed.flags, has_gradient=summed.has_gradient)

    def _agreed(self, mark: float, values: list[float]) -> list[float]:
        """The sums of the members' values, if all gave this mark. Raises CollectiveError, InvalidRequest."""
        assert self._group is not None
        told = [mark, *values, *[0.0] * (NUM_TOTALS - len(values))]
        sums = self._group.sums(told, self._state.device)
        if sums[0] != mark * self._group.world_size:
            raise InvalidRequest(
                "workers are at other updates or samples: an optimizer's step() or a backward pass depends on what "
                "differs between workers (a loss, an attribute that a joiner lacks; decide by the number of the "
                "batch), or the sampler's order does; or give the job one worker: --workers 1"
            )
        return sums[1:]

    def update(self, factor: float, feed: Feed | None, *, is_skipped: bool = False) -> None:
        """Does nothing: the library has updated the model when its step is committed."""
        self._is_begun = False

    def discard(self) -> None:
        """Take back what the turns of the step have updated."""
        if self._tail is not None and self._is_begun:
            self._copy.restore()
        for reducer in self._reducers:
            reducer.abandon()
        for parameter in self._parameters:
            parameter.grad = None
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
        """Does nothing: a step is done again as a whole."""

    def leave_loop(self) -> None:
        """Nothing is to be done."""
