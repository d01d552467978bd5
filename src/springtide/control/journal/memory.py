"""A journal in memory, for platforms on models of machines and for tests."""

from __future__ import annotations

from collections.abc import Iterator

from springtide.control.journal.codec import decode_step, encode_step
from springtide.core.ports import Step


class MemoryJournal:
    """A journal that keeps the encoded bytes in memory: what comes back is what was written, not the same objects."""

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
