"""Contents of files by their SHA-256: in a directory, where several jobs may use one, and in an archive for one job."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from springtide.core.errors import Conflict, InvalidRequest, StorageError
from springtide.storage.files import make_private
from springtide.storage.folders.tree import MAX_TREE_BYTES, FolderTree, decode_tree, encode_tree
from springtide.storage.workloads.artifacts import checked_digest

OpenContent = Callable[[str], IO[bytes]]
# In a platform's state directory, beside `workloads`.
CONTENTS = "contents"
_TREE = "tree.json"
_CHUNK_BYTES = 1 << 20


class ContentDirectory:
    """Contents under `root`, each a file that is named by its digest. Thread-safe; may be lost at any time.

    A content counts as used when it is asked for, put or read; `sweep` removes those that have long not been used.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, sha256: str) -> Path:
        """Where the content is, if it is there. Raises StorageError for what is no digest."""
        return self._root / checked_digest(sha256)[:2] / sha256

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Those digests whose contents are not here, each once, in order."""
        return [sha256 for sha256 in dict.fromkeys(digests) if not self._touch(sha256)]

    def put(self, sha256: str, data: bytes) -> None:
        """Keep a content. Raises Conflict if its digest is another one, StorageError."""
        with self.receiving(sha256) as file:
            file.write(data)

    @contextmanager
    def receiving(self, sha256: str) -> Iterator[IO[bytes]]:
        """A file for a content to be written into, which is kept if its digest is right at the end.

        Raises Conflict if it is another one, StorageError.
        """
        path = self.path(sha256)
        temporary = ""
        try:
            make_private(path.parent)
            descriptor, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
            with os.fdopen(descriptor, "w+b") as file:
                yield file
                file.seek(0)
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != sha256:
                raise Conflict(f"the bytes that came do not have the digest {sha256}; send them again")
            os.replace(temporary, path)
        except OSError as error:
            raise StorageError(f"cannot keep a content in {self._root}: {error.strerror or error}") from error
        finally:
            if temporary:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def open(self, sha256: str) -> IO[bytes]:
        """The content, to be read. Raises Conflict if it is not here, StorageError."""
        try:
            return self.path(sha256).open("rb")
        except FileNotFoundError:
            raise Conflict(f"the content {sha256} is not here; send it with PUT /v1/contents/{sha256}") from None
        except OSError as error:
            raise StorageError(f"cannot read the content {sha256}: {error.strerror}") from error

    def read_tree(self, sha256: str) -> FolderTree:
        """The list of files with this digest, checked. Raises Conflict if it is not here, InvalidRequest."""
        with self.open(sha256) as file:
            data = file.read(MAX_TREE_BYTES + 1)
        if len(data) > MAX_TREE_BYTES:
            raise InvalidRequest(f"the list of a folder's files has at most {MAX_TREE_BYTES:,} bytes")
        if hashlib.sha256(data).hexdigest() != sha256:
            self.discard(sha256)
            raise Conflict(f"the content {sha256} was damaged here; send it again")
        return decode_tree(data)

    def has_folder(self, sha256: str) -> bool:
        """Whether the list of this digest and all contents that it names are here."""
        return not self.missing([sha256]) and not self.missing(file.sha256 for file in self.read_tree(sha256).files)

    def discard(self, sha256: str) -> None:
        """Remove a content, of which it was found that it does not have its digest."""
        self.path(sha256).unlink(missing_ok=True)

    def sweep(self, kept: Collection[str], oldest_unix_s: float) -> int:
        """Remove all contents that are not in `kept` and were not used since that time. Returns how many."""
        num_removed = 0
        for path in self._root.glob("[0-9a-f][0-9a-f]/*"):
            with contextlib.suppress(OSError):
                if path.name not in kept and path.stat().st_mtime < oldest_unix_s:
                    path.unlink()
                    num_removed += 1
        return num_removed

    def _touch(self, sha256: str) -> bool:
        try:
            os.utime(self.path(sha256))
        except OSError:
            return False
        return True


def contents_of_platform(work_dir: Path) -> ContentDirectory:
    """The contents of the platform on this machine that has made a workload's directory (STATE/workloads/ID)."""
    return ContentDirectory(work_dir.parents[1] / CONTENTS)


class ArchiveBroken(StorageError):
    """An archive is none, or another one than was submitted."""


def write_archive(open_content: OpenContent, tree: FolderTree, path: Path, *, max_bytes: int | None = None) -> None:
    """Write the list and each of its contents into one file, a zip; of more than `max_bytes` some, and no more.

    Raises StorageError, and what `open_content` raises.
    """
    try:
        with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr(_TREE, encode_tree(tree)[1])
            for sha256 in dict.fromkeys(file.sha256 for file in tree.files):
                with open_content(sha256) as source, archive.open(sha256, "w", force_zip64=True) as target:
                    while (chunk := source.read(_CHUNK_BYTES)) and (max_bytes is None or file.tell() <= max_bytes):
                        target.write(chunk)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def open_archive(path: Path, sha256: str) -> Iterator[tuple[FolderTree, OpenContent]]:
    """The list in an archive, which must have the digest, and a function that opens its contents.

    What that reads is not checked yet. Raises ArchiveBroken, also out of the `with` block.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            with archive.open(_TREE) as file:
                data = file.read(MAX_TREE_BYTES + 1)
            if hashlib.sha256(data).hexdigest() != sha256:
                raise ArchiveBroken("the archive of the folder is another one than was submitted")
            yield decode_tree(data), archive.open
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:
        raise ArchiveBroken(f"the archive of the folder is broken: {error}") from None


def take_archive(contents: ContentDirectory, path: Path, sha256: str) -> None:
    """Keep the contents in an archive, whose list must have the digest. Raises InvalidRequest, StorageError."""
    try:
        with open_archive(path, sha256) as (tree, open_content):
            if encode_tree(tree)[0] != sha256:
                raise InvalidRequest("the list of the folder's files is not written as springtide writes it")
            lacking = set(contents.missing(file.sha256 for file in tree.files))
            for file in tree.files:
                if file.sha256 not in lacking:
                    continue
                lacking.remove(file.sha256)
                with open_content(file.sha256) as source, contents.receiving(file.sha256) as target:
                    left = file.num_bytes
                    # No more is unpacked than the list says, whatever the archive holds.
                    while left and (chunk := source.read(min(_CHUNK_BYTES, left))):
                        target.write(chunk)
                        left -= len(chunk)
            contents.put(*encode_tree(tree))
    except (ArchiveBroken, Conflict, ValueError) as error:
        raise InvalidRequest(f"the folder was not sent whole ({error}); send it again") from None
