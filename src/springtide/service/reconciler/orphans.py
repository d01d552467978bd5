"""Deletes the files that jobs leave in the object store when their objects are deleted, after the objects' TTL."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

from springtide.backends.kubernetes.client.kinds import TRAINING_FUNCTION, Key, Object, uid_of
from springtide.backends.kubernetes.resources.client import Objects
from springtide.backends.kubernetes.resources.from_object import keeps_artifacts, ttl_s
from springtide.control.records import JobRecord
from springtide.core.errors import SpringtideError
from springtide.core.workload import WorkloadId
from springtide.service.lookup import job_of_id
from springtide.service.ports import PlatformLike
from springtide.service.submission.source_stores import ObjectSources
from springtide.storage.workloads.head import RETIRED_GENERATION, Departure, WorkloadHead

LOG = logging.getLogger("springtide.objects")
KIND = TRAINING_FUNCTION.name
# How soon a job is checked again that could not be checked or deleted, or whose object still exists.
RETRY_S = 30.0
# The files stay for good, or are gone.
NEVER = float("inf")


class OrphanCollector:
    """Deletes the files of jobs without an object, once the time to live of the deleted object is over.

    Objects have no finalizer: without a running platform they could never be deleted. So an object goes at once, and
    its time to live is kept in the head of its job as soon as the deletion is noticed. A job whose object was deleted
    while no control plane led expires after the platform's `usual_s`.

    Only jobs in this platform's journal are checked, in its state or no longer, so that files of other platforms are
    never deleted. Jobs are left alone that have not ended, whose object still exists, or whose fence another writer has
    raised. Call `remember_ttl` and `check` on one thread only.
    """

    def __init__(self, platform: PlatformLike, objects: Objects, usual_s: float | None = None) -> None:
        """`usual_s` is the time to live, after a job's end, of objects that did not specify one; None: files stay."""
        self._platform = platform
        self._objects = objects
        self._usual_s = usual_s
        # By uid of existing objects: their time to live in seconds, and whether the job's artifacts stay.
        self._ttls: dict[str, tuple[float | None, bool]] = {}
        self._lock = threading.Lock()
        # When, on the platform's clock, a job without an object is checked next.
        self._next_s: dict[WorkloadId, float] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="springtide-orphans")

    def close(self) -> None:
        """Start no further deletions."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def remember_ttl(self, obj: Object) -> None:
        """Remember the time to live of an object, in case the object is deleted before that is over."""
        ttl = (ttl_s(obj, None), keeps_artifacts(obj))
        with self._lock:
            if ttl == (None, True):
                self._ttls.pop(uid_of(obj), None)
            else:
                self._ttls[uid_of(obj)] = ttl

    def check(self, record: JobRecord) -> None:
        """Check a job without an object; the store is accessed on another thread."""
        container = record.job.container
        if container is None or not _has_ended(record) or not self.is_due(record.workload_id):
            return
        with self._lock:
            # Do not check it again while a check is running.
            self._next_s[record.workload_id] = self._platform.now_s() + RETRY_S
            ttl = self._ttls.get(container.owner_uid)
        self._pool.submit(self._check, record, ttl)

    def is_due(self, job_id: WorkloadId) -> bool:
        """Whether a job without an object is to be checked now. One that has left the state is checked once more."""
        with self._lock:
            next_s = self._next_s.get(job_id, 0.0)
        has_left = next_s == NEVER and job_id not in self._platform.view().jobs
        return has_left or self._platform.now_s() >= next_s

    # --- on the other thread ----------------------------------------------------------------------------------------

    def _check(self, record: JobRecord, ttl: tuple[float | None, bool] | None) -> None:
        name = record.workload_id
        try:
            next_s = self._check_now(record, ttl)
            is_over = next_s == NEVER and name not in self._platform.view().jobs
            if is_over and not self._is_gone(record):
                is_over, next_s = False, self._platform.now_s() + RETRY_S
            if is_over:
                # Retention may drop it: no object is left that would then be taken for a new one.
                self._platform.view().ended.release(name)
        except SpringtideError as error:
            LOG.warning("what is left of %s, whose object is gone, stays for now: %s", name, error)
            return
        except Exception:
            LOG.exception("what is left of %s, whose object is gone, stays for now", name)
            return
        with self._lock:
            self._next_s[name] = next_s
            if is_over:
                del self._next_s[name]
            if next_s == NEVER and record.job.container is not None:
                self._ttls.pop(record.job.container.owner_uid, None)

    def _check_now(self, record: JobRecord, ttl: tuple[float | None, bool] | None) -> float:
        """Delete what is due. Returns when to check the job again. Raises StorageError, BackendError."""
        now_s, source_store = self._platform.now_s(), self._platform.source_store
        if not isinstance(source_store, ObjectSources):
            return NEVER
        head = source_store.head(record.workload_id)
        is_retired = head.generation == RETIRED_GENERATION
        is_empty = head == WorkloadHead() and not source_store.has(record.workload_id)
        if (is_retired and head.departure is None) or is_empty:
            return NEVER
        if head.generation > record.group.generation and not is_retired:
            LOG.warning(
                "what the store holds of %s is written by another process (generation %d, here %d) and stays: does "
                "another platform have the same store_url?",
                record.workload_id,
                head.generation,
                record.group.generation,
            )
            return NEVER
        offset_s = self._platform.wall_clock_offset_s
        departure = head.departure or self._departure(record, ttl, offset_s)
        if departure is None:
            return NEVER
        if not self._is_gone(record):
            return now_s + RETRY_S
        is_due = now_s + offset_s >= departure.at_unix_s
        if head.departure is None and (is_due or ttl is not None):
            # Also written if it is due now: if this process ends in between, the next one continues the deletion.
            source_store.set_departure(record.workload_id, departure)
        if not is_due:
            return departure.at_unix_s - offset_s
        num = source_store.retire(record.workload_id, keeps_artifacts=departure.keeps_artifacts)
        LOG.info("%s, whose object is gone, went with %d of its objects in the store", record.workload_id, num)
        return NEVER

    def _departure(self, record: JobRecord, ttl: tuple[float | None, bool] | None, offset_s: float) -> Departure | None:
        kept_s, keeps = ttl or (None, True)
        kept_s = self._usual_s if kept_s is None else kept_s
        if kept_s is None or record.lifecycle.ended_at_s is None:
            return None
        return Departure(at_unix_s=record.lifecycle.ended_at_s + kept_s + offset_s, keeps_artifacts=keeps)

    def _is_gone(self, record: JobRecord) -> bool:
        """Whether the job has ended and the API server confirms that its object is gone. Raises BackendError."""
        container = record.job.container
        assert container is not None
        now = job_of_id(self._platform.view(), record.workload_id)
        if now is None or not _has_ended(now):
            return False
        found = self._objects.read(KIND, Key(container.namespace, container.owner_name))
        return found is None or uid_of(found) != container.owner_uid


def _has_ended(record: JobRecord) -> bool:
    """Whether the job has ended and its last worker has left."""
    return record.lifecycle.state.is_terminal and record.lifecycle.ended_at_s is not None and not record.replicas
