"""The phases of a worker's start: from the platform's order to the process, the imported file, and the loaded model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

# A larger age of the process means that the clocks do not agree; the measurement is then dropped.
_MAX_AGE_S = 1e6


class StartPhases:
    """Measures the phases of one start in seconds, each from the end of the previous one.

    Create it where the worker's own code begins. `schedule` lasts from the order (`ordered_at_s` on the machine's
    monotonic clock, 0: unknown) until the process exists, `spawn` until this object does. If the start of the process
    is not known, `schedule` covers both.
    """

    def __init__(
        self,
        ordered_at_s: float,
        *,
        now_s: Callable[[], float] = time.monotonic,
        born_s: Callable[[], float | None] | None = None,
    ) -> None:
        self._now_s = now_s
        self._last_s = now_s()
        self._phases_s: dict[str, float] = {}
        born_at_s = (born_s or process_born_s)()
        if ordered_at_s > 0.0:
            self._phases_s["schedule"] = max(0.0, (self._last_s if born_at_s is None else born_at_s) - ordered_at_s)
        if born_at_s is not None:
            self._phases_s["spawn"] = max(0.0, self._last_s - max(born_at_s, ordered_at_s))

    def ended(self, phase: str) -> dict[str, float]:
        """End a phase now and return all phases so far; a phase that is ended twice keeps its first length."""
        now_s = self._now_s()
        if phase not in self._phases_s:
            self._phases_s[phase] = max(0.0, now_s - self._last_s)
        self._last_s = now_s
        return self.seconds()

    def seconds(self) -> dict[str, float]:
        """The length of every ended phase, in order."""
        return dict(self._phases_s)


def process_born_s() -> float | None:
    """When this process was started or forked, on the monotonic clock, with a resolution of 10 ms; None if unknown."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        # The name in parentheses may hold anything; the start is the 22nd field of all, the 20th after it.
        ticks = int(stat.rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.monotonic() - age_s if 0.0 <= age_s < _MAX_AGE_S else None
