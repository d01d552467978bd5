"""What a family of jobs has shown: how long its steps take, how noisy gradients are on the way, how long jobs last."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from springtide.core.decision import JobView
from springtide.core.job_parts import GradientNoise, StepTime
from springtide.core.workload import AdaptiveBatch, LengthUnit, TrainingJob
from springtide.perf.goodput import best_batches
from springtide.perf.step_estimate import StepEstimate, fit_throughput, merge_step_times

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The noise of a family is kept by how far its jobs are, on a logarithmic scale: so many stretches to a doubling.
STRETCHES_PER_DOUBLING = 4
# Beyond where any job of a family has come, its noise scale is taken to grow in proportion to progress, for so many
# stretches: it grows as the loss falls (McCandlish et al., 2018, section 4; a factor of 100 and more in Pollux's runs).
NUM_STRETCHES_AHEAD = 5 * STRETCHES_PER_DOUBLING
# Speeds are worked out for noise scales this far apart and interpolated between them.
NOISE_RATIOS = np.concatenate(([0.0], np.geomspace(1e-2, 1e5, 29)))
# A measurement that differs by less is the same: noise is no reason to fit a model anew.
SAME_FRACTION = 0.05
# So many lengths of jobs that have ended are kept; the newest count.
NUM_LENGTHS = 9
# A job that is further than others of its family came has this part of what it has done still to do.
OVERDUE_FRACTION = 0.1


class JobFamily(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a family: plain values only.

    `noise` maps a stretch of the way to (squared norm, variance) of the gradient; `lengths` are the progress at which
    jobs of unknown length were seen last. `used_s` is when one of its jobs was last there.
    """

    steps: tuple[StepTime, ...] = ()
    noise: dict[int, tuple[float, float]] = {}
    lengths: tuple[float, ...] = ()
    used_s: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether any step was measured."""
        return bool(self.steps)

    def with_view(self, view: JobView, now_s: float) -> JobFamily:
        """With what a job has shown since; the same object where that is nothing new."""
        known = {(step.placement, step.local_batch_size): step for step in self.steps}
        news = [
            step
            for step in view.learnt.step_times
            if not _is_same(known.get((step.placement, step.local_batch_size)), step)
        ]
        changed = self
        if news:
            changed = msgspec.structs.replace(changed, steps=merge_step_times(self.steps, news))
        if view.learnt.noise is not None and is_sound(view.learnt.noise):
            stretch, seen = stretch_of(view.equivalent_steps), (view.learnt.noise.grad_sqr, view.learnt.noise.grad_var)
            before = self.noise.get(stretch)
            if before is None or not _is_close(_ratio(*before), _ratio(*seen)):
                noise = dict(sorted({**self.noise, stretch: seen}.items()))
                changed = msgspec.structs.replace(changed, noise=noise)
        return changed if changed is self else msgspec.structs.replace(changed, used_s=now_s)

    def with_length(self, progress: float) -> JobFamily:
        """With the length of a job that is there no more."""
        return msgspec.structs.replace(self, lengths=(*self.lengths, progress)[-NUM_LENGTHS:])

    def left_of(self, progress: float) -> float | None:
        """What is left of a job of unknown length, by what others of its family took; None if none has ended."""
        if not self.lengths:
            return None
        return max(statistics.median(self.lengths) - progress, progress * OVERDUE_FRACTION)

    def noise_at(self, progress: float) -> GradientNoise | None:
        """The noise that was seen at this point of the way, or at the nearest one."""
        if not self.noise:
            return None
        stretch = stretch_of(progress)
        nearest = min(self.noise, key=lambda known: (abs(known - stretch), known))
        grad_sqr, grad_var = self.noise[nearest]
        return GradientNoise(grad_sqr=grad_sqr, grad_var=grad_var)


def read_family(kept: Mapping[str, Any]) -> JobFamily:
    """A family out of a journal's plain values."""
    return JobFamily(
        steps=tuple(
            StepTime(placement=tuple(placement), local_batch_size=local, step_s=step_s, sync_s=sync_s)
            for placement, local, step_s, sync_s in kept["steps"]
        ),
        noise={stretch: (grad_sqr, grad_var) for stretch, grad_sqr, grad_var in kept["noise"]},
        lengths=tuple(kept["lengths"]),
        used_s=kept["used_s"],
    )


def write_family(family: JobFamily) -> dict[str, Any]:
    """A family as plain values."""
    return {
        "steps": [[list(step.placement), step.local_batch_size, step.step_s, step.sync_s] for step in family.steps],
        "noise": [[stretch, grad_sqr, grad_var] for stretch, (grad_sqr, grad_var) in family.noise.items()],
        "lengths": list(family.lengths),
        "used_s": family.used_s,
    }


def family_key(job: TrainingJob, *, alone: bool = False) -> str:
    """Jobs with the same key learn from each other: one model with one batch rule. Without a family, itself alone."""
    family = "" if alone else job.family
    bounds = job.batch
    rule = (
        "fixed"
        if bounds is None
        else f"{bounds.min_size}-{bounds.max_size} {bounds.min_local_size}-{bounds.max_local_size} {job.length_unit}"
    )
    return f"{family or '#' + job.job_id}|{job.global_batch_size}|{rule}"


def stretch_of(progress: float) -> int:
    """Which stretch of the way this progress lies in."""
    return math.floor(STRETCHES_PER_DOUBLING * math.log2(max(progress, 1.0)))


def is_sound(noise: GradientNoise) -> bool:
    """Whether an estimate of the noise can be worked with."""
    return noise.grad_var >= 0.0 and 0.0 < noise.grad_sqr < math.inf and noise.grad_var < math.inf


def _ratio(grad_sqr: float, grad_var: float) -> float:
    return grad_var / grad_sqr


def _is_close(before: float, after: float) -> bool:
    return abs(before - after) <= SAME_FRACTION * max(abs(before), abs(after))


def _is_same(before: StepTime | None, after: StepTime) -> bool:
    return before is not None and _is_close(before.step_s, after.step_s)


class _Corrected:
    """The fitted model, corrected by its error where it was measured. The last question's answer is kept: the same
    candidates are asked about for every noise."""

    def __init__(self, estimate: StepEstimate) -> None:
        self._estimate = estimate
        self._asked: tuple[bytes, ...] = ()
        self._answer: tuple[Floats, Floats] = (np.zeros(0), np.zeros(0))

    def step_s(
        self, num_nodes: ArrayLike, num_workers: ArrayLike, local_batch_size: ArrayLike
    ) -> tuple[Floats, Floats]:
        """Return (step_s, sync_s) of steps of one pass; shapes broadcast."""
        nodes, workers, local = np.broadcast_arrays(num_nodes, num_workers, local_batch_size)
        asked = (nodes.tobytes(), workers.tobytes(), local.tobytes())
        if asked != self._asked:
            step_s, sync_s = self._estimate.model.step_s(nodes, workers, local)
            off, _ = self._estimate.error(nodes, workers, local)
            factor = np.exp(off).reshape(nodes.shape)
            self._asked, self._answer = asked, (step_s * factor, sync_s * factor)
        return self._answer


class FamilySpeed:
    """How fast a family's jobs go on each number of workers, at every point of their way. Derived from `JobFamily`."""

    def __init__(
        self, family: JobFamily, sizes: Sequence[int], devices_per_node: int, job: TrainingJob, *, adapts: bool = True
    ) -> None:
        estimate = fit_throughput(family.steps)
        assert estimate is not None
        self.family = family
        self.model = _Corrected(estimate)
        self.bounds: AdaptiveBatch | None = job.batch
        # Whether the batch is chosen by the noise; otherwise it is as it was, whatever the noise.
        self.adapts = adapts and job.batch is not None
        self.initial = job.global_batch_size
        self.unit: LengthUnit = job.length_unit if job.batch is not None else "samples"
        self.sizes: Ints = np.asarray(sizes, dtype=np.int64)
        self.devices_per_node = devices_per_node

    def with_family(self, family: JobFamily) -> FamilySpeed:
        """The same speeds with the way that a family's noise takes now; nothing new may have been measured."""
        other = copy.copy(self)
        other.family = family
        other.__dict__.pop("_way", None)
        return other

    def nodes_of(self, sizes: Ints) -> Ints:
        """On how many nodes so many workers lie when they lie close together."""
        return -(-sizes // self.devices_per_node)

    @cached_property
    def rates(self) -> Floats:
        """Progress a second, by size and noise ratio. Shape [S, R]."""
        placements = np.stack([self.nodes_of(self.sizes), self.sizes], axis=1)
        columns = []
        noises = [GradientNoise(grad_sqr=1.0, grad_var=ratio) for ratio in NOISE_RATIOS.tolist()]
        for noise in noises if self.adapts else [None]:
            best = best_batches(
                self.model,
                noise,
                placements,
                self.bounds,
                self.initial,
                self.unit,
            )
            columns.append(best.progress_per_s)
        return np.stack(columns, axis=1)

    def rates_at(self, noise: GradientNoise | None) -> Floats:
        """Progress a second on each size with this noise. Shape [S]."""
        if not self.adapts:
            return self.rates[:, 0]
        place = _place_of(noise)
        low = int(place)
        high = min(low + 1, len(NOISE_RATIOS) - 1)
        return np.asarray(self.rates[:, low] * (1.0 - place + low) + self.rates[:, high] * (place - low))

    @cached_property
    def _way(self) -> tuple[Floats, Floats]:
        """The ends of the stretches (progress), and the seconds up to each of them on each size [S, stretches + 1]."""
        if not self.adapts or not self.family.noise:
            rates = self.rates_at(None)[:, None]
            return np.array([0.0, 1.0]), np.concatenate([np.zeros_like(rates), _inverse(rates)], axis=1)
        known = list(self.family.noise)
        stretches = np.arange(known[0], known[-1] + 1 + NUM_STRETCHES_AHEAD)
        edges = np.concatenate(([0.0], 2.0 ** ((stretches[:-1] + 1) / STRETCHES_PER_DOUBLING)))
        columns: list[Floats] = []
        ratio = 0.0
        for stretch in stretches.tolist():
            if stretch in self.family.noise:
                ratio = _ratio(*self.family.noise[stretch])
            elif stretch > known[-1]:
                ratio *= 2.0 ** (1.0 / STRETCHES_PER_DOUBLING)
            columns.append(_inverse(self.rates_at(GradientNoise(grad_sqr=1.0, grad_var=ratio))))
        seconds = np.stack(columns, axis=1)
        lengths = np.diff(edges, append=edges[-1] + 1.0)
        ends = np.concatenate([np.zeros((len(self.sizes), 1)), np.cumsum(seconds * lengths, axis=1)], axis=1)
        return np.append(edges, edges[-1] + 1.0), ends

    def seconds(self, progress: Floats, total: Floats) -> Floats:
        """Seconds from `progress` to `total` (arrays [J]) on each size: [J, S]; inf where a size cannot run."""
        edges, ends = self._way

        def at(points: Floats) -> Floats:
            # Beyond the last stretch it goes on as in it.
            left = np.clip(np.searchsorted(edges, points, side="right") - 1, 0, len(edges) - 2)
            slope = (ends[:, left + 1] - ends[:, left]) / (edges[left + 1] - edges[left])
            return ends[:, left] + slope * (points - edges[left])

        with np.errstate(invalid="ignore"):
            found = (at(total) - at(progress)).T
        return np.where(np.isfinite(found), found, np.inf)

    def batch_for(self, num_nodes: int, num_workers: int, noise: GradientNoise | None) -> tuple[int, float]:
        """The best global batch for so many workers, and the progress a second that it brings by the model."""
        best = best_batches(self.model, noise, [(num_nodes, num_workers)], self.bounds, self.initial, self.unit)
        return int(best.global_batch_size[0]), float(best.goodput_per_s[0])


def _inverse(rates: Floats) -> Floats:
    return np.divide(1.0, rates, out=np.full_like(rates, np.inf), where=rates > 0.0)


def _place_of(noise: GradientNoise | None) -> float:
    """Where a noise ratio lies among `NOISE_RATIOS`, as a fractional index; no noise known counts as none."""
    if noise is None or not is_sound(noise):
        return 0.0
    return float(np.interp(noise.grad_var / noise.grad_sqr, NOISE_RATIOS, np.arange(len(NOISE_RATIOS))))
