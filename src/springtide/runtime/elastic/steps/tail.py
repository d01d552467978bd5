"""The last and small exchange of a step: the loss, changes of buffers, numbers of the optimizer, the members' flags.

Everything is summed in one vector of float64. What each member says for itself has a place of its own, and what only
rank 0 says is zero elsewhere. Every member also says which exchange of which step this is: members that are not at the
same one find it here, before anything is applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from springtide.core.errors import CollectiveError
from springtide.runtime.elastic.group import Group
from springtide.runtime.elastic.steps.buffers import BufferChanges
from springtide.runtime.elastic.steps.method import Flags
from springtide.runtime.models.named_tensors import TrainingState

# The kind of exchange: no sum of losses and gradients comes out as this number by chance.
_KIND = 7_340_033.0
_NUM_SAID = 6


@dataclass(frozen=True, slots=True)
class TailSum:
    """What the members' tails add up to."""

    loss: float
    flags: Flags
    has_gradient: list[bool]
    square: float = 0.0
    rank0_square: float = 0.0


class Tail:
    """The tails of the steps of one group's generation; all members begin it with the same step."""

    def __init__(self, state: TrainingState, buffers: BufferChanges, num_parameters: int, group: Group) -> None:
        self._state = state
        self._buffers = buffers
        self._group = group
        self._num_parameters = num_parameters
        self._names = [*buffers.floats, *buffers.integers]
        # Buffers that have changed in this generation, the only ones whose changes travel in the tail.
        self._moving: set[str] = set()
        self._changes_at = 1 + num_parameters + len(self._names) + state.num_numbers + 2 + _NUM_SAID * group.world_size

    def exchange(
        self,
        step: float,
        loss: float,
        weight: float,
        has_gradient: Sequence[bool],
        flags: Flags,
        works: Sequence[Any],
        *,
        square: float = 0.0,
        last_square: float = 0.0,
    ) -> TailSum:
        """Sum the tails, and apply what changes buffers and the optimizer's numbers. Raises CollectiveError.

        `loss` is the mean over this member's samples, which are the part `weight` of the batch. `works` are the sums of
        gradients that were begun before: they are complete, too, when this returns.
        """
        is_first = self._group.rank == 0
        changed = self._buffers.changed()
        floats, integers = self._split(self._moving)
        size = self._changes_at + self._buffers.size([*floats, *integers])
        vector = torch.zeros(size, dtype=torch.float64)
        said = [_KIND, float(step), float(flags.ready), float(flags.needs_sync), float(flags.preempt), flags.weight]
        nothing = [0.0] * _NUM_SAID
        head = [loss * weight if weight else 0.0, *map(float, has_gradient), *map(float, changed)]
        head += self._state.numbers() if is_first else [0.0] * self._state.num_numbers
        head += [square, last_square if is_first else 0.0]
        for rank in range(self._group.world_size):
            head += said if rank == self._group.rank else nothing
        vector[: self._changes_at] = torch.tensor(head, dtype=torch.float64)
        self._write_changes(vector[self._changes_at :], floats, integers, weight)
        summed = self._sum(vector, works)
        values = summed[: self._changes_at].tolist()
        agreed = self._agreed(step, values[-_NUM_SAID * self._group.world_size :])
        counts = values[1 : 1 + self._num_parameters]
        moved = values[1 + self._num_parameters :]
        is_moving = {name for name, count in zip(self._names, moved, strict=False) if count > 0}
        news = self._split(is_moving - self._moving)
        self._exchange_news(*news, weight)
        self._apply_changes(summed[self._changes_at :], floats, integers)
        self._moving |= is_moving
        numbers_at = 1 + self._num_parameters + len(self._names)
        self._state.set_numbers(values[numbers_at : numbers_at + self._state.num_numbers])
        square, rank0_square = values[numbers_at + self._state.num_numbers :][:2]
        return TailSum(
            loss=values[0],
            flags=agreed,
            has_gradient=[count > 0 for count in counts],
            square=square,
            rank0_square=rank0_square,
        )

    def _split(self, names: set[str]) -> tuple[list[str], list[str]]:
        """These buffers of floats, and of integers, in the model's order."""
        buffers = self._buffers
        return [name for name in buffers.floats if name in names], [name for name in buffers.integers if name in names]

    def _write_changes(self, out: torch.Tensor, floats: Sequence[str], integers: Sequence[str], weight: float) -> None:
        end = self._buffers.size(floats)
        self._buffers.write_floats(out[:end], floats, weight)
        if self._group.rank == 0:
            # Rank 0 has samples in every batch. Counts of batches are the same on every member that has.
            self._buffers.write_integers(out[end:], integers)

    def _apply_changes(self, changes: torch.Tensor, floats: Sequence[str], integers: Sequence[str]) -> None:
        end = self._buffers.size(floats)
        self._buffers.apply_floats(changes[:end], floats)
        self._buffers.apply_integers(changes[end:], integers)

    def _exchange_news(self, floats: Sequence[str], integers: Sequence[str], weight: float) -> None:
        """Exchange the changes of buffers that did not change before, once in a generation."""
        if not floats and not integers:
            return
        vector = torch.zeros(self._buffers.size([*floats, *integers]), dtype=torch.float64)
        self._write_changes(vector, floats, integers, weight)
        self._apply_changes(self._sum(vector), floats, integers)

    def _sum(self, vector: torch.Tensor, works: Sequence[Any] = ()) -> torch.Tensor:
        sent = vector.to(self._state.device)
        self._group.finish([*works, self._group.start_all_reduce(sent)])
        return sent.cpu()

    def _agreed(self, step: float, said: Sequence[float]) -> Flags:
        """What all members said, as one. Raises CollectiveError if one is at another exchange or step."""
        places = [said[at : at + _NUM_SAID] for at in range(0, len(said), _NUM_SAID)]
        for rank, (kind, its_step, *_) in enumerate(places):
            if kind != _KIND or its_step != step:
                raise CollectiveError(f"rank {rank} is not at the same exchange of step {step} as this member")
        readies, needs, preempts, weights = zip(*(place[2:] for place in places), strict=True)
        ready = int(readies[0]) if len(set(readies)) == 1 else 0
        return Flags(ready=ready, needs_sync=any(needs), preempt=int(max(preempts)), weight=sum(weights))
