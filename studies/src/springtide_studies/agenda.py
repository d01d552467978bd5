"""What happens when in a modelled world: closures in order of time, on a virtual clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from springtide.simulator.clock import VirtualClock


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
