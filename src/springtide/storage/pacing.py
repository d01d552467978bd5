"""Polling and retrying at growing, jittered intervals: for stores that cannot wake waiters, and for busy servers.

Clock, sleep and random draws are arguments; `real_pace` returns those of the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

Answer = TypeVar("Answer")


class PollInterval(msgspec.Struct, frozen=True, kw_only=True):
    """A monotonic clock (seconds), a function that sleeps (seconds), and random draws from [0, 1)."""

    now_s: Callable[[], float]
    sleep: Callable[[float], None]
    draw: Callable[[], float]


def real_pace() -> PollInterval:
    """The machine's clock and sleep. The draws affect only the times of requests, never results."""
    # Stores wait, so here the machine's clock is allowed.
    return PollInterval(now_s=time.monotonic, sleep=time.sleep, draw=_draw)  # noqa: TID251


def _draw() -> float:
    return int.from_bytes(os.urandom(4)) / 2.0**32


class Intervals(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of the pauses between requests: `first_s` at first, each `growth` times the previous one, up to `cap_s`.

    With growth g the newest pause is (g-1)/g of the time waited so far, and an object is found half a pause late on
    average: by one part in twenty of the wait for g = 1.1. Slower growth costs requests, faster growth delays all
    functions that wait for this one. Each pause is drawn between 1 - `jitter_fraction` and 1 of its length, so that
    many waiters do not poll at the same time.
    """

    first_s: float
    cap_s: float
    growth: float = 1.1
    jitter_fraction: float = 0.25

    def lengths(self, draw: Callable[[], float], begin_s: float = 0.0) -> Iterator[float]:
        """Yield the pauses before the second and all later requests; a larger `begin_s` replaces `first_s`."""
        length_s = max(self.first_s, min(begin_s, self.cap_s))
        while True:
            yield length_s * (1.0 - self.jitter_fraction * draw())
            length_s = min(length_s * self.growth, self.cap_s)


class PollState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a wait that timed out: when it asked last, and its last pause."""

    at_s: float
    pause_s: float


def ask_until(
    ask: Callable[[], Answer | None],
    timeout_s: float,
    intervals: Intervals,
    pace: PollInterval,
    before: PollState | None = None,
) -> tuple[Answer | None, PollState]:
    """Ask at growing intervals until there is an answer, and a last time at the timeout. None: no answer.

    A caller that waits in slices passes the state of the previous slice as `before`, so that the pauses go on growing.
    """
    deadline_s = pace.now_s() + timeout_s
    lengths = intervals.lengths(pace.draw, before.pause_s if before else 0.0)
    if before is not None:
        rest_s = min(before.at_s + next(lengths), deadline_s) - pace.now_s()
        if rest_s > 0.0:
            pace.sleep(rest_s)
    for length_s in lengths:
        answer = ask()
        now_s = pace.now_s()
        if answer is not None or now_s >= deadline_s:
            return answer, PollState(at_s=now_s, pause_s=length_s)
        pace.sleep(min(length_s, deadline_s - now_s))
    raise AssertionError("the intervals never end")
