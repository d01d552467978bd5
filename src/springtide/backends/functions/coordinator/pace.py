"""Measured durations of a job's steps, saves and starts, and the time limits that follow from them."""

from __future__ import annotations

from springtide.core.functions import FunctionService
from springtide.core.wire.functions import FunctionReport

# Saving may take this fraction of the duration of steps, and of their cost.
MAX_SAVE_FRACTION = 0.07
# The most work that has to be redone after a function died.
MAX_REDO_S = 60.0
MAX_SAVE_EVERY = 64
# The shortest limit for the silence of a function, however short its steps.
LEAST_SILENCE_S = 20.0
SILENT_STEPS = 5.0
# Added to the expected cold start before an accepted invocation counts as lost.
START_MARGIN_S = 20.0
# A function leaves when its lifetime no longer covers this many steps, saving, and the margin.
LEAVE_STEPS = 1.5
LEAVE_MARGIN_S = 2.0


class StepTiming:
    """Durations of one job, in seconds, updated by every report; predictions until something was measured."""

    def __init__(self, service: FunctionService, predicted_step_s: float | None) -> None:
        self._service = service
        self.predicted_step_s = predicted_step_s
        self.measured_step_s: float | None = None
        self.save_s = 0.0
        self._start_s: float | None = None
        self._starts: list[float] = []

    def for_plan(self, predicted_step_s: float | None) -> StepTiming:
        """The timing of another plan of the same job: durations of starts and saves are kept."""
        pace = StepTiming(self._service, predicted_step_s)
        pace.save_s, pace._starts = self.save_s, self._starts
        return pace

    @property
    def step_s(self) -> float:
        """How long a step takes: measured, else predicted, else one second."""
        return self.measured_step_s or self.predicted_step_s or 1.0

    @property
    def start_s(self) -> float:
        """How long it takes from an invocation until the function is warm; the longest of the last ones."""
        return max(self._starts) if self._starts else 2.0 * self._service.cold_start_s + 5.0

    def observe(self, report: FunctionReport) -> None:
        """Update the durations from a report of a training function."""
        if report.lanes.step_s > 0:
            old = self.measured_step_s
            self.measured_step_s = report.lanes.step_s if old is None else 0.7 * old + 0.3 * report.lanes.step_s
        if report.lanes.save_s > 0:
            self.save_s = max(report.lanes.save_s, 0.7 * self.save_s)

    def observe_start(self, seconds: float) -> None:
        """Record the time from an invocation until its function was warm."""
        self._starts = [*self._starts[-7:], seconds]

    def start_limit_s(self) -> float:
        """How long an accepted invocation may take to its first report before it counts as lost."""
        known_s = self.start_s if self._starts else 0.0
        return self._service.cold_start_s + START_MARGIN_S + known_s

    def silence_limit_s(self) -> float:
        """How long no step may be completed before functions are probed."""
        return max(LEAST_SILENCE_S, SILENT_STEPS * self.step_s + self.save_s) + self.start_s

    def answer_limit_s(self) -> float:
        """How long a function may take to join a new attempt: it finishes its computation and reads the record."""
        return LEAST_SILENCE_S / 2 + self.step_s

    def leaves_before_end_s(self) -> float:
        """How long before the end of its lifetime a function leaves."""
        return LEAVE_STEPS * self.step_s + self.save_s + LEAVE_MARGIN_S

    def calls_before_end_s(self) -> float:
        """How long before the end of a function's lifetime its successor is invoked."""
        return self.leaves_before_end_s() + 1.3 * self.start_s + 1.0

    def save_every(self, step_usd: float, save_usd: float) -> int:
        """The interval of saving in steps: a power of two, so that steps of a new interval are among the old ones'."""
        every = 1
        while every < MAX_SAVE_EVERY and 2 * every * self.step_s <= MAX_REDO_S:
            is_short = self.save_s <= MAX_SAVE_FRACTION * every * self.step_s
            is_cheap = save_usd <= MAX_SAVE_FRACTION * every * step_usd
            if is_short and is_cheap:
                break
            every *= 2
        return every
