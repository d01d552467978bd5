"""An object store in a directory, for machines without a bucket. Waits by polling the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from springtide.storage.pacing import Intervals, PollInterval, real_pace
from springtide.storage.stores.directory import ObjectDirectory
from springtide.storage.stores.raw import MAX_OBJECT_BYTES, content_version
from springtide.storage.stores.request_count import RequestCount

# Polling a missing file costs a few microseconds, so the pauses can be short.
FILE_INTERVALS = Intervals(first_s=0.005, cap_s=0.25)


class FileStore:
    """A raw store of files under `root`. Works between processes and on shared file systems that have hard links."""

    def __init__(
        self,
        root: Path,
        *,
        is_durable: bool = False,
        pace: PollInterval | None = None,
        intervals: Intervals = FILE_INTERVALS,
    ) -> None:
        self.title = f"the store in {root}"
        self.max_object_bytes = MAX_OBJECT_BYTES
        self.intervals = intervals
        self.pace = pace or real_pace()
        self.counts = RequestCount()
        self._directory = ObjectDirectory(root, is_durable=is_durable)

    def write(self, key: str, data: memoryview, *, only_if_absent: bool) -> bool:
        return self._directory.write(key, data, only_if_absent=only_if_absent)

    def read(self, key: str) -> bytes | None:
        return self._directory.read(key)

    def read_version(self, key: str) -> tuple[bytes, str] | None:
        data = self._directory.read(key)
        return None if data is None else (data, content_version(data))

    def replace(self, key: str, data: memoryview, version: str) -> str | None:
        with self._directory.locked():
            known = self._directory.read(key)
            if version != ("" if known is None else content_version(known)):
                return None
            self._directory.write(key, data, only_if_absent=False)
        return content_version(data)

    def remove(self, keys: Sequence[str]) -> None:
        self._directory.remove(keys)

    def names(self, prefix: str) -> list[str]:
        return self._directory.keys(prefix)

    def close(self) -> None:
        return
