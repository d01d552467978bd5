"""The step log of a job whose workers share no file system: uploaded in the background, every few seconds.

Until the store has the lines they are kept in memory and on the worker's own disk (step_spool.py). So none is lost when
the store is unavailable for hours, or when the worker is killed and its disk can still be read.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from springtide.core.errors import Fenced, StorageError
from springtide.runtime.elastic.step_log import StepRecord
from springtide.runtime.elastic.step_spool import SPOOL_NAME, StepSpool
from springtide.storage.step_lines import Line, is_gap, lines_above, lost_steps
from springtide.storage.workloads.store import WorkloadStore

# So many waiting lines trigger a write. When rank 0 dies, these and the lines of a running write are missing from the
# log; members get more lines than that with a training state, so that any one survivor can complete the log.
_WRITE_LINES = 512
_NUM_HANDED_OVER = 4 * _WRITE_LINES
_NUM_REMEMBERED = 16384
# Every write makes an object, so the interval between writes grows with the length of the run.
_FIRST_INTERVAL_S = 1.0
_LAST_INTERVAL_S = 15.0
_GROWTH = 1.5
# Lines received with a training state are spooled in pieces of this size, one piece in each step, because the whole
# group is paused when they arrive.
_SPOOLED_AT_ONCE = 256
# A member that leaves does not wait for a store that failed within this many seconds before.
_STORE_DOWN_S = 20.0


class RemoteStepLog:
    """A StepMemory that is filled by the training thread and uploaded by a daemon thread of its own."""

    def __init__(self, store: WorkloadStore, work_dir: Path) -> None:
        self._remembered: deque[StepRecord] = deque(maxlen=_NUM_REMEMBERED)
        self._store = store
        self._spool = StepSpool(work_dir / SPOOL_NAME)
        self._unspooled: deque[StepRecord] = deque(maxlen=_NUM_REMEMBERED)
        self._failed_at_s = -math.inf
        self._lock = threading.Lock()
        # Serialises writes, so that each one knows what the one before it has written.
        self._writing = threading.Lock()
        self._wake = threading.Event()
        self._asked_generation = 0
        self._fenced_generation = -1
        self._written_step = 0
        self._after: int | None = None
        self._interval_s = _FIRST_INTERVAL_S
        self._written_at_s = time.monotonic()
        self._thread: threading.Thread | None = None

    def remember(self, record: StepRecord) -> None:
        with self._lock:
            self._remembered.append(record)
            self._unspooled.append(record)
            num_now = min(len(self._unspooled), _SPOOLED_AT_ONCE)
            self._spool.add(_line(self._unspooled.popleft()) for _ in range(num_now))

    def newest(self) -> list[dict[str, Any]]:
        """The last steps, for a member that copies this one's state and may become rank 0."""
        with self._lock:
            records = list(self._remembered)
            num_lines = _NUM_HANDED_OVER
            if self._asked_generation and records:
                # Rank 0 hands over all unwritten lines, which are many if the store was unavailable for long.
                num_lines = max(num_lines, records[-1].step - self._written_step)
            return [_plain(record) for record in records[-num_lines:]]

    def take_over(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Replace the remembered steps by those that came with a training state. Raises TypeError."""
        taken = [StepRecord(**record) for record in records]
        with self._lock:
            self._remembered.clear()
            self._remembered.extend(taken)
            self._spool.clear()
            self._unspooled.clear()
            self._unspooled.extend(self._remembered)

    def forget_written(self) -> None:
        """Drop what is known of the log's content: another member is rank 0 and writes it."""
        with self._lock:
            self._after = None
            self._spool.note(leads=False, written_step=0)
            # If this member becomes rank 0, it must soon write the lines that the previous one did not.
            self._interval_s, self._written_at_s = _FIRST_INTERVAL_S, -math.inf

    def restart_at(self, step: int) -> None:
        """Continue from a checkpoint of `step`: the steps after it are written again."""
        with self._lock:
            self._remembered.clear()
            self._spool.clear()
            self._unspooled.clear()
            self._after = self._written_step = step

    def write(self, generation: int, *, is_leader: bool = True) -> None:
        """Wake the writer if enough steps wait or enough time has passed; without `is_leader`, write now.

        Raises Fenced if an earlier write was refused. StorageError only without `is_leader`.
        """
        if not is_leader:
            self.flush(generation)
            return
        with self._lock:
            if generation <= self._fenced_generation:
                raise Fenced(f"generation {generation} may not write: a newer one owns the job")
            self._asked_generation = generation
            self._spool.note(leads=True, written_step=self._written_step)
            num_waiting = self._remembered[-1].step - self._written_step if self._remembered else 0
            is_due = time.monotonic() - self._written_at_s >= self._interval_s or num_waiting >= _WRITE_LINES
        if is_due and not self._wake.is_set():
            self._wake.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="springtide-steps", daemon=True)
                self._thread.start()

    def leave(self, generation: int, *, is_leader: bool) -> None:
        """Write rank 0's unwritten lines; if that fails, the container's first process prints them from the disk."""
        if is_leader and time.monotonic() - self._failed_at_s >= _STORE_DOWN_S:
            with contextlib.suppress(OSError, StorageError):
                self.flush(generation)

    def flush(self, generation: int) -> None:
        """Write what the log lacks before returning. Raises Fenced, StorageError."""
        with self._writing:
            if not self._remembered:
                return
            with self._lock:
                after = self._after
            try:
                written_step = self._store.log_steps(generation, self._lines_after, after)
            except Fenced:
                raise
            except StorageError:
                self._failed_at_s = time.monotonic()
                raise
            with self._lock:
                self._written_step = written_step
                self._written_at_s = time.monotonic()
                self._failed_at_s = -math.inf
                self._spool.note(leads=self._asked_generation > 0, written_step=written_step)

    def _lines_after(self, step: int) -> list[Line]:
        with self._lock:
            lacking = [_line(record) for record in self._remembered if record.step > step]
            if lacking and lacking[0][0] > step + 1:
                lacking = [*self._spool.lines(step, lacking[0][0]), *lacking]
        lines = lines_above(lacking, step)
        if lines and is_gap(gap := json.loads(lines[0][1])):
            first, last = lost_steps(gap)
            lost = f"{last - first + 1} steps, {first} to {last}"
            sys.stderr.write(f"springtide: the step log will lack {lost}: no member has them any more\n")
        return lines

    def _run(self) -> None:
        while True:
            self._wake.wait()
            with self._lock:
                generation = self._asked_generation
            try:
                self.flush(generation)
                self._interval_s = min(self._interval_s * _GROWTH, _LAST_INTERVAL_S)
            except Fenced:
                with self._lock:
                    self._fenced_generation = max(self._fenced_generation, generation)
            except StorageError as error:
                sys.stderr.write(f"springtide: the step log could not be written, it will be tried again: {error}\n")
                with self._lock:
                    self._written_at_s = time.monotonic()
            self._wake.clear()


def _plain(record: StepRecord) -> dict[str, Any]:
    # dataclasses.asdict takes ten times as long.
    return {name: getattr(record, name) for name in StepRecord.__slots__}


def _line(record: StepRecord) -> Line:
    return record.step, json.dumps(_plain(record))
