"""A job on a dataset that grows: how much of it may be used, when its functions rest, and when they begin again.

Functions wait at the boundary for the samples of their next step. Where none come for a while all of them save and end:
then nothing runs and nothing is charged but the state's place in the store.
"""

from __future__ import annotations

import math
from typing import Any

from springtide.backends.functions.coordinator.attempts import CLOSE_S
from springtide.backends.functions.coordinator.change import Changes
from springtide.backends.functions.coordinator.messages import StreamSeen
from springtide.core.events import StreamObserved
from springtide.core.function_search import StreamView

# The control plane hears of a stream so often at most, and the record is written so often for samples that wait.
OBSERVED_INTERVAL_S = 5.0
# Functions rest no sooner and no later than this, whatever a start takes.
LEAST_IDLE_S = 2.0
LONGEST_IDLE_S = 60.0


class StreamComponent(Changes):
    """The part of the coordinator that watches a stream; without one it does nothing."""

    _stream: StreamView | None = None
    _observed_at_s = -math.inf
    _observed: tuple[int, bool] | None = None
    _starved_since_s: float | None = None
    _batch_since_s = math.inf
    _dry_step = 0
    _is_woken = False

    @property
    def idle_reason(self) -> str:
        """What the job waits for while none of its functions runs; empty while they run."""
        if self.mode != "dry":
            return ""
        have, rules = self._have(self._dry_step), self.facts.stream_rules
        needed = max(1, rules.min_start_steps) * self.facts.global_batch_size
        return f"waits for data of {self.facts.stream!r} ({max(0, have)} of {needed} samples)"

    @property
    def wants_stream(self) -> bool:
        """Whether somebody should look at the stream now and then."""
        return bool(self.facts.stream) and self.mode not in ("over", "assembling")

    def _saw_stream(self, seen: StreamSeen) -> None:
        if not self.facts.stream or self.mode in ("over", "assembling"):
            return
        if seen.stream is None:
            if self.mode not in ("closing", "looking_last"):
                self._pause_for_data(seen.error)
            return
        self._stream = seen.stream
        self._observe()
        if seen.stream.is_closed:
            self.progress.total_steps = -(-seen.stream.num_samples // self.facts.global_batch_size)
        self._offer()
        self._wake_if_due()

    def _observe(self) -> None:
        """Tell the control plane, at once of the end, otherwise now and then."""
        assert self._stream is not None
        now = (self._stream.num_samples, self._stream.is_closed)
        is_due = self._now_s - self._observed_at_s >= OBSERVED_INTERVAL_S
        is_end = self._stream.is_closed and (self._observed is None or not self._observed[1])
        if now != self._observed and (is_due or is_end):
            self._observed, self._observed_at_s = now, self._now_s
            self._emit(StreamObserved(job_id=self.facts.job_id, stream=self._stream))

    def _offer(self) -> None:
        """Let functions use what has come, unless they are about to stop: then all stop where they lack samples."""
        record, stream = self.record, self._stream
        if record is None or stream is None or self.mode not in ("running", "looking"):
            return
        if record.verb == "stop" or record.last_step is not None or record.num_available is None:
            return
        batch = self.facts.global_batch_size
        is_more = stream.num_samples // batch > record.num_available // batch
        if is_more or (stream.is_closed and not record.is_stream_closed):
            if self._is_starved():
                self._progress_at_s = self._now_s
            self._starved_since_s = None
            self._write(num_available=stream.num_samples, is_stream_closed=stream.is_closed)

    def _extras(self) -> dict[str, Any]:
        if self._stream is None:
            return super()._extras()
        offered = {"num_available": self._stream.num_samples, "is_stream_closed": self._stream.is_closed}
        return {**super()._extras(), **offered}

    def _have(self, step: int) -> int:
        """The samples that nobody has used after so many steps."""
        return self._stream.num_samples - step * self.facts.global_batch_size if self._stream is not None else 0

    def _is_starved(self) -> bool:
        """Whether nobody can make another step with what the record lets them use."""
        record = self.record
        if record is None or record.num_available is None or record.is_stream_closed:
            return False
        return record.num_available < (self.progress.furthest + 1) * self.facts.global_batch_size

    # --- resting ---------------------------------------------------------------------------------------------------

    def _may_begin(self, restore_step: int) -> bool:
        if not super()._may_begin(restore_step):
            return False
        if not self.facts.stream:
            return True
        batch = self.facts.global_batch_size
        if self._stream is not None and self._stream.is_closed and self._stream.num_samples == 0:
            self._fail(f"the stream {self.facts.stream!r} was closed without a sample")
            return False
        have = self._have(restore_step)
        is_end = self._stream is not None and self._stream.is_closed and have > 0
        is_going_on = self._is_woken or bool(self.pool.living())
        if is_end or self._is_enough(restore_step) or (is_going_on and have >= batch):
            self._is_woken = False
            return True
        if self.pool.living():
            # Nothing is left to do for those who live.
            self._adopt_change()
            self._stop_now("dry")
        else:
            self._rest(restore_step)
        return False

    def _is_enough(self, step: int) -> bool:
        """Whether what has come is worth a start."""
        rules = self.facts.stream_rules
        num_steps = self._have(step) // self.facts.global_batch_size
        has_waited = self.mode == "dry" and self._now_s - self._batch_since_s >= rules.max_wait_s
        return num_steps >= max(1, rules.min_start_steps) or (num_steps >= 1 and has_waited)

    def _rest_if_starved(self) -> None:
        """Where samples have been lacking for a while everybody saves and ends."""
        if not self.facts.stream or self.mode != "running" or not self._is_starved():
            self._starved_since_s = None
            return
        reports = [slot.invocation.report if slot.invocation is not None else None for slot in self.pool]
        if not all(report is not None and report.phase == "waiting" for report in reports):
            self._starved_since_s = None
            return
        self._progress_at_s = self._now_s
        if self._starved_since_s is None:
            self._starved_since_s = self._now_s
        idle_s = self.facts.stream_rules.idle_s
        if idle_s is None:
            idle_s = min(LONGEST_IDLE_S, max(LEAST_IDLE_S, self.pace.start_s))
        change = self._change
        if self._now_s - self._starved_since_s >= idle_s and (change is None or not change.is_due):
            self._adopt_change()
            self._close("dry", CLOSE_S)

    def _rest(self, step: int) -> None:
        self.mode, self.after, self._is_woken = "dry", "", False
        self.record = None
        if self._next_plan is not None:
            self._plan, self._next_plan = self._next_plan, None
        self.pool.retire(self.pool)
        self.pool.slots.clear()
        self._dry_step, self._batch_since_s = step, math.inf
        self._starved_since_s = None
        self._checkpoint_step = max(self._checkpoint_step, step)
        self.progress.furthest = max(self.progress.furthest, step)
        if self._resized_generation < self.generation:
            # It is what it is to be, as far as there is anything to do.
            self._resized_generation = self.generation
            self._emit_resized("replace" if self.changes else ("resume" if step else "start"), 0.0)
        self.reason = f"idle: {self.idle_reason}"
        self._emit_usage()
        self._wake_if_due()

    def _wake_if_due(self) -> None:
        """Begin again where enough has come; find out the rest where that is all there will be."""
        if self.mode != "dry":
            return
        is_closed = self._stream is not None and self._stream.is_closed
        if self._have(self._dry_step) >= self.facts.global_batch_size:
            self._batch_since_s = min(self._batch_since_s, self._now_s)
        if is_closed or self._is_enough(self._dry_step):
            self.reason, self._is_woken = "", True
            self._look()
