"""What the control plane is told about training: progress a few times a second, and every switch with its pause."""

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
from springtide.runtime.process.control_link import ControlLink

_PROGRESS_INTERVAL_S = 0.25
_WINDOW_S = 5.0

Direction = Literal["start", "grow", "shrink", "recover", "resume", "replace"]


class _Ended(NamedTuple):
    """A committed step."""

    at_s: float
    num_samples: int
    sync_s: float


class Reporter:
    """Turns step boundaries into reports. Every member sends Switched, only rank 0 sends Progress."""

    def __init__(self, link: ControlLink, slot: SlotWriter | None = None) -> None:
        """`slot` is where a worker tells when it computes (None: it has its device to itself)."""
        self._link = link
        self._slot = slot
        self._formation: Formation | None = None
        self._direction: Direction | None = None
        self._pause_s: float | None = None
        self._last_end_s: float | None = None
        self._sent_at_s = 0.0
        self._window: deque[_Ended] = deque()
        self._progress: Progress | None = None
        self._step = 0
        self.metrics: dict[str, float] = {}

    def group_changed(self, formation: Formation, previous: Formation | None, step: int) -> None:
        """A new group begins; it is reported after its first step."""
        self._formation = formation
        self._direction = _direction(formation, previous, step)
        self._pause_s = None
        self._step = step
        self._window.clear()

    def step_begins(self, num_samples: int = 0) -> None:
        """Training is about to compute again, here on about so many samples."""
        if self._slot is not None:
            self._slot.begin(num_samples)
        if self._direction is not None and self._pause_s is None:
            self._pause_s = time.monotonic() - self._last_end_s if self._last_end_s is not None else 0.0

    def computation_ended(self) -> float:
        """This member has computed its part of the step; what follows waits for the others. The moment it is now."""
        if self._slot is not None:
            self._slot.end()
        return time.monotonic()

    def step_given_up(self) -> None:
        """The step cannot be completed: its time is not counted."""
        if self._slot is not None:
            self._slot.abandon()

    def since_last_end_s(self) -> float:
        """How long ago this member committed a step; 0 where it has not."""
        return time.monotonic() - self._last_end_s if self._last_end_s is not None else 0.0

    def step_ended(self, course: TrainingCursor, batch: GlobalBatch, loss: float, *, sync_s: float) -> None:
        """A step on `batch` is committed; from its exchange on it took `sync_s`."""
        now_s, num_samples = time.monotonic(), len(batch.ids)
        self._last_end_s, self._step = now_s, course.step
        self._link.update(step=course.step)
        formation = self._formation
        assert formation is not None
        self._send_switched()
        if formation.rank != 0:
            return
        self._window.append(_Ended(now_s, num_samples, sync_s))
        # Two ends of steps always stay, or steps longer than the window would have no speed.
        while len(self._window) > 2 and now_s - self._window[0].at_s > _WINDOW_S:
            self._window.popleft()
        span_s = now_s - self._window[0].at_s
        num_in_span = sum(ended.num_samples for ended in self._window) - self._window[0].num_samples
        total_steps = course.total_steps
        self._progress = Progress(
            generation=formation.generation,
            step=course.step,
            total_steps=total_steps,
            world_size=formation.world_size,
            epoch=batch.epoch,
            loss=loss if abs(loss) < float("inf") else None,
            samples_per_s=num_in_span / span_s if span_s > 0 else None,
            metrics={name: value for name, value in self.metrics.items() if math.isfinite(value)},
            **self._measured(course, span_s, num_in_span, formation.world_size),
        )
        if now_s - self._sent_at_s >= _PROGRESS_INTERVAL_S or course.is_over:
            self._sent_at_s = now_s
            self._link.send(self._progress)

    def _measured(self, course: TrainingCursor, span_s: float, num_samples: int, world_size: int) -> dict[str, Any]:
        """What is said beyond steps: progress over changing batches, how long a step takes, gradient noise.

        A worker's share of a step counts as one pass over `local_batch_size` samples, though it goes over its virtual
        shards one after the other: that number never changes, so time still grows in proportion to the share. A step
        lasts from commit to commit, the user's own code included; epochs' short last batches count in proportion.
        """
        size = course.cursor.global_batch_size
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
        noise = course.noise
        # Where no signal is left above the noise, the last figures stand: "infinitely noisy" is nothing to choose by.
        if noise is not None and noise.grad_sqr > 0.0:
            timed |= {"grad_sqr": noise.grad_sqr, "grad_var": noise.grad_var}
        return {
            "progress": course.progress,
            "total_progress": course.total_progress,
            "global_batch_size": size,
            **timed,
        }

    def flush(self) -> None:
        """No step follows: report a switch that has had none, and the last progress."""
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
