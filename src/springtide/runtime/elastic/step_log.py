"""The job's step log: one line for every committed optimizer step, written by the leader under the fence."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from springtide.core.errors import StorageError
from springtide.storage.fence import Fence

# A full disk must not cost lines: this many steps may pass before there is room for them again.
_NUM_REMEMBERED = 4096
_TAIL_BYTES = 1 << 14
# Whoever takes over a state takes over these lines with it: a leader that dies leaves out one or two.
_NUM_HANDED_OVER = 16


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed step, counted from 1. `ids_digest` names its samples; `took_s` is from commit to commit."""

    generation: int
    step: int
    epoch: int
    loss: float
    num_samples: int
    ids_digest: str
    took_s: float = 0.0


class StepMemory(ABC):
    """Every member remembers its last steps, so that a new leader can write what the old one did not get to.

    After a restart from a checkpoint steps are replayed: then the line of the highest generation counts.
    """

    def __init__(self, num_remembered: int = _NUM_REMEMBERED, num_handed_over: int = _NUM_HANDED_OVER) -> None:
        self._remembered: deque[StepRecord] = deque(maxlen=num_remembered)
        self._num_handed_over = num_handed_over

    def remember(self, record: StepRecord) -> None:
        self._remembered.append(record)

    def newest(self) -> list[dict[str, Any]]:
        """The last steps remembered, for a member that takes over this one's state and may come to lead."""
        return [asdict(record) for record in list(self._remembered)[-self._num_handed_over :]]

    def take_over(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Remember what the giver of the state remembers. Raises TypeError."""
        taken = [StepRecord(**record) for record in records]
        self._remembered.clear()
        self._remembered.extend(taken)

    @abstractmethod
    def forget_written(self) -> None:
        """Another member leads and writes: should this one come to lead, it must look up what the log holds."""

    @abstractmethod
    def restart_at(self, step: int) -> None:
        """The job goes on from a checkpoint of `step`: later lines in the log are to be written again."""

    @abstractmethod
    def write(self, generation: int, *, is_leader: bool = True) -> None:
        """Write all remembered steps that the log lacks, soon where this member leads, else before returning.

        Raises Fenced if a newer generation owns the job, OSError, StorageError. A member that does not lead knows
        nothing of what the log holds, and looks.
        """

    def leave(self, generation: int, *, is_leader: bool) -> None:
        """This member leaves: what it was to write is there then. Where it cannot be any more, others write it."""
        with contextlib.suppress(OSError, StorageError):
            if is_leader:
                self.flush(generation)

    @abstractmethod
    def flush(self, generation: int) -> None:
        """Return when the log holds every step that the leader has asked to write. Raises as `write` does."""


class StepLog(StepMemory):
    """The step log as a file of the job's directory; what is written is there at once."""

    def __init__(self, work_dir: Path) -> None:
        super().__init__()
        self._path = work_dir / "steps.jsonl"
        self._fence = Fence(work_dir)
        self._written_step: int | None = None

    def forget_written(self) -> None:
        """Another member leads and writes: should this one come to lead, it must look up what the log holds."""
        self._written_step = None

    def restart_at(self, step: int) -> None:
        """The job goes on from a checkpoint of `step`: later lines in the log are to be written again."""
        self._remembered.clear()
        self._written_step = step

    def write(self, generation: int, *, is_leader: bool = True) -> None:
        """Append all remembered steps that the log lacks. Raises Fenced if a newer generation owns the job, OSError.

        A member that does not lead knows nothing of what the log holds, and looks.
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

    def flush(self, generation: int) -> None:
        """Nothing waits to be written."""

    def _last_step(self) -> int:
        """The last whole line's step; a torn last line (the writer was killed) is cut off."""
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
    """Append all of it or nothing, so that a second attempt repeats no line. Raises OSError."""
    data = text.encode()
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise
