"""The folder of a job's results, as files: listed, hashed and opened without following links out of it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
from pathlib import Path
from typing import IO

from springtide.core.errors import NotFound
from springtide.core.status.artifacts import ArtifactStatus
from springtide.storage.folders.tree import problem_with_path

# Where the environment of a job says where its results go.
OUT_VARIABLE = "SPRINGTIDE_OUT"
RESULTS = "artifacts"
# A listing ends after so many files, by name.
MAX_RESULTS = 10_000
_MAX_DIGESTS = 10_000


class ResultDigests:
    """Digests of files, remembered as long as size, time and number of a file stay the same. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int, int], str] = {}

    def of(self, root: Path, name: str) -> str:
        """The digest of a result; empty if it is gone, or written to meanwhile."""
        try:
            with open_result(root, name)[0] as file:
                key = _identity(root, name, file)
                if key not in self._known:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    if _identity(root, name, file) != key:
                        return ""
                    if len(self._known) >= _MAX_DIGESTS:
                        self._known.clear()
                    self._known[key] = digest
                    return digest
                return self._known.get(key, "")
        except (NotFound, OSError):
            return ""


def _identity(root: Path, name: str, file: IO[bytes]) -> tuple[str, int, int, int]:
    found = os.fstat(file.fileno())
    return f"{root}/{name}", found.st_size, found.st_mtime_ns, found.st_ino


def list_results(root: Path) -> list[ArtifactStatus]:
    """The files below the folder, by name, without their digests. Links and what is half written are left out."""
    found: list[ArtifactStatus] = []
    for folder, folders, names in os.walk(root):
        folders.sort()
        prefix = os.path.relpath(folder, root)
        for name in names:
            path = name if prefix == "." else f"{prefix}/{name}"
            if problem_with_path(path) or (name.startswith(".") and name.endswith(".tmp")):
                continue
            with contextlib.suppress(OSError):
                state = os.lstat(os.path.join(folder, name))
                if stat.S_ISREG(state.st_mode):
                    found.append(
                        ArtifactStatus(name=path, num_bytes=state.st_size, modified_unix_s=round(state.st_mtime, 3))
                    )
        if len(found) > MAX_RESULTS:
            break
    found.sort(key=lambda result: result.name)
    return found[:MAX_RESULTS]


def open_result(root: Path, name: str) -> tuple[io.BufferedReader, int]:
    """A result, to be read, and the number of its bytes. Raises NotFound."""
    unknown = NotFound(f"there is no artifact {name!r:.200}; `springtide artifacts list` names those that there are")
    if problem_with_path(name):
        raise unknown
    path = root / name
    try:
        # No part of the path may be a link: the job, which may write there, could have made one.
        if path.parent.resolve() != root.resolve() / Path(name).parent:
            raise unknown
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError:
        raise unknown from None
    state = os.fstat(file.fileno())
    if not stat.S_ISREG(state.st_mode):
        file.close()
        raise unknown
    return file, state.st_size
