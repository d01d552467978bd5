"""Bundles: a user's source file, optionally with its neighbours, as a zip with the same bytes for the same files.

Bundles come from a store and are not trusted: everything is checked before anything is written.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec

from springtide.core.errors import InvalidRequest, StorageError
from springtide.storage.files import make_private

# Files of these kinds are shipped as neighbours; data belongs in the store that the task reads.
NEIGHBOUR_SUFFIXES = (".py", ".pyi", ".json", ".toml", ".yaml", ".yml", ".txt", ".cfg", ".ini")
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist"})
# What marks a folder as a virtual environment.
ENVIRONMENT_FILE = "pyvenv.cfg"
_EARLIEST = (1980, 1, 1, 0, 0, 0)
_MAX_NAME_CHARS = 512
_SPARE_BYTES_PER_FILE = 4096


class BundleLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a bundle: its number of files, and their total size before compression."""

    max_files: int = 2_000
    max_bytes: int = 32 << 20


DEFAULT_LIMITS = BundleLimits()


def pack(filename: str, text: str, import_root: Path | None = None, limits: BundleLimits = DEFAULT_LIMITS) -> bytes:
    """Build a bundle of `text` as the file `filename`, with the neighbours under `import_root` if it is given.

    `text` is used even if the file has changed meanwhile. Hidden folders, `__pycache__`, virtual environments and links
    that lead out of the root are left out. Raises InvalidRequest above the limits.
    """
    problem = problem_with_name(filename)
    if problem:
        raise InvalidRequest(f"{filename!r} cannot be shipped: {problem}")
    files = {filename: text.encode()}
    total_bytes = len(files[filename])
    advice = f"move {filename} into a folder that holds only what it imports"
    for path in _neighbours(import_root) if import_root is not None else ():
        name = path.relative_to(import_root).as_posix() if import_root is not None else ""
        if name == filename or problem_with_name(name):
            continue
        # The size is checked before the file is read, because it may not fit in memory.
        total_bytes += path.stat().st_size
        if len(files) >= limits.max_files:
            raise InvalidRequest(f"{import_root} holds over {limits.max_files:,} files to ship; {advice}")
        if total_bytes > limits.max_bytes:
            break
        try:
            files[name] = path.read_bytes()
        except OSError as error:
            raise InvalidRequest(f"cannot read {path} to ship it: {error.strerror or error}; {advice}") from None
    if total_bytes > limits.max_bytes:
        raise InvalidRequest(f"{filename} and its neighbours are over {limits.max_bytes:,} bytes to ship; {advice}")
    return _zip_of(files)


def pack_folder(folder: Path, limits: BundleLimits = DEFAULT_LIMITS) -> bytes:
    """Build a bundle of all files in a folder; links are left out. Raises InvalidRequest above the limits."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    if len(paths) > limits.max_files or sum(path.stat().st_size for path in paths) > limits.max_bytes:
        raise InvalidRequest(
            f"the folder has over {limits.max_files:,} files or {limits.max_bytes:,} bytes to ship; leave some out"
        )
    try:
        return _zip_of({path.relative_to(folder).as_posix(): path.read_bytes() for path in paths})
    except OSError as error:
        raise InvalidRequest(f"cannot read {folder} to ship it: {error.strerror or error}") from None


def _zip_of(files: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.create_system = 3
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name])
    return target.getvalue()


def _neighbours(root: Path) -> Iterator[Path]:
    """Yield the files to ship under the root, sorted by folder and name."""
    if not root.is_dir():
        raise InvalidRequest(f"{root} is no directory to ship neighbours from")
    inside = os.path.realpath(root)
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in SKIPPED_FOLDERS
            and not os.path.exists(os.path.join(folder, name, ENVIRONMENT_FILE))
        )
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(NEIGHBOUR_SUFFIXES) and not name.startswith(".") and _is_inside(path, inside):
                yield path


def _is_inside(path: Path, root: str) -> bool:
    real = os.path.realpath(path)
    return os.path.isfile(real) and os.path.commonpath([real, root]) == root


def unpack(data: bytes | memoryview, into: Path, limits: BundleLimits = DEFAULT_LIMITS) -> list[Path]:
    """Write a bundle's files into `into`, which must not exist or be empty. Returns the paths written, in order.

    Raises StorageError for a bundle that is broken, over the limits, or names a path outside its root; then nothing is
    written.
    """
    if memoryview(data).nbytes > limits.max_bytes + limits.max_files * _SPARE_BYTES_PER_FILE:
        raise StorageError(f"a bundle of {memoryview(data).nbytes:,} bytes is over the limit; nothing was written")
    try:
        files = _files_of(bytes(data), limits)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, ValueError, EOFError, OSError) as error:
        raise StorageError(f"the bundle is broken ({error}); nothing was written; submit the job again") from None
    try:
        make_private(into.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".{into.name}.", dir=into.parent))
        try:
            for name, content in files.items():
                path = temporary / name
                make_private(path.parent)
                path.write_bytes(content)
            os.rename(temporary, into)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise StorageError(f"cannot unpack the bundle into {into}: {error.strerror or error}") from error
    return [into / name for name in files]


def _files_of(data: bytes, limits: BundleLimits) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if len(entries) > limits.max_files:
            raise StorageError(f"a bundle of {len(entries)} files is over the limit of {limits.max_files}")
        if sum(entry.file_size for entry in entries) > limits.max_bytes:
            raise StorageError(f"a bundle that unpacks to over {limits.max_bytes:,} bytes is refused")
        names = [_checked_name(entry) for entry in entries]
        folders = {parent.as_posix() for name in names for parent in PurePosixPath(name).parents}
        if len(set(names)) < len(names) or folders & set(names):
            raise StorageError("the bundle names a path twice; nothing was written")
        files: dict[str, bytes] = {}
        left_bytes = limits.max_bytes
        for name, entry in sorted(zip(names, entries, strict=True), key=lambda pair: pair[0]):
            with archive.open(entry) as file:
                # An entry may declare a wrong size, so the read is limited to what the limit leaves.
                content = file.read(left_bytes + 1)
            left_bytes -= len(content)
            if left_bytes < 0:
                raise StorageError(f"a bundle that unpacks to over {limits.max_bytes:,} bytes is refused")
            files[name] = content
        return files


def _checked_name(entry: zipfile.ZipInfo) -> str:
    name = entry.orig_filename
    problem = problem_with_name(name)
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in {0, stat.S_IFREG}:
        problem = problem or "it is a link or a device, not a file"
    if problem:
        raise StorageError(f"the bundle holds {name[:120]!r}: {problem}; nothing was written")
    return name


def problem_with_name(name: str) -> str:
    """Why a file in a bundle cannot have this name; "" if it can."""
    parts = name.split("/")
    if not name or len(name) > _MAX_NAME_CHARS or any(not each.isprintable() for each in name):
        return "its name is empty, too long or cannot be printed"
    if name.startswith("/") or "\\" in name or ":" in parts[0]:
        return "its path must be relative, with forward slashes"
    if any(part in {"", ".", ".."} for part in parts):
        return "its path leads outside its root" if ".." in parts else "its path has an empty part"
    return ""
