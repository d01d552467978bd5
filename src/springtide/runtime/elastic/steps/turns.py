"""The turns that optimizers take in one step."""

from __future__ import annotations

from springtide.runtime.elastic.steps.method import Reduced


class Turns:
    """Which optimizer's turn it is, and which turns of the step the state has already.

    A step that is done again after another member was lost may begin with turns whose updates every member has made:
    user code takes them again, and nothing comes of it. With one optimizer a step is one turn.
    """

    def __init__(self) -> None:
        self.place = 0
        # Whether the state has the update of this turn.
        self.is_repeated = False
        # The outcome of the newest update of several in a step, with which the boundary commits the step.
        self.last: Reduced | None = None
        self._num_taken = 0

    def begin_step(self) -> None:
        self._num_taken = 0

    def begin(self, place: int, num_updates: int) -> None:
        """The optimizer at `place` takes its turn; the state has the first `num_updates` of the step."""
        self.place, self.is_repeated = place, self._num_taken < num_updates

    def end(self) -> bool:
        """User code updates; whether the state has this turn already."""
        self._num_taken += 1
        was_repeated, self.is_repeated = self.is_repeated, False
        return was_repeated

    def pop_last(self) -> Reduced | None:
        """The outcome to commit the step with, once; None where a turn has not updated yet, or one optimizer did."""
        last, self.last = self.last, None
        return last
