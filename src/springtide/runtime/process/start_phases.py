"""What the start of a worker is made of: from the platform's order to the process, the user's file, and the model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

# Seconds. A larger age means that the process's clock is not ours, so it is not believed.
_MAX_AGE_S = 1e6


class StartPhases:
    """Measures the phases of one start, each from the end of the one before. Made where the worker's own code begins.

    `schedule` runs from the order (`ordered_at_s` on the machine's monotonic clock, 0: unknown) until the process
    exists, `spawn` until this object does. Where the start of the process is not known, `schedule` covers both.
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
        """The phase ends now. Returns all of them so far; one that is named again keeps its first length."""
        now_s = self._now_s()
        if phase not in self._phases_s:
            self._phases_s[phase] = max(0.0, now_s - self._last_s)
        self._last_s = now_s
        return self.seconds()

    def seconds(self) -> dict[str, float]:
        """The length of every phase that has ended, in order."""
        return dict(self._phases_s)


def process_born_s() -> float | None:
    """When this process was started (for a forked one: forked), on the monotonic clock; None where that is unknown.

    The kernel counts it in ticks of 10 ms.
    """
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        # The name in parentheses may hold anything; the start is the 22nd field of all, the 20th after it.
        ticks = int(stat.rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.monotonic() - age_s if 0.0 <= age_s < _MAX_AGE_S else None
