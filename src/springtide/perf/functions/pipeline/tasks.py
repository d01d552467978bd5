"""The tasks of one place's step as data (FuncPipe, section 4): their lanes, dependencies and messages.

The runtime executes such a graph.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from springtide.core.wire.functions import Place

Lane = Literal["compute", "upload", "download", "sync"]
Kind = Literal[
    "forward", "backward", "update", "send-output", "take-input", "send-gradient", "take-gradient", "exchange"
]


class Message(msgspec.Struct, frozen=True, order=True):
    """A transfer between two stages of one replica: a micro-batch's activation or gradient.

    `kind` "a" is an activation sent to the next stage, "g" a gradient sent to the previous one; `place` is the sender.
    """

    kind: Literal["a", "g"]
    place: Place
    micro_batch: int

    @property
    def reader(self) -> Place:
        return Place(self.place.stage + (1 if self.kind == "a" else -1), self.place.replica)

    @property
    def name(self) -> str:
        """As in keys, below the step's prefix."""
        return f"{self.kind}/{self.place}.{self.micro_batch}"


class StageTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task, which begins after the tasks `needs` (indices in the graph). Lanes keep the graph's order."""

    kind: Kind
    lane: Lane
    micro_batch: int = 0
    needs: tuple[int, ...] = ()
    message: Message | None = None


def step_tasks(place: Place, num_stages: int, num_replicas: int, num_micro_batches: int) -> tuple[StageTask, ...]:
    """The tasks of one step at `place`: all forward, then all backward in reversed order (FuncPipe, section 3.2).

    Inputs are downloaded as early as the link allows, and outputs are sent as soon as they are computed. Replicas
    exchange gradients as soon as the stage's backward pass ends; then the optimizer updates. A replica without
    micro-batches only exchanges and updates.
    """
    stage, replica = place.stage, place.replica
    assert 0 <= stage < num_stages, place
    assert 0 <= replica < num_replicas, place
    tasks: list[StageTask] = []

    def add(kind: Kind, lane: Lane, at: int, needs: tuple[int, ...], message: Message | None = None) -> int:
        tasks.append(StageTask(kind=kind, lane=lane, micro_batch=at, needs=needs, message=message))
        return len(tasks) - 1

    is_first, is_last = stage == 0, stage == num_stages - 1
    forwards: list[int] = []
    before: tuple[int, ...] = ()
    for at in range(num_micro_batches):
        needs = before
        if not is_first:
            source = Message("a", Place(stage - 1, replica), at)
            needs += (add("take-input", "download", at, (), source),)
        forwards.append(add("forward", "compute", at, needs))
        before = (forwards[-1],)
        if not is_last:
            add("send-output", "upload", at, before, Message("a", place, at))
    for at in reversed(range(num_micro_batches)):
        needs = (*before, forwards[at])
        if not is_last:
            source = Message("g", Place(stage + 1, replica), at)
            # The gradient cannot exist before this stage's own forward pass.
            needs += (add("take-gradient", "download", at, (forwards[at],), source),)
        before = (add("backward", "compute", at, tuple(sorted(set(needs)))),)
        if not is_first:
            add("send-gradient", "upload", at, before, Message("g", place, at))
    if num_replicas > 1:
        before = (add("exchange", "sync", 0, before),)
    add("update", "compute", 0, before)
    return tuple(tasks)


def micro_batch_bounds(
    num_samples: int, replica: int, num_replicas: int, micro_batch_size: int
) -> list[tuple[int, int]]:
    """Start and end of the micro-batches of `replica` in a global batch of `num_samples`; none of them is empty.

    The batch is divided over replicas as evenly as possible, and a replica's part over as few micro-batches as can hold
    it. A part may be empty.
    """
    low, high = replica * num_samples // num_replicas, (replica + 1) * num_samples // num_replicas
    count = -(-(high - low) // micro_batch_size)
    return [(low + at * (high - low) // count, low + (at + 1) * (high - low) // count) for at in range(count)]
