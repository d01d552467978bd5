"""Durable files: a reader sees the complete old or the complete new content, even after a crash."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Literal

from springtide.core.errors import BackendError, StorageError


def fsync_directory(path: Path) -> None:
    """Make the directory's entries durable. Raises StorageError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"cannot make {path} durable: {error.strerror}") from error


def sync_filesystem(path: Path) -> None:
    """Make all that was written to the filesystem of a directory durable: for many files at once. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make a file's content durable. Raises StorageError; the file must then be treated as lost."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"cannot make {path} durable: {error.strerror}") from error


def lock_file(path: Path, refusal: str) -> int:
    """Lock a file, made if it is missing, for as long as the descriptor that this returns is open.

    Raises BackendError with `refusal` if another process has the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise BackendError(refusal) from None
    return descriptor


def make_private(path: Path) -> None:
    """Make the directory and those of its parents that are missing, for their owner alone. Raises OSError."""
    missing = [path]
    for parent in path.parents:
        if parent.exists():
            break
        missing.append(parent)
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)


def open_private(path: Path | str, mode: Literal["wb", "ab"], *, buffering: int = -1) -> IO[bytes]:
    """Open a file to write, which its owner alone can read if it is new. Raises OSError."""
    return open(path, mode, buffering=buffering, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_durable(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write a temporary file, fsync, rename, fsync the directory. Raises StorageError; then the old content stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    fsync_directory(path.parent)


def write_directory_durable(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a temporary directory, make all durable, and rename it into place as `path`.

    Raises StorageError (also for what `fill` raises as OSError); nothing is visible under `path` then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        make_private(temporary.parent)
        temporary.mkdir(mode=0o700)
        fill(temporary)
        for file in temporary.iterdir():
            file.chmod(0o600)
        for file in temporary.iterdir():
            fsync_file(file)
        fsync_directory(temporary)
        os.rename(temporary, path)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    fsync_directory(path.parent)
