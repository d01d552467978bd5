"""Recovery after a restart: adopt workers that should run, report those that are gone as lost, end the others."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from pathlib import Path

from springtide.backends.control_channel.members import MemberPhase
from springtide.backends.control_channel.orders import OrderTable
from springtide.backends.local.driver import ProcessDriver
from springtide.backends.local.members import ProcessHandle, Worker
from springtide.backends.local.records import WorkerRecord
from springtide.backends.processes import boot_id, live_stat
from springtide.core.actions import EndJob, PreemptJob, StartReplica, StopReplica
from springtide.core.errors import StorageError
from springtide.core.events import CheckpointCommitted, FenceFound, ReplicaLost, ReplicaStopped
from springtide.core.ports import Standing
from springtide.core.workload import ReplicaId, WorkloadId

FOREIGN_GRACE_S = 1.0
_CHECKPOINT_NAME = re.compile(r"(\d+)-(\d+)")


class Recovery:
    """Compares the workers that should run with those that do. Runs once, on the I/O thread."""

    def __init__(self, driver: ProcessDriver, orders: OrderTable[ProcessHandle]) -> None:
        self._driver = driver
        self._table = driver.table
        self._orders = orders

    def recover(self, standing: Standing) -> None:
        """Take over from the previous control plane, and repeat its unconfirmed actions."""
        records = self._driver.records.read_all()
        restartable = {action.replica_id: action for action in standing.actions if isinstance(action, StartReplica)}
        told_to_end = self._told_to_end(standing)
        self._report_checkpoints(standing, self._written_generations(standing))
        for action in standing.replicas:
            self._resume(action, records.pop(action.replica_id, None), restartable, told_to_end)
        for record in records.values():
            self._fence(record)
        for workload_id, generation in standing.generations.items():
            job = self._table.jobs.get(workload_id)
            if job is not None:
                job.generation = max(job.generation, generation)
        for effect in standing.actions:
            self._orders.do(effect)

    def _resume(
        self,
        action: StartReplica,
        record: WorkerRecord | None,
        restartable: dict[ReplicaId, StartReplica],
        told_to_end: set[ReplicaId],
    ) -> None:
        table = self._table
        is_alive = record is not None and record.process is not None and live_stat(record.process) is not None
        if record is not None and is_alive:
            replica = self._adopt(action, record)
            self._driver.attach_process(replica, record.process)
            return
        if record is not None and record.process is None and action.replica_id in restartable:
            # It may have been spawned just before the crash; nothing is known of it until its Hello. Starting a second
            # one with a new token is safe: the first then fails its Hello and exits.
            table.counts["uncertain_spawns"] += 1
            return
        if record is None and action.replica_id in restartable:
            return
        table.remember_gone(action.replica_id)
        if record is not None:
            self._driver.records.remove(action.replica_id)
        table.counts["lost_while_away"] += 1
        if action.replica_id in told_to_end:
            table.post(ReplicaStopped(workload_id=action.workload_id, replica_id=action.replica_id))
            return
        reason = "the worker ended while the platform was away"
        table.post(ReplicaLost(workload_id=action.workload_id, replica_id=action.replica_id, reason=reason))

    def _adopt(self, action: StartReplica, record: WorkerRecord) -> Worker:
        replica = self._driver.make_replica(action, record.token_sha256)
        replica.phase = MemberPhase.ADOPTING
        replica.handle.share_slot = record.share_slot
        # Its silence is counted from now on; SilenceMonitor allows ADOPT_WINDOW_S for it to reconnect.
        replica.heard_at_s = time.monotonic()
        self._table.counts["adopted"] += 1
        return replica

    def _fence(self, record: WorkerRecord) -> None:
        """End a worker that should not run: its Hello is answered by FenceOrder, and a second later it is killed."""
        process = record.process
        if process is None or process.boot_id != boot_id() or live_stat(process) is None:
            self._driver.records.remove(record.replica_id)
            return
        table = self._table
        table.counts["fenced"] += 1
        foreigner = self._driver.make_foreigner(record)
        self._driver.attach_process(foreigner, process)
        foreigner.timers.append(table.reactor.after(FOREIGN_GRACE_S, lambda: table.kill(foreigner)))

    def _written_generations(self, standing: Standing) -> dict[WorkloadId, int]:
        """The generation that each job has reached; where its directory knows a later one than the journal, say so."""
        reached = dict(standing.generations)
        for job_id, generation in standing.generations.items():
            # A fence that cannot be read stops the job's next start, which says so.
            with contextlib.suppress(StorageError):
                reached[job_id] = max(generation, self._driver.fence_of(job_id))
            if reached[job_id] > generation:
                self._table.post(FenceFound(job_id=job_id, generation=reached[job_id]))
        return reached

    def _report_checkpoints(self, standing: Standing, generations: Mapping[WorkloadId, int]) -> None:
        """Report each job's newest checkpoint: its writer may have ended while no control plane ran.

        The manifest is written last, so a directory that has one is complete.
        """
        restored = {start.workload_id: start.restore.step for start in standing.replicas if start.restore is not None}
        for job_id, generation in generations.items():
            found: list[tuple[int, int, Path]] = []
            for manifest in (self._table.work_dir(job_id) / "checkpoints").glob("*/manifest.json"):
                match = _CHECKPOINT_NAME.fullmatch(manifest.parent.name)
                if match is not None and int(match[1]) <= generation:
                    found.append((int(match[2]), int(match[1]), manifest.parent))
            if not found or max(found)[0] <= restored.get(job_id, -1):
                continue
            step, written_by, path = max(found)
            try:
                num_bytes = sum(file.stat().st_size for file in path.iterdir())
            except OSError:
                # A living worker has just replaced it, and will report the new one.
                continue
            self._table.post(
                CheckpointCommitted(
                    job_id=job_id, generation=written_by, step=step, path=str(path), num_bytes=num_bytes
                )
            )

    def _told_to_end(self, standing: Standing) -> set[ReplicaId]:
        """The replicas that had been told to end before the restart."""
        told_to_end: set[ReplicaId] = set()
        for action in standing.actions:
            if isinstance(action, StopReplica):
                told_to_end.add(action.replica_id)
            elif isinstance(action, PreemptJob):
                told_to_end.update(action.replica_ids)
            elif isinstance(action, EndJob):
                told_to_end.update(r.replica_id for r in standing.replicas if r.workload_id == action.job_id)
        return told_to_end
