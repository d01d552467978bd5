"""What all stores have in common: names are checked, requests are counted, what is missing is an error."""

from __future__ import annotations

import hashlib
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from springtide.core.errors import ObjectMissing, StorageError
from springtide.core.ports import StoreRequests
from springtide.storage.key_names import checked_key, checked_keys, checked_prefix
from springtide.storage.pacing import Intervals, PollInterval, PollState, ask_until, real_pace
from springtide.storage.stores.request_count import RequestCount

# Object stores list and delete by pages of so many keys, one request each; all stores count as if they did.
KEYS_PER_REQUEST = 1000
MAX_WAITS_KNOWN = 1000


class CheckedStore(ABC):
    """A `Store` (core/ports.py) but for the four steps that a subclass adds, for keys that are known to be names.

    `title` names the store in sentences. A store that can block overrides `_wait`, too; one that can replace an object
    only where nobody else has done so overrides `_read_version` and `_replace`. `max_object_bytes` is what it takes in
    one put.
    """

    max_object_bytes: int = 1 << 62

    def __init__(self, title: str, intervals: Intervals, pace: PollInterval | None = None) -> None:
        self.title = title
        self.counts = RequestCount()
        self.pace = pace or real_pace()
        self._intervals = intervals
        self._lock = threading.Lock()
        self._given_up: dict[str, PollState] = {}

    @abstractmethod
    def _write(self, key: str, data: memoryview, *, only_if_absent: bool) -> bool:
        """Make the object visible at once and whole; whether it was written."""

    @abstractmethod
    def _read(self, key: str) -> bytes | None:
        """The object, or None where there is none."""

    @abstractmethod
    def _remove(self, keys: Sequence[str]) -> None:
        """Remove those that are there."""

    @abstractmethod
    def _names(self, prefix: str) -> list[str]:
        """At least all keys that begin so, in any order; as many as had to be listed for them."""

    def _read_version(self, key: str) -> tuple[bytes, str] | None:
        """The object with the name of its version, or None where there is none."""
        raise StorageError(f"{self.title} cannot tell versions of an object apart; use s3://, file:// or memory://")

    def _replace(self, key: str, data: memoryview, version: str) -> str | None:
        """Write the object if it still is of that version (empty: is not there); its new version, None if it is not."""
        raise StorageError(f"{self.title} cannot tell versions of an object apart; use s3://, file:// or memory://")

    def _wait(self, key: str, timeout_s: float) -> bytes | None:
        """The object once it is there, or None at the timeout. Counts its requests by itself."""
        before = self._taken_up(key)
        data, asked = ask_until(lambda: self._counted_read(key), timeout_s, self._intervals, self.pace, before)
        if data is None:
            with self._lock:
                self._given_up[key] = asked
                while len(self._given_up) > MAX_WAITS_KNOWN:
                    del self._given_up[next(iter(self._given_up))]
        return data

    def _taken_up(self, key: str) -> PollState | None:
        """What an earlier wait for the key has come to, if it ended just now: waiting in slices costs no more."""
        with self._lock:
            asked = self._given_up.pop(key, None)
        is_recent = asked is not None and self.pace.now_s() - asked.at_s <= asked.pause_s
        return asked if is_recent else None

    def _counted_read(self, key: str) -> bytes | None:
        self.counts.add(gets=1)
        data = self._read(key)
        if data is None:
            self.counts.add(misses=1)
        else:
            self.counts.add_bytes(down=len(data))
        return data

    def _counted_write(self, key: str, data: bytes | bytearray | memoryview, only_if_absent: bool) -> bool:
        view = memoryview(data)
        # A view of nothing cannot be cast.
        view = view.cast("B") if view.nbytes else memoryview(b"")
        if view.nbytes > self.max_object_bytes:
            raise StorageError(
                f"{key} has {view.nbytes:,} bytes and {self.title} takes at most {self.max_object_bytes:,} in one "
                f"object; cut it into parts"
            )
        self.counts.add(puts=1)
        is_written = self._write(checked_key(key), view, only_if_absent=only_if_absent)
        self.counts.add_bytes(up=view.nbytes)
        return is_written

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write an object; one of that key is replaced. Raises StorageError."""
        self._counted_write(checked_key(key), data, only_if_absent=False)

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> bool:
        """Write an object unless there is one of that key; whether it was written. Raises StorageError."""
        return self._counted_write(checked_key(key), data, only_if_absent=True)

    def get(self, key: str) -> bytes:
        """Read an object. Raises ObjectMissing, or StorageError."""
        data = self._counted_read(checked_key(key))
        if data is None:
            raise ObjectMissing(f"{self.title} holds no object {key}")
        return data

    def get_version(self, key: str) -> tuple[bytes, str] | None:
        """Read an object and what names its version, which `replace` asks for; None where there is none.

        Raises StorageError, also where the store knows no versions.
        """
        self.counts.add(gets=1)
        found = self._read_version(checked_key(key))
        if found is None:
            self.counts.add(misses=1)
        else:
            self.counts.add_bytes(down=len(found[0]))
        return found

    def replace(self, key: str, data: bytes, version: str) -> str | None:
        """Write an object if it still is of this version (empty: if there is none); its new version.

        None where somebody else was faster: nothing was written then. Of all who replace the same version exactly one
        gets through. Raises StorageError; whether it was written is not known then.
        """
        self.counts.add(puts=1)
        replaced = self._replace(checked_key(key), memoryview(data), version)
        self.counts.add_bytes(up=len(data))
        return replaced

    def put_file(self, key: str, path: Path) -> None:
        """Write an object from a file, without reading all of it into memory. Raises StorageError."""
        try:
            with path.open("rb") as file:
                if not path.stat().st_size:
                    self.put(key, b"")
                    return
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
                    self.put(key, view)
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror or error}") from error

    def get_file(self, key: str, path: Path) -> None:
        """Read an object into a file. Raises ObjectMissing, StorageError; what is in the file then is no use."""
        data = self.get(key)
        try:
            path.write_bytes(data)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror or error}") from error

    def wait(self, key: str, timeout_s: float) -> bytes:
        """Read an object as soon as it is there. Raises ObjectMissing at the timeout, or StorageError."""
        data = self._wait(checked_key(key), timeout_s)
        if data is None:
            raise ObjectMissing(f"{self.title} still held no object {key} after {timeout_s:g} s")
        return data

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are none. Raises StorageError."""
        names = checked_keys(keys)
        for first in range(0, len(names), KEYS_PER_REQUEST):
            self.counts.add(deletes=1)
            self._remove(names[first : first + KEYS_PER_REQUEST])

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin so, in order. Costs a list request for every 1000 of them. Raises StorageError."""
        listed = self._names(checked_prefix(prefix))
        self.counts.add(lists=1 + max(0, len(listed) - 1) // KEYS_PER_REQUEST)
        return sorted(name for name in listed if name.startswith(prefix))

    def requests(self) -> StoreRequests:
        """What has been asked so far."""
        return self.counts.total()

    def close(self) -> None:
        """Let go of what is held; what was put stays."""
        return


def content_version(data: bytes | memoryview) -> str:
    """What names a version where nothing else does: the same bytes are the same version."""
    return hashlib.sha256(data).hexdigest()
