"""Timing of a function's steps, as running sums, which do not depend on how often reports are read."""

from __future__ import annotations

from springtide.core.wire.functions import LaneTimes, StepTotals


class StepTimer:
    """Times one place's steps from commit to commit. `totals` are sums over steps of one size in the current attempt.

    Times are seconds of one monotonic clock. `pause_s` is the time between the last commit before the attempt and the
    first commit in it, without the computation of that step.
    """

    def __init__(self) -> None:
        self.totals = StepTotals()
        self.pause_s = 0.0
        self._committed_at_s: float | None = None
        self._is_first = True

    def begin(self) -> None:
        """Start an attempt: the sums restart at zero, because its steps may take a different time."""
        self.totals = StepTotals()
        self._is_first = True

    def skip(self, seconds: float) -> None:
        """Leave out time in which the place waited for samples."""
        if self._committed_at_s is not None:
            self._committed_at_s += seconds

    def committed(self, now_s: float, lanes: LaneTimes, global_batch_size: int, gradient_bytes: int) -> None:
        """Add a step that was committed at `now_s`."""
        computed_s = lanes.forward_s + lanes.backward_s + lanes.update_s
        before_s, self._committed_at_s = self._committed_at_s, now_s
        if self._is_first:
            self._is_first = False
            self.pause_s = max(0.0, now_s - before_s - computed_s) if before_s is not None else 0.0
            self.totals = StepTotals(global_batch_size=global_batch_size, gradient_bytes=gradient_bytes)
            return
        totals = self.totals
        if (totals.global_batch_size, totals.gradient_bytes) != (global_batch_size, gradient_bytes):
            # The first step of another size allocates and compiles, so it is not counted.
            self.totals = StepTotals(global_batch_size=global_batch_size, gradient_bytes=gradient_bytes)
            return
        assert before_s is not None
        took_s = now_s - before_s
        self.totals = StepTotals(
            global_batch_size=global_batch_size,
            gradient_bytes=gradient_bytes,
            num_steps=totals.num_steps + 1,
            step_s=totals.step_s + took_s,
            step_sqr=totals.step_sqr + took_s * took_s,
            compute_s=totals.compute_s + computed_s,
            sync_s=totals.sync_s + lanes.sync_s,
        )
