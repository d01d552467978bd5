"""A clock that only sleeping moves, for what waits."""

from __future__ import annotations

from springtide.storage.pacing import PollInterval


class VirtualTime:
    """Counts the seconds slept; `at` runs something when the clock passes an instant."""

    def __init__(self):
        self.now_s = 0.0
        self.sleeps = []
        self.due = []

    def at(self, instant_s, act):
        self.due.append((instant_s, act))

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now_s += seconds
        for item in [item for item in self.due if item[0] <= self.now_s]:
            self.due.remove(item)
            item[1]()

    def pace(self, draw=0.0):
        return PollInterval(now_s=lambda: self.now_s, sleep=self.sleep, draw=lambda: draw)
