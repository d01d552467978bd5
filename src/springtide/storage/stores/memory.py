"""An object store in the memory of one process: threads see each other's objects and are woken by a put."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache

from springtide.storage.pacing import Intervals, PollInterval
from springtide.storage.stores.checked import CheckedStore, content_version


class _Shelf:
    """Objects by key, and who waits for which."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        self.waiting: dict[str, list[threading.Event]] = {}


@cache
def _shelf_of(name: str) -> _Shelf:
    # A name means the same objects to everyone in this process, and they outlive every handle, as in other stores.
    return _Shelf()


class MemoryStore(CheckedStore):
    """The store of that name in this process; without a name, one of its own."""

    def __init__(self, name: str = "", pace: PollInterval | None = None) -> None:
        super().__init__(f"the memory store {name or '(unnamed)'}", Intervals(first_s=0.01, cap_s=0.01), pace)
        self._shelf = _shelf_of(name) if name else _Shelf()

    def _write(self, key: str, data: memoryview, *, only_if_absent: bool) -> bool:
        # Bytes cannot change under the store's hands; anything else can, and is copied.
        whole = data.obj
        copied = whole if type(whole) is bytes and len(whole) == data.nbytes else data.tobytes()
        with self._shelf.lock:
            if only_if_absent and key in self._shelf.objects:
                return False
            self._shelf.objects[key] = copied
            for woken in self._shelf.waiting.pop(key, ()):
                woken.set()
        return True

    def _read(self, key: str) -> bytes | None:
        with self._shelf.lock:
            return self._shelf.objects.get(key)

    def _read_version(self, key: str) -> tuple[bytes, str] | None:
        data = self._read(key)
        return None if data is None else (data, content_version(data))

    def _replace(self, key: str, data: memoryview, version: str) -> str | None:
        with self._shelf.lock:
            known = self._shelf.objects.get(key)
            if version != ("" if known is None else content_version(known)):
                return None
            self._shelf.objects[key] = data.tobytes()
            for woken in self._shelf.waiting.pop(key, ()):
                woken.set()
        return content_version(data)

    def _wait(self, key: str, timeout_s: float) -> bytes | None:
        deadline_s = self.pace.now_s() + timeout_s
        while True:
            woken = threading.Event()
            with self._shelf.lock:
                if key in self._shelf.objects:
                    woken.set()
                else:
                    self._shelf.waiting.setdefault(key, []).append(woken)
            is_in_time = woken.wait(max(0.0, deadline_s - self.pace.now_s()))
            if not is_in_time:
                self._forget(key, woken)
            data = self._counted_read(key)
            # An object that was deleted between the waking and the reading is waited for again.
            if data is not None or not is_in_time:
                return data

    def _forget(self, key: str, woken: threading.Event) -> None:
        with self._shelf.lock:
            waiting = self._shelf.waiting.get(key, [])
            if woken in waiting:
                waiting.remove(woken)
            if not waiting:
                self._shelf.waiting.pop(key, None)

    def _remove(self, keys: Sequence[str]) -> None:
        with self._shelf.lock:
            for key in keys:
                self._shelf.objects.pop(key, None)

    def _names(self, prefix: str) -> list[str]:
        with self._shelf.lock:
            return [key for key in self._shelf.objects if key.startswith(prefix)]
