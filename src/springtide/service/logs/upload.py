"""Uploads the logs of ended pods to the object store, for pods that could not reach the store themselves.

A pod has only seconds to upload its output when it ends; steps that the store's step log lacks it prints. The control
plane follows both into local files (backends/kubernetes/pods/logs.py), which are uploaded here.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from springtide.backends.kubernetes.pods.logs import ENDED_SUFFIX, STEPS_SUFFIX
from springtide.control.records import JobRecord
from springtide.core.errors import JournalError, StorageError
from springtide.core.events import ReplicaLost, ReplicaStopped
from springtide.core.ports import Step
from springtide.core.workload import ReplicaId, WorkloadId
from springtide.service.lookup import job_of_id
from springtide.service.ports import PlatformLike
from springtide.service.submission.source_stores import ObjectSources

LOG = logging.getLogger("springtide.logs")
RETRY_S = 5.0
# The end of the output arrives after the event that the pod has ended; without output by then there is none.
MAX_WAIT_S = 300.0
MAX_WAITING = 10_000

Replica = tuple[WorkloadId, ReplicaId]


class LogUploader:
    """Uploads logs on a thread of its own. Any thread may call `add`; tests call `upload_waiting` directly."""

    def __init__(self, platform: PlatformLike) -> None:
        self._platform = platform
        self._changed = threading.Condition()
        # The time at which each was added, on the platform's clock.
        self._waiting: dict[Replica, float] = {}
        self._sent: set[Replica] = set()
        self._is_over = False
        self._last_error = ""
        self._thread = threading.Thread(target=self._main, name="springtide-logs", daemon=True)
        platform.subscribe(self._on_step)

    def start(self) -> None:
        """Start the thread, which begins with the files that an earlier control plane has left on this disk."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread. Files that still wait are found by the next leader on this disk."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def add(self, workload_id: WorkloadId, replica_id: ReplicaId) -> None:
        """Note that a replica has ended and its output must be in the store."""
        with self._changed:
            if len(self._waiting) < MAX_WAITING:
                self._waiting.setdefault((workload_id, replica_id), self._platform.now_s())
                self._changed.notify_all()

    def _on_step(self, seq: int, step: Step, view: Any) -> None:
        if self._platform.now_s() - step.now_s > MAX_WAIT_S:
            # A step replayed at the start: `add_left_behind` finds the files of that time.
            return
        for event in step.events:
            if isinstance(event, ReplicaStopped | ReplicaLost):
                self.add(event.workload_id, event.replica_id)

    def _main(self) -> None:
        self.add_left_behind()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over, RETRY_S)
                if self._is_over:
                    return
            try:
                self.upload_waiting()
            except Exception:
                LOG.exception("what pods wrote could not be handed in")

    def add_left_behind(self) -> None:
        """Add every replica whose complete output is on this disk and not uploaded yet."""
        for marker in self._platform.workload_dir(WorkloadId("x")).parent.glob(f"*/logs/*{ENDED_SUFFIX}"):
            self.add(WorkloadId(marker.parents[1].name), ReplicaId(marker.stem))

    def upload_waiting(self) -> None:
        """Upload what is complete. If the store cannot be reached, the next call tries again."""
        with self._changed:
            waiting = list(self._waiting.items())
        for replica, since_s in waiting:
            try:
                is_done = self._upload(replica, since_s)
            except (StorageError, JournalError) as error:
                if str(error) != self._last_error:
                    LOG.warning("what pods wrote waits for the store: %s", error)
                self._last_error = str(error)
                return
            if is_done:
                with self._changed:
                    self._waiting.pop(replica, None)
                    self._sent.discard(replica)
        self._last_error = ""

    def _upload(self, replica: Replica, since_s: float) -> bool:
        """Upload a replica's output. Returns whether the replica is done. Raises StorageError, JournalError."""
        (workload_id, replica_id), source_store = replica, self._platform.source_store
        path = self._folder(workload_id) / f"{replica_id}.log"
        marker, steps = path.with_suffix(ENDED_SUFFIX), path.with_suffix(STEPS_SUFFIX)
        if not isinstance(source_store, ObjectSources):
            return True
        if not marker.exists():
            return self._platform.now_s() - since_s > MAX_WAIT_S
        if replica not in self._sent and path.exists():
            if source_store.keep_log(workload_id, replica_id, path):
                LOG.info("handed in what %s wrote", replica_id)
            self._sent.add(replica)
        if steps.exists():
            job = job_of_id(self._platform.view(), workload_id)
            if job is not None and not _has_ended(job):
                # While the job runs, its workers may write these steps themselves or compute them again.
                return False
            if job is not None:
                lines = steps.read_text("ascii", "replace").splitlines()
                source_store.keep_steps(workload_id, lines, job.group.generation)
            steps.unlink(missing_ok=True)
        marker.unlink(missing_ok=True)
        return True

    def _folder(self, workload_id: WorkloadId) -> Path:
        return self._platform.workload_dir(workload_id) / "logs"


def _has_ended(job: JobRecord) -> bool:
    return job.lifecycle.state.is_terminal and not job.replicas
