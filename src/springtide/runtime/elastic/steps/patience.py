"""How long a member waits for the others in a step before it takes one of them for lost."""

from __future__ import annotations

import time

from springtide.runtime.elastic.group import OPERATION_TIMEOUT_S

# What members do for the first time takes long: libraries load, memory is touched.
FIRST_STEP_TIMEOUT_S = 60.0
_NUM_STEPS = 10


class StepPatience:
    """Follows how long steps take; `timeout_s` is many times as long."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._num_in_generation = 0
        self._began_at_s = 0.0

    @property
    def timeout_s(self) -> float:
        least_s = OPERATION_TIMEOUT_S if self._num_in_generation else FIRST_STEP_TIMEOUT_S
        return max(least_s, _NUM_STEPS * self._longest_s)

    def begin_generation(self) -> None:
        self._num_in_generation = 0

    def begin_step(self) -> None:
        self._began_at_s = time.monotonic()

    def end_step(self) -> None:
        """Count a committed step; a long one is forgotten slowly."""
        self._num_in_generation += 1
        self._longest_s = max(0.9 * self._longest_s, time.monotonic() - self._began_at_s)
