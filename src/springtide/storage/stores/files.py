"""An object store in a directory: what the laptop has instead of a bucket. Waits by asking for the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from springtide.storage.pacing import Intervals, PollInterval
from springtide.storage.stores.checked import CheckedStore, content_version
from springtide.storage.stores.directory import ObjectDirectory

# A file that is not there costs a few microseconds to ask for: the pauses are chosen for the waiter.
FILE_INTERVALS = Intervals(first_s=0.005, cap_s=0.25)


class FileStore(CheckedStore):
    """Objects as files under `root`. Works between processes and on shared file systems that have hard links."""

    def __init__(
        self,
        root: Path,
        *,
        is_durable: bool = False,
        pace: PollInterval | None = None,
        intervals: Intervals = FILE_INTERVALS,
    ) -> None:
        super().__init__(f"the store in {root}", intervals, pace)
        self._directory = ObjectDirectory(root, is_durable=is_durable)

    def _write(self, key: str, data: memoryview, *, only_if_absent: bool) -> bool:
        return self._directory.write(key, data, only_if_absent=only_if_absent)

    def _read(self, key: str) -> bytes | None:
        return self._directory.read(key)

    def _read_version(self, key: str) -> tuple[bytes, str] | None:
        data = self._directory.read(key)
        return None if data is None else (data, content_version(data))

    def _replace(self, key: str, data: memoryview, version: str) -> str | None:
        with self._directory.locked():
            known = self._directory.read(key)
            if version != ("" if known is None else content_version(known)):
                return None
            self._directory.write(key, data, only_if_absent=False)
        return content_version(data)

    def _remove(self, keys: Sequence[str]) -> None:
        self._directory.remove(keys)

    def _names(self, prefix: str) -> list[str]:
        return self._directory.keys(prefix)
