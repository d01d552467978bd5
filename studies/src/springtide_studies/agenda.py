"""The agenda of a modelled world: callbacks in order of time, on a virtual clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from springtide.simulator.clock import VirtualClock


class Agenda:
    """Callbacks in order of time; those of the same instant run in the order in which they were added."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_entries = 0

    def at(self, at_s: float, callback: Callable[[], None]) -> None:
        """Add a callback for `at_s`, or for now if that has passed."""
        self._num_entries += 1
        heapq.heappush(self._heap, (max(at_s, self.clock.now_s()), self._num_entries, callback))

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Add a callback for `delay_s` seconds from now."""
        self.at(self.clock.now_s() + delay_s, callback)

    @property
    def next_s(self) -> float | None:
        """When the next entry is due; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def run_next(self) -> None:
        at_s, _, callback = heapq.heappop(self._heap)
        self.clock.advance_to(at_s)
        callback()

    def run_until(self, at_s: float) -> None:
        """Run everything up to and including `at_s` and move the clock there."""
        while self._heap and self._heap[0][0] <= at_s:
            self.run_next()
        self.clock.advance_to(at_s)
