"""A journal in memory, for tests and for platforms whose machines are models."""

from __future__ import annotations

from collections.abc import Iterator

from springtide.control.journal.codec import decode_step, encode_step
from springtide.core.ports import Step


class MemoryJournal:
    """Keeps the encoded steps in memory, so that reading decodes them as from a durable journal."""

    def __init__(self) -> None:
        self._steps: list[bytes] = []

    def append(self, step: Step) -> int:
        """Record a step and return its sequence number."""
        self._steps.append(encode_step(step))
        return len(self._steps)

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Step]]:
        """Every step with a higher sequence number, in order."""
        for index in range(after_seq, len(self._steps)):
            yield index + 1, decode_step(self._steps[index])
