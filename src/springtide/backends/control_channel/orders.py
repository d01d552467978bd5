"""Actions of the controller as orders to workers, enforced by signals where a worker does not comply."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from functools import singledispatchmethod
from typing import Generic

from springtide.backends.control_channel.members import Handle, Job, JobGroup, MemberPhase, Replica
from springtide.backends.control_channel.replica_table import ReplicaTable
from springtide.backends.control_channel.reports import Reports
from springtide.core.actions import (
    Action,
    AdmitJob,
    DrainNode,
    EndJob,
    LabelNode,
    PreemptJob,
    ResizeJob,
    SetShare,
    StartReplica,
    StopReplica,
)
from springtide.core.errors import BackendError, StorageError
from springtide.core.events import JobResized, ReplicaLost, ReplicaStopped
from springtide.core.wire.workers import FormGroup, Preempt, Stop
from springtide.core.workload import ReplicaId

_log = logging.getLogger(__name__)

END_GRACE_S = 5.0
_RETRY_S = 1.0


def _do_nothing(action: LabelNode) -> None:
    """Labels concern only the control plane, which records them in its journal."""


class OrderTable(Generic[Handle]):
    """Carries out actions. Runs on the I/O thread. Each action may be repeated any number of times.

    `start` starts one worker and raises StorageError or BackendError; `set_share` changes its share of a device;
    `label_node` passes a label on to a machine, where machines keep labels.
    """

    def __init__(
        self,
        table: ReplicaTable[Handle],
        start: Callable[[StartReplica], None],
        set_share: Callable[[SetShare], None],
        label_node: Callable[[LabelNode], None] = _do_nothing,
    ) -> None:
        self._table = table
        self._start = start
        self._set_share = set_share
        self._label_node = label_node
        self.reports: Reports[Handle]

    def do(self, action: Action) -> None:
        """Start an action. It is retried after an error of the disk, except for a start, which is reported lost."""
        try:
            self._do(action)
        except (StorageError, BackendError, OSError) as error:
            _log.error("%s failed: %s", type(action).__name__, error)
            self._table.counts["action_errors"] += 1
            if isinstance(action, StartReplica):
                self._table.remember_gone(action.replica_id)
                reason = f"the worker could not be started: {error}"
                self._table.post(
                    ReplicaLost(workload_id=action.workload_id, replica_id=action.replica_id, reason=reason)
                )
            else:
                self._table.reactor.after(_RETRY_S, lambda: self.do(action))

    def send_missed(self, replica: Replica[Handle]) -> None:
        """Send a worker that has just connected the orders it may have missed."""
        if replica.asked_to_stop and replica.order is None:
            # It was to stop before it had connected.
            self._table.kill(replica)
            return
        if replica.order is not None and replica.kill_at_s is not None:
            left_s = max(0.0, replica.kill_at_s - time.monotonic())
            order = replica.order
            self._table.send(
                replica,
                Preempt(generation=order.generation, grace_s=left_s)
                if isinstance(order, Preempt)
                else Stop(grace_s=left_s),
            )
            return
        job = self._table.jobs.get(replica.workload_id)
        group = job.group if job is not None else None
        if job is None or group is None or replica.replica_id not in group.audience:
            return
        if replica.group_generation < group.order.generation or not group.is_confirmed:
            self._send_group(job, group, replica)

    @singledispatchmethod
    def _do(self, action: Action) -> None:
        raise AssertionError(f"no way to do {type(action).__name__}")

    @_do.register
    def _(self, action: StartReplica) -> None:
        job = self._table.jobs.get(action.workload_id)
        if job is not None and job.has_ended:
            self._table.counts["repeated_actions"] += 1
            return
        self._start(action)

    @_do.register
    def _(self, action: SetShare) -> None:
        self._set_share(action)

    @_do.register
    def _(self, action: StopReplica) -> None:
        replica = self._table.replicas.get(action.replica_id)
        if replica is not None:
            self.stop(replica, Stop(grace_s=action.grace_s), action.grace_s)
        elif not self._table.has_existed(action.replica_id):
            self._table.remember_gone(action.replica_id)
            self._table.post(ReplicaStopped(workload_id=action.workload_id, replica_id=action.replica_id))
        else:
            self._table.counts["repeated_actions"] += 1

    @_do.register
    def _(self, action: ResizeJob) -> None:
        table = self._table
        job = table.jobs.get(action.job_id)
        if job is None or job.has_ended:
            table.counts["stale_actions"] += 1
            return
        group = job.group
        if group is not None and group.order.generation == action.generation and group.order.members:
            table.counts["repeated_actions"] += 1
            self._send_group_to_all(job, group)
            return
        if action.generation < max(job.generation, group.order.generation if group else 0):
            table.counts["stale_actions"] += 1
            return
        if self.reports.repeat_finish(job, action.generation):
            job.generation = action.generation
            return
        if action.forced and job.fenced < action.generation:
            if not table.driver.fence_storage(job, action.generation, lambda: self.do(action)):
                return
            job.fenced = action.generation
        job.generation = action.generation
        order = self._make_order(job, action)
        living = [r for r in table.of_workload(job.job_id) if not r.asked_to_stop and r.lost_reason is None]
        audience = {r.replica_id for r in living if r.group_generation > 0} | set(action.replica_ids)
        if group is not None:
            audience |= {r.replica_id for r in living if r.replica_id in group.order.members}
            self.reports.supersede(group)
        job.group = JobGroup(order=order, audience=frozenset(audience))
        self._send_group_to_all(job, job.group)

    @_do.register
    def _(self, action: PreemptJob) -> None:
        job = self._table.jobs.get(action.job_id)
        if job is not None:
            job.generation = max(job.generation, action.generation)
            if job.group is not None:
                self.reports.supersede(job.group)
        for replica_id in action.replica_ids:
            replica = self._table.replicas.get(replica_id)
            if replica is not None:
                order = Preempt(generation=action.generation, grace_s=action.grace_s)
                self.stop(replica, order, action.grace_s + 1.0)
            elif not self._table.has_existed(replica_id):
                self._table.remember_gone(replica_id)
                self._table.post(ReplicaStopped(workload_id=action.job_id, replica_id=replica_id))

    @_do.register
    def _(self, action: AdmitJob) -> None:
        """Nothing to do: promises concern only the control plane."""

    @_do.register
    def _(self, action: DrainNode) -> None:
        """Nothing to do: placements are decided before the order, and each replica to stop has its own order."""

    @_do.register
    def _(self, action: LabelNode) -> None:
        self._label_node(action)

    @_do.register
    def _(self, action: EndJob) -> None:
        job = self._table.jobs.get(action.job_id)
        self._table.inbox.forget_job(action.job_id)
        if job is None:
            return
        for replica in self._table.of_workload(action.job_id):
            self.stop(replica, Stop(grace_s=END_GRACE_S), END_GRACE_S)
        if job.group is not None:
            self.reports.supersede(job.group)
        self._table.end_job(job)

    def stop_all(self, grace_s: float) -> None:
        """Let jobs commit a checkpoint and services drain, and end all workers within `grace_s`."""
        for replica in list(self._table.replicas.values()):
            job = self._table.jobs.get(replica.workload_id)
            if replica.is_job and job is not None and replica.group_generation > 0:
                order = Preempt(generation=job.generation, grace_s=max(0.0, grace_s - 1.0))
                self.stop(replica, order, grace_s)
            else:
                self.stop(replica, Stop(grace_s=grace_s), grace_s)

    def stop(self, replica: Replica[Handle], order: Preempt | Stop, limit_s: float) -> None:
        """Give a worker `limit_s` to end by itself. A later limit than the one in force changes nothing."""
        table = self._table
        kill_at_s = time.monotonic() + limit_s
        replica.asked_to_stop = True
        if replica.lost_reason is not None or replica.has_exited:
            return
        if replica.phase is MemberPhase.QUEUED:
            table.note_exit(replica)
            return
        if replica.phase is MemberPhase.SPAWNING:
            # It never connected, so there is nothing to save. If its process is not known yet, it is killed once its
            # spawning is reported, or by the timer below if it never is.
            table.kill(replica)
            if not replica.handle.exists and replica.kill_at_s is None:
                replica.kill_at_s = kill_at_s
                replica.timers.append(table.reactor.after(limit_s, lambda: self._end(replica)))
            return
        if replica.kill_at_s is not None and replica.kill_at_s <= kill_at_s:
            table.counts["repeated_actions"] += 1
            return
        replica.cancel_timers()
        replica.kill_at_s = kill_at_s
        replica.order = order
        table.send(replica, order)
        if isinstance(order, Stop):
            replica.timers.append(table.reactor.after(limit_s / 2, lambda: table.kill(replica, signal.SIGTERM)))
        replica.timers.append(table.reactor.after(limit_s, lambda: self._end(replica)))

    def _end(self, replica: Replica[Handle]) -> None:
        self._table.counts["grace_kills"] += 1
        if not replica.handle.exists:
            self._table.note_exit(replica)
        else:
            self._table.kill(replica)

    def _send_group_to_all(self, job: Job, group: JobGroup) -> None:
        for replica_id in sorted(group.audience):
            replica = self._table.replicas.get(replica_id)
            if replica is not None and replica_id not in group.notified:
                self._send_group(job, group, replica)
        self.reports.confirm(job, wait_for_repeats=True)

    def _send_group(self, job: Job, group: JobGroup, replica: Replica[Handle]) -> None:
        if not self._table.send(replica, group.order):
            return
        group.notified.add(replica.replica_id)
        if not replica.is_script or group.is_confirmed:
            return
        # A script reports neither switches nor steps: it counts as switched once it has the order.
        if replica.replica_id in group.order.members:
            replica.group_generation = group.order.generation
        if all(member in group.notified for member in group.order.members):
            group.is_confirmed = True
            self._table.post(
                JobResized(
                    job_id=job.job_id,
                    generation=group.order.generation,
                    world_size=len(group.order.members),
                    step=replica.step,
                    pause_s=0.0,
                    direction="replace" if group.order.previous else "start",
                )
            )

    def _make_order(self, job: Job, action: ResizeJob) -> FormGroup:
        replicas = self._table.of_workload(job.job_id)
        previous = max((r.group_generation for r in replicas if r.group_generation < action.generation), default=0)
        is_script = any(replica.is_script for replica in replicas)
        members: tuple[ReplicaId, ...] = tuple(action.replica_ids)
        rendezvous = self._table.driver.rendezvous(job, action, is_script=is_script)
        return FormGroup(
            generation=action.generation,
            members=members,
            rendezvous=rendezvous,
            # A script's own library meets there, and knows no keys.
            key="" if is_script else self._table.driver.group_key(job, action),
            previous=previous,
            forced=action.forced,
            global_batch_size=action.global_batch_size,
        )
