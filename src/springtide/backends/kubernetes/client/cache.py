"""A cache of the API server's objects of one kind, trimmed, kept up to date and readable from every thread.

List, then watch from the listing's version on. Whatever goes wrong with a watch, no reader decides by it: readers
compare what should be with what is here. Four things keep that honest.

- A watch that ends, breaks or falls silent is taken up where it was; one that is too old (410) is listed anew.
- An answer from the past (an API server that lags behind another) is refused: no object goes back to an older version,
  and no listing that is older than what was seen counts.
- Every half minute what is here is compared with a listing of metadata alone, and what was missed is read: a
  notification that never came costs time, not truth.
- `confirm` asks the server itself about one object, before its absence is taken for its end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.errors import Expired, KubeApiError
from springtide.backends.kubernetes.client.kinds import Key, Kind, Object, key_of, uid_of, version_of
from springtide.backends.kubernetes.client.messages import Listing, ResponseHead, WatchEvent
from springtide.core.errors import BackendError

_log = logging.getLogger(__name__)

Trim = Callable[[Object], Object]
COMPARE_EVERY_S = 30.0
# The most of the time that comparisons may take: slow ones are made less often.
_COMPARE_PART = 0.02
# How long outdated answers of a server are rejected. After that it is taken to be restored from a backup.
PAST_REFUSED_S = 60.0
BACKOFF_S = (0.1, 10.0)
_WATCH_S = (240.0, 480.0)
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


class ObjectChange(NamedTuple):
    """A changed object: `before` is None if it is new here, `now` is None if it is gone."""

    kind: Kind
    key: Key
    before: Object | None
    now: Object | None


class _PastError(Exception):
    """The server answered with an older state than it did before."""


def trim_metadata(obj: Object) -> Object:
    """Remove the fields that only servers and kubectl read; changes the object and returns it."""
    metadata = obj["metadata"]
    metadata.pop("managedFields", None)
    annotations = metadata.get("annotations")
    if annotations is not None:
        annotations.pop(_LAST_APPLIED, None)
    return obj


class Cache:
    """The objects of one kind in some namespaces (one that is empty: in all), chosen by labels and fields.

    `trim` makes of each object what is kept. Listeners are called on the API thread, with every change, and must not
    wait for anything; they say what to look at, never what is true.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        namespaces: Sequence[str] = ("",),
        labels: str = "",
        fields: str = "",
        trim: Trim = trim_metadata,
        compare_every_s: float = COMPARE_EVERY_S,
        seed: int = 0,
    ) -> None:
        self.kind = kind
        self.namespaces = tuple(namespaces) or ("",)
        self.labels = labels
        self.fields = fields
        self.compare_every_s = compare_every_s
        self.num_lists = 0
        self.num_healed = 0
        self._trim = trim
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._objects: dict[Key, Object] = {}
        self._listeners: list[Callable[[ObjectChange], None]] = []
        self._unsynced = set(self.namespaces)
        self._synced = threading.Event()
        self._problems: dict[str, str] = {}

    # --- for every thread --------------------------------------------------------------------------------------------

    def listen(self, listener: Callable[[ObjectChange], None]) -> None:
        """Call the listener on every change; at once, on this thread, for each object that is cached already."""
        with self._lock:
            known = list(self._objects.items())
            self._listeners.append(listener)
        for key, obj in known:
            listener(ObjectChange(self.kind, key, None, obj))

    def get(self, name: str, namespace: str = "") -> Object | None:
        """The cached object; not to be changed."""
        return self._objects.get(Key(namespace, name))

    def objects(self) -> list[Object]:
        """All cached objects; not to be changed."""
        with self._lock:
            return list(self._objects.values())

    def keys(self) -> list[Key]:
        with self._lock:
            return list(self._objects)

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def is_synced(self) -> bool:
        """Whether all objects have been listed at least once."""
        return self._synced.is_set()

    @property
    def problem(self) -> str:
        """Why the cache is not up to date, as a sentence; empty if it is."""
        return next(iter(self._problems.values()), "")

    def wait_synced(self, timeout_s: float) -> bool:
        """Wait until it is synced; whether it is. Not on the API thread."""
        return self._synced.wait(timeout_s)

    # --- on the API thread -------------------------------------------------------------------------------------------

    async def run(self, api: KubeApi) -> None:
        """Keep it up to date until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for namespace in self.namespaces:
                tasks.create_task(_Reflector(self, api, namespace).run())

    async def confirm(self, api: KubeApi, name: str, namespace: str = "") -> Object | None:
        """Read an object from the server itself, and cache it; None if it is gone. Raises ApiError."""
        known = self._objects.get(Key(namespace, name))
        obj = await api.find(self.kind, name, namespace)
        if obj is not None:
            return self.put(obj)
        if known is not None:
            self.drop(Key(namespace, name), known)
        return None

    def put(self, obj: Object) -> Object:
        """Cache an object unless a later state of it is cached; returns the cached state."""
        key = key_of(obj)
        with self._lock:
            before = self._objects.get(key)
            if before is not None and _is_older(obj, before):
                return before
            now = self._trim(obj)
            if before is not None and _same_version(before, now):
                return before
            self._objects[key] = now
        self._tell(ObjectChange(self.kind, key, before, now))
        return now

    def drop(self, key: Key, gone: Object | None = None) -> None:
        """Remove an object, unless the cached one is later than `gone`."""
        with self._lock:
            before = self._objects.get(key)
            if before is None or (gone is not None and _is_older(gone, before)):
                return
            del self._objects[key]
        self._tell(ObjectChange(self.kind, key, before, None))

    def held(self, namespace: str) -> dict[Key, Object]:
        """The cached objects of one namespace, or of all (empty)."""
        with self._lock:
            return {key: obj for key, obj in self._objects.items() if not namespace or key.namespace == namespace}

    def note_synced(self, namespace: str) -> None:
        """A namespace was listed."""
        self._unsynced.discard(namespace)
        if not self._unsynced:
            self._synced.set()

    def note_problem(self, namespace: str, problem: str) -> None:
        """Set why a namespace is not up to date; empty if it is."""
        if problem and self._problems.get(namespace) != problem:
            _log.warning("%s: %s", self.kind.plural, problem)
        if problem:
            self._problems[namespace] = problem
        else:
            self._problems.pop(namespace, None)

    def jitter(self, low: float, high: float) -> float:
        """A random number in this range, so that callers do not act at the same moment."""
        return float(self._rng.uniform(low, high))

    def _tell(self, change: ObjectChange) -> None:
        for listener in self._listeners:
            try:
                listener(change)
            except Exception:
                # An error in one listener must stop neither the others nor the watch.
                _log.exception("a listener to %s failed on %s", self.kind.plural, change.key)


class _Reflector:
    """Keeps one namespace of a cache up to date."""

    def __init__(self, cache: Cache, api: KubeApi, namespace: str) -> None:
        self._cache = cache
        self._api = api
        self._namespace = namespace
        # From where the watch goes on, and the latest version that an object or a watch has shown (a listing's own
        # version is the whole server's, which a kind of its own may lag behind without being old).
        self._version = ""
        self._seen = 0
        # The version of the last comparison: notifications up to it are known already.
        self._settled = 0
        self._past_since_s: float | None = None
        self._watching: asyncio.Task[None] | None = None

    async def run(self) -> None:
        watching = comparing = None
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch_for_ever())
                comparing = tasks.create_task(self._compare_for_ever())
        finally:
            for task in (watching, comparing):
                if task is not None:
                    task.cancel()

    # --- list and watch ----------------------------------------------------------------------------------------------

    async def _watch_for_ever(self) -> None:
        backoff_s = BACKOFF_S[0]
        while True:
            began_s = time.monotonic()
            try:
                if not self._version:
                    await self._list()
                await self._watch_until_told()
                self._cache.note_problem(self._namespace, "")
                problem = None
            except Expired:
                self._version = ""
                problem = None
            except _PastError:
                problem = "the API server answers with what it held before; waiting for it to catch up"
            except KubeApiError as error:
                problem = str(error)
                if not error.is_passing:
                    # No right, or no such kind: a person has to fix that, maybe by another server, so forget the
                    # version.
                    self._version = ""
                if error.retry_after_s:
                    await asyncio.sleep(error.retry_after_s)
            except BackendError as error:
                problem = str(error)
            except Exception as error:
                # An error in `trim`, or a malformed object, must not end the watch.
                _log.exception("watching %s failed", self._cache.kind.plural)
                problem, self._version = f"watching failed: {error!r}", ""
            if problem is not None:
                self._cache.note_problem(self._namespace, problem)
            if problem is None or time.monotonic() - began_s > BACKOFF_S[1]:
                backoff_s = BACKOFF_S[0]
            # Pause also if every watch ends at once.
            await asyncio.sleep(self._cache.jitter(backoff_s / 2, backoff_s))
            backoff_s = min(backoff_s * 2, BACKOFF_S[1])

    async def _list(self) -> None:
        listing = await self._api.list(
            self._cache.kind, self._namespace, labels=self._cache.labels, fields=self._cache.fields
        )
        self._cache.num_lists += 1
        self._refuse_past(listing)
        listed = {key_of(obj): obj for obj in listing.items}
        for key, obj in self._cache.held(self._namespace).items():
            if key not in listed:
                self._cache.drop(key, obj)
        for obj in listing.items:
            self._cache.put(obj)
        self._saw(listing.items)
        self._version = listing.resource_version
        self._cache.note_problem(self._namespace, "")
        self._cache.note_synced(self._namespace)

    def _refuse_past(self, listing: Listing) -> None:
        """Raise _PastError if a listing is older than what was seen, unless that has lasted too long."""
        version = _number(listing.resource_version)
        if version < 0 or version >= self._seen:
            self._past_since_s = None
            return
        if not self._has_lasted():
            raise _PastError
        _log.warning("%s: the API server has gone back in time for good; believed", self._cache.kind.plural)
        self._past_since_s = None
        self._seen = self._settled = 0
        for key in self._cache.held(self._namespace):
            self._cache.drop(key)

    def _has_lasted(self) -> bool:
        """Whether the server has answered with older versions for so long that they count as current."""
        now_s = time.monotonic()
        if self._past_since_s is None:
            self._past_since_s = now_s
        return now_s - self._past_since_s >= PAST_REFUSED_S

    async def _watch_until_told(self) -> None:
        """Watch until that ends, or a comparison ends it: then it raises Expired."""
        self._watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({self._watching})
        finally:
            self._watching.cancel()
        if self._watching.cancelled():
            raise Expired(410, "Expired", "a comparison has found the watch to be of another time")
        self._watching.result()

    async def _watch(self) -> None:
        events = self._api.watch(
            self._cache.kind,
            self._namespace,
            resource_version=self._version,
            labels=self._cache.labels,
            fields=self._cache.fields,
            timeout_s=self._cache.jitter(*_WATCH_S),
            on_open=lambda: self._cache.note_problem(self._namespace, ""),
        )
        async for event in events:
            self._take(event)

    def _take(self, event: WatchEvent) -> None:
        version = version_of(event.object)
        if version >= 0 and version <= self._settled and event.type != "BOOKMARK":
            return
        if event.type == "DELETED":
            self._cache.drop(key_of(event.object), event.object)
        elif event.type != "BOOKMARK":
            self._cache.put(event.object)
        self._seen = max(self._seen, version)
        self._version = event.object["metadata"]["resourceVersion"]

    def _saw(self, objects: Iterable[Object]) -> None:
        self._seen = max((self._seen, *(version_of(obj) for obj in objects)))

    # --- comparing ---------------------------------------------------------------------------------------------------

    async def _compare_for_ever(self) -> None:
        pause_s = self._cache.compare_every_s
        while True:
            await asyncio.sleep(self._cache.jitter(0.9 * pause_s, 1.1 * pause_s))
            began_s = time.monotonic()
            try:
                if self._version:
                    await self._compare()
            except (BackendError, _PastError) as error:
                # Other errors are met and reported by the watch as well. But a watch from a version that the server has
                # not reached yet is merely silent.
                if _is_of_the_past(error) and self._has_lasted() and self._watching is not None:
                    self._watching.cancel()
                continue
            except Exception:
                _log.exception("comparing %s failed", self._cache.kind.plural)
            pause_s = max(self._cache.compare_every_s, (time.monotonic() - began_s) / _COMPARE_PART)

    async def _compare(self) -> None:
        """List all objects, and correct what notifications have missed."""
        # List in one answer, which the server has in memory, and decode only heads: decoding thousands of whole objects
        # would block this thread for a second and more.
        listing = await self._api.heads(
            self._cache.kind,
            self._namespace,
            labels=self._cache.labels,
            fields=self._cache.fields,
            not_older_than=str(self._seen) if self._seen else "",
        )
        version = _number(listing.resource_version)
        if version < self._seen:
            raise _PastError
        self._past_since_s = None
        listed = {head.key: head for head in listing.items}
        held = self._cache.held(self._namespace)
        # A cached object that is newer than the listing was created after it.
        gone = [(key, obj) for key, obj in held.items() if key not in listed and version_of(obj) <= version]
        other = [key for key, head in listed.items() if key not in held or not _is_current(held[key], head)]
        for key, obj in gone:
            self._cache.drop(key, obj)
        for key in other:
            await self._cache.confirm(self._api, key.name, key.namespace)
        self._cache.num_healed += len(gone) + len(other)
        self._settled = max(self._settled, version)
        self._seen = max((self._seen, *(head.version for head in listing.items)))


def _is_of_the_past(error: Exception) -> bool:
    """Whether the server answered that it has not reached the requested version."""
    is_behind = isinstance(error, KubeApiError) and "Too large resource version" in error.message
    return is_behind or isinstance(error, _PastError)


def _number(version: str) -> int:
    return int(version) if version.isdecimal() else -1


def _is_older(obj: Object, than: Object) -> bool:
    """Whether an object is an earlier state of another, or an earlier object of that name."""
    one, other = version_of(obj), version_of(than)
    return 0 <= one < other


def _is_current(known: Object, listed: ResponseHead) -> bool:
    """Whether the cached state of an object is the listed one, or later."""
    version = version_of(known)
    if uid_of(known) != listed.uid:
        return version > listed.version
    return not 0 <= version < listed.version


def _same_version(known: Object, seen: Object) -> bool:
    return (
        uid_of(known) == uid_of(seen)
        and known["metadata"].get("resourceVersion") == seen["metadata"].get("resourceVersion")
        and "resourceVersion" in known["metadata"]
    )
