"""Reports from training to the control plane: progress a few times a second, and every switch with its pause."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any, Literal, NamedTuple

from springtide.core.wire.shares import SlotWriter
from springtide.core.wire.workers import Progress, Switched
from springtide.runtime.data.shards import GlobalBatch
from springtide.runtime.elastic.membership import Formation
from springtide.runtime.elastic.training_cursor import TrainingCursor
from springtide.runtime.libraries.library_cursor import LibraryCursor
from springtide.runtime.process.control_link import ControlLink

PROGRESS_INTERVAL_S = 0.25
_AT_WORK_INTERVAL_S = 1.0
WINDOW_S = 5.0

Direction = Literal["start", "grow", "shrink", "recover", "resume", "replace"]


class _CommittedStep(NamedTuple):
    at_s: float
    num_samples: int
    sync_s: float


class Reporter:
    """Turns step boundaries into reports. Every member sends Switched, only rank 0 sends Progress."""

    def __init__(self, link: ControlLink, slot: SlotWriter | None = None) -> None:
        """`slot` tells the share daemon when this worker computes; None if it holds the whole device."""
        self._link = link
        self._slot = slot
        self._formation: Formation | None = None
        self._direction: Direction | None = None
        self._pause_s: float | None = None
        self._last_end_s: float | None = None
        self._sent_at_s = 0.0
        self._window: deque[_CommittedStep] = deque()
        self._progress: Progress | None = None
        self._step = 0
        self.diverged_at_step: int | None = None
        self.metrics: dict[str, float] = {}
        self.exact_obstacle = ""

    def group_changed(self, formation: Formation, previous: Formation | None, step: int) -> None:
        """Note a new group; the switch is reported after its first step, when the pause is known."""
        self._formation = formation
        self._direction = _direction(formation, previous, step)
        self._pause_s = None
        self._step = step
        self._window.clear()

    def step_begins(self, num_samples: int = 0) -> None:
        """Note that this member starts to compute a step, on about `num_samples` samples."""
        if self._slot is not None:
            self._slot.begin(num_samples)
        if self._direction is not None and self._pause_s is None:
            self._pause_s = time.monotonic() - self._last_end_s if self._last_end_s is not None else 0.0

    def computation_ended(self) -> float:
        """Note that this member's computation is done and the exchange begins; returns the monotonic time."""
        if self._slot is not None:
            self._slot.end()
        return time.monotonic()

    def step_given_up(self) -> None:
        """Note that the step was discarded, so that its time is not counted."""
        if self._slot is not None:
            self._slot.abandon()

    def still_at_work(self) -> None:
        """On rank 0, send the last progress again now and then: an evaluation is no hang, however long it takes."""
        now_s = time.monotonic()
        if self._progress is not None and self._direction is None and now_s - self._sent_at_s >= _AT_WORK_INTERVAL_S:
            self._sent_at_s = now_s
            self._link.send(self._progress)

    def since_last_end_s(self) -> float:
        """Seconds since this member last committed a step; 0 before the first."""
        return time.monotonic() - self._last_end_s if self._last_end_s is not None else 0.0

    def step_ended(
        self, training_cursor: TrainingCursor | LibraryCursor, batch: GlobalBatch, loss: float, *, sync_s: float
    ) -> None:
        """Report a committed step on `batch`; `sync_s` is the time from the start of its exchange to its end."""
        # The batch of a script has another size than the job's; its steps count as the job's.
        size = training_cursor.counted_size
        now_s, num_samples = time.monotonic(), len(batch.ids) * size // (batch.global_batch_size or size)
        self._last_end_s, self._step = now_s, training_cursor.step
        self._link.update(step=training_cursor.step)
        formation, is_diverged = self._formation, not math.isfinite(loss)
        assert formation is not None
        # Said at once, since the reports that follow may be of steps whose loss is finite again.
        is_news = is_diverged and self.diverged_at_step is None
        if is_news:
            self.diverged_at_step = training_cursor.step
        self._send_switched()
        if formation.rank != 0:
            self._progress = None
            return
        self._window.append(_CommittedStep(now_s, num_samples, sync_s))
        # Keep at least two steps, so that steps longer than the window have a speed too.
        while len(self._window) > 2 and now_s - self._window[0].at_s > WINDOW_S:
            self._window.popleft()
        span_s = now_s - self._window[0].at_s
        num_in_span = sum(ended.num_samples for ended in self._window) - self._window[0].num_samples
        total_steps = training_cursor.total_steps
        self._progress = Progress(
            generation=formation.generation,
            step=training_cursor.step,
            total_steps=total_steps,
            world_size=formation.world_size,
            epoch=batch.epoch,
            loss=None if is_diverged else loss,
            is_diverged=is_diverged,
            diverged_at_step=self.diverged_at_step,
            samples_per_s=num_in_span / span_s if span_s > 0 else None,
            metrics={name: value for name, value in self.metrics.items() if math.isfinite(value)},
            exact_obstacle=self.exact_obstacle,
            **self._measured(training_cursor, span_s, num_in_span, formation.world_size),
        )
        if now_s - self._sent_at_s >= PROGRESS_INTERVAL_S or training_cursor.is_over or is_news:
            self._sent_at_s = now_s
            self._link.send(self._progress)
        else:
            self._link.hold(self._progress)

    def _measured(
        self, training_cursor: TrainingCursor | LibraryCursor, span_s: float, num_samples: int, world_size: int
    ) -> dict[str, Any]:
        """The fields of Progress beyond steps: progress over changing batches, durations of a step, gradient noise.

        `local_batch_size` is a worker's part of a step, although it may run virtual shards one after the other: their
        number never changes, so the time still grows in proportion. A step lasts from commit to commit, including user
        code between; an epoch's smaller last batch counts as a fraction of a step.
        """
        size = training_cursor.counted_size
        num_steps = num_samples / size
        timed: dict[str, Any] = {}
        if num_steps > 0.0:
            sync_s = sum(ended.sync_s for ended in list(self._window)[1:]) / (len(self._window) - 1)
            step_s = span_s / num_steps
            timed = {
                "local_batch_size": -(-size // world_size),
                "step_s": step_s,
                "sync_s": min(sync_s, step_s),
            }
        noise = training_cursor.noise
        # Without a signal above the noise nothing is reported, so the controller keeps the last estimate.
        if noise is not None and noise.grad_sqr > 0.0:
            timed |= {"grad_sqr": noise.grad_sqr, "grad_var": noise.grad_var}
        return {
            "progress": training_cursor.progress,
            "total_progress": training_cursor.total_progress,
            "global_batch_size": size,
            **timed,
        }

    def flush(self) -> None:
        """Send a switch that was not reported yet, and the last progress; for the end of training."""
        self._send_switched()
        if self._progress is not None:
            self._link.send(self._progress)

    def _send_switched(self) -> None:
        formation, direction = self._formation, self._direction
        if formation is None or direction is None:
            return
        self._direction = None
        self._link.send(
            Switched(
                generation=formation.generation,
                rank=formation.rank,
                world_size=formation.world_size,
                step=self._step,
                pause_s=self._pause_s or 0.0,
                direction=direction,
            )
        )


def _direction(formation: Formation, previous: Formation | None, step: int) -> Direction:
    if formation.order.forced:
        return "recover"
    if previous is None:
        if formation.order.previous:
            return "grow"
        return "resume" if step else "start"
    if formation.world_size > previous.world_size:
        return "grow"
    return "shrink" if formation.world_size < previous.world_size else "replace"
