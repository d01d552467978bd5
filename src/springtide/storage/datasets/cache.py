"""A cache of shards: the most recently used in memory, others on the local disk, both bounded."""

from __future__ import annotations

import mmap
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from springtide.storage.datasets.cut import Arrays

# Below the free disk space of a function (AWS: 512 MB), with room for other files.
DEFAULT_DISK_BYTES = 400 << 20
DEFAULT_MEMORY_BYTES = 32 << 20
Reading = Callable[[bytes | memoryview], Arrays]


class ShardCache:
    """An LRU cache of shards by digest. Not thread-safe; call `close` when done.

    A new shard is kept in memory. A shard that is evicted from memory moves to a memory-mapped file in a private folder
    under `folder` (by default the system's folder for temporary files); one that is evicted from disk is dropped. The
    newest shard is always kept, however large. If the disk is full or read-only, only memory is used.
    """

    def __init__(
        self,
        folder: Path | None = None,
        disk_bytes: int = DEFAULT_DISK_BYTES,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> None:
        self._parent = folder
        self._folder: Path | None = None
        self._remove_folder: weakref.finalize[..., ShardCache] | None = None
        self._disk_bytes = disk_bytes
        self._memory_bytes = memory_bytes
        self._memory: OrderedDict[str, tuple[bytes, Arrays, Reading]] = OrderedDict()
        self._disk: OrderedDict[str, tuple[int, Arrays]] = OrderedDict()

    @property
    def memory_used_bytes(self) -> int:
        return sum(len(data) for data, _, _ in self._memory.values())

    @property
    def disk_used_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self._disk.values())

    def get(self, sha256: str) -> Arrays | None:
        if sha256 in self._memory:
            self._memory.move_to_end(sha256)
            return self._memory[sha256][1]
        if sha256 in self._disk:
            self._disk.move_to_end(sha256)
            return self._disk[sha256][1]
        return None

    def add(self, sha256: str, data: bytes, read: Reading) -> Arrays:
        """Add a shard and return its arrays, which `read` builds from its bytes or its file. Raises like `read`."""
        arrays = read(data)
        self._memory[sha256] = (data, arrays, read)
        while len(self._memory) > 1 and self.memory_used_bytes > self._memory_bytes:
            oldest, (moved, _, read_moved) = self._memory.popitem(last=False)
            self._spill(oldest, moved, read_moved)
        if len(data) > self._memory_bytes and self._spill(sha256, data, read):
            del self._memory[sha256]
            return self._disk[sha256][1]
        return arrays

    def close(self) -> None:
        """Drop all shards and remove the folder; arrays that were returned stay valid."""
        self._memory.clear()
        self._disk.clear()
        if self._remove_folder is not None:
            self._remove_folder()
        self._folder = self._remove_folder = None

    def _spill(self, sha256: str, data: bytes, read: Reading) -> bool:
        """Move a shard to the disk, if it fits. Returns whether it is there."""
        if len(data) > self._disk_bytes or not data:
            return False
        while self._disk and self.disk_used_bytes + len(data) > self._disk_bytes:
            oldest, _ = self._disk.popitem(last=False)
            self._path(oldest).unlink(missing_ok=True)
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="springtide-data-", dir=self._parent))
                # Also removes the folder of a cache that is never closed.
                self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            path = self._path(sha256)
            path.write_bytes(data)
            with path.open("rb") as file:
                # The mapping outlives the file's name, so arrays in use stay valid when the shard is evicted.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError:
            self._disk_bytes = self.disk_used_bytes
            return False
        self._disk[sha256] = (len(data), read(memoryview(mapped)))
        return True

    def _path(self, sha256: str) -> Path:
        assert self._folder is not None
        return self._folder / sha256
