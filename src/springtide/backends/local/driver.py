"""Replicas as processes of this machine: records, signals and exits, with crash points around each effect."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from springtide.backends.control_channel.members import Job, Replica, Source
from springtide.backends.control_channel.reactor import FramedConnection, Reactor
from springtide.backends.control_channel.replica_table import ReplicaTable
from springtide.backends.inbox import Inbox
from springtide.backends.local.members import ProcessHandle, Worker
from springtide.backends.local.records import WorkerRecord, WorkerRecords
from springtide.backends.processes import (
    ProcessIdentity,
    describe_exit,
    identify,
    open_pidfd,
    reap,
    signal_group,
)
from springtide.backends.sockets import free_tcp_port
from springtide.core.actions import ResizeJob, StartReplica
from springtide.core.errors import StorageError
from springtide.core.wire.workers import Hello, Report
from springtide.core.workload import ReplicaId, WorkloadId
from springtide.storage.fence import Fence as StorageFence
from springtide.storage.files import make_private, write_durable

CRASH_POINTS = tuple(
    f"executor.{effect}.{moment}"
    for effect in ("record", "spawn", "order", "fence", "kill", "acknowledge")
    for moment in ("before", "after")
)


class ProcessDriver:
    """The driver of LocalExecutor, with its table. `exit_codes` says whether a worker's exit code will still arrive."""

    death_s = 1.0

    def __init__(
        self, state_dir: Path, reactor: Reactor, inbox: Inbox[Source], crash_point: Callable[[str], None]
    ) -> None:
        self.table: ReplicaTable[ProcessHandle] = ReplicaTable(state_dir, reactor, inbox, crash_point, self)
        self.records = WorkerRecords(state_dir / "workers")
        self.exit_codes: Callable[[Worker], bool] = lambda replica: False
        self.on_process: Callable[[Worker], None] = lambda replica: None

    def make_replica(self, action: StartReplica, token_sha256: str) -> Worker:
        """Add a worker to the table."""
        return self.table.enter(
            self._new(action.replica_id, action.workload_id, action.generation, action, token_sha256)
        )

    def make_foreigner(self, record: WorkerRecord) -> Worker:
        """Enter a worker that should not run: its end is watched, but no event reports it."""
        foreigner = self._new(record.replica_id, record.workload_id, record.generation, None, record.token_sha256)
        self.table.foreigners.add(foreigner)
        return foreigner

    def write_record(self, replica: Worker) -> None:
        """Write the worker's identity durably. Raises StorageError."""
        self.table.crash_point("executor.record.before")
        self.records.write(
            WorkerRecord(
                replica_id=replica.replica_id,
                workload_id=replica.workload_id,
                generation=replica.generation,
                token_sha256=replica.token_sha256,
                process=replica.handle.identity,
                share_slot=replica.handle.share_slot,
            )
        )
        self.table.crash_point("executor.record.after")

    def raise_fence(self, work_dir: Path, generation: int) -> None:
        """Prevent everything older than `generation` from publishing in this directory. Raises StorageError."""
        self.table.crash_point("executor.fence.before")
        StorageFence(work_dir).raise_to(generation)
        self.table.crash_point("executor.fence.after")

    def fence_of(self, job_id: WorkloadId) -> int:
        """The generation that wrote last in the job's directory; 0 if none did. Raises StorageError."""
        return StorageFence(self.table.work_dir(job_id)).generation()

    def attach_process(self, replica: Worker, identity: ProcessIdentity | None) -> None:
        """Attach the process to its replica and watch for its end; None: the process has already ended."""
        if replica.handle.identity is not None or replica.has_exited:
            return
        pidfd = open_pidfd(identity) if identity is not None else None
        if identity is None or pidfd is None:
            replica.handle.identity = identity
            self.table.note_exit(replica)
            return
        replica.handle.identity, replica.handle.pidfd = identity, pidfd
        self.table.reactor.watch(pidfd, selectors.EVENT_READ, lambda mask: self.table.note_exit(replica))
        self.on_process(replica)

    # --- the port ReplicaDriver --------------------------------------------------------------------------------------

    def is_own(self, replica: Worker, hello: Hello, connection: FramedConnection[Report]) -> bool:
        """Whether the kernel says that the other end is the replica's process."""
        return connection.peer_pid == hello.pid and (
            replica.handle.identity is None or replica.handle.identity.pid == hello.pid
        )

    def take_hello(self, replica: Worker, hello: Hello, connection: FramedConnection[Report]) -> None:
        """Attach the process if the worker's Hello arrives before the zygote's report that it was spawned."""
        if replica.handle.identity is None:
            self.attach_process(replica, identify(hello.pid))
            try:
                self.write_record(replica)
            except StorageError:
                self.table.counts["record_errors"] += 1
        self.records.spec_path(replica.replica_id).unlink(missing_ok=True)

    def own_address(self, replica: Worker, address: str) -> str:
        """Workers of this machine may listen anywhere."""
        return address

    def owns_path(self, replica: Worker, path: str) -> bool:
        """Whether a path is in the directory of the replica's workload."""
        try:
            return Path(path).resolve().is_relative_to(replica.work_dir.resolve())
        except (OSError, ValueError):
            return False

    def rendezvous(self, job: Job, action: ResizeJob, *, is_script: bool) -> str:
        """A file in the workload's directory; a free port for scripts."""
        directory = job.work_dir / "rendezvous"
        make_private(directory)
        if not is_script:
            return f"file://{directory}/g{action.generation}"
        # The address is stored, so that an order repeated after a restart names the same one.
        path = directory / f"g{action.generation}.address"
        if not path.exists():
            write_durable(path, f"tcp://127.0.0.1:{free_tcp_port()}".encode())
        return path.read_text()

    def group_key(self, job: Job, action: ResizeJob) -> str:
        """None: members meet in a directory that only this account can enter."""
        return ""

    def fence_storage(self, job: Job, generation: int, then: Callable[[], None]) -> bool:
        """Raise the fence of the workload's directory. Raises StorageError."""
        self.raise_fence(job.work_dir, generation)
        return True

    def knows_exit_codes(self, replica: Worker) -> bool:
        """Whether the process that started the worker will still report it."""
        return self.exit_codes(replica)

    def describe_end(self, replica: Worker) -> str:
        """From its exit code and its log."""
        return describe_exit(replica.exit_code, replica.log_path)

    def was_ended_externally(self, replica: Worker) -> bool:
        """Never: on this machine, workers that end unrequested have failed."""
        return False

    def was_refused(self, replica: Worker) -> bool:
        """Never: a process that could not be started has failed."""
        return False

    def release(self, replica: Worker) -> None:
        """Close the descriptor that its end is watched by."""
        pidfd, replica.handle.pidfd = replica.handle.pidfd, None
        if pidfd is not None:
            self.table.reactor.unwatch(pidfd)
            os.close(pidfd)

    def forget(self, replica: Worker) -> None:
        """Remove its record, unless another worker of that name is in the table."""
        with contextlib.suppress(OSError):
            # On a disk that takes no changes it stays; that the worker has ended must be told all the same.
            self.records.spec_path(replica.replica_id).unlink(missing_ok=True)
        if replica.replica_id not in self.table.replicas:
            self.records.remove(replica.replica_id)

    def forget_job(self, job: Job) -> None:
        """Remove the rendezvous files of the job's groups."""
        for path in (job.work_dir / "rendezvous").glob("*"):
            if path.is_dir():
                # Leftovers of a rendezvous cost a few bytes and do no harm: generations never repeat.
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def signal(self, replica: Worker, number: int) -> None:
        """Signal its process group."""
        assert replica.handle.identity is not None, "only a known process is signalled"
        signal_group(replica.handle.identity, number)

    def exit_code(self, replica: Worker) -> int | None:
        """The exit code from the kernel, if the worker is a child of this process."""
        return reap(replica.handle.identity.pid) if replica.handle.identity is not None else None

    def _new(
        self,
        replica_id: ReplicaId,
        workload_id: WorkloadId,
        generation: int,
        action: StartReplica | None,
        token_sha256: str,
    ) -> Worker:
        return Replica(
            handle=ProcessHandle(),
            replica_id=replica_id,
            workload_id=workload_id,
            generation=generation,
            action=action,
            work_dir=self.table.work_dir(workload_id),
            log_path=self.table.log_path(workload_id, replica_id),
            token_sha256=token_sha256,
            born_at_s=time.monotonic(),
        )
