"""Measures what a tenant of a GPU did in a tick, from the counters of its processes, as an Observation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from springtide.backends.sharing.gpu.segments import NUM_CYCLES, UsageSegment
from springtide.core.wire.shares import SlotReading
from springtide.serving.share_control import Observation, ShareIteration

_WINDOW_S = 1.0
# The most work that a tenant can have launched ahead of the device.
_MAX_BACKLOG_NS = 2_000_000_000
_MAX_CYCLE_NS = 10**15
# A launch cycle counts as running while its work runs, or waits, or this long after: the cycle of a program that
# launches and never synchronises does not end.
_LAST_USE_S = 0.05
# Cycles are compared with others of about the same device time, in steps of 2**(1/4) from 10 us on.
_STEPS_IN_DOUBLING = 4
_SMALLEST_WORK_NS = 10_000


class Meter:
    """Follows one tenant from tick to tick.

    Launches are counted when they are made (waiting ones included), and the device executes them afterwards: launched
    but unfinished work is the backlog, which shrinks at the device's speed.
    """

    def __init__(self, usage: UsageSegment) -> None:
        self.used_s = 0.0
        self._launched_ns = usage.used_ns
        self._backlog_ns = 0
        self._used_at_s = -math.inf
        self._window: deque[tuple[float, float]] = deque()
        self._num_ended = usage.cycles()[1] if usage.data else 0
        self._cycle_from_ns = usage.used_ns
        self._reading = SlotReading()
        self._has_slot = False

    def is_active(self, now_s: float) -> bool:
        return self._backlog_ns > 0 or now_s - self._used_at_s < _LAST_USE_S

    def used_fraction(self) -> float:
        """The fraction of its device that it used over about the last second."""
        if len(self._window) < 2:
            return 0.0
        (begin_s, begin_used_s), (end_s, end_used_s) = self._window[0], self._window[-1]
        return min(1.0, (end_used_s - begin_used_s) / max(1e-4, end_s - begin_s))

    def observe(
        self,
        usage: UsageSegment,
        reading: SlotReading | None,
        *,
        granted_ns: int,
        rate: float,
        is_waiting: bool,
        now_s: float,
        tick_s: float,
    ) -> Observation:
        """Return the observation since the last call, `tick_s` ago. `granted_ns` and `rate` were in force until now."""
        used_s = self._advance(usage, granted_ns, is_waiting, now_s, tick_s)
        used_fraction = used_s / tick_s
        if is_waiting:
            # A waiting tenant uses all of its grant, if only for work that it has launched already.
            used_fraction = max(used_fraction, rate)
        if reading is not None:
            self._has_slot = self._has_slot or reading.num_begun > 0
        if self._has_slot:
            return self._observe_slot(reading, used_fraction, now_s)
        return self._observe_cycles(usage, used_fraction, is_waiting, now_s)

    def _advance(self, usage: UsageSegment, granted_ns: int, is_waiting: bool, now_s: float, tick_s: float) -> float:
        """Return the device time, in seconds, that was executed in the tick."""
        launched_ns = usage.used_ns
        if is_waiting:
            # Some counted work has not been launched yet, but all work with tokens has.
            launched_ns = max(self._launched_ns, min(launched_ns, granted_ns))
        added_ns = max(0, launched_ns - self._launched_ns)
        self._launched_ns = launched_ns
        if added_ns:
            self._used_at_s = now_s
        passed_ns = int(tick_s * 1e9)
        backlog_ns = min(passed_ns + _MAX_BACKLOG_NS, self._backlog_ns + added_ns)
        done_ns = min(backlog_ns, passed_ns)
        self._backlog_ns = backlog_ns - done_ns
        self.used_s += done_ns / 1e9
        window = self._window
        if not window or now_s - window[-1][0] > _WINDOW_S / 20:
            window.append((now_s, self.used_s))
            # The first entry is the newest that is older than the window.
            while len(window) > 2 and now_s - window[1][0] > _WINDOW_S:
                window.popleft()
        return done_ns / 1e9

    def _observe_slot(self, reading: SlotReading | None, used_fraction: float, now_s: float) -> Observation:
        """The worker's own report; while its slot is being written, the previous one."""
        finished: tuple[ShareIteration, ...] = ()
        if reading is not None:
            self._reading = reading
            finished = tuple(
                ShareIteration(batch_size=ended.batch_size, duration_s=ended.duration_s) for ended in reading.finished
            )
        current = self._reading
        return Observation(
            used_fraction=used_fraction,
            iteration_s=max(0.0, now_s - current.started_s) if current.started_s else 0.0,
            batch_size=current.batch_size,
            finished=finished,
            num_queued=current.num_queued,
        )

    def _observe_cycles(self, usage: UsageSegment, used_fraction: float, is_waiting: bool, now_s: float) -> Observation:
        """Take a launch cycle for an iteration, and the device time launched in it for its batch size."""
        _, num_ended, started_ns, durations_ns = usage.cycles()
        num_fresh = num_ended - self._num_ended
        work_ns = max(0, usage.used_ns - self._cycle_from_ns)
        finished: tuple[ShareIteration, ...] = ()
        if num_fresh:
            self._num_ended, self._cycle_from_ns = num_ended, usage.used_ns
            if num_fresh > 0:
                size = work_size(work_ns // num_fresh)
                finished = _iterations(durations_ns, num_ended, min(num_fresh, NUM_CYCLES), size)
            work_ns = 0
        is_running = 0 < started_ns <= int(now_s * 1e9) and (is_waiting or self.is_active(now_s))
        return Observation(
            used_fraction=used_fraction,
            iteration_s=max(0.0, now_s - started_ns / 1e9) if is_running else 0.0,
            batch_size=work_size(work_ns) if is_running else 0,
            finished=finished,
        )


def work_size(work_ns: int) -> int:
    """Return the device time rounded up to a step, in quarters of the smallest step, to be used as a batch size."""
    if work_ns <= _SMALLEST_WORK_NS:
        return _STEPS_IN_DOUBLING
    step: int = math.ceil(_STEPS_IN_DOUBLING * math.log2(min(work_ns, _MAX_CYCLE_NS) / _SMALLEST_WORK_NS))
    return int(_STEPS_IN_DOUBLING * 2.0 ** (step / _STEPS_IN_DOUBLING))


def _iterations(durations_ns: Sequence[int], num_ended: int, num_fresh: int, size: int) -> tuple[ShareIteration, ...]:
    newest = (durations_ns[number % NUM_CYCLES] for number in range(num_ended - num_fresh, num_ended))
    return tuple(
        ShareIteration(batch_size=size, duration_s=duration_ns / 1e9)
        for duration_ns in newest
        if 0 < duration_ns < _MAX_CYCLE_NS
    )
