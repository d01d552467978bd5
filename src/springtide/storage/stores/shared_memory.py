"""A parameter store in one machine's shared memory: objects are files in memory, and a put wakes its waiters."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from springtide.core.errors import InvalidRequest
from springtide.storage.pacing import Intervals, PollInterval, real_pace
from springtide.storage.stores.directory import PRIVATE_MARK, ObjectDirectory
from springtide.storage.stores.raw import MAX_OBJECT_BYTES
from springtide.storage.stores.request_count import RequestCount
from springtide.storage.stores.wake_sockets import WakeSockets

SHARED_MEMORY = Path("/dev/shm")
# Waiters also poll at this interval, in case a writer is killed after its put and before it wakes them.
LOOK_AGAIN_S = 0.5


class SharedMemoryStore:
    """The raw store of that name, shared by the processes of one user on this machine.

    Objects stay until they are deleted or the machine restarts; closing an empty store removes its folder.
    """

    def __init__(self, name: str, *, pace: PollInterval | None = None, parent: Path = SHARED_MEMORY) -> None:
        if not parent.is_dir():
            raise InvalidRequest(f"this machine has no shared memory at {parent}; use file:///absolute/path instead")
        self.title = f"the shared memory {name}"
        self.max_object_bytes = MAX_OBJECT_BYTES
        self.intervals = Intervals(first_s=LOOK_AGAIN_S, cap_s=LOOK_AGAIN_S, growth=1.0)
        self.pace = pace or real_pace()
        self.counts = RequestCount()
        self._root = parent / f"springtide-{os.getuid()}-{name}"
        self._directory = ObjectDirectory(self._root, is_remade=True)
        self._sockets = WakeSockets(self._root / f"{PRIVATE_MARK}wake")
        self._sockets.sweep()

    def write(self, key: str, data: memoryview, *, only_if_absent: bool) -> bool:
        is_written = self._directory.write(key, data, only_if_absent=only_if_absent)
        if is_written:
            self._sockets.wake(key)
        return is_written

    def read(self, key: str) -> bytes | None:
        return self._directory.read(key)

    def wait(self, key: str, timeout_s: float, read: Callable[[str], bytes | None]) -> bytes | None:
        deadline_s = self.pace.now_s() + timeout_s
        data = read(key)
        if data is not None or timeout_s <= 0.0:
            return data
        with self._sockets.listening(key) as listener:
            # Read again once the socket exists: a put before that had no socket to wake.
            while (data := read(key)) is None:
                left_s = deadline_s - self.pace.now_s()
                if left_s <= 0.0:
                    return None
                listener.settimeout(min(left_s, LOOK_AGAIN_S))
                with contextlib.suppress(TimeoutError):
                    listener.recv(1)
        return data

    def remove(self, keys: Sequence[str]) -> None:
        self._directory.remove(keys)

    def names(self, prefix: str) -> list[str]:
        return self._directory.keys(prefix)

    def close(self) -> None:
        """Remove the folder if it is empty and no process waits in it. Objects stay."""
        with contextlib.suppress(OSError):
            os.rmdir(self._root / f"{PRIVATE_MARK}wake")
        with contextlib.suppress(OSError):
            os.rmdir(self._root)
