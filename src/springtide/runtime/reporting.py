"""What the control plane is told about training: progress a few times a second, and every switch with its pause."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Literal

from springtide.core.wire import Progress, Switched
from springtide.runtime.link import ControlLink
from springtide.runtime.membership import Formation

_PROGRESS_INTERVAL_S = 0.25
_WINDOW_S = 5.0

Direction = Literal["start", "grow", "shrink", "recover", "resume", "replace"]


class Reporter:
    """Turns step boundaries into reports. Every member sends Switched, only rank 0 sends Progress."""

    def __init__(self, link: ControlLink) -> None:
        self._link = link
        self._formation: Formation | None = None
        self._direction: Direction | None = None
        self._pause_s: float | None = None
        self._last_end_s: float | None = None
        self._sent_at_s = 0.0
        self._window: deque[tuple[float, int]] = deque()
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

    def step_begins(self) -> None:
        """Training is about to compute again."""
        if self._direction is not None and self._pause_s is None:
            self._pause_s = time.monotonic() - self._last_end_s if self._last_end_s is not None else 0.0

    def since_last_end_s(self) -> float:
        """How long ago this member committed a step; 0 where it has not."""
        return time.monotonic() - self._last_end_s if self._last_end_s is not None else 0.0

    def step_ended(self, *, step: int, total_steps: int, epoch: int, loss: float, num_samples: int) -> None:
        """A step is committed."""
        now_s = time.monotonic()
        self._last_end_s, self._step = now_s, step
        self._link.update(step=step)
        formation = self._formation
        assert formation is not None
        self._send_switched()
        if formation.rank != 0:
            return
        self._window.append((now_s, num_samples))
        while now_s - self._window[0][0] > _WINDOW_S:
            self._window.popleft()
        span_s = now_s - self._window[0][0]
        num_in_span = sum(count for _, count in self._window) - self._window[0][1]
        self._progress = Progress(
            generation=formation.generation,
            step=step,
            total_steps=total_steps,
            world_size=formation.world_size,
            epoch=epoch,
            loss=loss if abs(loss) < float("inf") else None,
            samples_per_s=num_in_span / span_s if span_s > 0 else None,
            metrics={name: value for name, value in self.metrics.items() if math.isfinite(value)},
        )
        if now_s - self._sent_at_s >= _PROGRESS_INTERVAL_S or step == total_steps:
            self._sent_at_s = now_s
            self._link.send(self._progress)

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
