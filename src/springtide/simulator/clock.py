"""Virtual time: a clock that only moves when told, and the agenda of a long trace."""

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
        """Move on to `at_s`; a moment that has passed changes nothing."""
        if at_s > self._now_s:
            self._now_s = at_s


class FluidAgenda:
    """The moments of a long trace, without a closure for each: `happen` and its one argument are kept apart.

    Those of one instant happen in the order of their entry; `num_happened` counts those that have been.
    """

    def __init__(self) -> None:
        self.num_happened = 0
        self._entries: list[tuple[float, int, Callable[..., None], Any]] = []
        self._num_entries = 0

    @property
    def next_s(self) -> float | None:
        """The next moment, None if nothing is to happen any more."""
        return self._entries[0][0] if self._entries else None

    def at(self, at_s: float, happen: Callable[..., None], what: Any) -> None:
        """Call `happen(what)` at a moment."""
        self._num_entries += 1
        heapq.heappush(self._entries, (at_s, self._num_entries, happen, what))

    def run_due(self, now_s: float) -> None:
        """Let everything happen that is due, what that puts on the agenda for now included."""
        entries = self._entries
        while entries and entries[0][0] <= now_s:
            _, _, happen, what = heapq.heappop(entries)
            self.num_happened += 1
            happen(what)
