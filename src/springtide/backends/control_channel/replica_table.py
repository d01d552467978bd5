"""The table of workers and jobs, and how the end of a worker becomes an event. What a worker is made of comes below."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import quote

from springtide.backends.control_channel.members import Job, MemberPhase, Replica, Source
from springtide.backends.control_channel.reactor import FramedConnection, Reactor
from springtide.backends.inbox import Inbox
from springtide.core.actions import ResizeJob
from springtide.core.events import Event, ReplicaLost, ReplicaStopped
from springtide.core.wire.workers import Acknowledge, FenceOrder, Hello, Order, Report
from springtide.core.workload import ReplicaId, WorkloadId

R = TypeVar("R", bound=Replica)

_MAX_REMEMBERED = 10_000
# How long the exit code and the last reports of an ended worker may take to arrive after its end is known.
_LAST_WORDS_S = 0.5


class ReplicaTable(ABC, Generic[R]):
    """State and effects that the parts of an executor share. Everything here runs on the I/O thread.

    The abstract methods are where processes and pods differ. `crash_point` is called with a name around each effect,
    for tests that end the process there. `death_s` is how long a killed worker may take to be gone before its loss is
    reported nevertheless.
    """

    death_s = 1.0

    def __init__(
        self, state_dir: Path, reactor: Reactor, inbox: Inbox[Source], crash_point: Callable[[str], None]
    ) -> None:
        self.state_dir = state_dir
        self.reactor = reactor
        self.inbox = inbox
        self.crash_point = crash_point
        self.replicas: dict[ReplicaId, R] = {}
        # The same by workload, in the order in which they came: each start and each stop asks for its own.
        self._by_workload: dict[WorkloadId, dict[ReplicaId, R]] = {}
        self.foreigners: set[R] = set()
        self.jobs: dict[WorkloadId, Job] = {}
        self.counts: Counter[str] = Counter()
        self.on_gone: Callable[[R], None] = lambda replica: None
        self._gone: OrderedDict[ReplicaId, None] = OrderedDict()

    # --- what a body is ----------------------------------------------------------------------------------------------

    @abstractmethod
    def is_own(self, replica: R, hello: Hello, connection: FramedConnection[Report]) -> bool:
        """Whether the other end of a connection, whose Hello bears the replica's token, may be the replica."""

    @abstractmethod
    def take_hello(self, replica: R, hello: Hello, connection: FramedConnection[Report]) -> None:
        """A replica has introduced itself, for the first time or again."""

    def own_address(self, replica: R, address: str) -> str:
        """The address at which a replica says it listens, if it may listen there; else empty."""
        return address

    @abstractmethod
    def lies_in(self, replica: R, path: str) -> bool:
        """Whether a path that a replica reports is one of its own workload's."""

    @abstractmethod
    def rendezvous(self, job: Job, action: ResizeJob, *, is_script: bool) -> str:
        """Where the members of a group meet; the same for a repeated action. Raises BackendError or OSError."""

    @abstractmethod
    def fence_storage(self, job: Job, generation: int, then: Callable[[], None]) -> bool:
        """Let nothing older than `generation` publish any more. Raises StorageError.

        True where that has been done; else it is noted in `job.fenced` and `then` is called once it has been.
        """

    @abstractmethod
    def knows_exit_codes(self, replica: R) -> bool:
        """Whether somebody will still tell how this worker ended."""

    @abstractmethod
    def describe_end(self, replica: R) -> str:
        """A sentence on how a worker that nobody asked to end has ended."""

    @abstractmethod
    def let_go_of(self, replica: R) -> None:
        """Watch it no more, and close what was opened for that."""

    @abstractmethod
    def forget(self, replica: R) -> None:
        """A replica has left the table: remove what was kept of it elsewhere."""

    @abstractmethod
    def forget_job(self, job: Job) -> None:
        """A job has ended and its last worker is gone: remove what only its groups needed."""

    @abstractmethod
    def _signal(self, replica: R, number: int) -> None:
        """End the body of a replica that has one: SIGTERM kindly, SIGKILL at once."""

    @abstractmethod
    def _exit_code_of(self, replica: R) -> int | None:
        """The exit code of a body that has ended, if it can be had now."""

    # --- the table ---------------------------------------------------------------------------------------------------

    def work_dir(self, workload_id: WorkloadId) -> Path:
        """The workload's directory on this machine."""
        return self.state_dir / "workloads" / quote(workload_id, safe="")

    def log_path(self, workload_id: WorkloadId, replica_id: ReplicaId) -> Path:
        """Where a replica's output is kept on this machine."""
        return self.work_dir(workload_id) / "logs" / f"{quote(replica_id, safe='')}.log"

    def enter(self, replica: R) -> R:
        """Enter a replica into the table, and its job where it is the first."""
        self.replicas[replica.replica_id] = replica
        self._by_workload.setdefault(replica.workload_id, {})[replica.replica_id] = replica
        if replica.is_job:
            job = self.jobs.setdefault(replica.workload_id, Job(replica.workload_id, replica.work_dir))
            job.generation = max(job.generation, replica.generation)
        return replica

    def of_workload(self, workload_id: WorkloadId) -> list[R]:
        """The living replicas of a job or service."""
        return list(self._by_workload.get(workload_id, {}).values())

    def was_here(self, replica_id: ReplicaId) -> bool:
        """Whether a replica of this id lives or has lived here, so that starting it again would be a second life."""
        return replica_id in self.replicas or replica_id in self._gone

    def bury(self, replica_id: ReplicaId) -> None:
        """Remember that a replica is gone."""
        self._gone[replica_id] = None
        if len(self._gone) > _MAX_REMEMBERED:
            self._gone.popitem(last=False)

    # --- effects -----------------------------------------------------------------------------------------------------

    def post(self, event: Event, sources: list[Source] | None = None) -> None:
        """Hand an event to the control loop."""
        self.inbox.post(event, sources or ())

    def send(self, replica: Replica, order: Order) -> bool:
        """Send an order to a connected worker; False where there is no connection (it is told when it is back)."""
        if replica.connection is None:
            return False
        name = "acknowledge" if isinstance(order, Acknowledge) else "order"
        self.crash_point(f"executor.{name}.before")
        sent = replica.connection.send(order)
        self.crash_point(f"executor.{name}.after")
        return sent

    def kill(self, replica: R, number: int = signal.SIGKILL) -> None:
        """Signal a worker and everything it started, if it is still what it was."""
        if not replica.has_body:
            return
        self.crash_point("executor.kill.before")
        self._signal(replica, number)
        self.crash_point("executor.kill.after")

    def settle(self, sources: list[Source]) -> None:
        """Reports are done with (journaled, or nothing to journal): acknowledge as far as nothing older is open."""
        touched: dict[int, Replica] = {}
        for replica, seq in sources:
            replica.open_seqs.discard(seq)
            touched[id(replica)] = replica
        for replica in touched.values():
            upto = min(replica.open_seqs) - 1 if replica.open_seqs else replica.seen_seq
            if upto > replica.acknowledged_seq:
                replica.acknowledged_seq = upto
                self.send(replica, Acknowledge(seq=upto))

    # --- the end of a worker -----------------------------------------------------------------------------------------

    def note_exit(self, replica: R, exit_code: int | None = None) -> None:
        """The worker has ended. What it still said is read first; its exit code may come a little later."""
        if replica.phase is MemberPhase.GONE:
            return
        self.let_go_of(replica)
        if exit_code is None:
            exit_code = self._exit_code_of(replica)
        if exit_code is not None:
            replica.exit_code = exit_code
        if not replica.has_exited:
            replica.has_exited = True
            replica.timers.append(self.reactor.after(_LAST_WORDS_S, lambda: self._conclude(replica)))
        self.conclude_if_silent(replica)

    def conclude_if_silent(self, replica: R) -> None:
        """Draw the conclusion about an ended worker once nothing more can be heard of it."""
        if not replica.has_exited or replica.phase is MemberPhase.GONE or replica.connection is not None:
            return
        if replica.exit_code is not None or not self.knows_exit_codes(replica):
            self._conclude(replica)

    def lose(self, replica: R, reason: str) -> None:
        """Give a worker up: revoke its token, kill it, and report it lost once it is gone (or `death_s` later)."""
        if replica.lost_reason is not None or replica.phase is MemberPhase.GONE or replica.has_exited:
            return
        replica.lost_reason = reason
        self.counts["lost"] += 1
        if replica.connection is not None:
            self.send(replica, FenceOrder(reason=reason))
        self.kill(replica)
        self._drop_connection(replica)
        if not replica.has_body:
            self._conclude(replica)
        else:
            replica.timers.append(self.reactor.after(self.death_s, lambda: self._conclude(replica)))

    def retire(self, replica: R) -> None:
        """Take a replica out of the table with everything that was kept for it."""
        replica.phase = MemberPhase.GONE
        replica.cancel_timers()
        self.let_go_of(replica)
        self._drop_connection(replica)
        if replica in self.foreigners:
            self.foreigners.discard(replica)
        else:
            self.replicas.pop(replica.replica_id, None)
            those = self._by_workload.get(replica.workload_id, {})
            those.pop(replica.replica_id, None)
            if not those:
                self._by_workload.pop(replica.workload_id, None)
            self.bury(replica.replica_id)
        self.forget(replica)

    def let_go(self) -> None:
        """Close what is held of every worker; the workers live on."""
        for replica in [*self.replicas.values(), *self.foreigners]:
            replica.cancel_timers()
            self.let_go_of(replica)
            self._drop_connection(replica)

    def end_job(self, job: Job) -> None:
        """Forget an ended job as soon as its last worker is gone."""
        job.has_ended = True
        self._forget_ended_job(job.job_id)

    def ended_as_asked(self, replica: R) -> bool:
        """Whether the end of a worker is what was wanted of it, or what it announced."""
        job = self.jobs.get(replica.workload_id)
        is_over = job is not None and (job.has_ended or job.finish is not None)
        return replica.asked_to_stop or replica.has_left or replica.has_failed or (replica.has_finished and is_over)

    def is_fault(self, replica: R) -> bool:
        """Whether the worker failed that ended without being asked by the platform."""
        return True

    def _conclude(self, replica: R) -> None:
        if replica.phase is MemberPhase.GONE:
            return
        # What the worker started and left behind must not outlive it.
        self.kill(replica)
        is_foreign = replica in self.foreigners
        self.retire(replica)
        if is_foreign:
            return
        self.on_gone(replica)
        event: Event
        if replica.lost_reason is None and self.ended_as_asked(replica):
            event = ReplicaStopped(workload_id=replica.workload_id, replica_id=replica.replica_id)
        else:
            event = ReplicaLost(
                workload_id=replica.workload_id,
                replica_id=replica.replica_id,
                reason=replica.lost_reason or replica.failure or self.describe_end(replica),
                exit_code=replica.exit_code,
                is_fault=self.is_fault(replica),
            )
        self.post(event)
        self._forget_ended_job(replica.workload_id)

    def _forget_ended_job(self, workload_id: WorkloadId) -> None:
        job = self.jobs.get(workload_id)
        if job is not None and job.has_ended and not self.of_workload(workload_id):
            self.forget_job(job)
            del self.jobs[workload_id]

    def _drop_connection(self, replica: R) -> None:
        connection, replica.connection = replica.connection, None
        if connection is not None:
            connection.close_when_sent()
