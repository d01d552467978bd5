"""One executor out of two: the processes of this machine, and the functions of a service that jobs may run on."""

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
    """An executor that takes events from outside, too."""

    def post(self, event: Event) -> None:
        """Hand over an event; thread-safe."""
        ...

    def sharing(self) -> SharingStatus:
        """How its devices are shared; thread-safe."""
        ...


class JobsOnFunctions(Executor, Protocol):
    """The executor of jobs on functions, as far as it is needed here."""

    def send_events_to(self, post: Callable[[Event], None]) -> None:
        """Let events go there."""
        ...

    def knows(self, job_id: WorkloadId) -> bool:
        """Whether the job has ever been begun on functions."""
        ...

    def status(self, job_id: WorkloadId) -> FunctionRunStatus | None:
        """A job's functions as they are, or were last."""
        ...


class RoutedExecutor:
    """Hands each action to the executor of its job: `functions` for a job with a menu, `machines` for all else.

    Both speak through the stream of events of `machines`, so that `wait` and `acknowledge` are its own.
    """

    def __init__(self, machines: PostingExecutor, functions: JobsOnFunctions) -> None:
        self.machines = machines
        self.functions = functions
        self._on_functions: set[WorkloadId] = set()
        functions.send_events_to(machines.post)

    def recover(self, standing: Standing) -> None:
        """Split what should be running between the two."""
        starts = [*standing.replicas, *(action for action in standing.actions if isinstance(action, StartReplica))]
        self._on_functions |= {start.workload_id for start in starts if _is_on_functions(start)}
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
        if isinstance(action, StartReplica) and _is_on_functions(action):
            self._on_functions.add(action.workload_id)
        (self.functions if self._is_for_functions(action) else self.machines).start(action)

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        """Return as soon as something happened at either, or nothing at the deadline."""
        return self.machines.wait(deadline_s)

    def acknowledge(self, events: Sequence[Event]) -> None:
        """The events are durable in the journal."""
        self.machines.acknowledge(events)
        self.functions.acknowledge(events)

    def post(self, event: Event) -> None:
        """Hand over an event from outside; `wait` returns at once."""
        self.machines.post(event)

    def sharing(self) -> SharingStatus:
        """How the devices of the machines are shared; a function service shares nothing."""
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
            # A job that rested when the platform was restarted has objects to be removed, too.
            return action.job_id in self._on_functions or self.functions.knows(action.job_id)
        if isinstance(action, ResizeJob | PreemptJob):
            return action.job_id in self._on_functions
        return False


def _is_on_functions(start: StartReplica) -> bool:
    return isinstance(start.workload, TrainingJob) and start.workload.is_on_functions
