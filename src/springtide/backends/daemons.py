"""What daemons that count in milliseconds need: to come before other programs, and to know what they cost."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections import deque
from collections.abc import Iterable

# Everything turned off but the limits: every sharer may use its limit at all times, as under a static partition.
CONTROL_VARIABLE = "SPRINGTIDE_SHARE_CONTROL"
_PRIORITY = -15
_SPARE_FILES = 16


def be_on_time() -> None:
    """Come before all ordinary programs, as far as the rights go: a late turn holds nobody back (late_p99_s counts it).

    For who works well under a tenth of the time; the kernel stops even those that come first at 95 %. Nothing of a
    daemon is in cycles, and a collection at the wrong moment would be a late turn, so collections become rare.
    """
    try:
        flags = os.SCHED_RR | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, flags, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


def allow_many_files() -> None:
    """Raise the soft limit of open descriptors to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def may_keep(descriptor: int) -> bool:
    """Whether a descriptor leaves enough for what is opened and closed all the time: files of /proc, the status.

    The kernel gives out the lowest number that is free.
    """
    return descriptor < resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE_FILES


def p99(values: Iterable[float]) -> float:
    """Return the value that 99 of 100 do not exceed; 0.0 of none."""
    found = sorted(values)
    return found[min(len(found) - 1, int(0.99 * len(found)))] if found else 0.0


class OwnLoad:
    """The part of a core that this process uses, over about the last ten looks."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, float]] = deque(maxlen=20)

    def fraction(self, now_s: float, used_s: float) -> float:
        """Take note of the CPU seconds used until now and return the part of a core."""
        self._looks.append((now_s, used_s))
        begin_s, begin_used_s = self._looks[0]
        return (used_s - begin_used_s) / (now_s - begin_s) if now_s > begin_s else 0.0
