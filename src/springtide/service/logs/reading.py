"""Reads and follows the logs of a workload's replicas, within bounds and safely for any bytes a worker wrote."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from springtide.core.errors import InvalidRequest, NotFound

MAX_TAIL = 100_000
MAX_TAIL_BYTES = 1024 * 1024
MAX_CHUNK_BYTES = 256 * 1024
MAX_LINE_BYTES = 16 * 1024
MAX_FILES = 64
POLL_S = 0.2
QUIET_POLLS = 3
# As the API describes it: empty is every replica; two dots in a row are in no id.
REPLICA_PATTERN = r"^([a-z0-9](\.?[a-z0-9_-])*\.?)?$"
_REPLICA = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
# A worker's output must not move the cursor or change the colours of the reader's terminal.
_VISIBLE = {code: 0x2400 + code for code in range(32) if code != 9} | dict.fromkeys(range(127, 160), 0xFFFD)


def list_logs(folder: Path, replica: str = "") -> list[Path]:
    """Return the log files of a workload or of one replica, sorted by time of writing; the newest MAX_FILES.

    Raises InvalidRequest for an impossible replica id, NotFound if the replica has no log.
    """
    if replica and (_REPLICA.fullmatch(replica) is None or ".." in replica):
        raise InvalidRequest(f"replica {replica!r:.80} is not a replica's id; it is like 'digits-3f2a.0'")
    found: list[tuple[float, Path]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                is_wanted = entry.name == f"{replica}.log" if replica else entry.name.endswith(".log")
                if is_wanted and entry.is_file(follow_symlinks=False):
                    found.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
    except (FileNotFoundError, NotADirectoryError):
        found = []
    if replica and not found:
        raise NotFound(f"there is no log of replica {replica!r}; leave `replica` out to see every replica's log")
    return [path for _, path in sorted(found)][-MAX_FILES:]


def read_tail(folder: Path, tail: int, replica: str = "") -> tuple[list[str], dict[Path, int]]:
    """Return the newest `tail` lines, divided among the replicas, and for each file the offset up to which it was read.

    The lines of one replica stay together, and the replica that wrote last comes last. An unfinished last line is left
    for the next read.
    """
    ends: dict[Path, int] = {}
    lines_of: dict[Path, list[str]] = {}
    for path in list_logs(folder, replica):
        size = _size_bytes(path)
        start = max(0, size - MAX_TAIL_BYTES)
        data = _read(path, start, size - start)
        complete, _, rest = data.rpartition(b"\n")
        ends[path] = start + len(data) - len(rest)
        raw = complete.split(b"\n") if complete else ([b""] if data.startswith(b"\n") else [])
        if start and raw:
            # The read started in the middle of the file, so the first line may be incomplete.
            raw = raw[1:]
        lines_of[path] = [_line(path, part) for part in raw[-tail:]] if tail else []
    shares = share_out(tail, {path: len(lines) for path, lines in lines_of.items()})
    return [line for path, lines in lines_of.items() for line in lines[len(lines) - shares[path] :]], ends


def share_out(total: int, wanted: dict[Path, int]) -> dict[Path, int]:
    """Divide `total` as evenly as possible, giving none more than it wants."""
    shares = dict.fromkeys(wanted, 0)
    left = total
    for num_waiting, path in zip(range(len(wanted), 0, -1), sorted(wanted, key=lambda p: wanted[p]), strict=True):
        shares[path] = min(wanted[path], -(-left // num_waiting) if num_waiting == 1 else left // num_waiting)
        left -= shares[path]
    return shares


def read_new(folder: Path, ends: dict[Path, int], replica: str = "", *, is_final: bool = False) -> list[str]:
    """Return the lines completed since `ends`, and advance `ends`. `is_final` also returns unfinished lines."""
    lines: list[str] = []
    for path in list_logs(folder, replica):
        start = ends.get(path, 0)
        size = _size_bytes(path)
        if size < start:
            # The file was truncated or replaced: read it from the start.
            start = 0
        data = _read(path, start, min(MAX_CHUNK_BYTES, size - start))
        if not data:
            continue
        complete, newline, rest = data.rpartition(b"\n")
        if not newline and not is_final and len(data) < MAX_LINE_BYTES:
            continue
        if not newline or is_final:
            complete, rest = data.removesuffix(b"\n"), b""
        ends[path] = start + len(data) - len(rest)
        lines += [_line(path, part) for part in complete.split(b"\n")]
    return lines


async def follow(
    folder: Path, tail: int, replica: str, is_over: Callable[[], bool], *, poll_s: float = POLL_S
) -> AsyncGenerator[bytes, None]:
    """Yield the tail, then new lines until `is_over()` and no more arrive. Empty chunks keep the connection alive."""
    lines, ends = await anyio.to_thread.run_sync(read_tail, folder, tail, replica)
    yield as_text(lines)
    num_quiet = 0
    last_sent_at = time.monotonic()
    while num_quiet < QUIET_POLLS:
        await anyio.sleep(poll_s)
        was_over = is_over()
        lines = await anyio.to_thread.run_sync(partial(_read_new_or_none, folder, ends, replica))
        if lines:
            last_sent_at = time.monotonic()
            yield as_text(lines)
        num_quiet = num_quiet + 1 if was_over and not lines else 0
        if time.monotonic() - last_sent_at > 15:
            last_sent_at = time.monotonic()
            yield b""
    yield as_text(await anyio.to_thread.run_sync(partial(_read_new_or_none, folder, ends, replica, is_final=True)))


def as_text(lines: list[str]) -> bytes:
    """Return the lines as UTF-8 text."""
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")


def _read_new_or_none(folder: Path, ends: dict[Path, int], replica: str, is_final: bool = False) -> list[str]:
    try:
        return read_new(folder, ends, replica, is_final=is_final)
    except NotFound:
        return []


def _line(path: Path, raw: bytes) -> str:
    text = raw[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip("\r")
    # A progress bar rewrites its line after a carriage return: keep only the last version.
    return f"[{path.stem}] {text.rpartition(chr(13))[2].translate(_VISIBLE)}"


def _open(path: Path) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def _size_bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _read(path: Path, start: int, num_bytes: int) -> bytes:
    """Read a part of a plain file; empty if it is gone or not a plain file."""
    descriptor = _open(path) if num_bytes > 0 else None
    if descriptor is None:
        return b""
    try:
        return os.pread(descriptor, num_bytes, start)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
