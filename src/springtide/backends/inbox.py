"""The queue of events to the control loop, with the workers' reports that each of them came from."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from springtide.core.events import Event, ProgressReported
from springtide.core.ports import Clock
from springtide.core.workload import WorkloadId

S = TypeVar("S")

# Progress is journaled, and the whole journal is read at every start: once a second is enough for its readers.
PROGRESS_INTERVAL_S = 1.0
# The first reports of a group are delivered sooner: the policy learns the new group's speed from them.
NUM_PROMPT_REPORTS = 4
PROMPT_INTERVAL_S = 0.25
# The platform clock may be changed during a wait, so it is read again after this time.
_LONGEST_WAIT_S = 1.0


class _Delivered(NamedTuple):
    """A job's last delivered progress: its generation, its number within it (from 1), and when (monotonic clock)."""

    generation: int
    number: int
    at_s: float


_NEVER = _Delivered(0, 0, float("-inf"))


class Inbox(Generic[S]):
    """Thread-safe. `S` is the source of an event: one report of one worker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._condition = threading.Condition()
        self._events: list[Event] = []
        self._unacknowledged: list[tuple[Event, tuple[S, ...]]] = []
        self._progress: dict[WorkloadId, ProgressReported] = {}
        self._delivered: dict[WorkloadId, _Delivered] = {}
        self._is_closed = False

    def post(self, event: Event, sources: Sequence[S] = ()) -> None:
        """Hand over an event; `wait` returns at once."""
        with self._condition:
            if not isinstance(event, ProgressReported):
                # A job's last progress is delivered before an event about its end.
                job_id = getattr(event, "job_id", None)
                progress = self._progress.pop(job_id, None) if job_id is not None else None
                if progress is not None:
                    self._deliver(progress)
            self._events.append(event)
            if sources:
                self._unacknowledged.append((event, tuple(sources)))
            self._condition.notify_all()

    def progress(self, event: ProgressReported) -> bool:
        """Keep a job's newest progress, to be delivered at intervals. False: it is older than what is known."""
        with self._condition:
            newest = self._progress.get(event.job_id)
            generation = self._delivered.get(event.job_id, _NEVER).generation
            if event.generation < max(generation, newest.generation if newest else 0):
                return False
            if newest and (event.generation, event.step) < (newest.generation, newest.step):
                return False
            self._progress[event.job_id] = event
            self._condition.notify_all()
            return True

    def wait(self, deadline_s: float | None) -> list[Event]:
        """Return events as soon as there are any; none at the deadline (platform clock) or when closed."""
        with self._condition:
            while True:
                due_in_s = self._take_due_progress()
                if self._events or self._is_closed:
                    events, self._events = self._events, []
                    return events
                timeout_s = due_in_s
                if deadline_s is not None:
                    left_s = deadline_s - self._clock.now_s()
                    if left_s <= 0:
                        return []
                    timeout_s = min(left_s, _LONGEST_WAIT_S, due_in_s if due_in_s is not None else left_s)
                self._condition.wait(timeout_s)

    def take_sources(self, events: Sequence[Event]) -> list[S]:
        """Remove and return the sources of events that are durable now."""
        taken: list[S] = []
        with self._condition:
            for event in events:
                for index, (waiting, sources) in enumerate(self._unacknowledged):
                    if waiting is event or waiting == event:
                        taken += sources
                        del self._unacknowledged[index]
                        break
        return taken

    def forget_job(self, job_id: WorkloadId) -> None:
        """Drop the progress of a job that has ended."""
        with self._condition:
            self._progress.pop(job_id, None)
            self._delivered.pop(job_id, None)

    def close(self) -> None:
        """Let every wait return."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _deliver(self, event: ProgressReported) -> None:
        before = self._delivered.get(event.job_id, _NEVER)
        number = before.number + 1 if before.generation == event.generation else 1
        self._delivered[event.job_id] = _Delivered(event.generation, number, time.monotonic())
        self._events.append(event)

    def _take_due_progress(self) -> float | None:
        """Move due progress to the events; return in how many seconds the next is due, if any is left."""
        now_s = time.monotonic()
        next_s: float | None = None
        for job_id in list(self._progress):
            last = self._delivered.get(job_id, _NEVER)
            is_prompt = last.number < NUM_PROMPT_REPORTS or self._progress[job_id].generation > last.generation
            due_s = last.at_s + (PROMPT_INTERVAL_S if is_prompt else PROGRESS_INTERVAL_S)
            if due_s <= now_s:
                self._deliver(self._progress.pop(job_id))
            else:
                next_s = min(due_s - now_s, next_s if next_s is not None else due_s - now_s)
        return next_s
