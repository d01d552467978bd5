"""A store over any raw store: checks keys, counts requests, polls where the raw store cannot block."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from pathlib import Path

from springtide.core.errors import ObjectMissing, StorageError
from springtide.core.ports import StoreRequests
from springtide.storage.key_names import checked_key, checked_keys, checked_prefix
from springtide.storage.pacing import PollState, ask_until
from springtide.storage.stores.raw import BlockingStore, RawStore, StreamingStore, VersionedStore

# Object stores list and delete in pages of this many keys, one request each; all stores are counted like this.
KEYS_PER_REQUEST = 1000
MAX_WAITS_KNOWN = 1000


class CheckedStore:
    """A `Store` (core/ports.py) that also replaces objects by version and transfers files, if `raw` supports it."""

    def __init__(self, raw: RawStore) -> None:
        self.raw = raw
        self._lock = threading.Lock()
        self._timed_out: dict[str, PollState] = {}

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write an object; an object with that key is replaced. Raises StorageError."""
        self._counted_write(checked_key(key), data, only_if_absent=False)

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> bool:
        """Write an object unless one with that key exists. Returns whether it was written. Raises StorageError."""
        return self._counted_write(checked_key(key), data, only_if_absent=True)

    def _counted_write(self, key: str, data: bytes | bytearray | memoryview, only_if_absent: bool) -> bool:
        view = memoryview(data)
        # An empty view cannot be cast.
        view = view.cast("B") if view.nbytes else memoryview(b"")
        if view.nbytes > self.raw.max_object_bytes:
            raise StorageError(
                f"{key} has {view.nbytes:,} bytes and {self.raw.title} takes at most {self.raw.max_object_bytes:,} in "
                f"one object; cut it into parts"
            )
        self.raw.counts.add(puts=1)
        is_written = self.raw.write(key, view, only_if_absent=only_if_absent)
        self.raw.counts.add_bytes(up=view.nbytes)
        return is_written

    def get(self, key: str) -> bytes:
        """Read an object. Raises ObjectMissing, or StorageError."""
        data = self._counted_read(checked_key(key))
        if data is None:
            raise ObjectMissing(f"{self.raw.title} holds no object {key}")
        return data

    def _counted_read(self, key: str) -> bytes | None:
        self.raw.counts.add(gets=1)
        data = self.raw.read(key)
        if data is None:
            self.raw.counts.add(misses=1)
        else:
            self.raw.counts.add_bytes(down=len(data))
        return data

    def get_version(self, key: str) -> tuple[bytes, str] | None:
        """Read an object and the name of its version, for `replace`; None if there is no object.

        Raises StorageError, also if the store has no versions.
        """
        self.raw.counts.add(gets=1)
        found = self._versions().read_version(checked_key(key))
        if found is None:
            self.raw.counts.add(misses=1)
        else:
            self.raw.counts.add_bytes(down=len(found[0]))
        return found

    def replace(self, key: str, data: bytes, version: str) -> str | None:
        """Write an object if it still has this version (empty: if there is none). Returns its new version.

        Returns None if another writer was faster; then nothing was written. Of all writers that replace the same
        version exactly one succeeds. Raises StorageError; then it is not known whether the object was written.
        """
        self.raw.counts.add(puts=1)
        replaced = self._versions().replace(checked_key(key), memoryview(data), version)
        self.raw.counts.add_bytes(up=len(data))
        return replaced

    def _versions(self) -> VersionedStore:
        if not isinstance(self.raw, VersionedStore):
            raise StorageError(
                f"{self.raw.title} cannot tell versions of an object apart; use s3://, file:// or memory://"
            )
        return self.raw

    def put_file(self, key: str, path: Path) -> None:
        """Write an object from a file, without reading all of it into memory. Raises StorageError."""
        try:
            num_bytes = path.stat().st_size
            if isinstance(self.raw, StreamingStore) and num_bytes > self.raw.part_bytes:
                self.raw.upload(checked_key(key), path, num_bytes)
                self.raw.counts.add_bytes(up=num_bytes)
                return
            with path.open("rb") as file:
                if not num_bytes:
                    self.put(key, b"")
                    return
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
                    self.put(key, view)
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror or error}") from error

    def get_file(self, key: str, path: Path) -> None:
        """Read an object into a file. Raises ObjectMissing, StorageError; then the file's content is undefined."""
        if isinstance(self.raw, StreamingStore):
            self.raw.counts.add(gets=1)
            num_bytes = self.raw.download(checked_key(key), path)
            if num_bytes is None:
                raise ObjectMissing(f"{self.raw.title} holds no object {key}")
            self.raw.counts.add_bytes(down=num_bytes)
            return
        data = self.get(key)
        try:
            path.write_bytes(data)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror or error}") from error

    def wait(self, key: str, timeout_s: float) -> bytes:
        """Read an object as soon as it exists. Raises ObjectMissing at the timeout, or StorageError."""
        if isinstance(self.raw, BlockingStore):
            data = self.raw.wait(checked_key(key), timeout_s, self._counted_read)
        else:
            data = self._poll(checked_key(key), timeout_s)
        if data is None:
            raise ObjectMissing(f"{self.raw.title} still held no object {key} after {timeout_s:g} s")
        return data

    def _poll(self, key: str, timeout_s: float) -> bytes | None:
        before = self._recent_poll(key)
        data, poll = ask_until(lambda: self._counted_read(key), timeout_s, self.raw.intervals, self.raw.pace, before)
        if data is None:
            with self._lock:
                self._timed_out[key] = poll
                while len(self._timed_out) > MAX_WAITS_KNOWN:
                    del self._timed_out[next(iter(self._timed_out))]
        return data

    def _recent_poll(self, key: str) -> PollState | None:
        """The state of a recent wait for the key, so that waiting in slices costs no more than one long wait."""
        with self._lock:
            poll = self._timed_out.pop(key, None)
        is_recent = poll is not None and self.raw.pace.now_s() - poll.at_s <= poll.pause_s
        return poll if is_recent else None

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; keys without an object are ignored. Raises StorageError."""
        names = checked_keys(keys)
        for first in range(0, len(names), KEYS_PER_REQUEST):
            self.raw.counts.add(deletes=1)
            self.raw.remove(names[first : first + KEYS_PER_REQUEST])

    def keys(self, prefix: str) -> list[str]:
        """The keys with this prefix, sorted. Costs a list request per 1000 keys. Raises StorageError."""
        listed = self.raw.names(checked_prefix(prefix))
        self.raw.counts.add(lists=1 + max(0, len(listed) - 1) // KEYS_PER_REQUEST)
        return sorted(name for name in listed if name.startswith(prefix))

    def requests(self) -> StoreRequests:
        """All requests made so far."""
        return self.raw.counts.total()

    def close(self) -> None:
        """Release what the store holds open; objects stay."""
        self.raw.close()
