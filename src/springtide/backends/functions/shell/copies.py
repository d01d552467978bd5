"""Copies in the store of a job's status, losses and logs, for a control plane on another machine.

They are whole files under `workloads/ID/functions/`, written at intervals and at the end. Another control plane then
lacks at most the newest lines about steps, which functions report again. No decision depends on them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from springtide.backends.functions.shell.notes import LOGS, LOSSES_FILE, STATUS_FILE
from springtide.core.errors import ObjectMissing, StorageError
from springtide.core.ports import Store
from springtide.core.workload import WorkloadId
from springtide.storage.files import make_private, write_durable

_log = logging.getLogger(__name__)
# The interval of copying changed files; a long file is copied only once it has grown by GROWN_PART.
COPY_S = 30.0
# The interval for lines that are written only once (which function ended and why, its output).
URGENT_COPY_S = 1.0
GROWN_PART = 0.2
SHORT_BYTES = 256 * 1024
MAX_FILES = 256


def copies_prefix(job_id: WorkloadId) -> str:
    """The prefix of a job's copies in the store."""
    return f"workloads/{job_id}/functions/"


class Copies:
    """The copies of one job, whose files are in `work_dir`. Thread-safe; errors are logged and stop no job."""

    def __init__(self, store: Store, job_id: WorkloadId, work_dir: Path) -> None:
        self._store = store
        self._prefix = copies_prefix(job_id)
        self._work_dir = work_dir
        self._lock = threading.Lock()
        self._urgency = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._urgent: frozenset[str] = frozenset()
        self._saved_at_s = time.monotonic()

    def restore(self) -> None:
        """Fetch the copies that are longer than the local files, which only ever grow, and the status."""
        with self._lock:
            try:
                for key in self._store.keys(self._prefix)[:MAX_FILES]:
                    name = key.removeprefix(self._prefix)
                    if _is_copied(name):
                        self._restore(name, key)
            except StorageError as error:
                _log.warning("the copies under %s cannot be had: %s", self._prefix, error)

    def is_due(self) -> bool:
        """Whether it is time to save again."""
        since_s = time.monotonic() - self._saved_at_s
        return since_s >= COPY_S or (bool(self._urgent) and since_s >= URGENT_COPY_S)

    def copy_soon(self, name: str) -> None:
        """Copy this file soon, whatever its length: it has lines that are not written again."""
        with self._urgency:
            self._urgent |= {name}

    def save(self, *, is_last: bool = False) -> None:
        """Copy changed files; at the last time also long ones that have grown little."""
        if not self._lock.acquire(blocking=is_last):
            return
        try:
            self._saved_at_s = time.monotonic()
            with self._urgency:
                urgent, self._urgent = self._urgent, frozenset()
            for name, path in self._files():
                self._save(name, path, is_last or (name in urgent and name != LOSSES_FILE))
        except StorageError as error:
            _log.warning("copies under %s could not be written: %s", self._prefix, error)
        finally:
            self._lock.release()

    def _restore(self, name: str, key: str) -> None:
        try:
            data = self._store.get(key)
        except ObjectMissing:
            return
        path = self._work_dir / name
        here = _size_bytes(path)
        if name != STATUS_FILE and here >= len(data):
            self._sizes[name] = len(data)
            return
        try:
            make_private(path.parent)
        except OSError as error:
            raise StorageError(f"cannot make {path.parent}: {error.strerror}") from error
        write_durable(path, data, mode=0o600)
        self._sizes[name] = len(data)

    def _save(self, name: str, path: Path, is_last: bool) -> None:
        before, now = self._sizes.get(name, 0), _size_bytes(path)
        if name != STATUS_FILE and now == before:
            return
        if not is_last and now > SHORT_BYTES and now < before * (1 + GROWN_PART):
            return
        try:
            data = path.read_bytes()
        except OSError as error:
            _log.warning("%s cannot be copied: %s", path, error.strerror)
            return
        self._store.put(self._prefix + name, data)
        self._sizes[name] = len(data)

    def _files(self) -> Iterator[tuple[str, Path]]:
        """The files to copy: the names of their copies, and their paths."""
        names = [STATUS_FILE, LOSSES_FILE]
        folder = self._work_dir / LOGS
        names += [f"{LOGS}/{path.name}" for path in sorted(folder.glob("*.log"))] if folder.is_dir() else []
        for name in names[:MAX_FILES]:
            path = self._work_dir / name
            if path.is_file() and not path.is_symlink():
                yield name, path


def fetch_status(store: Store, job_id: WorkloadId, work_dir: Path) -> None:
    """Fetch the copy of a job's status, if there is one. Raises StorageError."""
    try:
        data = store.get(copies_prefix(job_id) + STATUS_FILE)
    except ObjectMissing:
        return
    try:
        make_private(work_dir)
    except OSError as error:
        raise StorageError(f"cannot make {work_dir}: {error.strerror}") from error
    write_durable(work_dir / STATUS_FILE, data, mode=0o600)


def _is_copied(name: str) -> bool:
    """Whether a name is that of a copy; other objects are ignored."""
    if name in (STATUS_FILE, LOSSES_FILE):
        return True
    parts = PurePosixPath(name).parts
    return len(parts) == 2 and parts[0] == LOGS and parts[1].endswith(".log") and not parts[1].startswith(".")


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
