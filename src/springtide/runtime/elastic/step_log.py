"""The job's step log: one JSON line for every committed optimizer step, written by rank 0 under the fence."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from springtide.storage.fence import Fence
from springtide.storage.files import open_private

# How many steps stay in memory: a disk may be full for that long without losing lines.
_NUM_REMEMBERED = 4096
_TAIL_BYTES = 1 << 14
# How many lines a member receives with a training state; rank 0 leaves one or two unwritten when it dies.
_NUM_HANDED_OVER = 16


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed step, counted from 1. `ids_digest` identifies its samples; `took_s` is from commit to commit."""

    generation: int
    step: int
    epoch: int
    loss: float
    num_samples: int
    ids_digest: str
    took_s: float = 0.0


class StepMemory(Protocol):
    """The last steps in a member's memory, so that a new rank 0 can write what the previous one had not written.

    After a restart from a checkpoint steps are replayed: the line with the highest generation is then the valid one.
    """

    def remember(self, record: StepRecord) -> None:
        """Note a committed step."""

    def newest(self) -> list[dict[str, Any]]:
        """The last steps, for a member that copies this one's state and may become rank 0."""

    def take_over(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Replace the remembered steps by those that came with a training state. Raises TypeError."""

    def forget_written(self) -> None:
        """Drop what is known of the log's content: another member is rank 0 and writes it."""

    def restart_at(self, step: int) -> None:
        """Continue from a checkpoint of `step`: the steps after it are written again."""

    def write(self, generation: int, *, is_leader: bool = True) -> None:
        """Write all remembered steps that the log lacks: soon if `is_leader`, else before returning.

        A member that is not rank 0 reads the log first to see what it holds. Raises Fenced if a newer generation owns
        the job, OSError, StorageError.
        """

    def leave(self, generation: int, *, is_leader: bool) -> None:
        """Write rank 0's unwritten lines before this member leaves; a store that fails is ignored."""

    def flush(self, generation: int) -> None:
        """Return once the log holds every step passed to `write`. Raises as `write` does."""


class StepLog:
    """A StepMemory whose log is a file in the job's directory; `write` appends to it before it returns."""

    def __init__(self, work_dir: Path) -> None:
        self._remembered: deque[StepRecord] = deque(maxlen=_NUM_REMEMBERED)
        self._path = work_dir / "steps.jsonl"
        self._fence = Fence(work_dir)
        self._written_step: int | None = None

    def remember(self, record: StepRecord) -> None:
        """Note a committed step."""
        self._remembered.append(record)

    def newest(self) -> list[dict[str, Any]]:
        """The last steps, as plain values."""
        return [asdict(record) for record in list(self._remembered)[-_NUM_HANDED_OVER:]]

    def take_over(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Replace the remembered steps by those that came with a training state. Raises TypeError."""
        taken = [StepRecord(**record) for record in records]
        self._remembered.clear()
        self._remembered.extend(taken)

    def forget_written(self) -> None:
        """Drop what is known of the log's content: another member is rank 0 and writes it."""
        self._written_step = None

    def restart_at(self, step: int) -> None:
        """Continue from a checkpoint of `step`: the steps after it are written again."""
        self._remembered.clear()
        self._written_step = step

    def write(self, generation: int, *, is_leader: bool = True) -> None:
        """Append all remembered steps that the log lacks. Raises Fenced if a newer generation owns the job, OSError.

        A member that is not rank 0 reads the log's last line first.
        """
        if not self._remembered:
            return
        with self._fence.writing(generation):
            if self._written_step is None or not is_leader:
                self._written_step = self._last_step()
            lines: list[StepRecord] = []
            for record in reversed(self._remembered):
                if record.step <= self._written_step:
                    break
                lines.append(record)
            if lines:
                _append_whole(self._path, "".join(json.dumps(asdict(record)) + "\n" for record in reversed(lines)))
                self._written_step = lines[0].step

    def leave(self, generation: int, *, is_leader: bool) -> None:
        """Does nothing: `write` leaves lines unwritten only where the directory cannot be written."""

    def flush(self, generation: int) -> None:
        """Append what `write` could not while it failed. Raises as `write` does."""
        self.write(generation)

    def _last_step(self) -> int:
        """The step of the last complete line; an incomplete one after it (the writer was killed) is cut off."""
        if not self._path.exists():
            return 0
        with open(self._path, "r+b") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read()
            whole, newline, torn = tail.rpartition(b"\n")
            if torn:
                file.truncate(size - len(torn))
            if not newline:
                return 0
            return int(json.loads(whole.rpartition(b"\n")[2])["step"])


def _append_whole(path: Path, text: str) -> None:
    """Append the whole text or nothing, so that a retry repeats no line. Raises OSError."""
    data = text.encode()
    with open_private(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise
