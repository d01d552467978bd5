"""A job on a growing dataset: how much of it may be used, when its functions end for lack of samples and restart.

Functions wait at the boundary for the samples of their next step. If none come for a while, all of them save and end:
from then on only the stored state is charged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from springtide.backends.functions.coordinator.function_pool import JobFacts
from springtide.backends.functions.coordinator.messages import Emit, Order, StreamRead
from springtide.backends.functions.coordinator.run import After, Mode, Run
from springtide.backends.functions.coordinator.verdicts import (
    CLOSE_S,
    CloseAtBoundary,
    Effect,
    FailJob,
    FindStart,
    RestUntilData,
    StopNow,
    Verdict,
)
from springtide.core.events import StreamObserved
from springtide.core.function_search import StreamView

# Interval of StreamObserved events.
OBSERVED_INTERVAL_S = 5.0
# Bounds on the wait for samples before functions end, where it is derived from the duration of a start.
LEAST_IDLE_S = 2.0
LONGEST_IDLE_S = 60.0


class JobStream:
    """The length of the job's stream, and whether that is enough to train; does nothing for a job without a stream."""

    def __init__(self, facts: JobFacts) -> None:
        self._facts = facts
        self._view: StreamView | None = None
        self._reported: tuple[int, bool] | None = None
        self._reported_at_s = -math.inf
        # Since when all functions have been waiting for samples.
        self._starved_since_s: float | None = None
        # While no function runs: the step reached, since when there are samples for one more, whether a restart is due.
        self._resting_at = 0
        self._batch_since_s = math.inf
        self._is_woken = False

    def idle_reason(self, run: Run) -> str:
        """Why none of the job's functions runs; empty while they run."""
        if run.mode is not Mode.RESTING:
            return ""
        have, rules = self._num_unused(self._resting_at), self._facts.stream_rules
        needed = max(1, rules.min_start_steps) * self._facts.global_batch_size
        return f"waits for data of {self._facts.stream!r} ({max(0, have)} of {needed} samples)"

    def is_wanted(self, run: Run) -> bool:
        """Whether the stream is to be read regularly."""
        return bool(self._facts.stream) and run.mode not in (Mode.OVER, Mode.ASSEMBLING)

    def _num_unused(self, step: int) -> int:
        """The number of samples left after `step` steps."""
        return self._view.num_samples - step * self._facts.global_batch_size if self._view is not None else 0

    # --- new samples -----------------------------------------------------------------------------------------------

    def observe(self, run: Run, seen: StreamRead) -> Iterator[Effect]:
        """The stream was read."""
        if not self.is_wanted(run):
            return
        if seen.stream is None:
            if run.mode not in (Mode.CLOSING, Mode.LOOKING_LAST):
                yield StopNow(After.DATA, seen.error)
            return
        self._view = seen.stream
        yield from self._report(run, seen.stream)
        if seen.stream.is_closed:
            run.progress.total_steps = -(-seen.stream.num_samples // self._facts.global_batch_size)
        yield from self._offer(run, seen.stream)
        yield from self.wake_if_due(run)

    def _report(self, run: Run, stream: StreamView) -> Iterator[Order]:
        """Report the stream to the control plane: its end at once, its growth at intervals."""
        now = (stream.num_samples, stream.is_closed)
        is_due = run.now_s - self._reported_at_s >= OBSERVED_INTERVAL_S
        is_end = stream.is_closed and (self._reported is None or not self._reported[1])
        if now != self._reported and (is_due or is_end):
            self._reported, self._reported_at_s = now, run.now_s
            yield Emit(event=StreamObserved(job_id=self._facts.job_id, stream=stream))

    def _offer(self, run: Run, stream: StreamView) -> Iterator[Order]:
        """Release new samples to the functions, unless they are about to stop: all must stop at the same step."""
        record = run.record
        if record is None or run.mode not in (Mode.RUNNING, Mode.LOOKING):
            return
        if record.verb == "stop" or record.last_step is not None or record.num_available is None:
            return
        batch = self._facts.global_batch_size
        is_more = stream.num_samples // batch > record.num_available // batch
        if is_more or (stream.is_closed and not record.is_stream_closed):
            if run.is_starved:
                run.progress_at_s = run.now_s
            self._starved_since_s = None
            yield run.amend(num_available=stream.num_samples, is_stream_closed=stream.is_closed)

    def offered(self) -> dict[str, Any]:
        """The fields of an attempt's record that describe the stream."""
        if self._view is None:
            return {}
        return {"num_available": self._view.num_samples, "is_stream_closed": self._view.is_closed}

    # --- resting ---------------------------------------------------------------------------------------------------

    def verdict_instead_of_start(self, run: Run, step: int) -> Verdict | None:
        """What to do instead of beginning an attempt from that step now; None if the attempt may begin."""
        if not self._facts.stream:
            return None
        is_closed = self._view is not None and self._view.is_closed
        if self._view is not None and is_closed and self._view.num_samples == 0:
            return FailJob(f"the stream {self._facts.stream!r} was closed without a sample")
        num_unused = self._num_unused(step)
        is_going_on = self._is_woken or bool(run.pool.living())
        if (
            (is_closed and num_unused > 0)
            or self._is_enough(run, step)
            or (is_going_on and num_unused >= self._facts.global_batch_size)
        ):
            self._is_woken = False
            return None
        # The living functions have no samples for another step.
        return StopNow(After.REST) if run.pool.living() else RestUntilData(step)

    def _is_enough(self, run: Run, step: int) -> bool:
        """Whether there are enough samples to be worth a start."""
        rules = self._facts.stream_rules
        num_steps = self._num_unused(step) // self._facts.global_batch_size
        has_waited = run.mode is Mode.RESTING and run.now_s - self._batch_since_s >= rules.max_wait_s
        return num_steps >= max(1, rules.min_start_steps) or (num_steps >= 1 and has_waited)

    def check(self, run: Run, *, is_change_due: bool) -> Iterator[Effect]:
        """Let all functions save and end once samples have been lacking for the idle time."""
        reports = run.pool.reports()
        is_waiting = all(report is not None and report.phase == "waiting" for report in reports)
        if not self._facts.stream or run.mode is not Mode.RUNNING or not run.is_starved or not is_waiting:
            self._starved_since_s = None
            return
        run.progress_at_s = run.now_s
        if self._starved_since_s is None:
            self._starved_since_s = run.now_s
        idle_s = self._facts.stream_rules.idle_s
        if idle_s is None:
            idle_s = min(LONGEST_IDLE_S, max(LEAST_IDLE_S, run.pace.start_s))
        if run.now_s - self._starved_since_s >= idle_s and not is_change_due:
            yield CloseAtBoundary(After.REST, CLOSE_S)

    def rest(self, step: int) -> None:
        """No function runs; `step` steps are done."""
        self._resting_at, self._batch_since_s = step, math.inf
        self._starved_since_s, self._is_woken = None, False

    def wake_if_due(self, run: Run) -> Iterator[Verdict]:
        """Start again once there are enough samples, or the stream was closed."""
        if run.mode is not Mode.RESTING:
            return
        if self._num_unused(self._resting_at) >= self._facts.global_batch_size:
            self._batch_since_s = min(self._batch_since_s, run.now_s)
        if (self._view is not None and self._view.is_closed) or self._is_enough(run, self._resting_at):
            run.reason, self._is_woken = "", True
            yield FindStart()
