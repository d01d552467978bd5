"""What `ReplicaTable` asks of the processes or pods that its replicas are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from springtide.backends.control_channel.members import Handle, Job, Replica
from springtide.backends.control_channel.reactor import FramedConnection
from springtide.core.actions import ResizeJob
from springtide.core.wire.workers import Hello, Report


class ReplicaDriver(Protocol[Handle]):
    """All methods are called on the I/O thread and do not block.

    `death_s` is how long a killed replica may take to disappear before its loss is reported nevertheless.
    """

    death_s: float

    def is_own(self, replica: Replica[Handle], hello: Hello, connection: FramedConnection[Report]) -> bool:
        """Whether the other end of a connection, whose Hello has the replica's token, may be the replica."""

    def take_hello(self, replica: Replica[Handle], hello: Hello, connection: FramedConnection[Report]) -> None:
        """A replica has introduced itself, for the first time or again."""

    def own_address(self, replica: Replica[Handle], address: str) -> str:
        """The address at which a replica says it listens, if it may listen there; else empty."""

    def lies_in(self, replica: Replica[Handle], path: str) -> bool:
        """Whether a path that a replica reports is one of its own workload's."""

    def rendezvous(self, job: Job, action: ResizeJob, *, is_script: bool) -> str:
        """Where the members of a group meet; the same for a repeated action. Raises BackendError or OSError."""

    def fence_storage(self, job: Job, generation: int, then: Callable[[], None]) -> bool:
        """Prevent everything older than `generation` from publishing. Raises StorageError.

        True where that has been done; else it is noted in `job.fenced` and `then` is called once it has been.
        """

    def signal(self, replica: Replica[Handle], number: int) -> None:
        """End a process or pod that exists: SIGTERM gracefully, SIGKILL at once."""

    def exit_code(self, replica: Replica[Handle]) -> int | None:
        """The exit code of a process or pod that has ended, if it is available now."""

    def knows_exit_codes(self, replica: Replica[Handle]) -> bool:
        """Whether the exit code of this replica will still arrive through `ReplicaTable.note_exit`."""

    def describe_end(self, replica: Replica[Handle]) -> str:
        """A sentence on how a worker ended that the platform did not ask to end."""

    def was_taken(self, replica: Replica[Handle]) -> bool:
        """Whether something outside the platform ended it: then it did not fail, however it ended."""

    def release(self, replica: Replica[Handle]) -> None:
        """Stop watching it, and close what was opened for that."""

    def forget(self, replica: Replica[Handle]) -> None:
        """A replica has left the table: remove what was kept of it elsewhere."""

    def forget_job(self, job: Job) -> None:
        """A job has ended and its last worker is gone: remove what only its groups needed."""
