"""Walks one rank's schedule against a store: an upload lane and a download lane, several requests in flight on each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.collectives.schedule import rank_steps
from springtide.collectives.steps import Get, Put, Reduce, Step
from springtide.core.errors import CollectiveError, InvalidRequest, ObjectMissing, StorageError
from springtide.core.functions import Collective
from springtide.core.ports import Store


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one all-reduce took and moved, as this rank saw it. Reads that found nothing are the store's to count."""

    took_s: float
    num_puts: int
    num_gets: int
    bytes_up: int
    bytes_down: int


class Communicator:
    """One rank's end of all-reduces among ranks that reach each other through a store only.

    Ranks call `all_reduce` in the same order, each time with a prefix that was never used before (the generation, the
    attempt and the step belong into it). Whatever arrives first, addends are added in the order of ranks: the sum is
    the same bit for bit on every rank, in every run, for every collective and any number of chunks.

    Keys are removed without ever listing: what one rank reads it deletes once it has it; what several read is deleted
    by its writer when a later all-reduce has brought something from each of them, which they began only after they
    had read it. What the last all-reduce leaves lies under its prefix, for the process that ends the job to delete.
    `now_s` is a clock in seconds that never goes back; threads that wait look up every `check_s`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        *,
        now_s: Callable[[], float],
        collective: Collective = "duplex",
        num_chunks: int = 1,
        num_shards: int = 0,
        num_in_flight: int = 4,
        check_s: float = 1.0,
    ) -> None:
        """Raises InvalidRequest for a collective or counts that cannot be. `num_shards` is SMLT's m (0: see chunks)."""
        if num_in_flight < 1:
            raise InvalidRequest(f"{num_in_flight} requests in flight move nothing; allow at least 1")
        rank_steps(collective, rank, num_ranks, 0, num_chunks, num_shards)
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._now_s = now_s
        self._collective: Collective = collective
        self._num_chunks = num_chunks
        self._num_shards = num_shards
        self._num_in_flight = num_in_flight
        self._check_s = check_s
        self._steps: dict[int, tuple[Step, ...]] = {}
        # How many all-reduces were begun here, and the newest from which each other rank has been heard.
        self._turn = 0
        self._heard = {other: 0 for other in range(num_ranks) if other != rank}
        self._left: list[tuple[int, list[str]]] = []
        self._sweepers: list[_Sweeper] = []

    def all_reduce(
        self,
        values: NDArray[Any],
        prefix: str,
        *,
        mean: bool = False,
        abandon: Callable[[], bool] | None = None,
        timeout_s: float | None = None,
    ) -> SyncReport:
        """Replace `values` (1-D, contiguous, floats), in place, by the sum over all ranks, or by its mean.

        While it waits, `abandon` is called every `check_s`: where it says True, or raises, nothing more of this
        all-reduce is waited for. Raises CollectiveError then and at the timeout, StorageError where the store fails;
        at once, whatever is still under way (deletes that failed raise at a later call). The values are then neither
        the old nor the new ones, and the prefix must not be used again.
        """
        if values.ndim != 1 or not values.flags.c_contiguous or not values.flags.writeable or values.dtype.kind != "f":
            raise InvalidRequest("an all-reduce takes a one-dimensional, contiguous, writable array of floats")
        # A delete that hangs delays no rank; the error of one that failed is the store's, and is raised.
        self._sweepers = [sweeper for sweeper in self._sweepers if not sweeper.is_done()]
        self._turn += 1
        began_s = self._now_s()
        steps = self._steps_of(values.size)
        scale = 1.0 / self._num_ranks if mean else None
        walk = _Walk(self._store, self._rank, steps, values, prefix, scale, self._check_s)
        try:
            walk.start(self._num_in_flight)
            self._watch(walk, abandon, None if timeout_s is None else began_s + timeout_s)
        except BaseException:
            walk.abandon()
            raise
        self._tidy(steps, prefix)
        size = values.itemsize
        up = [step.stop - step.start for step in steps if isinstance(step, Put)]
        down = [step.stop - step.start for step in steps if isinstance(step, Get)]
        return SyncReport(
            took_s=self._now_s() - began_s,
            num_puts=len(up),
            num_gets=len(down),
            bytes_up=size * sum(up),
            bytes_down=size * sum(down),
        )

    def take_over(self, prefix: str, num_elements: int) -> None:
        """Clean up, when the time comes, what the rank's predecessor has left of an all-reduce under that prefix."""
        keys = _shared_keys(self._steps_of(num_elements), prefix)
        if keys:
            self._left.append((self._turn, keys))

    def flush(self) -> None:
        """Wait until what was to be deleted is deleted: at the end of a process's work. Raises StorageError."""
        sweepers, self._sweepers = self._sweepers, []
        for sweeper in sweepers:
            sweeper.join()
        for sweeper in sweepers:
            sweeper.is_done()

    def _steps_of(self, num_elements: int) -> tuple[Step, ...]:
        if num_elements not in self._steps:
            self._steps[num_elements] = rank_steps(
                self._collective, self._rank, self._num_ranks, num_elements, self._num_chunks, self._num_shards
            )
        return self._steps[num_elements]

    def _watch(self, walk: _Walk, abandon: Callable[[], bool] | None, deadline_s: float | None) -> None:
        """Wait until the walk is over, asking now and then whether it is still wanted."""
        ask_at_s = self._now_s() + self._check_s
        while True:
            now_s = self._now_s()
            until_s = ask_at_s if deadline_s is None else min(ask_at_s, deadline_s)
            if walk.wait(max(until_s - now_s, 0.0)):
                return
            now_s = self._now_s()
            if deadline_s is not None and now_s >= deadline_s:
                raise CollectiveError(f"the all-reduce was not over at its deadline; {walk.missing()}")
            if now_s >= ask_at_s:
                if abandon is not None and abandon():
                    raise CollectiveError("the all-reduce was abandoned")
                ask_at_s = self._now_s() + self._check_s

    def _tidy(self, steps: Iterable[Step], prefix: str) -> None:
        """Delete what this rank alone has read, and what all others are known to have read."""
        gets = [step for step in steps if isinstance(step, Get)]
        for step in gets:
            if step.writer != self._rank:
                self._heard[step.writer] = self._turn
        keys = [f"{prefix}/{step.key}" for step in gets if step.is_only_reader]
        heard = min(self._heard.values(), default=self._turn)
        for turn, old in self._left:
            if turn < heard:
                keys += old
        self._left = [(turn, old) for turn, old in self._left if turn >= heard]
        mine = _shared_keys(steps, prefix)
        if mine:
            self._left.append((self._turn, mine))
        if keys:
            self._sweepers.append(_Sweeper(self._store, keys))


class _Sweeper:
    """Deletes keys while others compute: only `flush` waits for it."""

    def __init__(self, store: Store, keys: Sequence[str]) -> None:
        self._store = store
        self._keys = keys
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._delete, name="sync-sweep", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def is_done(self) -> bool:
        """Whether it is over. Raises, once, what the store raised."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        return not self._thread.is_alive()

    def _delete(self) -> None:
        try:
            self._store.delete(self._keys)
        except Exception as error:
            self._error = error


def _shared_keys(steps: Iterable[Step], prefix: str) -> list[str]:
    return [f"{prefix}/{step.key}" for step in steps if isinstance(step, Put) and step.num_readers > 1]


class _Walk:
    """One all-reduce under way: which steps have ended, which may begin, and the first thing that went wrong."""

    def __init__(
        self,
        store: Store,
        rank: int,
        steps: tuple[Step, ...],
        values: NDArray[Any],
        prefix: str,
        scale: float | None,
        check_s: float,
    ) -> None:
        self._store = store
        self._rank = rank
        self._steps = steps
        self._values = values
        self._prefix = prefix
        self._scale = scale
        self._check_s = check_s
        self._changed = threading.Condition()
        self._waits = [len(step.after) for step in steps]
        self._followers: list[list[int]] = [[] for _ in steps]
        for index, step in enumerate(steps):
            for before in step.after:
                self._followers[before].append(index)
        self._lanes = {
            kind: [index for index, step in enumerate(steps) if isinstance(step, kind)][::-1]
            for kind in (Put, Get, Reduce)
        }
        self._num_left = len(steps)
        self._under_way: set[int] = set()
        self._held: dict[tuple[int, int, int], NDArray[Any]] = {}
        self._error: BaseException | None = None
        self._is_over = False

    def start(self, num_in_flight: int) -> None:
        """Begin: so many threads for each lane, one for sums."""
        for kind, lane in self._lanes.items():
            for _ in range(min(num_in_flight if kind is not Reduce else 1, len(lane))):
                # Daemons: a request that hangs must not keep a process alive whose work is abandoned.
                threading.Thread(target=self._work, args=(kind,), name=f"sync-{kind.__name__}", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Whether everything has ended, within so long. Raises what went wrong in any thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._num_left == 0, timeout_s)
            if self._error is not None:
                raise self._error
            return self._num_left == 0

    def abandon(self) -> None:
        """Nothing of it touches the values from now on, whatever is still under way."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def missing(self) -> str:
        with self._changed:
            gets = [self._steps[index] for index in sorted(self._under_way)]
        keys = [step.key for step in gets if isinstance(step, Get)]
        return f"still waiting for {', '.join(keys[:3])} under {self._prefix}" if keys else "nothing is waited for"

    def _work(self, kind: type[Step]) -> None:
        try:
            while (index := self._next(kind)) is not None:
                step = self._steps[index]
                if isinstance(step, Put):
                    self._store.put(f"{self._prefix}/{step.key}", self._bytes(step))
                elif isinstance(step, Get):
                    self._take(step)
                else:
                    self._add_up(step)
                self._ended(index)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _next(self, kind: type[Step]) -> int | None:
        """The next step of a lane, once nothing holds it back; None: there is none, or it is over."""
        lane = self._lanes[kind]
        with self._changed:
            while True:
                if self._is_over or self._error is not None or not lane:
                    return None
                # Sums may be done in any order; requests keep theirs.
                for place in range(len(lane) - 1, -1, -1) if kind is Reduce else (len(lane) - 1,):
                    if not self._waits[lane[place]]:
                        index = lane.pop(place)
                        self._under_way.add(index)
                        return index
                self._changed.wait()

    def _ended(self, index: int) -> None:
        with self._changed:
            self._under_way.discard(index)
            self._num_left -= 1
            for follower in self._followers[index]:
                self._waits[follower] -= 1
            self._changed.notify_all()

    def _bytes(self, step: Put) -> memoryview:
        view: memoryview = self._values[step.start : step.stop].data
        return view.cast("B")

    def _take(self, step: Get) -> None:
        """Wait for an object and put it in its place."""
        key = f"{self._prefix}/{step.key}"
        while True:
            try:
                data = self._store.wait(key, self._check_s)
                break
            except ObjectMissing:
                if self._is_over or self._error is not None:
                    return
        num_bytes = (step.stop - step.start) * self._values.itemsize
        if len(data) != num_bytes:
            raise StorageError(
                f"{key} holds {len(data)} bytes where {num_bytes} were expected: its writer counts other elements, "
                "or something else writes under this prefix"
            )
        piece = np.frombuffer(data, dtype=self._values.dtype)
        with self._changed:
            if self._is_over:
                return
            if step.is_final:
                self._values[step.start : step.stop] = piece
            else:
                self._held[step.writer, step.start, step.stop] = piece

    def _add_up(self, step: Reduce) -> None:
        """The sum of all addends, in the order that the step says, in place of the rank's own."""
        own = self._values[step.start : step.stop]
        addends = []
        for rank in step.addends:
            held = self._held.pop((rank, step.start, step.stop), None)
            if held is None and rank != self._rank:
                raise CollectiveError(f"the addend of rank {rank} is missing: the schedule is not sound")
            addends.append(own if held is None else held)
        total = addends[0].copy() if len(addends) == 1 else addends[0] + addends[1]
        for addend in addends[2:]:
            total += addend
        if self._scale is not None:
            total *= total.dtype.type(self._scale)
        with self._changed:
            if not self._is_over:
                own[:] = total
