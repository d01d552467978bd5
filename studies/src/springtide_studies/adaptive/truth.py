"""The true behaviour of one application: step times, progress of a step, and ends of epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest
from springtide_studies.adaptive.surface import LinearSurface
from springtide_studies.workloads.pollux_tables import Application, Placement, canonical

Floats = NDArray[np.float64]
# `raw`: as measured. `packed`: no layout is faster than the one on the fewest nodes, whose workers fill them in order.
TableRule = Literal["raw", "packed"]
TABLE_RULES: tuple[TableRule, ...] = ("raw", "packed")

# The published simulator measures no job on more (OSDI'21, section 5.3.1: 16 nodes of 4).
MAX_NODES = 16
MAX_WORKERS = 64
DEVICES_PER_NODE = 4


class Split(NamedTuple):
    """How a step's batch is made up: every worker makes `num_passes` passes over `local_batch_size` samples."""

    local_batch_size: int
    num_passes: int
    global_batch_size: int


class AppTruth:
    """The true behaviour of jobs of one application. Each distinct lookup is made once and kept."""

    def __init__(self, application: Application, tables: TableRule = "raw") -> None:
        self.app = application
        self._tables = tables
        self._times: dict[tuple[Placement, int], tuple[float, float]] = {}
        self._noises: dict[tuple[int, int], tuple[float, float]] = {}
        self._splits: dict[tuple[int, int], Split] = {}

    @cached_property
    def epoch_ends(self) -> tuple[float, ...]:
        """Progress, in steps of the initial batch size, at which each epoch ends: the earliest of all trainings."""
        runs = self.app.runs.values()
        return tuple(min(float(run.progress[epoch]) for run in runs) for epoch in range(self.app.num_epochs))

    @cached_property
    def _surface(self) -> LinearSurface:
        """Step and exchange seconds by (nodes, workers, local batch), means of the placements that share these."""
        sums: dict[tuple[int, int, float], list[Floats]] = {}
        for placement, measured in self.app.placements.items():
            for size, times_s in zip(measured.local_batch_sizes.tolist(), measured.times_s, strict=True):
                sums.setdefault((len(placement), sum(placement), size), []).append(times_s)
        # Sorted, and the larger clusters after them: the triangulation depends on the order of its points.
        keys = sorted(sums)
        points = np.concatenate([np.array(keys, dtype=float), self.app.scalability[:, :3]])
        values = np.concatenate([np.array([np.mean(sums[key], axis=0) for key in keys]), self.app.scalability[:, 3:]])
        return LinearSurface(points, values)

    def split(self, global_batch_size: int, num_workers: int) -> Split:
        """How so many workers make up a batch (Pollux's `update_local_bsz`).

        As few passes as the largest local batch allows, all of the same size, rounded up; at least two on one worker
        above the initial batch size. A worker takes at least `min_local_size`, which can make the batch larger;
        rounding never takes it above the largest batch size.
        """
        known = self._splits.get((global_batch_size, num_workers))
        if known is not None:
            return known
        app = self.app
        share = -(-global_batch_size // num_workers)
        num_passes = max(1, -(-share // app.max_local_size))
        if num_workers == 1 and global_batch_size > app.initial_batch_size:
            num_passes = max(2, num_passes)
        count = num_workers * num_passes
        local = min(-(-share // num_passes), app.max_batch_size // count)
        local = max(local, app.min_local_size)
        split = self._splits[global_batch_size, num_workers] = Split(local, num_passes, count * local)
        return split

    def step_times(self, placement: Placement, local_batch_size: int) -> tuple[float, float]:
        """Seconds of a step of one pass on workers so spread over nodes, and of the exchange in it.

        Linear between the measured local batch sizes of a measured ring; linear over (nodes, workers, local batch)
        for others. Batch sizes beyond the measured ones take as long as the nearest.
        """
        ring = canonical(placement)
        known = self._times.get((ring, local_batch_size))
        if known is None:
            known = self._look_up(ring, local_batch_size)
            if self._tables == "packed":
                compact = canonical(compact_placement(sum(placement)))
                known = max(known, self._look_up(compact, local_batch_size))
            self._times[ring, local_batch_size] = known
        return known

    def _look_up(self, ring: Placement, local_batch_size: int) -> tuple[float, float]:
        measured = self.app.placements.get(ring)
        if measured is None:
            step_s, sync_s = self._surface.at([min(len(ring), MAX_NODES), sum(ring), local_batch_size])
        else:
            sizes, times_s = measured.local_batch_sizes, measured.times_s
            step_s, sync_s = (np.interp(local_batch_size, sizes, times_s[:, index]) for index in (0, 1))
        return float(step_s), float(sync_s)

    def total_step_s(self, placement: Placement, split: Split) -> float:
        """Seconds of a whole step: only the last pass includes the exchange."""
        step_s, sync_s = self.step_times(placement, split.local_batch_size)
        return step_s + (split.num_passes - 1) * (step_s - sync_s)

    def noise(self, global_batch_size: int, epoch: int) -> tuple[float, float]:
        """The gradient's squared norm, and its variance at the initial batch size, in an epoch at a batch size.

        Linear between the trained batch sizes, and of the nearest one beyond them.
        """
        known = self._noises.get((global_batch_size, epoch))
        if known is None:
            sizes = np.array(list(self.app.runs), dtype=float)
            runs = self.app.runs.values()
            sqr = float(np.interp(global_batch_size, sizes, [run.grad_sqr[epoch] for run in runs]))
            var = float(np.interp(global_batch_size, sizes, [run.grad_var[epoch] for run in runs]))
            known = self._noises[global_batch_size, epoch] = (sqr, var)
        return known

    def gain(self, global_batch_size: int, epoch: int) -> float:
        """Progress of one step at a batch size, in steps of the initial one (OSDI'21, section 3.1)."""
        grad_sqr, grad_var = self.noise(global_batch_size, epoch)
        scale = global_batch_size / self.app.initial_batch_size
        return (grad_var + grad_sqr) / (grad_var / scale + grad_sqr)

    def fits(self, global_batch_size: int, num_workers: int) -> bool:
        """Whether so many workers can share a batch of that size without making it larger."""
        return num_workers * self.app.min_local_size <= global_batch_size <= self.app.max_batch_size

    def time_alone_s(self, placement: Placement, batch_sizes: Sequence[int]) -> float:
        """Seconds of all epochs on workers that stay where they are, each epoch at its best batch; inf if none fits."""
        num_workers = sum(placement)
        splits = [self.split(size, num_workers) for size in batch_sizes if self.fits(size, num_workers)]
        total_s, begun = 0.0, 0.0
        for epoch, end in enumerate(self.epoch_ends):
            rates = [self.gain(s.global_batch_size, epoch) / self.total_step_s(placement, s) for s in splits]
            total_s += (end - begun) / max(rates) if rates else math.inf
            begun = end
        return total_s

    def batch_grid(self, num_sizes: int = 40) -> tuple[int, ...]:
        """Global batch sizes at equal ratios from the initial to the largest; the fixed one where there is one."""
        app = self.app
        if app.fixed_batch_size is not None:
            return (app.fixed_batch_size,)
        sizes = np.geomspace(app.initial_batch_size, app.max_batch_size, num_sizes)
        return tuple(dict.fromkeys(round(size) for size in sizes.tolist()))


def compact_placement(num_workers: int) -> Placement:
    """Workers on the fewest nodes of four, filled one after the other."""
    full, part = divmod(num_workers, DEVICES_PER_NODE)
    return (DEVICES_PER_NODE,) * full + ((part,) if part else ())


def make_truths(applications: dict[str, Application], tables: str = "raw") -> dict[str, AppTruth]:
    """The truth of every application. Raises InvalidRequest for an unknown rule of tables."""
    for rule in TABLE_RULES:
        if rule == tables:
            return {name: AppTruth(application, rule) for name, application in applications.items()}
    raise InvalidRequest(f"there are no {tables!r} tables; choose one of {', '.join(TABLE_RULES)}")
