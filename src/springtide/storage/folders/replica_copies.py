"""Copies of a folder for replicas of a service: each has its own, which goes when the replica does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from springtide.core.errors import StorageError
from springtide.storage.files import make_private
from springtide.storage.folders.contents import OpenContent
from springtide.storage.folders.copies import make_copy
from springtide.storage.folders.tree import FolderTree

# In the directory of a service: the copies of its replicas, by their ids, each with a lock beside it.
REPLICA_FOLDERS = "folders"
_LOCK = ".lock"


@contextmanager
def replica_copy(
    tree: FolderTree, open_content: OpenContent, copies: Path, name: str, *, directory: str = ""
) -> Iterator[Path]:
    """A copy `copies`/`name` for as long as the `with` block lasts. Copies of processes that were killed go first.

    Raises like `make_copy`.
    """
    make_private(copies)
    remove_left_copies(copies)
    lock = _locked(copies / f"{name}{_LOCK}")
    try:
        make_copy(tree, open_content, copies / name, directory=directory, is_durable=False)
        yield copies / name
    finally:
        _remove(copies, name)
        os.close(lock)


def remove_left_copies(copies: Path) -> None:
    """Remove the copies of processes that are gone: their locks are free."""
    for path in copies.glob(f"*{_LOCK}"):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(copies, path.name.removesuffix(_LOCK))
            finally:
                os.close(lock)


def _locked(path: Path) -> int:
    try:
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return lock
            # Another process took it for one that was left, before it was locked.
            os.close(lock)
    except OSError as error:
        raise StorageError(f"cannot lock {path}: {error.strerror or error}") from error


def _remove(copies: Path, name: str) -> None:
    # A process that is killed while it copies leaves a folder of another name.
    for path in (copies / name, *copies.glob(f".{name}.*")):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        (copies / f"{name}{_LOCK}").unlink()
