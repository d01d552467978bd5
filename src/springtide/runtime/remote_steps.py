"""The step log of a job whose workers share no file system: lines go up in the background, some seconds at a time."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from springtide.core.errors import Fenced, StorageError
from springtide.runtime.records import StepMemory, StepRecord
from springtide.storage.workload_store import Line, WorkloadStore

# A leader that dies leaves out what waits to be written: so many lines, and those of a write under way. Whoever takes
# over a state takes over more lines than that, so that any one member that is left can make the log whole.
_MANY_LINES = 512
_NUM_HANDED_OVER = 4 * _MANY_LINES
_NUM_REMEMBERED = 16384
# Every write makes an object: a job that runs for long makes them more rarely.
_FIRST_INTERVAL_S = 1.0
_LAST_INTERVAL_S = 15.0
_GROWTH = 1.5


class RemoteStepLog(StepMemory):
    """Remembers steps on the training thread and writes them on one of its own, which ends with the process."""

    def __init__(self, store: WorkloadStore) -> None:
        super().__init__(_NUM_REMEMBERED, _NUM_HANDED_OVER)
        self._store = store
        self._lock = threading.Lock()
        # One write at a time: the later one then finds what the earlier one has written.
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
        """Note a committed step."""
        with self._lock:
            super().remember(record)

    def newest(self) -> list[dict[str, Any]]:
        """The last steps remembered, for a member that takes over this one's state and may come to lead."""
        with self._lock:
            records = list(self._remembered)
            num_lines = self._num_handed_over
            if self._asked_generation and records:
                # A leader knows what waits, also where the store has been away for long.
                num_lines = max(num_lines, records[-1].step - self._written_step)
            # By hand: this lies within a pause of the whole group, and asdict takes ten times as long.
            return [{name: getattr(record, name) for name in StepRecord.__slots__} for record in records[-num_lines:]]

    def take_over(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Remember what the giver of the state remembers. Raises TypeError."""
        with self._lock:
            super().take_over(records)

    def forget_written(self) -> None:
        """Another member leads and writes: should this one come to lead, it finds out what the log holds."""
        with self._lock:
            self._after = None
            # Who comes to lead has what the leader before it left out: that waits no longer than it has to.
            self._interval_s, self._written_at_s = _FIRST_INTERVAL_S, -math.inf

    def restart_at(self, step: int) -> None:
        """The job goes on from a checkpoint of `step`: later lines in the log are to be written again."""
        with self._lock:
            self._remembered.clear()
            self._after = step

    def write(self, generation: int, *, is_leader: bool = True) -> None:
        """Have the steps written when enough of them wait, or enough time has passed; at once where nobody leads.

        Raises Fenced once an earlier write was refused, StorageError.
        """
        if not is_leader:
            self.flush(generation)
            return
        with self._lock:
            if generation <= self._fenced_generation:
                raise Fenced(f"generation {generation} may not write: a newer one owns the job")
            self._asked_generation = generation
            num_waiting = self._remembered[-1].step - self._written_step if self._remembered else 0
            is_due = time.monotonic() - self._written_at_s >= self._interval_s or num_waiting >= _MANY_LINES
        if is_due and not self._wake.is_set():
            self._wake.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="springtide-steps", daemon=True)
                self._thread.start()

    def flush(self, generation: int) -> None:
        """Write what the log lacks before returning. Raises Fenced, StorageError."""
        with self._writing:
            if not self._remembered:
                return
            with self._lock:
                after = self._after
            written_step = self._store.log_steps(generation, self._lines_after, after)
            with self._lock:
                self._written_step = written_step
                self._written_at_s = time.monotonic()

    def _lines_after(self, step: int) -> list[Line]:
        with self._lock:
            lacking = [record for record in self._remembered if record.step > step]
        if lacking and lacking[0].step > step + 1:
            lost = f"steps {step + 1} to {lacking[0].step - 1}"
            sys.stderr.write(f"springtide: the step log will lack {lost}: whoever knew of them is gone\n")
        return [(record.step, json.dumps(asdict(record))) for record in lacking]

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
