"""What the trainer needs from a way to compute and exchange a step: overlapped, sharded, or a library's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from springtide.runtime.data.shards import GlobalBatch
from springtide.runtime.elastic.catchup import Lease
from springtide.runtime.elastic.group import Group
from springtide.runtime.elastic.step_vector import StepVector
from springtide.runtime.elastic.training_cursor import TrainingCursor


@dataclass(frozen=True, slots=True)
class Flags:
    """What a member says in a step; after the exchange, what all agree on.

    `ready` is the generation whose group a member has connected (0: none). The members agree on it only if all said the
    same. `needs_sync`: a joiner needs the whole state. `preempt` is the generation as which all are to leave (0: none).
    `weight` is what the parts of the batch count for, which is added up.
    """

    ready: int = 0
    needs_sync: bool = False
    preempt: int = 0
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Reduced:
    """The outcome of a step's exchange, alike on every member. `loss` is the mean over the global batch.

    `squares` are the parts' mean square norm, weighted by samples, and that of the mean gradient, where gradient noise
    is measured; `num_parts` counts the parts (0: the filled virtual shards). `rank0_square` is what rank 0 sent of
    the step before.
    """

    loss: float
    flags: Flags
    has_gradient: list[bool]
    squares: tuple[float, float] | None = None
    rank0_square: float = 0.0
    num_parts: int = 0


# Gets the reduced gradients, and for every parameter whether it has one, before they are applied.
Feed = Callable[[Lease, list[bool]], None]


class StepMethod(Protocol):
    """Computes one step after the other: `begin`; for each part `begin_part` and `backward`; `exchange`; `update`.

    Every member has at least one part. Where a batch has fewer samples than there are members, the others get samples
    that count for nothing, so that user code runs on every worker in every step.
    """

    # Flat vectors of gradients, in which joiners get those of the steps that they apply.
    payload: StepVector
    # Why the parts of an exact batch have a pass each, a code of EXACT_OBSTACLES; empty if they have one together.
    exact_obstacle: str

    @property
    def can_discard(self) -> bool:
        """Whether a step can be given up after a part of it was computed."""

    def warm(self, rank: int, world_size: int, feeds_joiners: bool) -> None:
        """Allocate what a rank of the next group needs. From any thread."""

    def begin(self, batch: GlobalBatch, group: Group | None, *, is_measured: bool) -> None:
        """Begin a step in the group (None: alone). `is_measured`: gradient noise is measured in it."""

    def parts(self, batch: GlobalBatch, group: Group | None) -> list[tuple[int, tuple[int, int]]]:
        """The numbers and (first, end) samples of this member's parts of a batch, as `begin_part` will give them."""

    def has_part(self) -> bool:
        """Whether this member has a part of the batch left to compute."""

    def begin_part(self) -> tuple[int, tuple[int, int]]:
        """The next part's number and its (first, end) samples; gradients are cleared for it."""

    def backward(
        self, loss: torch.Tensor, root: torch.Tensor | None = None, place: int = 0, weight: float | None = None
    ) -> None:
        """Run backward for the part that was begun; `loss` is the mean over it, a tensor without dimensions.

        `root` is where it begins, if that is not the loss itself: the loss times a scale. `place` is that of the
        optimizer whose parameters are to get gradients. Where there are several, a step has a `backward`, an `exchange`
        and an `update` for each in turn, as often as user code likes.
        `weight` is only added up; None: that of its samples.
        """

    def exchange(self, step: float, flags: Flags, last_square: float) -> Reduced:
        """Reduce what the members computed of `step`. Raises CollectiveError; the step must then be discarded.

        The parameters then have the sums as their gradients, which the caller may change before `update`.
        """

    def update(self, factor: float, feed: Feed | None, *, is_skipped: bool = False) -> None:
        """Take a step of the optimizer, with the learning rates multiplied by `factor`; if `is_skipped`, none."""

    def rewind(self) -> None:
        """Drop what passes did to buffers since the last update: the state has the update that they were for."""

    def discard(self) -> None:
        """Drop what was computed of the step: the state is that of the step before."""

    def leave_loop(self) -> None:
        """User code has left its loop, perhaps within a part."""


def parts_ahead(
    training_cursor: TrainingCursor, method: StepMethod, group: Group | None, part: int
) -> Iterator[tuple[GlobalBatch, int, tuple[int, int]]]:
    """Batch, number and (first, end) samples of a member's parts, from `part` of the next step on.

    They are right as long as the group and the batch size stay.
    """
    for index, batch in enumerate(training_cursor.batches_ahead()):
        for number, bounds in method.parts(batch, group):
            if index or number >= part:
                yield batch, number, bounds
