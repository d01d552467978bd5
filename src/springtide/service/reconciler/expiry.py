"""ttlSecondsAfterFinished: jobs that have ended go when their time is over, with what the store holds of them."""

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
# A job that could not be removed is tried again after so long.
RETRY_S = 10.0
# A store is slow with many objects; threads keep the other jobs from waiting for it.
MAX_THREADS = 2


class Expiry:
    """Knows which ended jobs are to go when, and takes them away: what the store holds first, then the object.

    A crash in between leaves the object, so that the next process begins again. Before anything is taken away the
    server is asked for the object: what it says by now counts. `look` and `due` are for one thread.
    """

    def __init__(self, platform: PlatformLike, objects: Objects, name: str, usual_s: float | None = None) -> None:
        """`name` is the platform's; `usual_s` is the time, in seconds, of objects that do not say."""
        self._platform = platform
        self._objects = objects
        self._name = name
        self._usual_s = usual_s
        self._due_s: dict[Key, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self._going: set[str] = set()
        self._troubles: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="springtide-expiry")

    def close(self) -> None:
        """Begin nothing new."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def look(self, obj: Object, record: JobRecord) -> Condition | None:
        """What is told of an object's time after its end, None where it has none; and, once that is over, its end."""
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
        # Looked at again until it is gone.
        self._due_s[key] = (uid, now_s + RETRY_S)
        with self._lock:
            trouble = self._troubles.pop(uid, "")
            is_new = uid not in self._going
            self._going.add(uid)
        if is_new:
            self._pool.submit(self._take_away, obj, record)
        if trouble:
            return Condition(ConditionType.EXPIRED, True, Reason.STORE_UNAVAILABLE, f"it cannot go yet: {trouble}")
        return Condition(ConditionType.EXPIRED, True, Reason.TIME_OVER, "its time after its end is over: it goes now")

    def due(self) -> list[Key]:
        now_s = self._platform.now_s()
        return [key for key, (_, due_s) in self._due_s.items() if due_s <= now_s]

    def forget(self, uids: set[str]) -> None:
        """Of all objects but these nothing is remembered."""
        self._due_s = {key: due for key, due in self._due_s.items() if due[0] in uids}
        with self._lock:
            self._troubles = {uid: trouble for uid, trouble in self._troubles.items() if uid in uids}

    # --- on other threads -------------------------------------------------------------------------------------------

    def _take_away(self, obj: Object, record: JobRecord) -> None:
        uid, trouble = uid_of(obj), ""
        try:
            self._take_away_now(obj, record)
        except SpringtideError as error:
            trouble = str(error)
            LOG.warning("%s/%s has expired and stays for now: %s", *key_of(obj), error)
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
            LOG.exception("%s/%s has expired and stays for now", *key_of(obj))
        finally:
            with self._lock:
                self._going.discard(uid)
                if trouble:
                    self._troubles[uid] = trouble

    def _take_away_now(self, obj: Object, record: JobRecord) -> None:
        key, uid = key_of(obj), uid_of(obj)
        found = self._objects.read(KIND, key)
        if found is None or uid_of(found) != uid:
            return
        end_s, now_s = expires_s(found, record, self._usual_s), self._platform.now_s()
        if end_s is None or now_s < end_s:
            # Its owner gave it more time.
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
    """When an object's time is over, on the platform's clock; None while its job runs, and where it has no end.

    Until the last worker has left nothing of a job has ended.
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
