"""The platform's own objects in a cluster, TrainingFunctions and InferenceFunctions: read, made, changed, told of."""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.cache import Cache, ObjectChange
from springtide.backends.kubernetes.client.errors import (
    AlreadyExists,
    Invalid,
    KubeApiError,
    KubeForbidden,
    NoSuchObject,
)
from springtide.backends.kubernetes.client.kinds import (
    CONFIG_MAP,
    EVENT,
    INFERENCE_FUNCTION,
    TRAINING_FUNCTION,
    Key,
    Kind,
    Object,
    key_of,
    uid_of,
)
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.resources.from_object import PART_KEY, trimmed
from springtide.backends.kubernetes.settings import PLATFORM_LABEL
from springtide.core.errors import BackendError, InvalidRequest

ResultT = TypeVar("ResultT")
LOG = logging.getLogger("springtide.objects")
KINDS: Mapping[str, Kind] = MappingProxyType(
    {TRAINING_FUNCTION.name: TRAINING_FUNCTION, INFERENCE_FUNCTION.name: INFERENCE_FUNCTION}
)
CALL_TIMEOUT_S = 20.0
# Events are news, not state: when the server is away for long, the oldest that still wait are dropped.
MAX_WAITING_EVENTS = 10_000


class Objects:
    """Both kinds, in the namespaces that the platform reconciles (none named: all), but for those that are labelled
    for another platform.

    What is kept here holds digests in the place of a source's texts; `read` asks the server for the whole object.
    Methods that wait for the server are not for the decision loop, and not for the API thread.
    """

    def __init__(self, api_thread: ApiThread, namespaces: Sequence[str] = (), platform: str = "") -> None:
        self._api_thread = api_thread
        self._platform = platform
        self.namespaces = tuple(namespaces)
        self._caches: dict[str, Cache] = {}
        self._lock = threading.Lock()
        self._statuses: dict[str, tuple[Kind, Key, Object]] = {}
        self._num_events = 0
        self.num_dropped_events = 0

    def open(self, listener: Callable[[str, Key], None]) -> None:
        """Begin to follow the objects; `listener(kind, key)` is called on the API thread for whatever changes."""

        def heard(change: ObjectChange) -> None:
            listener(change.kind.name, change.key)

        for kind in KINDS.values():
            self._caches[kind.name] = self._api_thread.cache(
                kind, namespaces=self.namespaces or ("",), trim=trimmed, listener=heard
            )

    @property
    def is_synced(self) -> bool:
        """Whether every object that there was at some moment after `open` has been seen."""
        return all(cache.is_synced for cache in self._caches.values())

    def watches(self, namespace: str) -> bool:
        """Whether this platform reconciles objects of that namespace."""
        return not self.namespaces or namespace in self.namespaces

    def all(self, kind: str) -> list[Object]:
        """All cached objects of a kind."""
        return [obj for obj in self._caches[kind].objects() if self._is_ours(obj)]

    def get(self, kind: str, key: Key) -> Object | None:
        """A cached object."""
        found = self._caches[kind].get(key.name, key.namespace)
        return found if found is not None and self._is_ours(found) else None

    def _is_ours(self, obj: Object) -> bool:
        """Whether an object names this platform or none."""
        named = obj["metadata"].get("labels", {}).get(PLATFORM_LABEL, "")
        return not self._platform or named in ("", self._platform)

    # --- calls that wait for the server -----------------------------------------------------------------------------

    def read(self, kind: str, key: Key) -> Object | None:
        """Read the whole object from the server; None if there is none. Raises BackendError."""
        return self._call(lambda api: api.find(KINDS[kind], key.name, key.namespace))

    def create(self, kind: str, obj: Object) -> Object | None:
        """Create an object; None if there is one of that name. Raises InvalidRequest (refused), BackendError."""
        try:
            return self._call(lambda api: api.create(KINDS[kind], obj))
        except AlreadyExists:
            return None
        except (Invalid, KubeForbidden, NoSuchObject) as error:
            raise InvalidRequest(f"the cluster refuses the object: {error.message}") from error

    def patch(self, kind: str, key: Key, patch: Any, *, uid: str) -> Object | None:
        """Patch the spec of this very object; None if it is gone. Raises InvalidRequest, BackendError.

        `patch` maps fields of the spec to values, None takes a field away.
        """
        merge = {"metadata": {"uid": uid}, "spec": patch}
        try:
            return self._call(lambda api: api.patch(KINDS[kind], key.name, merge, key.namespace))
        except NoSuchObject:
            return None
        except (Invalid, KubeForbidden) as error:
            if "metadata.uid" in error.fields:
                # Another object has that name now.
                return None
            raise InvalidRequest(f"the cluster refuses the change: {error.message}") from error

    def replace_spec(self, kind: str, key: Key, obj: Object) -> Object | None:
        """Replace an object's spec and annotations; None if it is gone."""
        changes = [{"op": "replace", "path": "/spec", "value": obj["spec"]}]
        try:
            return self._call(lambda api: api.patch(KINDS[kind], key.name, changes, key.namespace, how="json"))
        except NoSuchObject:
            return None
        except (Invalid, KubeForbidden) as error:
            raise InvalidRequest(f"the cluster refuses the change: {error.message}") from error

    def delete(self, kind: str, key: Key, *, uid: str) -> None:
        """Delete this very object. Raises BackendError."""
        try:
            self._call(lambda api: api.delete(KINDS[kind], key.name, key.namespace, uid=uid))
        except KubeApiError as error:
            if error.status != 409:
                raise

    def config_map(self, namespace: str, name: str) -> dict[str, str] | None:
        """The texts of a ConfigMap; None if there is none. Raises BackendError."""
        found = self._call(lambda api: api.find(CONFIG_MAP, name, namespace))
        return None if found is None else dict(found.get("data") or {})

    def config_map_part(self, namespace: str, name: str) -> bytes | None:
        """The part of a folder's archive that a ConfigMap holds; None if there is none. Raises BackendError."""
        found = self._call(lambda api: api.find(CONFIG_MAP, name, namespace))
        text = None if found is None else (found.get("binaryData") or {}).get(PART_KEY)
        return None if text is None else base64.b64decode(text)

    def _call(self, task: Callable[[KubeApi], Coroutine[Any, Any, ResultT]]) -> ResultT:
        return self._api_thread.call(task, CALL_TIMEOUT_S)

    # --- queued writes ----------------------------------------------------------------------------------------------

    def tell_status(self, obj: Object, status: Object) -> None:
        """Queue an object's status; of several that are queued only the newest is written."""
        uid, kind, key = uid_of(obj), KINDS[obj["kind"]], key_of(obj)
        with self._lock:
            is_waiting = uid in self._statuses
            self._statuses[uid] = (kind, key, status)
        if not is_waiting:
            self._api_thread.write(("status", uid), lambda api: self._write_status(api, uid), failed=_tell_failure)

    async def _write_status(self, api: KubeApi, uid: str) -> None:
        with self._lock:
            waiting = self._statuses.pop(uid, None)
        if waiting is None:
            return
        kind, key, status = waiting
        # Replace the whole status, so that no outdated field stays; and only of this very object.
        changes = [
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "add", "path": "/status", "value": status},
        ]
        try:
            await api.patch(kind, key.name, changes, key.namespace, how="json", subresource="status")
        except NoSuchObject:
            return
        except Invalid:
            # A failed `test` operation and an invalid status get the same error from the server.
            found = await api.find(kind, key.name, key.namespace)
            if found is not None and uid_of(found) == uid:
                raise
        except KubeApiError as error:
            if error.is_passing:
                with self._lock:
                    self._statuses.setdefault(uid, waiting)
            raise

    def tell_event(self, event: Object) -> None:
        """Queue an Event; repeating one changes nothing."""
        with self._lock:
            if self._num_events >= MAX_WAITING_EVENTS:
                self.num_dropped_events += 1
                return
            self._num_events += 1

        async def post(api: KubeApi) -> None:
            try:
                await api.create(EVENT, event)
            except AlreadyExists:
                return

        # Those of one object in order; `over` counts however it ends.
        key = ("event", event["involvedObject"]["uid"])
        self._api_thread.write(key, post, done=lambda _: self._event_is_over(), failed=self._event_failed)

    def _event_is_over(self) -> None:
        with self._lock:
            self._num_events -= 1

    def _event_failed(self, error: BackendError) -> None:
        self._event_is_over()
        # A namespace that is being deleted accepts no Events.
        is_expected = isinstance(error, KubeForbidden | NoSuchObject)
        LOG.log(logging.DEBUG if is_expected else logging.WARNING, "an event could not be posted: %s", error)


def _tell_failure(error: BackendError) -> None:
    LOG.warning("a status could not be written: %s", error)
