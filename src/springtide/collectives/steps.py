"""The steps of an all-reduce over a store: puts, gets and sums of one rank, with the steps that each waits for."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Put(msgspec.Struct, frozen=True, kw_only=True, tag="put"):
    """Write elements `start` to `stop` of this rank's values under a key. `after` are indices of this rank's steps.

    `num_readers` is how many ranks get it: a single reader deletes the key, otherwise its writer does.
    """

    key: str
    start: int
    stop: int
    num_readers: int
    after: tuple[int, ...] = ()


class Get(msgspec.Struct, frozen=True, kw_only=True, tag="get"):
    """Read what rank `writer` puts under a key.

    A final result replaces elements `start` to `stop` of the values; anything else is kept as the writer's addend.
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

    The sum replaces these elements of the values. A rank's own addend is its values, unless it got them from the store.
    """

    start: int
    stop: int
    addends: tuple[int, ...]
    after: tuple[int, ...] = ()


Step = Put | Get | Reduce


class CollectiveSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """An all-reduce of `num_elements` among `num_workers`: `ranks[rank]` are the steps of each rank.

    Puts begin in the order of the steps, and so do gets, each as soon as the steps in its `after` have ended and its
    lane has room; a put waits for a get, or a get for a put, only through `after`. Ranks from `num_workers` on are
    servers: they have no values of their own, and end with the sum like every rank.
    """

    name: str
    num_workers: int
    num_elements: int
    ranks: tuple[tuple[Step, ...], ...]


def bounds(start: int, stop: int, num_parts: int) -> list[tuple[int, int]]:
    """Cut `start` to `stop` into parts whose sizes differ by at most one; some may be empty."""
    size = stop - start
    return [(start + part * size // num_parts, start + (part + 1) * size // num_parts) for part in range(num_parts)]


class StepList:
    """Builds one rank's steps. Each method returns the new step's index, or None if the step would be empty."""

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
