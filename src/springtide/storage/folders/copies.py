"""A workload's own copy of a folder: fresh files, which share nothing with contents that others use."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from springtide.core.errors import Conflict, StorageError
from springtide.storage.files import make_private, sync_filesystem
from springtide.storage.folders.contents import OpenContent
from springtide.storage.folders.tree import FolderFile, FolderTree

# From linux/fs.h: let a file share the other's blocks until one of both is written to, where the filesystem can.
_FICLONE = 0x40049409
_CHUNK_BYTES = 1 << 20


class ContentDamaged(Conflict):
    """A content does not have its digest any more."""

    def __init__(self, file: FolderFile) -> None:
        super().__init__(f"the content of {file.path} was damaged where it was kept; send it again")
        self.sha256 = file.sha256


def make_copy(
    tree: FolderTree, open_content: OpenContent, into: Path, *, directory: str = "", is_durable: bool = True
) -> None:
    """Write the folder's files into `into`, which appears when it is complete and durable; nothing if it is there.

    `directory` is made, too. Without `is_durable` a loss of power may leave it damaged. Raises
    ContentDamaged for a content with another digest, StorageError, and what `open_content` raises.
    """
    if into.exists():
        return
    try:
        make_private(into.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".{into.name}.", dir=into.parent))
        try:
            for folder in (*tree.folders, directory):
                make_private(temporary / folder)
            made: set[str] = set()
            for file in tree.files:
                path = f"{temporary}/{file.path}"
                parent = os.path.dirname(path)
                if parent not in made:
                    make_private(Path(parent))
                    made.add(parent)
                with open_content(file.sha256) as source:
                    _copy(file, source, path)
            if is_durable:
                sync_filesystem(temporary)
            with contextlib.suppress(FileExistsError):
                os.rename(temporary, into)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise StorageError(f"cannot copy the folder to {into}: {error.strerror or error}") from error


def _copy(file: FolderFile, source: IO[bytes], path: str) -> None:
    digest, num_bytes = hashlib.sha256(), 0
    mode = 0o700 if file.is_executable else 0o600
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as target:
        is_clone = _clone(source, target)
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
            if num_bytes > file.num_bytes:
                break
            if not is_clone:
                target.write(chunk)
    if num_bytes != file.num_bytes or digest.hexdigest() != file.sha256:
        raise ContentDamaged(file)


def _clone(source: IO[bytes], target: IO[bytes]) -> bool:
    """Let the target share the source's blocks; False where the filesystem cannot, or it is no file."""
    try:
        fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError:
        return False
    return True


def prune_copy(tree: FolderTree, root: Path, copied_ns: int) -> None:
    """Remove those files of a copy that nothing has written to since it was made, and folders that are then empty.

    What the job wrote stays. `copied_ns` is when the copy was complete, as a file's time of modification.
    """
    for file in tree.files:
        path = root / file.path
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime_ns <= copied_ns:
                path.unlink()
    for folder, _, _ in os.walk(root, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
