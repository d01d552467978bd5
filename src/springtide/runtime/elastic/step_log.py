"""The job's step log: one line for every committed optimizer step, written by the leader under the fence."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from springtide.storage.fence import Fence

# A full disk must not cost lines: this many steps may pass before there is room for them again.
_NUM_REMEMBERED = 4096
_TAIL_BYTES = 1 << 14
# A member that takes over a state gets this many lines with it: a leader that dies leaves out one or two.
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


class StepMemory(Protocol):
    """Every member remembers its last steps, so that a new leader can write what the old one had not written yet.

    After a restart from a checkpoint steps are replayed: then the line of the highest generation counts.
    """

    def remember(self, record: StepRecord) -> None:
        """Note a committed step."""

    def newest(self) -> list[dict[str, Any]]:
        """The last steps remembered, for a member that takes over this one's state and may come to lead."""

    def take_over(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Remember what the giver of the state remembers. Raises TypeError."""

    def forget_written(self) -> None:
        """Another member leads and writes: if this one comes to lead, it must look up what the log holds."""

    def restart_at(self, step: int) -> None:
        """The job continues from a checkpoint of `step`: later lines in the log are to be written again."""

    def write(self, generation: int, *, is_leader: bool = True) -> None:
        """Write all remembered steps that the log lacks, soon where this member leads, else before returning.

        Raises Fenced if a newer generation owns the job, OSError, StorageError. A member that does not lead does not
        know what the log holds, and looks.
        """

    def leave(self, generation: int, *, is_leader: bool) -> None:
        """Called before this member leaves: writes its unwritten lines, unless the store fails."""

    def flush(self, generation: int) -> None:
        """Return when the log holds every step that the leader has asked to write. Raises as `write` does."""


class StepLog:
    """A StepMemory whose log is a file in the job's directory; what is written is in the file at once."""

    def __init__(self, work_dir: Path) -> None:
        self._remembered: deque[StepRecord] = deque(maxlen=_NUM_REMEMBERED)
        self._path = work_dir / "steps.jsonl"
        self._fence = Fence(work_dir)
        self._written_step: int | None = None

    def remember(self, record: StepRecord) -> None:
        """Note a committed step."""
        self._remembered.append(record)

    def newest(self) -> list[dict[str, Any]]:
        """The last steps remembered."""
        return [asdict(record) for record in list(self._remembered)[-_NUM_HANDED_OVER:]]

    def take_over(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Remember what the giver of the state remembers. Raises TypeError."""
        taken = [StepRecord(**record) for record in records]
        self._remembered.clear()
        self._remembered.extend(taken)

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

    def leave(self, generation: int, *, is_leader: bool) -> None:
        """Nothing waits to be written."""

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
