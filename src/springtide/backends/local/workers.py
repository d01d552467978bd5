"""The table of workers and jobs, and every effect on the world, each between two named crash points."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from springtide.backends.inbox import Inbox
from springtide.backends.local.members import Job, Phase, Replica, Source
from springtide.backends.local.reactor import Reactor
from springtide.backends.local.records import WorkerRecord, WorkerRecords
from springtide.backends.processes import (
    ProcessIdentity,
    describe_exit,
    open_pidfd,
    reap,
    signal_group,
)
from springtide.core.actions import StartReplica
from springtide.core.events import Event, ReplicaLost, ReplicaStopped
from springtide.core.wire import Acknowledge, Fence, Order
from springtide.core.workload import ReplicaId, WorkloadId
from springtide.storage.fence import Fence as StorageFence

CRASH_POINTS = tuple(
    f"executor.{effect}.{moment}"
    for effect in ("record", "spawn", "order", "fence", "kill", "acknowledge")
    for moment in ("before", "after")
)
_MAX_REMEMBERED = 10_000
# How long the exit code and the last reports of an ended worker may take to arrive after its end is known.
_LAST_WORDS_S = 0.5
# How long a killed worker may take to be gone before its loss is reported nevertheless.
_DEATH_S = 1.0


class Workers:
    """State and effects that the parts of the executor share. Everything here runs on the I/O thread."""

    def __init__(
        self, state_dir: Path, reactor: Reactor, inbox: Inbox[Source], crash_point: Callable[[str], None]
    ) -> None:
        self.state_dir = state_dir
        self.reactor = reactor
        self.inbox = inbox
        self.crash_point = crash_point
        self.records = WorkerRecords(state_dir / "workers")
        self.replicas: dict[ReplicaId, Replica] = {}
        self.foreigners: set[Replica] = set()
        self.jobs: dict[WorkloadId, Job] = {}
        self.counts: Counter[str] = Counter()
        self.knows_exit_codes: Callable[[Replica], bool] = lambda replica: False
        self.on_gone: Callable[[Replica], None] = lambda replica: None
        self.on_process: Callable[[Replica], None] = lambda replica: None
        self._gone: OrderedDict[ReplicaId, None] = OrderedDict()

    # --- the table ---------------------------------------------------------------------------------------------------

    def work_dir(self, workload_id: WorkloadId) -> Path:
        """The workload's directory."""
        return self.state_dir / "workloads" / quote(workload_id, safe="")

    def make_replica(self, action: StartReplica, token_sha256: str) -> Replica:
        """Enter a replica into the table, and its job where it is the first."""
        replica = self._new(action.replica_id, action.workload_id, action.generation, action, token_sha256)
        self.replicas[action.replica_id] = replica
        if replica.is_job:
            job = self.jobs.setdefault(action.workload_id, Job(action.workload_id, replica.work_dir))
            job.generation = max(job.generation, action.generation)
        return replica

    def make_foreigner(self, record: WorkerRecord) -> Replica:
        """Take note of a worker that should not run: its end is watched, and nobody is told of it."""
        foreigner = self._new(record.replica_id, record.workload_id, record.generation, None, record.token_sha256)
        self.foreigners.add(foreigner)
        return foreigner

    def _new(
        self,
        replica_id: ReplicaId,
        workload_id: WorkloadId,
        generation: int,
        action: StartReplica | None,
        token_sha256: str,
    ) -> Replica:
        work_dir = self.work_dir(workload_id)
        return Replica(
            replica_id=replica_id,
            workload_id=workload_id,
            generation=generation,
            action=action,
            work_dir=work_dir,
            log_path=work_dir / "logs" / f"{quote(replica_id, safe='')}.log",
            token_sha256=token_sha256,
            born_at_s=time.monotonic(),
        )

    def of_workload(self, workload_id: WorkloadId) -> list[Replica]:
        """The living replicas of a job or service."""
        return [replica for replica in self.replicas.values() if replica.workload_id == workload_id]

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

    def write_record(self, replica: Replica) -> None:
        """Make durable who this worker is. Raises StorageError."""
        self.crash_point("executor.record.before")
        self.records.write(
            WorkerRecord(
                replica_id=replica.replica_id,
                workload_id=replica.workload_id,
                generation=replica.generation,
                token_sha256=replica.token_sha256,
                process=replica.identity,
                share_slot=replica.share_slot,
            )
        )
        self.crash_point("executor.record.after")

    def raise_fence(self, work_dir: Path, generation: int) -> None:
        """From now on nothing older than `generation` publishes in this directory. Raises StorageError."""
        self.crash_point("executor.fence.before")
        StorageFence(work_dir).raise_to(generation)
        self.crash_point("executor.fence.after")

    def send(self, replica: Replica, order: Order) -> bool:
        """Send an order to a connected worker; False where there is no connection (it is told when it is back)."""
        if replica.connection is None:
            return False
        name = "acknowledge" if isinstance(order, Acknowledge) else "order"
        self.crash_point(f"executor.{name}.before")
        sent = replica.connection.send(order)
        self.crash_point(f"executor.{name}.after")
        return sent

    def kill(self, replica: Replica, number: int = signal.SIGKILL) -> None:
        """Signal a worker and everything it started, if it is still the process that it was."""
        if replica.identity is None:
            return
        self.crash_point("executor.kill.before")
        signal_group(replica.identity, number)
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

    def take_process(self, replica: Replica, identity: ProcessIdentity | None) -> None:
        """Tie a replica to its process and watch for its end; None: the process has ended before it was looked at."""
        if replica.identity is not None or replica.has_exited:
            return
        pidfd = open_pidfd(identity) if identity is not None else None
        if identity is None or pidfd is None:
            replica.identity = identity
            self.note_exit(replica)
            return
        replica.identity, replica.pidfd = identity, pidfd
        self.reactor.watch(pidfd, selectors.EVENT_READ, lambda mask: self.note_exit(replica))
        self.on_process(replica)

    def note_exit(self, replica: Replica, exit_code: int | None = None) -> None:
        """The process has ended. What it still said is read first; its exit code may come a little later."""
        if replica.phase is Phase.GONE:
            return
        self._unwatch(replica)
        if exit_code is None and replica.identity is not None:
            exit_code = reap(replica.identity.pid)
        if exit_code is not None:
            replica.exit_code = exit_code
        if not replica.has_exited:
            replica.has_exited = True
            replica.timers.append(self.reactor.after(_LAST_WORDS_S, lambda: self._conclude(replica)))
        self.conclude_if_silent(replica)

    def conclude_if_silent(self, replica: Replica) -> None:
        """Draw the conclusion about an ended worker once nothing more can be heard of it."""
        if not replica.has_exited or replica.phase is Phase.GONE or replica.connection is not None:
            return
        if replica.exit_code is not None or not self.knows_exit_codes(replica):
            self._conclude(replica)

    def lose(self, replica: Replica, reason: str) -> None:
        """Give a worker up: revoke its token, kill it, and report it lost once it is gone (or a second later)."""
        if replica.lost_reason is not None or replica.phase is Phase.GONE or replica.has_exited:
            return
        replica.lost_reason = reason
        self.counts["lost"] += 1
        if replica.connection is not None:
            self.send(replica, Fence(reason=reason))
        self.kill(replica)
        self._drop_connection(replica)
        if replica.identity is None:
            self._conclude(replica)
        else:
            replica.timers.append(self.reactor.after(_DEATH_S, lambda: self._conclude(replica)))

    def retire(self, replica: Replica) -> None:
        """Take a replica out of the table with everything that was kept for it."""
        replica.phase = Phase.GONE
        replica.cancel_timers()
        self._unwatch(replica)
        self._drop_connection(replica)
        if replica in self.foreigners:
            self.foreigners.discard(replica)
        else:
            self.replicas.pop(replica.replica_id, None)
            self.bury(replica.replica_id)
        self.records.spec_path(replica.replica_id).unlink(missing_ok=True)
        if replica.replica_id not in self.replicas:
            self.records.remove(replica.replica_id)

    def _conclude(self, replica: Replica) -> None:
        if replica.phase is Phase.GONE:
            return
        if replica.identity is not None:
            # What the worker started and left behind must not outlive it.
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
                reason=replica.lost_reason or replica.failure or describe_exit(replica.exit_code, replica.log_path),
                exit_code=replica.exit_code,
            )
        self.post(event)
        self._forget_ended_job(replica.workload_id)

    def _ended_as_asked(self, replica: Replica) -> bool:
        job = self.jobs.get(replica.workload_id)
        is_over = job is not None and (job.has_ended or job.finish is not None)
        return replica.asked_to_stop or replica.has_left or replica.has_failed or (replica.has_finished and is_over)

    def _forget_ended_job(self, workload_id: WorkloadId) -> None:
        job = self.jobs.get(workload_id)
        if job is not None and job.has_ended and not self.of_workload(workload_id):
            for path in (job.work_dir / "rendezvous").glob("*"):
                if path.is_dir():
                    # Leftovers of a rendezvous cost a few bytes and confuse nobody: generations never repeat.
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            del self.jobs[workload_id]

    def let_go(self) -> None:
        """Close what is held of every worker; the workers live on."""
        for replica in [*self.replicas.values(), *self.foreigners]:
            replica.cancel_timers()
            self._unwatch(replica)
            self._drop_connection(replica)

    def end_job(self, job: Job) -> None:
        """Forget an ended job as soon as its last worker is gone."""
        job.has_ended = True
        self._forget_ended_job(job.job_id)

    def _unwatch(self, replica: Replica) -> None:
        pidfd, replica.pidfd = replica.pidfd, None
        if pidfd is not None:
            self.reactor.unwatch(pidfd)
            os.close(pidfd)

    def _drop_connection(self, replica: Replica) -> None:
        connection, replica.connection = replica.connection, None
        if connection is not None:
            connection.close_when_sent()
