"""What an all-reduce over a store is made of: puts, gets and sums of one rank, in order, with what each waits for."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Put(msgspec.Struct, frozen=True, kw_only=True, tag="put"):
    """Write elements `start` to `stop` of this rank's values under a key. `after` are indices of this rank's steps.

    `num_readers` is how many ranks get it: the only reader of a key deletes it, one of several leaves it to the writer.
    """

    key: str
    start: int
    stop: int
    num_readers: int
    after: tuple[int, ...] = ()


class Get(msgspec.Struct, frozen=True, kw_only=True, tag="get"):
    """Read what rank `writer` puts under a key.

    A final one becomes elements `start` to `stop` of the values; else it is held, as the writer's addend, for a sum.
    """

    key: str
    start: int
    stop: int
    writer: int
    is_final: bool
    is_only_reader: bool
    after: tuple[int, ...] = ()


class Reduce(msgspec.Struct, frozen=True, kw_only=True, tag="reduce"):
    """Add up elements `start` to `stop` of ranks `addends`, in that order, whatever the order in which they arrived.

    The sum replaces these elements of the values. A rank's own addend is its values, unless it has got it as others do.
    """

    start: int
    stop: int
    addends: tuple[int, ...]
    after: tuple[int, ...] = ()


Step = Put | Get | Reduce


class CollectiveSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """An all-reduce of `num_elements` among `num_workers`, by what each rank does: `ranks[rank]` are its steps.

    Puts are begun in the order of the steps, and so are gets, each as soon as what it is `after` has ended and its
    lane has room; puts do not wait for gets but through `after`, nor gets for puts. Ranks from `num_workers` on are
    servers: they add nothing of their own, and end with the sum like every rank.
    """

    name: str
    num_workers: int
    num_elements: int
    ranks: tuple[tuple[Step, ...], ...]


def bounds(start: int, stop: int, num_parts: int) -> list[tuple[int, int]]:
    """`start` to `stop` cut into parts whose sizes differ by one at most; some are empty if there are more than fit."""
    size = stop - start
    return [(start + part * size // num_parts, start + (part + 1) * size // num_parts) for part in range(num_parts)]


class StepList:
    """Collects one rank's steps. Each method returns the new step's index, or None: of nothing, nothing is made."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def put(
        self, key: str, where: tuple[int, int], *, num_readers: int, after: Iterable[int | None] = ()
    ) -> int | None:
        if where[0] == where[1] or num_readers == 0:
            return None
        return self._append(Put(key=key, start=where[0], stop=where[1], num_readers=num_readers, after=_present(after)))

    def get(
        self,
        key: str,
        where: tuple[int, int],
        writer: int,
        *,
        num_readers: int,
        is_final: bool,
        after: Iterable[int | None] = (),
    ) -> int | None:
        if where[0] == where[1]:
            return None
        return self._append(
            Get(
                key=key,
                start=where[0],
                stop=where[1],
                writer=writer,
                is_final=is_final,
                is_only_reader=num_readers == 1,
                after=_present(after),
            )
        )

    def reduce(self, where: tuple[int, int], num_workers: int, *, after: Iterable[int | None] = ()) -> int | None:
        """Append a sum over all workers, in the order of their ranks."""
        if where[0] == where[1]:
            return None
        return self._append(
            Reduce(start=where[0], stop=where[1], addends=tuple(range(num_workers)), after=_present(after))
        )

    def steps(self) -> tuple[Step, ...]:
        return tuple(self._steps)

    def _append(self, step: Step) -> int:
        self._steps.append(step)
        return len(self._steps) - 1


def _present(after: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(sorted({index for index in after if index is not None}))
