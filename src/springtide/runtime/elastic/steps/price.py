"""What exact steps cost beside plain ones, measured by the job itself in a few of its first steps."""

from __future__ import annotations

import time

from springtide.core.job_parts import EXACT_COST

# Steps before the first one warm up, and so do the first plain passes, which find no memory in use before.
_FIRST_STEP = 5
_NUM_STEPS = 6
_NUM_WARM = 2


class PriceMeter:
    """Compares passes in a step with a plain pass over the same samples, each with what else the step does.

    It takes the least processor time of each. A plain pass is made in `_NUM_STEPS` steps, and thrown away.
    """

    def __init__(self, metrics: dict[str, float]) -> None:
        self._metrics = metrics
        self._num_begun = 0
        self._steps: list[tuple[float, float]] = []
        self._is_dropped = False
        self._began_s = 0.0
        self._taken_s = {"plain": 0.0, "exact": 0.0}

    def begin_step(self) -> None:
        """A step begins."""
        self._num_begun += 1
        self._is_dropped = False
        self._taken_s = {"plain": 0.0, "exact": 0.0}

    @property
    def wants_plain(self) -> bool:
        """Whether the step is to have a plain pass too."""
        return self._num_begun > _FIRST_STEP and len(self._steps) < _NUM_STEPS

    def begin_part(self) -> None:
        """A pass begins, with the reading of its samples."""
        self._began_s = time.process_time()

    def end_part(self, way: str) -> None:
        """It has ended; `way` is `plain` for the one that is thrown away."""
        self._taken_s["plain" if way == "plain" else "exact"] += time.process_time() - self._began_s

    def begin_rest(self) -> None:
        """All passes are made; what follows is the same for both kinds of step."""
        self._began_s = time.process_time()

    def drop_step(self) -> None:
        """This step tells nothing: a pass was made that others do not have, or the step is given up."""
        self._is_dropped = True

    def end_step(self) -> None:
        """The step is done."""
        plain_s, exact_s = self._taken_s["plain"], self._taken_s["exact"]
        if not plain_s or self._is_dropped:
            return
        rest_s = time.process_time() - self._began_s
        self._steps.append((exact_s + rest_s, plain_s + rest_s))
        if len(self._steps) == _NUM_STEPS:
            exact, plain = (min(taken) for taken in zip(*self._steps[_NUM_WARM:], strict=True))
            self._metrics[EXACT_COST] = round(exact / plain, 2)
