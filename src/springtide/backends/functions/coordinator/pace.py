"""What a coordinator learns about the time that things take, and the limits that follow from it."""

from __future__ import annotations

from springtide.core.functions import FunctionService
from springtide.core.wire.functions import FunctionReport

# Saving may cost this fraction of a step's time, and of its price.
MAX_SAVE_FRACTION = 0.07
# A loss should cost no more than this much work done again.
MAX_REDO_S = 60.0
MAX_SAVE_EVERY = 64
# How long a function may be silent at the least, whatever its steps take.
LEAST_SILENCE_S = 20.0
SILENT_STEPS = 5.0
# An invocation that was accepted may begin this much later than a cold start usually does.
START_MARGIN_S = 20.0
# A function stops when its time would not cover this many steps, the saving and a little more.
LEAVE_STEPS = 1.5
LEAVE_MARGIN_S = 2.0


class StepTiming:
    """Figures of one job, updated by every report. Seconds throughout; guesses until something is known."""

    def __init__(self, service: FunctionService, predicted_step_s: float | None) -> None:
        self._service = service
        self.predicted_step_s = predicted_step_s
        self.measured_step_s: float | None = None
        self.save_s = 0.0
        self._start_s: float | None = None
        self._starts: list[float] = []

    def followed_by(self, predicted_step_s: float | None) -> StepTiming:
        """The figures of another plan of the same job: what starts take and saving takes is known already."""
        pace = StepTiming(self._service, predicted_step_s)
        pace.save_s, pace._starts = self.save_s, self._starts
        return pace

    @property
    def step_s(self) -> float:
        """How long a step takes, as far as it is known."""
        return self.measured_step_s or self.predicted_step_s or 1.0

    @property
    def start_s(self) -> float:
        """How long it takes from an invocation until the function is warm."""
        return max(self._starts) if self._starts else 2.0 * self._service.cold_start_s + 5.0

    def saw(self, report: FunctionReport) -> None:
        """Learn from a report of a function that trains."""
        if report.lanes.step_s > 0:
            old = self.measured_step_s
            self.measured_step_s = report.lanes.step_s if old is None else 0.7 * old + 0.3 * report.lanes.step_s
        if report.lanes.save_s > 0:
            self.save_s = max(report.lanes.save_s, 0.7 * self.save_s)

    def saw_start(self, seconds: float) -> None:
        """A function was warm so long after it was invoked."""
        self._starts = [*self._starts[-7:], seconds]

    def start_limit_s(self) -> float:
        """After so long without a word an invocation that was accepted has been lost."""
        known_s = self.start_s if self._starts else 0.0
        return self._service.cold_start_s + START_MARGIN_S + known_s

    def silence_limit_s(self) -> float:
        """After so long without any step something is wrong."""
        return max(LEAST_SILENCE_S, SILENT_STEPS * self.step_s + self.save_s) + self.start_s

    def answer_limit_s(self) -> float:
        """So long a function may take to answer a new attempt: one computation, and a look at the record."""
        return LEAST_SILENCE_S / 2 + self.step_s

    def leaves_before_end_s(self) -> float:
        """So long before its lifetime is over a function leaves."""
        return LEAVE_STEPS * self.step_s + self.save_s + LEAVE_MARGIN_S

    def calls_before_end_s(self) -> float:
        """So long before its lifetime is over the successor is called."""
        return self.leaves_before_end_s() + 1.3 * self.start_s + 1.0

    def save_every(self, step_usd: float, save_usd: float) -> int:
        """After how many steps states are saved: a power of two, so that old and new numbers share their steps."""
        every = 1
        while every < MAX_SAVE_EVERY and 2 * every * self.step_s <= MAX_REDO_S:
            is_short = self.save_s <= MAX_SAVE_FRACTION * every * self.step_s
            is_cheap = save_usd <= MAX_SAVE_FRACTION * every * step_usd
            if is_short and is_cheap:
                break
            every *= 2
        return every
