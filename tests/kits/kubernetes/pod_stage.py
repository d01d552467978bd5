"""A stage for parts of the executor: time stands still until a test moves it, and nothing else happens meanwhile."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from springtide.backends.control_channel.reactor import Timer


class StillReactor:
    """Runs what is due when time is moved; calls from other threads at once."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, Timer]] = []

    def after(self, delay_s: float, function: Callable[[], None]) -> Timer:
        timer = Timer(self.now_s + delay_s, function)
        heapq.heappush(self._timers, (timer.due_s, next(self._numbers), timer))
        return timer

    def call(self, function: Callable[[], None]) -> None:
        function()

    def pass_time(self, duration_s: float) -> None:
        end_s = self.now_s + duration_s
        while self._timers and self._timers[0][0] <= end_s:
            due_s, _, timer = heapq.heappop(self._timers)
            self.now_s = max(self.now_s, due_s)
            timer.fire()
        self.now_s = end_s


def stand_still(monkeypatch: pytest.MonkeyPatch, *modules: object) -> StillReactor:
    """Let these modules go by the reactor's time."""
    reactor = StillReactor()
    for module in modules:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: reactor.now_s))
    return reactor
