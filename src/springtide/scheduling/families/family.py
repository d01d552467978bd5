"""What was measured of a family of jobs: the time of steps, the gradient noise along the run, the length of jobs."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
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

# The noise of a family is kept by progress, on a logarithmic scale: so many stretches to a doubling.
STRETCHES_PER_DOUBLING = 4
# Beyond the progress of any job of a family, its noise scale is assumed to grow in proportion to progress, for so many
# stretches: it grows as the loss falls (McCandlish et al., 2018, section 4; a factor of 100 and more in Pollux's runs).
NUM_STRETCHES_AHEAD = 5 * STRETCHES_PER_DOUBLING
# Speeds are computed for these ratios of noise and interpolated between them.
NOISE_RATIOS = np.concatenate(([0.0], np.geomspace(1e-2, 1e5, 29)))
# A measurement that differs by less than this fraction counts as equal: noise is no reason to fit a model anew.
SAME_FRACTION = 0.05
# How many lengths of ended jobs are kept, the newest ones.
NUM_LENGTHS = 9
# A job with more progress than any ended job of its family is assumed to have this part of its progress left.
OVERDUE_FRACTION = 0.1
# How many best batches are remembered for a family at most; beyond that all are forgotten.
MOST_BATCHES = 10_000


class JobFamily(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a family, in plain values.

    `noise` maps a stretch of progress to (squared norm, variance) of the gradient. `lengths` are the last progress of
    ended jobs whose length was not known. `used_s` is when there was last a job of the family.
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
        """The family with the new measurements of a job; the same object if there are none."""
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
        """The family with the length of a job that has ended."""
        return msgspec.structs.replace(self, lengths=(*self.lengths, progress)[-NUM_LENGTHS:])

    def left_of(self, progress: float) -> float | None:
        """The progress left of a job of unknown length, by the lengths of its family; None if no job has ended."""
        if not self.lengths:
            return None
        return max(statistics.median(self.lengths) - progress, progress * OVERDUE_FRACTION)

    def noise_at(self, progress: float) -> GradientNoise | None:
        """The noise measured at this progress, or at the nearest one."""
        if not self.noise:
            return None
        stretch = stretch_of(progress)
        nearest = min(self.noise, key=lambda known: (abs(known - stretch), known))
        grad_sqr, grad_var = self.noise[nearest]
        return GradientNoise(grad_sqr=grad_sqr, grad_var=grad_var)


def read_family(kept: Mapping[str, Any]) -> JobFamily:
    """A family from the plain values of the journal."""
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
    """The key of jobs that learn from each other: one model with one batch rule. A job without a family is alone."""
    family = "" if alone else job.family
    bounds = job.batch
    rule = (
        "fixed"
        if bounds is None
        else f"{bounds.min_size}-{bounds.max_size} {bounds.min_local_size}-{bounds.max_local_size} {job.length_unit}"
    )
    each = f"|{job.devices_each} each" if job.devices_each > 1 else ""
    return f"{family or '#' + job.job_id}|{job.global_batch_size}|{rule}{each}"


def stretch_of(progress: float) -> int:
    """The stretch that contains this progress."""
    return math.floor(STRETCHES_PER_DOUBLING * math.log2(max(progress, 1.0)))


def is_sound(noise: GradientNoise) -> bool:
    """Whether an estimate of the noise is usable."""
    return noise.grad_var >= 0.0 and 0.0 < noise.grad_sqr < math.inf and noise.grad_var < math.inf


def _ratio(grad_sqr: float, grad_var: float) -> float:
    return grad_var / grad_sqr


def _is_close(before: float, after: float) -> bool:
    return abs(before - after) <= SAME_FRACTION * max(abs(before), abs(after))


def _is_same(before: StepTime | None, after: StepTime) -> bool:
    return before is not None and _is_close(before.step_s, after.step_s)


class _Corrected:
    """The fitted model, corrected by its error where it was measured. The last result is cached, since the same
    candidates are evaluated for every noise."""

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
    """The speed of a family's jobs on each number of workers, at every progress. Derived from `JobFamily`.

    The best batches that were asked for are remembered, by placement and noise: most jobs ask the same at every
    decision.
    """

    def __init__(
        self, family: JobFamily, sizes: Sequence[int], devices_per_node: int, job: TrainingJob, *, adapts: bool = True
    ) -> None:
        estimate = fit_throughput(family.steps)
        assert estimate is not None
        self.family = family
        self.model = _Corrected(estimate)
        self.bounds: AdaptiveBatch | None = job.batch
        # Whether the batch is chosen by the noise; otherwise it does not change.
        self.adapts = adapts and job.batch is not None
        self.initial = job.global_batch_size
        self.unit: LengthUnit = job.length_unit if job.batch is not None else "samples"
        self.sizes: Ints = np.asarray(sizes, dtype=np.int64)
        self.devices_per_node = devices_per_node
        # They depend on nothing that `with_family` changes.
        self._batches: dict[tuple[int, int, GradientNoise | None], tuple[int, float]] = {}

    def with_family(self, family: JobFamily) -> FamilySpeed:
        """The same speeds with the present noise of the family; its measured step times must be the same."""
        other = copy.copy(self)
        other.family = family
        other.__dict__.pop("_way", None)
        return other

    def nodes_of(self, sizes: Ints) -> Ints:
        """The number of nodes of so many workers in a compact placement."""
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
        """The ends of the stretches (progress), and the seconds up to each of them by size [S, stretches + 1]."""
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
            # Beyond the last stretch, the speed stays as in it.
            left = np.clip(np.searchsorted(edges, points, side="right") - 1, 0, len(edges) - 2)
            slope = (ends[:, left + 1] - ends[:, left]) / (edges[left + 1] - edges[left])
            return ends[:, left] + slope * (points - edges[left])

        with np.errstate(invalid="ignore"):
            found = (at(total) - at(progress)).T
        return np.where(np.isfinite(found), found, np.inf)

    def rates_of_one_batch(self, done: float, total: float) -> Floats:
        """Progress a second on each size, on average from `done` to `total`, with the one batch that is best for the
        whole way. Shape [S]."""
        placements = np.stack([self.nodes_of(self.sizes), self.sizes], axis=1)
        noise = self._mean_noise(done, total) if self.adapts else None
        best = best_batches(self.model, noise, placements, self.bounds, self.initial, self.unit)
        return best.progress_per_s

    def _mean_noise(self, done: float, total: float) -> GradientNoise | None:
        """The noise under which a batch takes as long as from `done` to `total`: the seconds for a step of progress are
        linear in the parts that variance and signal have of the gradient, so that the means of these parts count.

        Where nothing was measured, the noise is that of the nearest progress; it is not assumed to grow.
        """
        first, last = stretch_of(done), stretch_of(max(total, done + 1.0))
        edges = [done, *(2.0 ** (number / STRETCHES_PER_DOUBLING) for number in range(first + 1, last + 1)), total]
        variance = signal = 0.0
        for begin, end in itertools.pairwise(edges):
            noise = self.family.noise_at(begin)
            if noise is None:
                return None
            length = max(end - begin, 0.0) / (noise.grad_var + noise.grad_sqr)
            variance, signal = variance + length * noise.grad_var, signal + length * noise.grad_sqr
        return GradientNoise(grad_sqr=signal, grad_var=variance) if signal > 0.0 else None

    def batch_for(self, num_nodes: int, num_workers: int, noise: GradientNoise | None) -> tuple[int, float]:
        """The best global batch for so many workers, and its progress a second by the model."""
        key = (num_nodes, num_workers, noise)
        known = self._batches.get(key)
        if known is None:
            best = best_batches(self.model, noise, [(num_nodes, num_workers)], self.bounds, self.initial, self.unit)
            if len(self._batches) >= MOST_BATCHES:
                self._batches.clear()
            known = self._batches[key] = int(best.global_batch_size[0]), float(best.goodput_per_s[0])
        return known


def _inverse(rates: Floats) -> Floats:
    return np.divide(1.0, rates, out=np.full_like(rates, np.inf), where=rates > 0.0)


@lru_cache(maxsize=4096)
def _place_of(noise: GradientNoise | None) -> float:
    """Where a noise ratio lies among `NOISE_RATIOS`, as a fractional index; no noise known counts as none."""
    if noise is None or not is_sound(noise):
        return 0.0
    return float(np.interp(noise.grad_var / noise.grad_sqr, NOISE_RATIOS, np.arange(len(NOISE_RATIOS))))
