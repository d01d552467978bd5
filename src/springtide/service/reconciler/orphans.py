"""What is left in the object store of jobs whose objects were deleted: it expires at the times those objects gave."""

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
from springtide.service.ports import PlatformLike
from springtide.service.submission.source_stores import ObjectSources
from springtide.storage.workloads.head import NOBODYS_GENERATION, Departure, WorkloadHead

LOG = logging.getLogger("springtide.objects")
KIND = TRAINING_FUNCTION.name
# A job that could not be examined or removed is tried again after so long; one still present is examined again.
RETRY_S = 30.0
# For good: what they left stays, or is gone.
NEVER = float("inf")


class OrphanCollector:
    """Takes away what jobs without an object have in the store, once the time that the object gave them is over.

    An object of which the platform would have to be told before it may go would hang there for good where no platform
    is any more; so it goes at once, and only what it wanted for afterwards is kept: in the head of its job, from the
    moment at which its end is seen. A job that ended while no control plane led expires by the platform's `usual_s`.

    Only jobs of this platform's journal are looked at, so that no other platform's are taken away; never one that has
    not ended, whose object the server still has, or whose fence another writer has raised. `heed` and `look`
    are for one thread.
    """

    def __init__(self, platform: PlatformLike, objects: Objects, usual_s: float | None = None) -> None:
        """`usual_s` is the time, in seconds after a job's end, of objects that did not say; None: it stays."""
        self._platform = platform
        self._objects = objects
        self._usual_s = usual_s
        # What living objects want for the time after: by uid, seconds and whether what was made stays.
        self._wishes: dict[str, tuple[float | None, bool]] = {}
        self._lock = threading.Lock()
        # When, on the platform's clock, a job without an object is looked at next.
        self._next_s: dict[WorkloadId, float] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="springtide-orphans")

    def close(self) -> None:
        """Begin nothing new."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def heed(self, obj: Object) -> None:
        """Remember what an object wants for the time after its job's end, should it be gone by then."""
        wish = (ttl_s(obj, None), keeps_artifacts(obj))
        with self._lock:
            if wish == (None, True):
                self._wishes.pop(uid_of(obj), None)
            else:
                self._wishes[uid_of(obj)] = wish

    def look(self, record: JobRecord) -> None:
        """Look at a job without an object; what is to be done is done on another thread."""
        container = record.job.container
        if container is None or not _has_ended(record):
            return
        now_s = self._platform.now_s()
        with self._lock:
            if now_s < self._next_s.get(record.workload_id, 0.0):
                return
            # Not again while it is being looked at.
            self._next_s[record.workload_id] = now_s + RETRY_S
            wish = self._wishes.get(container.owner_uid)
        self._pool.submit(self._look, record, wish)

    # --- on the other thread ----------------------------------------------------------------------------------------

    def _look(self, record: JobRecord, wish: tuple[float | None, bool] | None) -> None:
        name = record.workload_id
        try:
            next_s = self._look_now(record, wish)
        except SpringtideError as error:
            LOG.warning("what is left of %s, whose object is gone, stays for now: %s", name, error)
            return
        except Exception:
            LOG.exception("what is left of %s, whose object is gone, stays for now", name)
            return
        with self._lock:
            self._next_s[name] = next_s
            if next_s == NEVER and record.job.container is not None:
                self._wishes.pop(record.job.container.owner_uid, None)

    def _look_now(self, record: JobRecord, wish: tuple[float | None, bool] | None) -> float:
        """Take away what is due; returns when it is to be looked at again. Raises StorageError, BackendError."""
        now_s, source_store = self._platform.now_s(), self._platform.source_store
        if not isinstance(source_store, ObjectSources):
            return NEVER
        head = source_store.head(record.workload_id)
        is_retired = head.generation == NOBODYS_GENERATION
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
        departure = head.departure or self._departure(record, wish, offset_s)
        if departure is None:
            return NEVER
        if not self._is_gone(record):
            return now_s + RETRY_S
        is_due = now_s + offset_s >= departure.at_unix_s
        if head.departure is None and (is_due or wish is not None):
            # Also for what goes now: should this process end in between, the next one knows that it is not done.
            source_store.set_departure(record.workload_id, departure)
        if not is_due:
            return departure.at_unix_s - offset_s
        num = source_store.retire(record.workload_id, keeps_artifacts=departure.keeps_artifacts)
        LOG.info("%s, whose object is gone, went with %d of its objects in the store", record.workload_id, num)
        return NEVER

    def _departure(
        self, record: JobRecord, wish: tuple[float | None, bool] | None, offset_s: float
    ) -> Departure | None:
        kept_s, keeps = wish or (None, True)
        kept_s = self._usual_s if kept_s is None else kept_s
        if kept_s is None or record.lifecycle.ended_at_s is None:
            return None
        return Departure(at_unix_s=record.lifecycle.ended_at_s + kept_s + offset_s, keeps_artifacts=keeps)

    def _is_gone(self, record: JobRecord) -> bool:
        """Whether the job has ended, by the newest view, and its object is gone, by the server. Raises BackendError."""
        container = record.job.container
        assert container is not None
        now = self._platform.view().jobs.get(record.workload_id)
        if now is None or not _has_ended(now):
            return False
        found = self._objects.read(KIND, Key(container.namespace, container.owner_name))
        return found is None or uid_of(found) != container.owner_uid


def _has_ended(record: JobRecord) -> bool:
    """Whether the job has ended and its last worker has left."""
    return record.lifecycle.state.is_terminal and record.lifecycle.ended_at_s is not None and not record.replicas
