"""The port between `ReplicaTable` and the processes or pods of its replicas."""

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
        """Whether the sender of a Hello with the replica's token may be the replica."""

    def take_hello(self, replica: Replica[Handle], hello: Hello, connection: FramedConnection[Report]) -> None:
        """A replica has sent its Hello, for the first time or again."""

    def own_address(self, replica: Replica[Handle], address: str) -> str:
        """The address at which a replica reports to listen, if that is allowed; else empty."""

    def owns_path(self, replica: Replica[Handle], path: str) -> bool:
        """Whether a path that a replica reports belongs to its own workload."""

    def rendezvous(self, job: Job, action: ResizeJob, *, is_script: bool) -> str:
        """The address where the members of a group meet; the same for a repeated action.

        Raises BackendError, OSError.
        """

    def group_key(self, job: Job, action: ResizeJob) -> str:
        """The key that the members of a group prove to each other; the same for a repeated action.

        Empty if they need none. Raises BackendError while that is not known yet.
        """

    def fence_storage(self, job: Job, generation: int, then: Callable[[], None]) -> bool:
        """Prevent everything older than `generation` from publishing. Raises StorageError.

        False: it is not done yet; once it is, the driver sets `job.fenced` and calls `then`.
        """

    def signal(self, replica: Replica[Handle], number: int) -> None:
        """End a process or pod that exists: SIGTERM gracefully, SIGKILL at once."""

    def exit_code(self, replica: Replica[Handle]) -> int | None:
        """The exit code of a process or pod that has ended, if it is available now."""

    def knows_exit_codes(self, replica: Replica[Handle]) -> bool:
        """Whether the exit code of this replica will still arrive through `ReplicaTable.note_exit`."""

    def describe_end(self, replica: Replica[Handle]) -> str:
        """A sentence on how a worker ended that the platform did not tell to end."""

    def was_ended_externally(self, replica: Replica[Handle]) -> bool:
        """Whether something outside the platform ended it: then it did not fail, whatever its exit code."""

    def was_refused(self, replica: Replica[Handle]) -> bool:
        """Whether the replica's machine turned it away before any of its code ran."""

    def release(self, replica: Replica[Handle]) -> None:
        """Stop watching the replica, and close what was opened for that."""

    def forget(self, replica: Replica[Handle]) -> None:
        """A replica has left the table: remove what the driver stored about it."""

    def forget_job(self, job: Job) -> None:
        """A job has ended and its last worker is gone: remove the files of its groups."""
