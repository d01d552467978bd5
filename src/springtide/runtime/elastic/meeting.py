"""The rendezvous store of a group on one machine: a directory with one file for each key.

torch's FileStore appends records to one file. A member that is killed while it appends leaves half a record, on which
every later reader hangs. Here each key is written by rename, so it is either complete or absent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch._C import _distributed_c10d as c10d

from springtide.storage.files import make_private, open_private

_POLL_S = 0.002
_LOCK = "lock"
_PRIVATE = "~"


class MeetingPlace(c10d.Store):
    """A c10d store in a directory that all members can access. Safe for several threads and processes.

    Like torch's stores it raises RuntimeError on a timeout, and also if the directory was removed.
    """

    def __init__(self, directory: Path, timeout_s: float) -> None:
        super().__init__()
        make_private(directory)
        self._directory = directory
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        path = self._path(key)
        temporary = f"{path}{_PRIVATE}{os.getpid()}.{threading.get_ident()}"
        try:
            with open_private(temporary, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except OSError as error:
            raise RuntimeError(f"the meeting place {self._directory} is gone: {error.strerror}") from error

    def get(self, key: str) -> bytes:
        """Wait for the key and return its value."""
        self.wait([key])
        with open(self._path(key), "rb") as file:
            return file.read()

    def check(self, keys: Sequence[str]) -> bool:
        return all(os.path.exists(self._path(key)) for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        end_s = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if time.monotonic() > end_s:
                raise RuntimeError(f"no member has set {', '.join(keys)} in time")
            if not self._directory.is_dir():
                raise RuntimeError(f"the meeting place {self._directory} is gone")
            time.sleep(_POLL_S)

    def add(self, key: str, amount: int) -> int:
        """Add to an integer key, which starts at 0; returns the sum."""
        with open_private(self._directory / (_PRIVATE + _LOCK), "wb") as lock:
            # The kernel releases the lock when the process that holds it ends, also when it is killed.
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = self.get(key) if self.check([key]) else b"0"
            total = int(known) + amount
            self.set(key, str(total))
        return total

    def delete_key(self, key: str) -> bool:
        """Remove the key; returns whether it was set."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key))
            return True
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of `wait` and `get`."""
        self._timeout_s = timeout.total_seconds()

    def _path(self, key: str) -> str:
        # Hexadecimal, because a key may hold characters that a file name cannot.
        return str(self._directory / key.encode().hex())
