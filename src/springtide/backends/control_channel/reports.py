"""Turns workers' messages into events: a worker connects and is ready, its job's group changes and ends."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from functools import singledispatchmethod
from typing import Generic

from msgspec.structs import replace

from springtide.backends.control_channel.members import Handle, Job, JobGroup, MemberPhase, Replica, Source
from springtide.backends.control_channel.reactor import FramedConnection
from springtide.backends.control_channel.replica_table import ReplicaTable
from springtide.core.events import (
    CheckpointCommitted,
    GroupBroken,
    JobFailed,
    JobFinished,
    JobResized,
    ProgressReported,
    ReplicaReady,
    StartHeldUp,
)
from springtide.core.wire import workers as wire
from springtide.core.wire.workers import LOST_AFTER_S

# A reconnected worker's Hello comes before the reports it repeats; these hold more, so wait for them.
_REPEATS_S = 0.3
_BREAK_CHECK_S = 0.5
_SILENT_S = 1.0
_HELLO_TIMEOUT_S = 10.0
# The most connections without a Hello: a port on a network is open to more than workers.
MAX_UNIDENTIFIED = 1024


class Reports(Generic[Handle]):
    """Handles connections and reports. Runs on the I/O thread.

    `send_missed_orders` sends a worker the orders it may have missed; `make_room` is called once one has connected.
    """

    def __init__(
        self,
        table: ReplicaTable[Handle],
        send_missed_orders: Callable[[Replica[Handle]], None],
        make_room: Callable[[], None],
    ) -> None:
        self._table = table
        self._send_missed_orders = send_missed_orders
        self._make_room = make_room
        self._owners: dict[FramedConnection[wire.Report], Replica[Handle]] = {}
        self.unidentified: set[FramedConnection[wire.Report]] = set()

    # --- connections -------------------------------------------------------------------------------------------------

    def register(self, connection: FramedConnection[wire.Report]) -> None:
        """Register a new connection, which must send a Hello within a time limit."""
        if len(self.unidentified) >= MAX_UNIDENTIFIED:
            self._table.counts["rejected_connections"] += 1
            connection.close("too many have not introduced themselves")
            return
        self.unidentified.add(connection)
        self._table.reactor.after(_HELLO_TIMEOUT_S, lambda: self._expire(connection))

    def on_message(self, connection: FramedConnection[wire.Report], report: wire.Report) -> None:
        """Handle one frame of a worker."""
        replica = self._owners.get(connection)
        if replica is None:
            if isinstance(report, wire.Hello) and connection in self.unidentified:
                self._hello(connection, report)
            else:
                self._table.counts["unintroduced_frames"] += 1
                connection.close("the first frame must be a Hello")
            return
        if replica.connection is not connection:
            return
        replica.heard_at_s = time.monotonic()
        replica.suspect_ticks = None
        if report.seq > 0:
            if report.seq <= replica.seen_seq:
                self._table.counts["repeated_reports"] += 1
                if report.seq <= replica.acknowledged_seq:
                    self._table.send(replica, wire.Acknowledge(seq=replica.acknowledged_seq))
                return
            replica.seen_seq = report.seq
            replica.open_seqs.add(report.seq)
        self._take(report, replica)

    def on_close(self, connection: FramedConnection[wire.Report], reason: str) -> None:
        """A connection is gone; its worker may come back, or may have ended."""
        if reason:
            self._table.counts["closed_connections"] += 1
        self.unidentified.discard(connection)
        replica = self._owners.pop(connection, None)
        if replica is not None and replica.connection is connection:
            replica.connection = None
            self._table.conclude_if_silent(replica)

    def close(self) -> None:
        """Close every connection; the workers live on."""
        for connection in [*self._owners, *self.unidentified]:
            connection.close()

    def _expire(self, connection: FramedConnection[wire.Report]) -> None:
        if connection in self.unidentified:
            connection.close("it said no Hello")

    def _hello(self, connection: FramedConnection[wire.Report], hello: wire.Hello) -> None:
        self.unidentified.discard(connection)
        table = self._table
        replica = table.replicas.get(hello.replica_id)
        known = (
            replica is not None
            and hmac.compare_digest(replica.token_sha256, hash_token(hello.token))
            and replica.workload_id == hello.workload_id
            and replica.lost_reason is None
            and table.driver.is_own(replica, hello, connection)
        )
        if replica is None or not known:
            # The sender may be a worker that was replaced: the fence makes it exit.
            table.counts["refused_hellos"] += 1
            connection.send(wire.FenceOrder(reason="this worker is unknown here, or has been replaced"))
            if not connection.is_closed:
                connection.close_when_sent()
            return
        old, replica.connection = replica.connection, connection
        if old is not None:
            self._owners.pop(old, None)
            old.close("replaced by a newer connection")
        self._owners[connection] = replica
        table.driver.take_hello(replica, hello, connection)
        self._adopt(replica, hello)

    def _adopt(self, replica: Replica[Handle], hello: wire.Hello) -> None:
        table = self._table
        replica.phase = MemberPhase.RUNNING
        replica.heard_at_s = time.monotonic()
        replica.suspect_ticks = None
        replica.step = max(replica.step, hello.step)
        replica.group_generation = max(replica.group_generation, hello.generation)
        if hello.is_ready and not replica.is_ready:
            replica.address = self._table.driver.own_address(replica, hello.address)
            table.reactor.after(_REPEATS_S, lambda: self._infer_ready(replica))
        self._send_missed_orders(replica)
        self._make_room()
        job = table.jobs.get(replica.workload_id)
        if job is not None and job.group is not None and not job.group.is_confirmed:
            table.reactor.after(_REPEATS_S, lambda: self.confirm(job))

    def _infer_ready(self, replica: Replica[Handle]) -> None:
        """Take readiness from the Hello where no Ready report repeats it: an earlier control plane acknowledged it."""
        if not replica.is_ready and replica.phase is MemberPhase.RUNNING:
            self._ready(replica, wire.Ready(address=replica.address), [])

    # --- reports -----------------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _take(self, report: wire.Report, replica: Replica[Handle]) -> None:
        raise AssertionError(f"no way to take {type(report).__name__}")

    @_take.register
    def _(self, report: wire.Hello, replica: Replica[Handle]) -> None:
        self._table.counts["repeated_reports"] += 1

    @_take.register
    def _(self, report: wire.Heartbeat, replica: Replica[Handle]) -> None:
        replica.step = max(replica.step, report.step)
        self._table.settle([(replica, report.seq)])

    @_take.register
    def _(self, report: wire.Preparing, replica: Replica[Handle]) -> None:
        replica.is_preparing = bool(report.reason)
        if not report.reason:
            # The program that it becomes says Hello once it has imported what it needs.
            replica.phase, replica.born_at_s = MemberPhase.SPAWNING, time.monotonic()
        event = StartHeldUp(workload_id=replica.workload_id, replica_id=replica.replica_id, reason=report.reason)
        self._table.post(event, [(replica, report.seq)])

    @_take.register
    def _(self, report: wire.Ready, replica: Replica[Handle]) -> None:
        self._ready(replica, report, [(replica, report.seq)])

    @_take.register
    def _(self, report: wire.Progress, replica: Replica[Handle]) -> None:
        event = ProgressReported(
            job_id=replica.workload_id,
            generation=report.generation,
            step=report.step,
            total_steps=report.total_steps,
            world_size=report.world_size,
            epoch=report.epoch,
            loss=report.loss,
            is_diverged=report.is_diverged,
            diverged_at_step=report.diverged_at_step,
            samples_per_s=report.samples_per_s,
            metrics=report.metrics,
            exact_obstacle=report.exact_obstacle,
            progress=report.progress,
            total_progress=report.total_progress,
            global_batch_size=report.global_batch_size,
            local_batch_size=report.local_batch_size,
            step_s=report.step_s,
            sync_s=report.sync_s,
            grad_sqr=report.grad_sqr,
            grad_var=report.grad_var,
        )
        replica.step = max(replica.step, report.step)
        if not self._table.inbox.progress(event):
            self._table.counts["stale_reports"] += 1
        self._table.settle([(replica, report.seq)])

    @_take.register
    def _(self, report: wire.Switched, replica: Replica[Handle]) -> None:
        replica.group_generation = max(replica.group_generation, report.generation)
        replica.step = max(replica.step, report.step)
        job = self._table.jobs.get(replica.workload_id)
        group = job.group if job is not None else None
        if job is None or group is None or report.generation != group.order.generation or group.is_confirmed:
            self._table.counts["stale_reports"] += 1
            self._table.settle([(replica, report.seq)])
            return
        group.switched[replica.replica_id] = report
        group.sources.append((replica, report.seq))
        self.confirm(job, wait_for_repeats=True)

    @_take.register
    def _(self, report: wire.CheckpointWritten, replica: Replica[Handle]) -> None:
        checkpoint = report.checkpoint
        source = (replica, report.seq)
        if not self._table.driver.owns_path(replica, checkpoint.path):
            self._table.counts["stray_paths"] += 1
            self._table.settle([source])
            return
        event = CheckpointCommitted(
            job_id=replica.workload_id,
            generation=checkpoint.generation,
            step=checkpoint.step,
            path=checkpoint.path,
            num_bytes=checkpoint.num_bytes,
        )
        self._table.post(event, [source])

    @_take.register
    def _(self, report: wire.Finished, replica: Replica[Handle]) -> None:
        replica.has_finished = True
        replica.group_generation = max(replica.group_generation, report.generation)
        job = self._table.jobs.get(replica.workload_id)
        if job is None or job.finish is not None:
            self._table.settle([(replica, report.seq)])
            return
        job.finished.append((replica, report.seq))
        job.finished_step = max(job.finished_step, report.step)
        job.has_result = job.has_result or report.has_result
        job.diverged_at_step = report.diverged_at_step or job.diverged_at_step
        if report.artifact_path and self._table.driver.owns_path(replica, report.artifact_path):
            job.artifact_path = report.artifact_path
        self.finish(job)

    @_take.register
    def _(self, report: wire.Failed, replica: Replica[Handle]) -> None:
        if not replica.is_job:
            replica.failure = report.error
            self._table.settle([(replica, report.seq)])
            return
        replica.has_failed = True
        generation = max(report.generation, self._generation_of(replica))
        event = JobFailed(
            job_id=replica.workload_id,
            generation=generation,
            error=report.error,
            is_fixed_size=report.is_fixed_size,
        )
        self._table.post(event, [(replica, report.seq)])

    @_take.register
    def _(self, report: wire.Left, replica: Replica[Handle]) -> None:
        replica.has_left = True
        self._table.settle([(replica, report.seq)])

    @_take.register
    def _(self, report: wire.GroupBrokenReport, replica: Replica[Handle]) -> None:
        job = self._table.jobs.get(replica.workload_id)
        if job is None:
            self._table.settle([(replica, report.seq)])
            return
        group = job.group
        if group is None:
            # After a restart the newest order is not known: take the worker's generation, unless a newer one is known.
            if report.generation < job.generation:
                self._table.counts["stale_reports"] += 1
                self._table.settle([(replica, report.seq)])
                return
            order = wire.FormGroup(generation=report.generation, members=(), rendezvous="")
            group = job.group = JobGroup(order=order, audience=frozenset(), is_confirmed=True)
        # A break of the previous group counts while the next one forms: they can switch only at a step of the former.
        is_before = not group.is_confirmed and report.generation == group.order.previous
        if report.generation < group.order.generation and not is_before:
            self._table.counts["stale_reports"] += 1
            self._table.settle([(replica, report.seq)])
            return
        group.broken.append((replica, report.seq))
        group.broken_detail = report.detail
        if group.broken_at_s is None:
            group.broken_at_s = time.monotonic()
            group.broke_before = is_before
            self._table.reactor.after(_BREAK_CHECK_S, lambda: self._check_break(job, group))

    def _ready(self, replica: Replica[Handle], report: wire.Ready, sources: list[Source]) -> None:
        replica.is_ready = True
        replica.address = self._table.driver.own_address(replica, report.address) or replica.address
        event = ReplicaReady(
            workload_id=replica.workload_id,
            replica_id=replica.replica_id,
            address=replica.address,
            phases_s=report.phases_s,
            device_seen=report.device_seen,
        )
        self._table.post(event, sources)

    # --- groups ------------------------------------------------------------------------------------------------------

    def confirm(self, job: Job, *, wait_for_repeats: bool = False) -> None:
        """Report the resize once every member of the newest group has switched.

        A member that switched under an earlier control plane reports that only in its Hello, without the pause.
        """
        group = job.group
        if group is None or group.is_confirmed or self._table.jobs.get(job.job_id) is not job:
            return
        order = group.order
        members = [self._table.replicas.get(member) for member in order.members]
        if not all(member is not None and member.group_generation >= order.generation for member in members):
            return
        if wait_for_repeats and len(group.switched) < len(order.members):
            self._table.reactor.after(_REPEATS_S, lambda: self.confirm(job))
            return
        group.is_confirmed = True
        switches = [group.switched[member] for member in order.members if member in group.switched]
        first = min(switches, key=lambda switched: switched.rank, default=None)
        event = JobResized(
            job_id=job.job_id,
            generation=order.generation,
            world_size=len(order.members),
            step=first.step if first else max(member.step for member in members if member is not None),
            pause_s=first.pause_s if first else 0.0,
            direction=first.direction if first else ("replace" if order.previous else "start"),
        )
        sources, group.sources = group.sources, []
        self._table.post(event, sources)

    def supersede(self, group: JobGroup) -> None:
        """A newer group replaces this one: acknowledge the reports that were held back for it."""
        sources = [*group.sources, *group.broken]
        group.sources, group.broken = [], []
        self._table.settle(sources)

    def finish(self, job: Job) -> None:
        """Report the end of training once the result is stored and the function has returned on every living member.

        A leader that dies while it writes the result has not reported it: the group forms anew and another one writes
        it.
        """
        if job.finish is not None or not job.finished or not job.has_result:
            return
        living = [
            replica
            for replica in self._table.of_workload(job.job_id)
            if not replica.asked_to_stop and replica.lost_reason is None and not replica.has_exited
        ]
        # A joiner without a group has nothing to finish; a worker that has not reconnected yet may have.
        if any(not r.has_finished and (r.group_generation > 0 or r.phase is MemberPhase.ADOPTING) for r in living):
            return
        generation = max(replica.group_generation for replica, _ in job.finished)
        order = job.group.order if job.group is not None else None
        if order is not None and (order.forced or {r.replica_id for r in living} <= set(order.members)):
            # They belong to the newest group, whether they still switched to it or not.
            generation = max(generation, order.generation)
        job.finish = JobFinished(
            job_id=job.job_id,
            generation=generation,
            step=job.finished_step,
            artifact_path=job.artifact_path,
            diverged_at_step=job.diverged_at_step,
        )
        sources, job.finished = job.finished, []
        self._table.post(job.finish, sources)

    def repeat_finish(self, job: Job, generation: int) -> bool:
        """A resize was decided before the end of training was known: report the end again, for the new generation."""
        if job.finish is None:
            return False
        job.finish = replace(job.finish, generation=generation)
        self._table.post(job.finish)
        return True

    def on_gone(self, replica: Replica[Handle]) -> None:
        """A worker has left the table: the remaining ones may all have finished."""
        job = self._table.jobs.get(replica.workload_id)
        if job is not None:
            self.finish(job)

    def _check_break(self, job: Job, group: JobGroup) -> None:
        """A collective broke. Lost members are reported elsewhere; if all are alive, report that the group broke."""
        if job.group is not group or group.is_break_posted or job.has_ended or job.finish is not None:
            return
        if group.broke_before and group.is_confirmed:
            # The members continued in the new group, which has not broken.
            self._table.settle(group.broken)
            group.broken, group.broken_at_s, group.broke_before = [], None, False
            return
        now_s = time.monotonic()
        living = [replica for replica in self._table.of_workload(job.job_id) if not replica.asked_to_stop]
        is_any_silent = any(now_s - replica.heard_at_s > _SILENT_S for replica in living if replica.heard_at_s)
        since_s = now_s - (group.broken_at_s or now_s)
        if is_any_silent or since_s < LOST_AFTER_S:
            self._table.reactor.after(_BREAK_CHECK_S, lambda: self._check_break(job, group))
            return
        group.is_break_posted = True
        event = GroupBroken(job_id=job.job_id, generation=group.order.generation, detail=group.broken_detail)
        sources, group.broken = group.broken, []
        self._table.post(event, sources)

    def _generation_of(self, replica: Replica[Handle]) -> int:
        job = self._table.jobs.get(replica.workload_id)
        if job is None or job.group is None or replica.replica_id not in job.group.order.members:
            return 0
        return job.group.order.generation


def hash_token(token: str) -> str:
    """Return the hash by which a worker's token is stored."""
    return hashlib.sha256(token.encode()).hexdigest()
