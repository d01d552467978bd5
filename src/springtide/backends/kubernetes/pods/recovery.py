"""Recovery after a restart: adopt pods that should run, and find out how missing ones ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from springtide.backends.control_channel.members import MemberPhase
from springtide.backends.control_channel.orders import OrderTable
from springtide.backends.kubernetes.pods.driver import PodDriver, PodHandle
from springtide.backends.kubernetes.pods.launcher import PodLauncher
from springtide.backends.kubernetes.pods.reading import read_pod
from springtide.backends.kubernetes.pods.shares import SHARE_ANNOTATION, share_of, share_text
from springtide.backends.kubernetes.pods.state import PodState
from springtide.core.actions import StartReplica
from springtide.core.events import CheckpointCommitted, FenceFound
from springtide.core.ports import Standing
from springtide.core.resources import NodeId
from springtide.core.workload import Checkpoint, WorkloadId

# The end of a pod whose object is gone.
AWAY = "the worker ended while the platform was away"


class PodRecovery:
    """Compares the replicas that should run with the existing pods. Runs once, on the I/O thread."""

    def __init__(self, driver: PodDriver, launcher: PodLauncher, orders: OrderTable[PodHandle]) -> None:
        self._driver = driver
        self._table = driver.table
        self._pods = driver.pods
        self._launcher = launcher
        self._orders = orders

    def recover(self, standing: Standing, checkpoints: Mapping[WorkloadId, Checkpoint]) -> None:
        """Take over from the previous control plane, and repeat its unconfirmed actions.

        `checkpoints` are the newest in the object store: their writers may have ended before reporting them.
        """
        self._report_checkpoints(standing, checkpoints)
        restartable = {action.replica_id for action in standing.actions if isinstance(action, StartReplica)}
        resumed = [self._resume(action, action.replica_id in restartable) for action in standing.replicas]
        for workload_id, generation in standing.generations.items():
            job = self._table.jobs.get(workload_id)
            if job is not None:
                job.generation = max(job.generation, generation)
        for effect in standing.actions:
            self._orders.do(effect)
        for replica_id in restartable & self._table.replicas.keys():
            self._table.replicas[replica_id].handle.told_hold = None
        for pod in resumed:
            if pod is None:
                continue
            if pod.uid:
                self._pods.refresh(pod)
            else:
                # The listing may be outdated: only the API server itself can say that the pod is gone.
                self._pods.confirm(pod)

    def _resume(self, action: StartReplica, is_restartable: bool) -> PodState | None:
        table = self._table
        pod = self._launcher.state_of(action)
        obj = self._pods.find(action.replica_id, pod.key)
        if obj is None and is_restartable:
            # It may not have been created yet: then its unconfirmed action creates it, under the same name.
            return None
        replica = self._driver.make_replica(action)
        # A worker that never connected may still wait for its image; it does not count as silent.
        replica.phase = MemberPhase.SPAWNING if is_restartable else MemberPhase.ADOPTING
        replica.heard_at_s = time.monotonic()
        if obj is None:
            pod.absent = AWAY
            table.counts["missing"] += 1
            self._launcher.adopt(replica, pod, is_bound=True)
            return pod
        table.counts["adopted"] += 1
        reading = read_pod(obj)
        pod.uid = reading.uid
        pod.node_id = NodeId(reading.node) or pod.node_id
        is_bound = bool(reading.node) or reading.is_ending or reading.is_over
        self._launcher.adopt(replica, pod, is_bound=is_bound)
        self._restore_share(action, pod, obj)
        return pod

    def _restore_share(self, action: StartReplica, pod: PodState, obj: dict[str, Any]) -> None:
        """Repeat a change of the share that was lost in the crash."""
        if action.share is not None and share_of(obj) != action.share:
            self._pods.annotate(pod, {SHARE_ANNOTATION: share_text(action.share)})

    def _report_checkpoints(self, standing: Standing, checkpoints: Mapping[WorkloadId, Checkpoint]) -> None:
        restored = {start.workload_id: start.restore.step for start in standing.replicas if start.restore is not None}
        for job_id, checkpoint in checkpoints.items():
            is_newer = checkpoint.step > restored.get(job_id, -1)
            if checkpoint.generation > standing.generations.get(job_id, 0):
                self._table.post(FenceFound(job_id=job_id, generation=checkpoint.generation))
            if is_newer:
                self._table.post(
                    CheckpointCommitted(
                        job_id=job_id,
                        generation=checkpoint.generation,
                        step=checkpoint.step,
                        path=checkpoint.path,
                        num_bytes=checkpoint.num_bytes,
                    )
                )
