"""Digests of a folder's files, remembered between runs: only what changed since is read again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from springtide.client.folders.scan import FoundFile
from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest, StorageError
from springtide.storage.files import make_private, write_durable
from springtide.storage.folders.tree import FolderFile

_MAX_BYTES = 16 << 20
# A file that was written to while it was hashed, or within the clock's resolution of that, looks unchanged afterwards.
_SETTLED_S = 2.0


class _Known(msgspec.Struct, frozen=True, array_like=True):
    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    sha256: str


def hash_files(
    folder: Path, files: Iterable[FoundFile], on_file: Callable[[int], None] = lambda num_bytes: None
) -> list[FolderFile]:
    """The files with their digests, in order. `on_file` is called with the size of each file that had to be read.

    Raises InvalidRequest for a file that cannot be read.
    """
    before, now = _read_known(folder), dict[str, _Known]()
    hashed: list[FolderFile] = []
    for file in files:
        stat = file.stat
        known = before.get(file.path)
        if known is None or (known.num_bytes, known.mtime_ns, known.ctime_ns) != _state_of(stat):
            read_at_s = time.time()
            known = _Known(*_state_of(stat), _digest(file))
            on_file(stat.st_size)
            is_settled = max(stat.st_mtime, stat.st_ctime) < read_at_s - _SETTLED_S
        else:
            is_settled = True
        if is_settled:
            now[file.path] = known
        hashed.append(FolderFile(file.path, known.sha256, known.num_bytes, bool(stat.st_mode & 0o100)))
    if now != before:
        _write_known(folder, now)
    return hashed


def cache_directory() -> Path:
    """Where the client keeps what it can make anew: XDG_CACHE_HOME/springtide, by default below ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "springtide"


def _state_of(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _digest(file: FoundFile) -> str:
    try:
        with open(file.location, "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise InvalidRequest(f"cannot read {file.path}: {error.strerror or error}") from None


def _place(folder: Path) -> Path:
    return cache_directory() / "folders" / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]}.json"


def _read_known(folder: Path) -> dict[str, _Known]:
    try:
        data = _place(folder).read_bytes()
        return decode_json(data, dict[str, _Known]) if len(data) <= _MAX_BYTES else {}
    except (OSError, RuntimeError, msgspec.MsgspecError, ValueError, RecursionError):
        return {}


def _write_known(folder: Path, known: dict[str, _Known]) -> None:
    # Without it, as on a disk that takes no changes, the next run reads all files again.
    with contextlib.suppress(OSError, RuntimeError, StorageError):
        place = _place(folder)
        make_private(place.parent)
        write_durable(place, msgspec.json.encode(known))
