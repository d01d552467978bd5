"""Virtual time: a clock that only its owner advances, and the agenda of a long trace."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class VirtualClock:
    """A platform clock that stands still until it is advanced."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, at_s: float) -> None:
        """Move on to `at_s`; a moment in the past changes nothing."""
        if at_s > self._now_s:
            self._now_s = at_s


class FluidAgenda:
    """The callbacks of a long trace, kept with their one argument: a closure for each would cost more memory.

    Entries of one instant run in the order in which they were added; `num_run` counts those that were run.
    """

    def __init__(self) -> None:
        self.num_run = 0
        self._entries: list[tuple[float, int, Callable[..., None], Any]] = []
        self._num_entries = 0

    @property
    def next_s(self) -> float | None:
        """The moment of the next entry, None without entries."""
        return self._entries[0][0] if self._entries else None

    def at(self, at_s: float, callback: Callable[..., None], argument: Any) -> None:
        """Call `callback(argument)` at a moment."""
        self._num_entries += 1
        heapq.heappush(self._entries, (at_s, self._num_entries, callback, argument))

    def run_due(self, now_s: float) -> None:
        """Run every entry that is due, those included that are added for now meanwhile."""
        entries = self._entries
        while entries and entries[0][0] <= now_s:
            _, _, callback, argument = heapq.heappop(entries)
            self.num_run += 1
            callback(argument)
