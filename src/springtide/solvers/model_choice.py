"""Which model of device each job should have: one choice over all jobs, where a job's value differs by model and size.

The sizes within one model are taken to be divisible along concave hulls, as in `solvers/share_dp.py`; the choice of
models is a local search from the present one, with the dual of these hulls as the price of a device of each model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from springtide.solvers.share_dp import hull_segments

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# How many of the jobs that gain most at the present prices are tried one by one, when many at once do not pay.
NUM_SINGLE = 6
# A trial takes time in proportion to the jobs: this many of them may be looked at, in all trials together.
MAX_LOOKED_AT = 8_000
LEAST_TRIALS = 4
# Jobs without a model are given one in so many groups, each at the prices that the groups before it have left.
NUM_GROUPS = 16
# A move has to raise the sum of values by this fraction.
LEAST_GAIN = 1e-9


class ModelChoice:
    """`sizes[j, k]` (ascending, 0 behind the last) and `values[j, k]` are the choices of job j on devices of model k,
    `capacity[k]` how many devices of it there are. `models[j]` is the model that the job has now (-1: none yet).

    Jobs in `movable` may be given another model. On model k job j has `floors[j, k]` devices in any case, one of its
    sizes there, or 0.
    """

    def __init__(
        self,
        sizes: Ints,
        values: Floats,
        capacity: Sequence[int],
        models: Sequence[int],
        movable: Sequence[bool],
        floors: Ints,
    ) -> None:
        self._sizes, self._values, self._floors = sizes, np.where(sizes > 0, values, 0.0), floors
        self._at_floor: Floats = np.where(sizes == floors[:, :, None], self._values, 0.0).max(axis=2)
        self._capacity = capacity
        self.models: Ints = np.array(models, dtype=np.int64)
        self._movable: Bools = np.array(movable, dtype=bool)
        self._able: Bools = np.asarray((self._values > 0.0).any(axis=2))
        self._worth = [0.0] * len(self._capacity)
        self.prices: Floats = np.zeros(len(self._capacity))
        self._num_left = 0
        # The segments of all jobs on each model, the best first.
        self._segments: list[tuple[Ints, Floats, Floats]] = []
        for k in range(len(capacity)):
            more = np.maximum(sizes[:, k] - floors[:, k, None], 0)
            gains = np.where(more > 0, self._values[:, k] - self._at_floor[:, k, None], 0.0)
            rows, slopes, widths = hull_segments(more, gains)
            order = np.argsort(-slopes, kind="stable")
            self._segments.append((rows[order], slopes[order], widths[order]))

    def run(self) -> list[int]:
        """Choose. Returns the model of each job."""
        if not len(self.models):
            return []
        self._update(range(len(self._capacity)))
        self._place_new()
        self._num_left = max(LEAST_TRIALS, MAX_LOOKED_AT // len(self.models))
        while self._num_left > 0:
            gains, best = self._gains()
            order = np.argsort(-gains, kind="stable")
            order = order[gains[order] > 0.0]
            if not len(order) or not (self._move_many(order, best) or self._move_one(order[:NUM_SINGLE], best)):
                break
        return [int(model) for model in self.models]

    def _place_new(self) -> None:
        new = np.flatnonzero(self.models < 0)
        # Those that are worth most first.
        new = new[np.argsort(-self._values[new].max(axis=(1, 2)), kind="stable")]
        step = max(1, -(-len(new) // NUM_GROUPS))
        for first in range(0, len(new), step):
            group = new[first : first + step]
            surplus = self._surplus()[group]
            # Where nothing is left over its price, it goes where it would be worth most.
            alone = np.where(self._able[group], self._values[group].max(axis=2), -1.0)
            self.models[group] = np.where(surplus.max(axis=1) > 0.0, surplus.argmax(axis=1), alone.argmax(axis=1))
            self._update(range(len(self._capacity)))

    def _move_many(self, order: Ints, best: Ints) -> bool:
        """Move the jobs that gain most at the present prices, as many as raise the sum; returns whether any does."""
        count = len(order)
        while count > 1 and self._num_left > 0:
            chosen = order[:count]
            if self._try(chosen, best[chosen]):
                return True
            count //= 2
        return False

    def _move_one(self, order: Ints, best: Ints) -> bool:
        """Move one job, and if that alone does not pay, another one out of its way."""
        before, worth = self.models.copy(), sum(self._worth)
        for job in order.tolist():
            if self._num_left <= 0:
                break
            if self._try(np.array([job]), best[[job]]):
                return True
            self._set(np.array([job]), best[[job]])
            gains, second = self._gains()
            gains[job] = 0.0
            other = int(np.argmax(gains))
            if gains[other] > 0.0:
                self._set(np.array([other]), second[[other]])
                if sum(self._worth) > worth * (1.0 + LEAST_GAIN):
                    return True
            changed = np.flatnonzero(self.models != before)
            self._set(changed, before[changed])
        return False

    def _try(self, jobs: Ints, models: Ints) -> bool:
        before, worth = self.models[jobs].copy(), sum(self._worth)
        self._set(jobs, models)
        if sum(self._worth) > worth * (1.0 + LEAST_GAIN):
            return True
        self._set(jobs, before)
        return False

    def _set(self, jobs: Ints, models: Ints) -> None:
        self._num_left -= 1
        touched = {*self.models[jobs].tolist(), *models.tolist()}
        self.models[jobs] = models
        self._update(touched)

    def _update(self, touched: Sequence[int] | set[int] | range) -> None:
        """The value of these models' devices, and the price of one, with the jobs that have the model now."""
        for k in touched:
            rows, slopes, widths = self._segments[k]
            mine = self.models == k
            here = mine[rows]
            slopes, widths = slopes[here], widths[here]
            left = max(0, self._capacity[k] - int(self._floors[mine, k].sum()))
            ends = np.cumsum(widths)
            taken = np.clip(left - (ends - widths), 0.0, widths)
            self._worth[k] = float(self._at_floor[mine, k].sum() + slopes @ taken)
            full = int(np.searchsorted(ends, left, side="right"))
            self.prices[k] = slopes[full] if full < len(slopes) else 0.0

    def _surplus(self) -> Floats:
        """The most that each job's value exceeds the price on each model. Shape [J, K]."""
        over = self._values - self.prices[None, :, None] * self._sizes
        return np.asarray(np.where(self._values > 0.0, over, 0.0).max(axis=2).clip(min=0.0))

    def _gains(self) -> tuple[Floats, Ints]:
        """How much more each job that may move has over the price on another model, and on which. Shapes [J]."""
        surplus = self._surplus()
        rows = np.arange(len(self.models))
        present = surplus[rows, self.models]
        # On its own model it competes with itself for the marginal device.
        surplus[rows, self.models] = -1.0
        best = surplus.argmax(axis=1)
        gains = np.where(self._movable, surplus[rows, best] - present, 0.0)
        is_stuck = self._movable & ~self._able[rows, self.models] & self._able.any(axis=1)
        return np.where(is_stuck, np.maximum(gains, surplus[rows, best]), gains), best
