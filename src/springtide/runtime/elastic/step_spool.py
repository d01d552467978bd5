"""Step lines on a worker's own disk until the store has them: more than memory holds, and there after its death.

    <directory>/<first step>.jsonl     lines of steps in a row, the newest file being written
    <directory>/standing               whether this worker leads, and up to which step the store has the log

The keeper of the container reads it when the worker has ended, however it ended, and says what the store lacks.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from springtide.storage.step_lines import Line, gap_line, pack_lines, whole_lines

# A line has some 170 bytes: two hundred thousand of them. Beyond that the oldest are dropped.
MAX_BYTES = 32 << 20
_PART_LINES = 8192
_STANDING = "standing"
# In the worker's own directory.
SPOOL_NAME = "steps"
# Of what the store lacks after a worker's end so many lines are said, the newest ones.
MAX_LINES_SAID = 20_000


class StepSpool:
    """For one thread at a time. A disk without room costs lines of the spool, never a step."""

    def __init__(self, directory: Path, max_bytes: int = MAX_BYTES, part_lines: int = _PART_LINES) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._part_lines = part_lines
        # First step, last step and bytes of each part, oldest first.
        self._parts: list[tuple[int, int, int]] = []
        self._descriptor: int | None = None
        self._num_lines = 0
        self._told: tuple[bool, int] | None = None

    def add(self, lines: Iterable[Line]) -> None:
        """Write lines, ascending, after those that are there."""
        for step, line in lines:
            try:
                self._add(step, f"{line}\n".encode())
            except OSError:
                # What was written of it must not join the next one.
                self._close()

    def lines(self, above: int, below: int) -> list[Line]:
        """The lines of the steps between these two, as far as they are kept."""
        found = [part for part in self._parts if part[1] > above and part[0] < below]
        kept = (line for first, _, _ in found for line in _read(self._path(first)))
        return [line for line in kept if above < line[0] < below]

    def note(self, *, leads: bool, written_step: int) -> None:
        """Note whether this member writes the log, and up to which step the store has it; older files are removed."""
        if self._told == (leads, written_step):
            return
        if self._parts and self._parts[-1][1] <= written_step:
            self.clear()
        while self._parts and self._parts[0][1] <= written_step:
            self._drop_oldest()
        with contextlib.suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            # Renamed, so that a reader after this process's death finds the old or the new note, whole.
            temporary = self._directory / f"{_STANDING}.tmp"
            temporary.write_text(json.dumps({"leads": leads, "written": written_step}))
            temporary.replace(self._directory / _STANDING)
            self._told = (leads, written_step)

    def clear(self) -> None:
        """Forget all lines: the steps are made again."""
        self._close()
        while self._parts:
            self._drop_oldest()

    def _add(self, step: int, data: bytes) -> None:
        if self._descriptor is None or self._num_lines >= self._part_lines:
            self._close()
            self._directory.mkdir(parents=True, exist_ok=True)
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


def said_of(directory: Path, max_lines: int = MAX_LINES_SAID) -> list[str]:
    """What is to be said of lines that the store lacks after a worker's end; empty if another member writes the log."""
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
