"""Virtual time: a clock that only moves when told, and agendas of what happens when."""

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


class Agenda:
    """What will happen, in order of time; what is due at the same instant happens in the order of its entry."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_entries = 0

    def at(self, at_s: float, happen: Callable[[], None]) -> None:
        """Enter what happens at `at_s`, or now where that has passed."""
        self._num_entries += 1
        heapq.heappush(self._heap, (max(at_s, self.clock.now_s()), self._num_entries, happen))

    def after(self, delay_s: float, happen: Callable[[], None]) -> None:
        """Enter what happens in `delay_s` seconds."""
        self.at(self.clock.now_s() + delay_s, happen)

    @property
    def next_s(self) -> float | None:
        """When the next entry is due; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def run_next(self) -> None:
        at_s, _, happen = heapq.heappop(self._heap)
        self.clock.advance_to(at_s)
        happen()

    def run_until(self, at_s: float) -> None:
        """Let everything up to and including `at_s` happen and move the clock there."""
        while self._heap and self._heap[0][0] <= at_s:
            self.run_next()
        self.clock.advance_to(at_s)


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
