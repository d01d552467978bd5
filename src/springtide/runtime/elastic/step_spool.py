"""Step lines on a worker's own disk until the store has them: more than fit in memory, and they survive the worker.

    <directory>/<first step>.jsonl     lines of consecutive steps; the newest file is being written
    <directory>/standing               whether this worker is rank 0, and up to which step the store has the log

After the worker has ended, also by a signal, the container's first process reads the files and prints the lines that
the store lacks.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from springtide.storage.files import make_private, open_private
from springtide.storage.step_lines import Line, gap_line, pack_lines, whole_lines

# Room for about 200,000 lines of 170 bytes. Beyond that the oldest are dropped.
MAX_BYTES = 32 << 20
_PART_LINES = 8192
_STANDING = "standing"
# The spool's directory within the worker's directory.
SPOOL_NAME = "steps"
# At most this many lines, the newest, are printed after a worker's end.
MAX_PRINTED_LINES = 20_000


class StepSpool:
    """For one thread at a time. On a full disk it loses lines; it never raises into a training step."""

    def __init__(self, directory: Path, max_bytes: int = MAX_BYTES, part_lines: int = _PART_LINES) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._part_lines = part_lines
        # First step, last step and bytes of each part, oldest first.
        self._parts: list[tuple[int, int, int]] = []
        self._descriptor: int | None = None
        self._num_lines = 0
        self._noted: tuple[bool, int] | None = None

    def add(self, lines: Iterable[Line]) -> None:
        """Append lines, in ascending order of their steps."""
        for step, line in lines:
            try:
                self._add(step, f"{line}\n".encode())
            except OSError:
                # Begin a new file, so that the next line does not continue a partly written one.
                self._close()

    def lines(self, above: int, below: int) -> list[Line]:
        """The kept lines with `above` < step < `below`."""
        found = [part for part in self._parts if part[1] > above and part[0] < below]
        kept = (line for first, _, _ in found for line in _read(self._path(first)))
        return [line for line in kept if above < line[0] < below]

    def note(self, *, leads: bool, written_step: int) -> None:
        """Record whether this member writes the log, and up to which step the store has it; remove older files."""
        if self._noted == (leads, written_step):
            return
        if self._parts and self._parts[-1][1] <= written_step:
            self.clear()
        while self._parts and self._parts[0][1] <= written_step:
            self._drop_oldest()
        with contextlib.suppress(OSError):
            make_private(self._directory)
            # By rename, so that a reader after this process was killed finds a complete file.
            temporary = self._directory / f"{_STANDING}.tmp"
            with open_private(temporary, "wb") as file:
                file.write(json.dumps({"leads": leads, "written": written_step}).encode())
            temporary.replace(self._directory / _STANDING)
            self._noted = (leads, written_step)

    def clear(self) -> None:
        """Remove all lines: the steps will be repeated."""
        self._close()
        while self._parts:
            self._drop_oldest()

    def _add(self, step: int, data: bytes) -> None:
        if self._descriptor is None or self._num_lines >= self._part_lines:
            self._close()
            make_private(self._directory)
            self._descriptor = os.open(self._path(step), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            self._parts.append((step, step, 0))
        if os.write(self._descriptor, data) < len(data):
            raise OSError("there is no room for the whole line")
        self._num_lines += 1
        first, _, num_bytes = self._parts[-1]
        self._parts[-1] = (first, step, num_bytes + len(data))
        while len(self._parts) > 1 and sum(part[2] for part in self._parts) > self._max_bytes:
            self._drop_oldest()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._num_lines = None, 0

    def _drop_oldest(self) -> None:
        first, _, _ = self._parts.pop(0)
        with contextlib.suppress(OSError):
            self._path(first).unlink(missing_ok=True)

    def _path(self, first_step: int) -> Path:
        return self._directory / f"{first_step:010d}.jsonl"


def missing_lines(directory: Path, max_lines: int = MAX_PRINTED_LINES) -> list[str]:
    """The step lines that the store lacks after a worker's end, encoded for printing; empty unless it was rank 0."""
    try:
        standing = json.loads((directory / _STANDING).read_text())
        leads, written_step = bool(standing["leads"]), int(standing["written"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not leads:
        return []
    lines = [line for path in sorted(directory.glob("*.jsonl")) for line in _read(path) if line[0] > written_step]
    dropped = lines[: max(0, len(lines) - max_lines)]
    if dropped:
        generation = json.loads(dropped[0][1])["generation"]
        lines = [gap_line(generation, dropped[0][0], dropped[-1][0]), *lines[len(dropped) :]]
    return pack_lines(lines)


def _read(path: Path) -> list[Line]:
    try:
        return list(whole_lines(path.read_bytes()))
    except OSError:
        return []
