"""The protocols of raw stores, one implementation per kind of store; `CheckedStore` turns them into a `Store`.

Keys are already checked, and the caller counts every request except retries and waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from springtide.storage.pacing import Intervals, PollInterval
from springtide.storage.stores.request_count import RequestCount

MAX_OBJECT_BYTES = 1 << 62


class RawStore(Protocol):
    """Objects by key. All methods raise StorageError where the store fails.

    `title` names the store in messages, `max_object_bytes` is the most it takes in one put, `intervals` are the pauses
    between two polls for an object, and `counts` receives the requests that the store makes by itself (retries, waits).
    """

    title: str
    max_object_bytes: int
    intervals: Intervals
    pace: PollInterval
    counts: RequestCount

    def write(self, key: str, data: memoryview, *, only_if_absent: bool) -> bool:
        """Make the object visible atomically. Returns whether it was written."""

    def read(self, key: str) -> bytes | None:
        """The object, or None where there is none."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove those that exist."""

    def names(self, prefix: str) -> list[str]:
        """All keys with this prefix, in any order; may include others that had to be listed for them."""

    def close(self) -> None:
        """Release connections and handles; objects stay."""


@runtime_checkable
class VersionedStore(Protocol):
    """A raw store that replaces an object only if nothing else has replaced it."""

    def read_version(self, key: str) -> tuple[bytes, str] | None:
        """The object with the name of its version, or None if there is none."""

    def replace(self, key: str, data: memoryview, version: str) -> str | None:
        """Write the object if it still has this version (empty: if there is none). Returns the new version, or None."""


@runtime_checkable
class BlockingStore(Protocol):
    """A raw store whose waiters are woken by a put; all others are polled."""

    def wait(self, key: str, timeout_s: float, read: Callable[[str], bytes | None]) -> bytes | None:
        """The object once it exists, or None at the timeout. `read` reads the object and counts the request."""


@runtime_checkable
class StreamingStore(Protocol):
    """A raw store that transfers files in parts; a file of at most `part_bytes` is put as one object."""

    part_bytes: int

    def upload(self, key: str, path: Path, num_bytes: int) -> None:
        """Write an object from a file. Counts its requests by itself."""

    def download(self, key: str, path: Path) -> int | None:
        """Read an object into a file. Returns its number of bytes, or None if there is no object."""


def content_version(data: bytes | memoryview) -> str:
    """A version name for stores without versions: equal bytes have equal versions."""
    return hashlib.sha256(data).hexdigest()
