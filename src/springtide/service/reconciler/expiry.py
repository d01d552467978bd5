"""ttlSecondsAfterFinished: deletes ended jobs after their time to live, with their files in the object store."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

from springtide.backends.kubernetes.client.kinds import TRAINING_FUNCTION, Key, Object, key_of, uid_of
from springtide.backends.kubernetes.resources.client import Objects
from springtide.backends.kubernetes.resources.definitions import API_VERSION
from springtide.backends.kubernetes.resources.events import object_event
from springtide.backends.kubernetes.resources.from_object import keeps_artifacts, ttl_s
from springtide.backends.kubernetes.resources.status import Condition, stamp
from springtide.backends.kubernetes.resources.status_schema import ConditionType, Reason
from springtide.control.records import JobRecord
from springtide.core.errors import SpringtideError
from springtide.service.ports import PlatformLike

LOG = logging.getLogger("springtide.objects")
KIND = TRAINING_FUNCTION.name
# A job that could not be deleted is tried again after this time.
RETRY_S = 10.0
# Deleting many files from a store is slow; threads keep the other jobs from waiting for it.
MAX_THREADS = 2


class Expiry:
    """Deletes ended jobs when their time to live is over: first their files in the store, then the object.

    After a crash in between the object is still there and the next process continues. Before deleting anything the
    object is read from the API server again, because its time to live may have changed. Call `check` and `due` on one
    thread only.
    """

    def __init__(self, platform: PlatformLike, objects: Objects, name: str, usual_s: float | None = None) -> None:
        """`name` is the platform's name; `usual_s` is the time to live of objects that do not specify one."""
        self._platform = platform
        self._objects = objects
        self._name = name
        self._usual_s = usual_s
        self._due_s: dict[Key, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self._deleting: set[str] = set()
        self._problems: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="springtide-expiry")

    def close(self) -> None:
        """Start no further deletions."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def check(self, obj: Object, record: JobRecord) -> Condition | None:
        """The EXPIRED condition of an object, None without a time to live. Starts the deletion when that is over."""
        key, uid, end_s = key_of(obj), uid_of(obj), expires_s(obj, record, self._usual_s)
        if end_s is None:
            self._due_s.pop(key, None)
            return None
        now_s = self._platform.now_s()
        if now_s < end_s:
            self._due_s[key] = (uid, end_s)
            kept = "what it made stays" if keeps_artifacts(obj) else "what it made goes, too"
            moment = stamp(end_s + self._platform.wall_clock_offset_s)
            message = f"it goes at {moment}, with its source, checkpoints and logs in the object store; {kept}"
            return Condition(ConditionType.EXPIRED, False, Reason.KEPT, message)
        # Checked again until the object is gone.
        self._due_s[key] = (uid, now_s + RETRY_S)
        with self._lock:
            problem = self._problems.pop(uid, "")
            is_new = uid not in self._deleting
            self._deleting.add(uid)
        if is_new:
            self._pool.submit(self._delete, obj, record)
        if problem:
            return Condition(ConditionType.EXPIRED, True, Reason.STORE_UNAVAILABLE, f"it cannot go yet: {problem}")
        return Condition(ConditionType.EXPIRED, True, Reason.TIME_OVER, "its time after its end is over: it goes now")

    def due(self) -> list[Key]:
        """The objects to check again now."""
        now_s = self._platform.now_s()
        return [key for key, (_, due_s) in self._due_s.items() if due_s <= now_s]

    def forget(self, uids: set[str]) -> None:
        """Forget all objects except these."""
        self._due_s = {key: due for key, due in self._due_s.items() if due[0] in uids}
        with self._lock:
            self._problems = {uid: problem for uid, problem in self._problems.items() if uid in uids}

    # --- on other threads -------------------------------------------------------------------------------------------

    def _delete(self, obj: Object, record: JobRecord) -> None:
        uid, problem = uid_of(obj), ""
        try:
            self._delete_now(obj, record)
        except SpringtideError as error:
            problem = str(error)
            LOG.warning("%s/%s has expired and stays for now: %s", *key_of(obj), error)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            LOG.exception("%s/%s has expired and stays for now", *key_of(obj))
        finally:
            with self._lock:
                self._deleting.discard(uid)
                if problem:
                    self._problems[uid] = problem

    def _delete_now(self, obj: Object, record: JobRecord) -> None:
        key, uid = key_of(obj), uid_of(obj)
        found = self._objects.read(KIND, key)
        if found is None or uid_of(found) != uid:
            return
        end_s, now_s = expires_s(found, record, self._usual_s), self._platform.now_s()
        if end_s is None or now_s < end_s:
            # The time to live was extended in the meantime.
            return
        num = self._platform.source_store.retire(record.workload_id, keeps_artifacts=keeps_artifacts(found))
        container = record.job.container
        if container is not None:
            text = f"its time after its end is over: it goes, with {num} of its objects in the store"
            self._objects.tell_event(
                object_event(
                    container,
                    "expired",
                    text,
                    api_version=API_VERSION,
                    platform=self._name,
                    at_unix_s=now_s + self._platform.wall_clock_offset_s,
                    identity="expired",
                )
            )
        self._objects.delete(KIND, key, uid=uid)


def expires_s(obj: Object, record: JobRecord, usual_s: float | None = None) -> float | None:
    """When an object expires, on the platform's clock; None without a time to live and until the job has ended.

    A job counts as ended once its last worker has left.
    """
    kept_s = ttl_s(obj, usual_s)
    if (
        kept_s is None
        or not record.lifecycle.state.is_terminal
        or record.lifecycle.ended_at_s is None
        or record.replicas
    ):
        return None
    return record.lifecycle.ended_at_s + kept_s
