"""An object store in the memory of one process, shared by its threads. A put wakes waiting threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache

from springtide.storage.pacing import Intervals, PollInterval, real_pace
from springtide.storage.stores.raw import MAX_OBJECT_BYTES, content_version
from springtide.storage.stores.request_count import RequestCount


class _Objects:
    """Objects by key, and the threads that wait for one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        self.waiting: dict[str, list[threading.Event]] = {}


@cache
def _objects_of(name: str) -> _Objects:
    # Cached, so that a name means the same objects in the whole process and they outlive every handle, as in other
    # stores.
    return _Objects()


class MemoryStore:
    """The raw store of that name in this process; without a name, a private one."""

    def __init__(self, name: str = "", pace: PollInterval | None = None) -> None:
        self.title = f"the memory store {name or '(unnamed)'}"
        self.max_object_bytes = MAX_OBJECT_BYTES
        self.intervals = Intervals(first_s=0.01, cap_s=0.01)
        self.pace = pace or real_pace()
        self.counts = RequestCount()
        self._held = _objects_of(name) if name else _Objects()

    def write(self, key: str, data: memoryview, *, only_if_absent: bool) -> bool:
        # Bytes are immutable; anything else is copied.
        whole = data.obj
        copied = whole if type(whole) is bytes and len(whole) == data.nbytes else data.tobytes()
        with self._held.lock:
            if only_if_absent and key in self._held.objects:
                return False
            self._held.objects[key] = copied
            for woken in self._held.waiting.pop(key, ()):
                woken.set()
        return True

    def read(self, key: str) -> bytes | None:
        with self._held.lock:
            return self._held.objects.get(key)

    def read_version(self, key: str) -> tuple[bytes, str] | None:
        data = self.read(key)
        return None if data is None else (data, content_version(data))

    def replace(self, key: str, data: memoryview, version: str) -> str | None:
        with self._held.lock:
            known = self._held.objects.get(key)
            if version != ("" if known is None else content_version(known)):
                return None
            self._held.objects[key] = data.tobytes()
            for woken in self._held.waiting.pop(key, ()):
                woken.set()
        return content_version(data)

    def wait(self, key: str, timeout_s: float, read: Callable[[str], bytes | None]) -> bytes | None:
        deadline_s = self.pace.now_s() + timeout_s
        while True:
            woken = threading.Event()
            with self._held.lock:
                if key in self._held.objects:
                    woken.set()
                else:
                    self._held.waiting.setdefault(key, []).append(woken)
            is_in_time = woken.wait(max(0.0, deadline_s - self.pace.now_s()))
            if not is_in_time:
                self._forget(key, woken)
            data = read(key)
            # If the object was deleted before the woken thread read it, wait again.
            if data is not None or not is_in_time:
                return data

    def _forget(self, key: str, woken: threading.Event) -> None:
        with self._held.lock:
            waiting = self._held.waiting.get(key, [])
            if woken in waiting:
                waiting.remove(woken)
            if not waiting:
                self._held.waiting.pop(key, None)

    def remove(self, keys: Sequence[str]) -> None:
        with self._held.lock:
            for key in keys:
                self._held.objects.pop(key, None)

    def names(self, prefix: str) -> list[str]:
        with self._held.lock:
            return [key for key in self._held.objects if key.startswith(prefix)]

    def close(self) -> None:
        return
