"""Executes one rank's schedule against a store: an upload and a download lane, with several requests in flight each."""

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
    """The time and the traffic of one all-reduce on this rank. Reads that found nothing are counted by the store."""

    took_s: float
    num_puts: int
    num_gets: int
    bytes_up: int
    bytes_down: int


class Communicator:
    """One rank's side of all-reduces among ranks that communicate only through a store.

    All ranks call `all_reduce` in the same order, each time with a new prefix (it should contain the generation, the
    attempt and the step). Addends are added in the order of ranks, not of arrival: the sum is the same bit for bit on
    every rank, in every run, for every collective and any number of chunks.

    Keys are deleted without list requests. An object with one reader is deleted by this reader; one with several is
    deleted by its writer after a later all-reduce in which it got an object from each reader, which shows that they
    have finished the earlier one. Objects of the last all-reduce stay, for the process that ends the job to delete.
    `now_s` is a monotonic clock in seconds; waiting threads check for an abort every `check_s`.
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
        """Raises InvalidRequest for an unknown collective or impossible counts. `num_shards` is as in `rank_steps`."""
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
        # The number of all-reduces begun, and the last one in which this rank got an object from each other rank.
        self._turn = 0
        self._last_heard = {other: 0 for other in range(num_ranks) if other != rank}
        self._to_delete: list[tuple[int, list[str]]] = []
        self._deletions: list[_Deletion] = []

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

        While it waits, `abandon` is called every `check_s`; if it returns True or raises, the all-reduce is aborted.
        Raises CollectiveError then and at the timeout, and StorageError if the store fails, without waiting for
        requests in flight (failed deletes raise at a later call). After an error the values are undefined, and the
        prefix must not be used again.
        """
        if values.ndim != 1 or not values.flags.c_contiguous or not values.flags.writeable or values.dtype.kind != "f":
            raise InvalidRequest("an all-reduce takes a one-dimensional, contiguous, writable array of floats")
        # Deletes that hang delay nothing. `is_done` raises the error of one that failed.
        self._deletions = [deletion for deletion in self._deletions if not deletion.is_done()]
        self._turn += 1
        began_s = self._now_s()
        steps = self._steps_of(values.size)
        scale = 1.0 / self._num_ranks if mean else None
        run = _ScheduleRun(self._store, self._rank, steps, values, prefix, scale, self._check_s)
        try:
            run.start(self._num_in_flight)
            self._wait_for(run, abandon, None if timeout_s is None else began_s + timeout_s)
        except BaseException:
            run.abandon()
            raise
        self._delete_read(steps, prefix)
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
        """Schedule the deletion of what the rank's predecessor has put in the all-reduce under `prefix`."""
        keys = _shared_keys(self._steps_of(num_elements), prefix)
        if keys:
            self._to_delete.append((self._turn, keys))

    def flush(self) -> None:
        """Wait for all deletes, at the end of a process's work. Raises StorageError."""
        deletions, self._deletions = self._deletions, []
        for deletion in deletions:
            deletion.join()
        for deletion in deletions:
            deletion.is_done()

    def _steps_of(self, num_elements: int) -> tuple[Step, ...]:
        if num_elements not in self._steps:
            self._steps[num_elements] = rank_steps(
                self._collective, self._rank, self._num_ranks, num_elements, self._num_chunks, self._num_shards
            )
        return self._steps[num_elements]

    def _wait_for(self, run: _ScheduleRun, abandon: Callable[[], bool] | None, deadline_s: float | None) -> None:
        """Wait for the end of the run; checks the deadline and `abandon` in between."""
        ask_at_s = self._now_s() + self._check_s
        while True:
            now_s = self._now_s()
            until_s = ask_at_s if deadline_s is None else min(ask_at_s, deadline_s)
            if run.wait(max(until_s - now_s, 0.0)):
                return
            now_s = self._now_s()
            if deadline_s is not None and now_s >= deadline_s:
                raise CollectiveError(f"the all-reduce was not over at its deadline; {run.missing()}")
            if now_s >= ask_at_s:
                if abandon is not None and abandon():
                    raise CollectiveError("the all-reduce was abandoned")
                ask_at_s = self._now_s() + self._check_s

    def _delete_read(self, steps: Iterable[Step], prefix: str) -> None:
        """Delete objects with this rank as the only reader, and own objects that all others are known to have read."""
        gets = [step for step in steps if isinstance(step, Get)]
        for step in gets:
            if step.writer != self._rank:
                self._last_heard[step.writer] = self._turn
        keys = [f"{prefix}/{step.key}" for step in gets if step.is_only_reader]
        heard = min(self._last_heard.values(), default=self._turn)
        for turn, old in self._to_delete:
            if turn < heard:
                keys += old
        self._to_delete = [(turn, old) for turn, old in self._to_delete if turn >= heard]
        shared = _shared_keys(steps, prefix)
        if shared:
            self._to_delete.append((self._turn, shared))
        if keys:
            self._deletions.append(_Deletion(self._store, keys))


class _Deletion:
    """Deletes keys in a background thread; only `flush` waits for it."""

    def __init__(self, store: Store, keys: Sequence[str]) -> None:
        self._store = store
        self._keys = keys
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._delete, name="sync-sweep", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def is_done(self) -> bool:
        """Whether it has ended. Raises the store's error, once."""
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


class _ScheduleRun:
    """A running all-reduce: which steps have ended, which may begin, and the first error."""

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
        """Start `num_in_flight` threads for each lane, and one for sums."""
        for kind, lane in self._lanes.items():
            for _ in range(min(num_in_flight if kind is not Reduce else 1, len(lane))):
                # Daemon threads, because a request that hangs must not keep the process alive.
                threading.Thread(target=self._work, args=(kind,), name=f"sync-{kind.__name__}", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for all steps; whether they ended within `timeout_s`. Raises the first error of any thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._num_left == 0, timeout_s)
            if self._error is not None:
                raise self._error
            return self._num_left == 0

    def abandon(self) -> None:
        """From now on no thread changes the values, even if its request is still in flight."""
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
                    self._get(step)
                else:
                    self._reduce(step)
                self._ended(index)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _next(self, kind: type[Step]) -> int | None:
        """Wait until the next step of a lane may begin and return it; None if there is none or the run has ended."""
        lane = self._lanes[kind]
        with self._changed:
            while True:
                if self._is_over or self._error is not None or not lane:
                    return None
                # Sums may run in any order, requests only in that of the schedule.
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

    def _get(self, step: Get) -> None:
        """Wait for an object and store it in the values, or as an addend."""
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

    def _reduce(self, step: Reduce) -> None:
        """Replace the rank's own elements by the sum of all addends, in the order that the step says."""
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
