"""The events on their way to the control loop, and which worker's reports each of them came from."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from springtide.core.events import Event, ProgressReported
from springtide.core.ports import Clock
from springtide.core.workload import WorkloadId

S = TypeVar("S")

# Progress is journaled, and a journal is read whole at every start: once a second is enough for people and policies.
PROGRESS_INTERVAL_S = 1.0
# The first reports of a group come at once: they are what the policy learns the new number of workers by.
NUM_PROMPT_REPORTS = 4
PROMPT_INTERVAL_S = 0.25
# The platform clock may be set while a wait is under way, so no wait trusts it for longer than this.
_LONGEST_WAIT_S = 1.0


class _Delivered(NamedTuple):
    """The last progress of a job that was handed over: of which generation, its how-manieth, and when."""

    generation: int
    number: int
    at_s: float


_NEVER = _Delivered(0, 0, float("-inf"))


class Inbox(Generic[S]):
    """Thread-safe. `S` names where an event came from: one report of one worker."""

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
                # What a job says last about its progress comes before what became of it.
                job_id = getattr(event, "job_id", None)
                progress = self._progress.pop(job_id, None) if job_id is not None else None
                if progress is not None:
                    self._deliver(progress)
            self._events.append(event)
            if sources:
                self._unacknowledged.append((event, tuple(sources)))
            self._condition.notify_all()

    def progress(self, event: ProgressReported) -> bool:
        """Keep a job's newest progress, for delivery once a second, the first of a group sooner. False: of the past."""
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
        """Return what happened as soon as something has, or nothing at the deadline (platform clock) or when closed."""
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
        """Return, once, the sources of events that are durable now."""
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
        """Drop what is kept of a job's progress: it has ended."""
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
