"""What a function measures of its own steps: sums that do not depend on how often its reports are read."""

from __future__ import annotations

from springtide.core.wire.functions import LaneTimes, StepTotals


class StepTimer:
    """Times one place's steps from commit to commit. `totals` are sums over like steps of the present attempt.

    Times are seconds of one clock that never goes back. `pause_s` is how long the place stood still between its last
    step before the present attempt and the first one in it, the computation of that one left out.
    """

    def __init__(self) -> None:
        self.totals = StepTotals()
        self.pause_s = 0.0
        self._committed_at_s: float | None = None
        self._is_first = True

    def begin(self) -> None:
        """An attempt begins: sums start at zero, since its steps may take another time."""
        self.totals = StepTotals()
        self._is_first = True

    def skip(self, seconds: float) -> None:
        if self._committed_at_s is not None:
            self._committed_at_s += seconds

    def committed(self, now_s: float, lanes: LaneTimes, global_batch_size: int, gradient_bytes: int) -> None:
        computed_s = lanes.forward_s + lanes.backward_s + lanes.update_s
        before_s, self._committed_at_s = self._committed_at_s, now_s
        if self._is_first:
            self._is_first = False
            self.pause_s = max(0.0, now_s - before_s - computed_s) if before_s is not None else 0.0
            self.totals = StepTotals(global_batch_size=global_batch_size, gradient_bytes=gradient_bytes)
            return
        totals = self.totals
        if (totals.global_batch_size, totals.gradient_bytes) != (global_batch_size, gradient_bytes):
            # The first step of another size allocates and compiles: it says nothing about those after it.
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
