"""Combines two executors into one: that of machines or pods, and that of jobs on a function service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from springtide.core.actions import Action, EndJob, PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.events import Event
from springtide.core.ports import Executor, Standing
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.status.shares import SharingStatus
from springtide.core.workload import TrainingJob, WorkloadId


class PostingExecutor(Executor, Protocol):
    """An executor that also takes events from outside."""

    def post(self, event: Event) -> None:
        """Hand over an event; thread-safe."""
        ...

    def sharing(self) -> SharingStatus:
        """How its devices are shared; thread-safe."""
        ...


class JobsOnFunctions(Executor, Protocol):
    """The part of the executor of jobs on functions that is used here."""

    def send_events_to(self, post: Callable[[Event], None]) -> None:
        """Pass every event to `post`."""
        ...

    def knows(self, job_id: WorkloadId) -> bool:
        """Whether the job was ever started on functions."""
        ...

    def status(self, job_id: WorkloadId) -> FunctionRunStatus | None:
        """The newest known status of a job's functions; None for a job on machines."""
        ...


class RoutedExecutor:
    """Routes each action to one of two executors: `functions` for jobs with a menu, `machines` for everything else.

    Events of `functions` are posted to `machines`, so that one `wait` returns the events of both.
    """

    def __init__(self, machines: PostingExecutor, functions: JobsOnFunctions) -> None:
        self.machines = machines
        self.functions = functions
        self._on_functions: set[WorkloadId] = set()
        # What has run here and there: both executors keep something of it until it ends.
        self._moved: set[WorkloadId] = set()
        functions.send_events_to(machines.post)

    def recover(self, standing: Standing) -> None:
        """Give each executor its part of what should be running."""
        starts = [*standing.replicas, *(action for action in standing.actions if isinstance(action, StartReplica))]
        for start in starts:
            self._note_place(start)
        self.machines.recover(
            replace(
                standing,
                replicas=tuple(start for start in standing.replicas if not _is_on_functions(start)),
                actions=tuple(action for action in standing.actions if not self._is_for_functions(action)),
            )
        )
        self.functions.recover(
            replace(
                standing,
                replicas=tuple(start for start in standing.replicas if _is_on_functions(start)),
                actions=tuple(action for action in standing.actions if self._is_for_functions(action)),
            )
        )

    def start(self, action: Action) -> None:
        """Begin an action; never blocks."""
        if isinstance(action, StartReplica):
            self._note_place(action)
        if isinstance(action, EndJob) and action.job_id in self._moved:
            self._moved.discard(action.job_id)
            self.machines.start(action)
            self.functions.start(action)
            return
        (self.functions if self._is_for_functions(action) else self.machines).start(action)

    def _note_place(self, start: StartReplica) -> None:
        """Note where the workload runs from now on: a job may move."""
        workload, workload_id = start.workload, start.workload_id
        if _is_on_functions(start):
            self._on_functions.add(workload_id)
            if isinstance(workload, TrainingJob) and workload.machine_run is not None:
                self._moved.add(workload_id)
        elif workload_id in self._on_functions:
            self._on_functions.discard(workload_id)
            self._moved.add(workload_id)

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        """Return the events of both executors as soon as there are any; an empty sequence at the deadline."""
        return self.machines.wait(deadline_s)

    def acknowledge(self, events: Sequence[Event]) -> None:
        """Tell both executors that the events are durable in the journal."""
        self.machines.acknowledge(events)
        self.functions.acknowledge(events)

    def post(self, event: Event) -> None:
        """Add an event from outside and wake `wait`. Thread-safe."""
        self.machines.post(event)

    def sharing(self) -> SharingStatus:
        """How the devices of the machines are shared; functions do not share devices."""
        return self.machines.sharing()

    def status(self, job_id: WorkloadId) -> FunctionRunStatus | None:
        """A job's functions; None for a job on machines."""
        return self.functions.status(job_id)

    def _is_for_functions(self, action: Action) -> bool:
        if isinstance(action, StartReplica):
            return _is_on_functions(action)
        if isinstance(action, StopReplica):
            return action.workload_id in self._on_functions
        if isinstance(action, EndJob):
            # A job that had no replica when the platform was restarted still has objects to remove.
            return action.job_id in self._on_functions or self.functions.knows(action.job_id)
        if isinstance(action, ResizeJob | PreemptJob):
            return action.job_id in self._on_functions
        return False


def _is_on_functions(start: StartReplica) -> bool:
    return isinstance(start.workload, TrainingJob) and start.workload.is_on_functions
