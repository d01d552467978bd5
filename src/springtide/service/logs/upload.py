"""What pods wrote, handed in to the object store by the control plane where it was away when they ended.

A pod puts its output into the store at its end, and has seconds for that; and of its job's step log it says on its
output what the store lacks. Both are followed into files here (backends/kubernetes/pod_logs.py).
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from springtide.backends.kubernetes.pods.logs import ENDED_SUFFIX, STEPS_SUFFIX
from springtide.control.records import JobRecord
from springtide.core.errors import StorageError
from springtide.core.events import ReplicaLost, ReplicaStopped
from springtide.core.ports import Step
from springtide.core.workload import ReplicaId, WorkloadId
from springtide.service.ports import PlatformLike
from springtide.service.submission.source_stores import ObjectSources

LOG = logging.getLogger("springtide.logs")
RETRY_S = 5.0
# The end of an output arrives later than the news of a pod's end; a pod without output by then has none.
PATIENCE_S = 300.0
MOST_WAITING = 10_000

Replica = tuple[WorkloadId, ReplicaId]


class LogHandIn:
    """One thread. `note` is for any other; `round` may be called in the thread's place."""

    def __init__(self, platform: PlatformLike) -> None:
        self._platform = platform
        self._changed = threading.Condition()
        # Since when, on the platform's clock.
        self._waiting: dict[Replica, float] = {}
        self._sent: set[Replica] = set()
        self._is_over = False
        self._trouble = ""
        self._thread = threading.Thread(target=self._main, name="springtide-logs", daemon=True)
        platform.subscribe(self._on_step)

    def start(self) -> None:
        """Begin with what an earlier control plane has left on this disk."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; the next leader on this disk finds what still waits."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def note(self, workload_id: WorkloadId, replica_id: ReplicaId) -> None:
        """A replica is gone: its output is to be in the store."""
        with self._changed:
            if len(self._waiting) < MOST_WAITING:
                self._waiting.setdefault((workload_id, replica_id), self._platform.now_s())
                self._changed.notify_all()

    def _on_step(self, seq: int, step: Step, view: Any) -> None:
        if self._platform.now_s() - step.now_s > PATIENCE_S:
            # The journal of the past: what is left of that was found by looking around.
            return
        for event in step.events:
            if isinstance(event, ReplicaStopped | ReplicaLost):
                self.note(event.workload_id, event.replica_id)

    def _main(self) -> None:
        self.look_around()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over, RETRY_S)
                if self._is_over:
                    return
            try:
                self.round()
            except Exception:
                LOG.exception("what pods wrote could not be handed in")

    def look_around(self) -> None:
        """Note every replica whose complete output lies here and was not uploaded yet."""
        for marker in self._platform.workload_dir(WorkloadId("x")).parent.glob(f"*/logs/*{ENDED_SUFFIX}"):
            self.note(WorkloadId(marker.parents[1].name), ReplicaId(marker.stem))

    def round(self) -> None:
        """Hand in what can be; a store that is away is asked again in the next round."""
        with self._changed:
            waiting = list(self._waiting.items())
        for replica, since_s in waiting:
            try:
                is_done = self._hand_in(replica, since_s)
            except StorageError as error:
                if str(error) != self._trouble:
                    LOG.warning("what pods wrote waits for the store: %s", error)
                self._trouble = str(error)
                return
            if is_done:
                with self._changed:
                    self._waiting.pop(replica, None)
                    self._sent.discard(replica)
        self._trouble = ""

    def _hand_in(self, replica: Replica, since_s: float) -> bool:
        """Upload a replica's output; whether nothing is left to do for it. Raises StorageError."""
        (workload_id, replica_id), source_store = replica, self._platform.source_store
        path = self._folder(workload_id) / f"{replica_id}.log"
        marker, steps = path.with_suffix(ENDED_SUFFIX), path.with_suffix(STEPS_SUFFIX)
        if not isinstance(source_store, ObjectSources):
            return True
        if not marker.exists():
            return self._platform.now_s() - since_s > PATIENCE_S
        if replica not in self._sent and path.exists():
            if source_store.keep_log(workload_id, replica_id, path):
                LOG.info("handed in what %s wrote", replica_id)
            self._sent.add(replica)
        if steps.exists():
            job = self._platform.view().jobs.get(workload_id)
            if job is not None and not _has_ended(job):
                # Others may be about to write the same steps, or to make them again.
                return False
            if job is not None:
                said = steps.read_text("ascii", "replace").splitlines()
                source_store.keep_steps(workload_id, said, job.group.generation)
            steps.unlink(missing_ok=True)
        marker.unlink(missing_ok=True)
        return True

    def _folder(self, workload_id: WorkloadId) -> Path:
        return self._platform.workload_dir(workload_id) / "logs"


def _has_ended(job: JobRecord) -> bool:
    return job.lifecycle.state.is_terminal and not job.replicas
