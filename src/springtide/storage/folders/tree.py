"""The list of what is in a submitted folder: each file with the digest of its content. It is itself a content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest
from springtide.core.quantities import format_bytes
from springtide.core.workload import JobFolder
from springtide.storage.bundles import problem_with_name

MAX_FILES = 20_000
MAX_BYTES = 512 << 20
# One content, which is sent as one body.
MAX_FILE_BYTES = 256 << 20
MAX_TREE_BYTES = 8 << 20
MAX_DEPTH = 64
# In a job's directory: its copy of the folder, and the list of what was copied.
FOLDER = "folder"
FOLDER_LIST = "folder.json"
_MAX_PART_BYTES = 255
_NAMED = 5


class FolderFile(msgspec.Struct, frozen=True, array_like=True):
    """One file: its path below the folder, the SHA-256 of its content (hexadecimal) and the number of bytes."""

    path: str
    sha256: str
    num_bytes: int
    is_executable: bool = False


class FolderTree(msgspec.Struct, frozen=True):
    """A folder: its files, and those of its folders that hold none of them, both by path in order."""

    files: tuple[FolderFile, ...]
    folders: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.num_bytes for file in self.files)


def encode_tree(tree: FolderTree) -> tuple[str, bytes]:
    """The digest of the list and its bytes: the same for the same files."""
    data = msgspec.json.encode(tree)
    return hashlib.sha256(data).hexdigest(), data


def decode_tree(data: bytes) -> FolderTree:
    """The list with these bytes, checked. Raises InvalidRequest."""
    try:
        tree = decode_json(data, FolderTree)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the list of the folder's files cannot be read: {error}") from None
    check_tree(tree)
    return tree


def check_tree(tree: FolderTree) -> None:
    """Raise InvalidRequest unless every name is one below the folder, none is there twice, and all is in bounds."""
    check_amount((file.path, file.num_bytes) for file in tree.files)
    names = [file.path for file in tree.files]
    for name in (*names, *tree.folders):
        problem = problem_with_path(name)
        if problem:
            raise InvalidRequest(f"the folder holds {name[:120]!r}: {problem}")
    if len(tree.folders) > MAX_FILES:
        raise InvalidRequest(f"the folder holds over {MAX_FILES:,} empty folders; remove some")
    inner = {parent.as_posix() for name in (*names, *tree.folders) for parent in PurePosixPath(name).parents}
    inner.update(tree.folders)
    twice = next((name for name in names if name in inner), "")
    if twice or len(set(names)) < len(names):
        raise InvalidRequest(f"the list of the folder's files names a path twice: {twice[:120]!r}")
    for file in tree.files:
        if len(file.sha256) != 64 or not set(file.sha256) <= set("0123456789abcdef"):
            raise InvalidRequest(f"the folder's file {file.path[:120]!r} has no digest of a content")


def check_amount(
    files: Iterable[tuple[str, int]],
    *,
    limits: tuple[int, int, int] = (MAX_FILES, MAX_BYTES, MAX_FILE_BYTES),
    advice: str = "",
) -> None:
    """Raise InvalidRequest, naming the largest ones, for more files or bytes than a folder may have.

    `files` are their paths and sizes, `limits` the most files, bytes, and bytes of one file. `advice` says what to do.
    """
    sizes = dict(files)
    most_files, most_bytes, most_of_one = limits
    total_bytes = sum(sizes.values())
    too_large = {path: size for path, size in sizes.items() if not 0 <= size <= most_of_one}
    if too_large:
        raise InvalidRequest(
            f"a file of a folder has at most {format_bytes(most_of_one)}, but: {largest(too_large)}{advice}"
        )
    if total_bytes > most_bytes:
        raise InvalidRequest(
            f"the folder has {format_bytes(total_bytes)} in {len(sizes):,} files, and at most "
            f"{format_bytes(most_bytes)} travel with a job; the largest: {largest(sizes)}{advice}"
        )
    if len(sizes) > most_files:
        counts: dict[str, int] = {}
        for path in sizes:
            inside = path.rpartition("/")[0] or "."
            counts[inside] = counts.get(inside, 0) + 1
        most = sorted(counts, key=lambda name: -counts[name])[:_NAMED]
        named = ", ".join(f"{name}/ ({counts[name]:,})" for name in most)
        raise InvalidRequest(
            f"the folder has {len(sizes):,} files, and at most {most_files:,} travel with a job; most are in: "
            f"{named}{advice}"
        )


def folder_name(folder: JobFolder) -> str:
    """What the archive of a job's folder is called among the job's objects in a store."""
    return f"folder-{folder.sha256[:16]}.zip"


def import_roots(file: Path, folder: Path) -> list[Path]:
    """From where a job's file imports, first to last: its own folder, the one that travels, and the src in that."""
    return [each for each in dict.fromkeys((file.parent, folder, folder / "src")) if each.is_dir()]


def largest(sizes: dict[str, int]) -> str:
    """The largest files among these, by path, for people."""
    first = sorted(sizes, key=lambda path: -sizes[path])[:_NAMED]
    return ", ".join(f"{path[:200]} ({format_bytes(sizes[path])})" for path in first)


def problem_with_path(path: str) -> str:
    """Why a file in a folder cannot have this path; "" if it can."""
    parts = path.split("/")
    if len(parts) > MAX_DEPTH:
        return f"it is more than {MAX_DEPTH} folders deep"
    if any(len(part.encode(errors="replace")) > _MAX_PART_BYTES for part in parts):
        return f"a part of its path has more than {_MAX_PART_BYTES} bytes"
    return problem_with_name(path)
