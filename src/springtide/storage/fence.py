"""The fence of one job's directory: a writer of a lower generation than the highest seen is refused.

Comparing and writing happen under an exclusive file lock, so they are atomic between processes, and a writer that was
suspended and resumes an hour later is refused like any other.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from springtide.core.errors import Fenced, StorageError
from springtide.storage.files import make_private, write_durable


class Fence:
    """Guards what is published under `directory`. Cheap to build; holds no descriptor between calls."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "fence"
        self._lock_path = directory / "fence.lock"

    def generation(self) -> int:
        """The lowest generation that may still write; 0 if none has written yet."""
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise StorageError(f"the fence {self._path} is unreadable: {error}") from error

    def raise_to(self, generation: int) -> None:
        """Refuse every writer below `generation` from now on. A lower value changes nothing."""
        with self._locked():
            if generation > self.generation():
                write_durable(self._path, str(generation).encode())

    @contextmanager
    def writing(self, generation: int) -> Iterator[None]:
        """Hold the lock while the body publishes. Raises Fenced if a newer generation has written."""
        with self._locked():
            current = self.generation()
            if generation < current:
                raise Fenced(f"generation {generation} may not write: generation {current} owns {self._path.parent}")
            if generation > current:
                write_durable(self._path, str(generation).encode())
            yield

    @contextmanager
    def _locked(self) -> Iterator[None]:
        make_private(self._lock_path.parent)
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
