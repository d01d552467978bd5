"""The table of replicas and jobs, and how the end of a replica becomes an event."""

from __future__ import annotations

import signal
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic
from urllib.parse import quote

from springtide.backends.control_channel.driver import ReplicaDriver
from springtide.backends.control_channel.members import Handle, Job, MemberPhase, Replica, Source
from springtide.backends.control_channel.reactor import Reactor
from springtide.backends.inbox import Inbox
from springtide.core.events import Event, ReplicaLost, ReplicaStopped
from springtide.core.wire.workers import Acknowledge, FenceOrder, Order
from springtide.core.workload import ReplicaId, WorkloadId

_MAX_REMEMBERED = 10_000
# How long the exit code and the last reports of an ended worker may take to arrive after its end is known.
_LAST_REPORTS_S = 0.5


class ReplicaTable(Generic[Handle]):
    """State and effects that the parts of an executor share. Runs on the I/O thread.

    `driver` does what differs between processes and pods. `crash_point` is called with a name around each effect, for
    tests that end the process there. `on_gone` is called with each replica that has left the table.
    """

    def __init__(
        self,
        state_dir: Path,
        reactor: Reactor,
        inbox: Inbox[Source],
        crash_point: Callable[[str], None],
        driver: ReplicaDriver[Handle],
    ) -> None:
        self.state_dir = state_dir
        self.reactor = reactor
        self.inbox = inbox
        self.crash_point = crash_point
        self.driver = driver
        self.replicas: dict[ReplicaId, Replica[Handle]] = {}
        # The same by workload, in the order in which they were entered, for quick look-ups.
        self._by_workload: dict[WorkloadId, dict[ReplicaId, Replica[Handle]]] = {}
        self.foreigners: set[Replica[Handle]] = set()
        self.jobs: dict[WorkloadId, Job] = {}
        self.counts: Counter[str] = Counter()
        self.on_gone: Callable[[Replica[Handle]], None] = lambda replica: None
        self._gone: OrderedDict[ReplicaId, None] = OrderedDict()

    # --- the table ---------------------------------------------------------------------------------------------------

    def work_dir(self, workload_id: WorkloadId) -> Path:
        """The workload's directory on this machine."""
        return self.state_dir / "workloads" / quote(workload_id, safe="")

    def log_path(self, workload_id: WorkloadId, replica_id: ReplicaId) -> Path:
        """Where a replica's output is kept on this machine."""
        return self.work_dir(workload_id) / "logs" / f"{quote(replica_id, safe='')}.log"

    def enter(self, replica: Replica[Handle]) -> Replica[Handle]:
        """Add a replica to the table, and its job if it is the job's first replica."""
        self.replicas[replica.replica_id] = replica
        self._by_workload.setdefault(replica.workload_id, {})[replica.replica_id] = replica
        if replica.is_job:
            job = self.jobs.setdefault(replica.workload_id, Job(replica.workload_id, replica.work_dir))
            job.generation = max(job.generation, replica.generation)
        return replica

    def of_workload(self, workload_id: WorkloadId) -> list[Replica[Handle]]:
        """The living replicas of a job or service."""
        return list(self._by_workload.get(workload_id, {}).values())

    def has_existed(self, replica_id: ReplicaId) -> bool:
        """Whether a replica of this id exists or has existed: it must not be started again."""
        return replica_id in self.replicas or replica_id in self._gone

    def remember_gone(self, replica_id: ReplicaId) -> None:
        """Remember the id of a replica that is gone."""
        self._gone[replica_id] = None
        if len(self._gone) > _MAX_REMEMBERED:
            self._gone.popitem(last=False)

    # --- effects -----------------------------------------------------------------------------------------------------

    def post(self, event: Event, sources: list[Source] | None = None) -> None:
        """Hand an event to the control loop."""
        self.inbox.post(event, sources or ())

    def send(self, replica: Replica[Any], order: Order) -> bool:
        """Send an order to a worker; False if it is not connected (then it is sent when it reconnects)."""
        if replica.connection is None:
            return False
        name = "acknowledge" if isinstance(order, Acknowledge) else "order"
        self.crash_point(f"executor.{name}.before")
        sent = replica.connection.send(order)
        self.crash_point(f"executor.{name}.after")
        return sent

    def kill(self, replica: Replica[Handle], number: int = signal.SIGKILL) -> None:
        """Signal a worker and everything it started, if its process or pod still exists."""
        if not replica.handle.exists:
            return
        self.crash_point("executor.kill.before")
        self.driver.signal(replica, number)
        self.crash_point("executor.kill.after")

    def settle(self, sources: list[Source]) -> None:
        """Reports are processed (journaled if need be): acknowledge them up to the oldest one that is not."""
        touched: dict[int, Replica[Any]] = {}
        for replica, seq in sources:
            replica.open_seqs.discard(seq)
            touched[id(replica)] = replica
        for replica in touched.values():
            upto = min(replica.open_seqs) - 1 if replica.open_seqs else replica.seen_seq
            if upto > replica.acknowledged_seq:
                replica.acknowledged_seq = upto
                self.send(replica, Acknowledge(seq=upto))

    # --- the end of a worker -----------------------------------------------------------------------------------------

    def note_exit(self, replica: Replica[Handle], exit_code: int | None = None) -> None:
        """The worker has ended. Its last reports are still read, and its exit code may arrive shortly after."""
        if replica.phase is MemberPhase.GONE:
            return
        self.driver.release(replica)
        if exit_code is None:
            exit_code = self.driver.exit_code(replica)
        if exit_code is not None:
            replica.exit_code = exit_code
        if not replica.has_exited:
            replica.has_exited = True
            replica.timers.append(self.reactor.after(_LAST_REPORTS_S, lambda: self._conclude(replica)))
        self.conclude_if_silent(replica)

    def conclude_if_silent(self, replica: Replica[Handle]) -> None:
        """Report the end of an exited worker once neither reports nor an exit code can arrive any more."""
        if not replica.has_exited or replica.phase is MemberPhase.GONE or replica.connection is not None:
            return
        if replica.exit_code is not None or not self.driver.knows_exit_codes(replica):
            self._conclude(replica)

    def lose(self, replica: Replica[Handle], reason: str) -> None:
        """Revoke a worker's token, kill it, and report it lost once it is gone (at most `driver.death_s` later)."""
        if replica.lost_reason is not None or replica.phase is MemberPhase.GONE or replica.has_exited:
            return
        replica.lost_reason = reason
        self.counts["lost"] += 1
        if replica.connection is not None:
            self.send(replica, FenceOrder(reason=reason))
        self.kill(replica)
        self._drop_connection(replica)
        if not replica.handle.exists:
            self._conclude(replica)
        else:
            replica.timers.append(self.reactor.after(self.driver.death_s, lambda: self._conclude(replica)))

    def retire(self, replica: Replica[Handle]) -> None:
        """Remove a replica from the table with all of its state."""
        replica.phase = MemberPhase.GONE
        replica.cancel_timers()
        self.driver.release(replica)
        self._drop_connection(replica)
        if replica in self.foreigners:
            self.foreigners.discard(replica)
        else:
            self.replicas.pop(replica.replica_id, None)
            those = self._by_workload.get(replica.workload_id, {})
            those.pop(replica.replica_id, None)
            if not those:
                self._by_workload.pop(replica.workload_id, None)
            self.remember_gone(replica.replica_id)
        self.driver.forget(replica)

    def disconnect_all(self) -> None:
        """Close connections and descriptors of all workers, which keep running."""
        for replica in [*self.replicas.values(), *self.foreigners]:
            replica.cancel_timers()
            self.driver.release(replica)
            self._drop_connection(replica)

    def end_job(self, job: Job) -> None:
        """Forget an ended job as soon as its last worker is gone."""
        job.has_ended = True
        self._forget_ended_job(job.job_id)

    def _ended_as_asked(self, replica: Replica[Handle]) -> bool:
        """Whether a worker ended because it was told to, or announced its end."""
        if self.driver.was_ended_externally(replica) and not replica.asked_to_stop and not replica.has_finished:
            # The platform did not request this end, however orderly it was.
            return False
        job = self.jobs.get(replica.workload_id)
        is_over = job is not None and (job.has_ended or job.finish is not None)
        return replica.asked_to_stop or replica.has_left or replica.has_failed or (replica.has_finished and is_over)

    def _conclude(self, replica: Replica[Handle]) -> None:
        if replica.phase is MemberPhase.GONE:
            return
        # Processes that the worker started must not outlive it.
        self.kill(replica)
        is_foreign = replica in self.foreigners
        self.retire(replica)
        if is_foreign:
            return
        self.on_gone(replica)
        event: Event
        if replica.lost_reason is None and self._ended_as_asked(replica):
            event = ReplicaStopped(workload_id=replica.workload_id, replica_id=replica.replica_id)
        else:
            event = ReplicaLost(
                workload_id=replica.workload_id,
                replica_id=replica.replica_id,
                reason=replica.lost_reason or replica.failure or self.driver.describe_end(replica),
                exit_code=replica.exit_code,
                is_fault=not self.driver.was_ended_externally(replica),
                is_refused=self.driver.was_refused(replica),
            )
        self.post(event)
        self._forget_ended_job(replica.workload_id)

    def _forget_ended_job(self, workload_id: WorkloadId) -> None:
        job = self.jobs.get(workload_id)
        if job is not None and job.has_ended and not self.of_workload(workload_id):
            self.driver.forget_job(job)
            del self.jobs[workload_id]

    def _drop_connection(self, replica: Replica[Handle]) -> None:
        connection, replica.connection = replica.connection, None
        if connection is not None:
            connection.close_when_sent()
