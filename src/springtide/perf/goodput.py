"""Goodput: the gain of a larger batch, its split over workers and passes, and the best batch for a placement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from springtide.core.job_parts import GradientNoise
from springtide.core.workload import AdaptiveBatch, LearningRateRule, LengthUnit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# How many batch sizes are tried within a job's bounds, in equal ratios (as in the published adaptdl).
NUM_BATCH_SIZES = 50
# The tolerance for quotients that are whole numbers except for rounding errors.
_EPSILON = 1e-8


class StepModel(Protocol):
    """Predicts the seconds of a step: the fitted `ThroughputModel`, or a table of measurements."""

    def step_s(
        self, num_nodes: ArrayLike, num_workers: ArrayLike, local_batch_size: ArrayLike
    ) -> tuple[Floats, Floats]:
        """Return (seconds of a step of one pass, the part of it that a further pass would not add)."""
        ...


class BestBatches(msgspec.Struct, frozen=True, kw_only=True):
    """For each of P candidate placements (arrays of shape [P]) the batch with the highest goodput.

    `global_batch_size` is `num_workers * local_batch_size * num_passes` for an adaptive job. `progress_per_s` is in
    steps of the initial batch size, in the job's length unit; `goodput_per_s` is the same in scale-invariant progress,
    by which the batch was chosen. Both are 0.0 where the placement cannot run within the bounds.
    """

    global_batch_size: Ints
    local_batch_size: Ints
    num_passes: Ints
    step_s: Floats
    progress_per_s: Floats
    goodput_per_s: Floats


def gain(noise: GradientNoise | None, scale: ArrayLike) -> Floats:
    """Scale-invariant progress of one step at `scale` times the initial batch size (Pollux, OSDI'21, section 3.1).

    `(var + sqr) / (var / scale + sqr)`: 1 at scale 1, approaching `1 + var / sqr` for large batches. While the noise is
    not known (None, or without a finite positive sum), a larger batch has no gain: 1 from scale 1 on.
    """
    scales = np.asarray(scale, dtype=np.float64)
    if not _is_known(noise):
        return np.minimum(scales, 1.0)
    assert noise is not None
    return np.asarray((noise.grad_var + noise.grad_sqr) / (noise.grad_var / scales + noise.grad_sqr))


def efficiency(noise: GradientNoise | None, scale: ArrayLike) -> Floats:
    """Progress per sample relative to the initial batch size: `gain / scale`, at most 1 for scales from 1 on."""
    scales = np.asarray(scale, dtype=np.float64)
    return gain(noise, scales) / scales


def noise_scale(noise: GradientNoise | None, initial_batch_size: int) -> float | None:
    """The batch size in samples at which noise and signal of the gradient are equal; None if not known.

    McCandlish et al., 2018, section 2.2: tr(Sigma) / |G|^2, here `var / sqr * initial_batch_size`.
    """
    if not _is_known(noise) or noise is None or noise.grad_sqr <= 0.0:
        return None
    return noise.grad_var / noise.grad_sqr * initial_batch_size


def step_total_s(step_s: ArrayLike, sync_s: ArrayLike, num_passes: ArrayLike) -> Floats:
    """Seconds of a step of several passes, of which only the last includes the exchange (`sync_s`)."""
    steps = np.asarray(step_s, dtype=np.float64)
    return np.asarray(steps + (np.asarray(num_passes) - 1) * (steps - np.asarray(sync_s, dtype=np.float64)))


def best_batches(
    model: StepModel,
    noise: GradientNoise | None,
    placements: ArrayLike | Sequence[tuple[int, int]],
    bounds: AdaptiveBatch | None,
    initial_batch_size: int,
    length_unit: LengthUnit = "progress",
) -> BestBatches:
    """Choose the batch with the highest goodput for each placement, a pair (num_nodes, num_workers).

    `NUM_BATCH_SIZES` sizes in equal ratios are tried within the bounds (Pollux, section 4.1, and adaptdl). A job
    without bounds keeps its batch; so does one whose noise is not known, except where `min_local_size` demands a larger
    one.
    """
    pairs = np.asarray(placements, dtype=np.int64).reshape(-1, 2)
    num_nodes, num_workers = pairs[:, 0], pairs[:, 1]
    if bounds is None:
        globals_ = np.full((1, len(pairs)), initial_batch_size, dtype=np.int64)
        passes = np.ones_like(globals_)
        locals_ = -(-globals_ // np.maximum(num_workers, 1))
        is_valid = num_workers <= initial_batch_size
    else:
        locals_, passes = _candidates(num_workers, bounds, initial_batch_size, is_fixed=not _is_known(noise))
        globals_ = locals_ * passes * num_workers
        is_valid = (locals_ >= bounds.min_local_size) & (globals_ <= bounds.max_size) & (globals_ >= bounds.min_size)
    is_valid = is_valid & (num_workers >= 1)
    step_s, sync_s = model.step_s(num_nodes, num_workers, np.maximum(locals_, 1))
    totals = step_total_s(step_s, sync_s, passes)
    scales = globals_ / initial_batch_size
    goodputs = np.where(is_valid, gain(noise, np.maximum(scales, _EPSILON)) / totals, 0.0)
    chosen = np.argmax(goodputs, axis=0), np.arange(len(pairs))
    goodput, total, scale = goodputs[chosen], totals[chosen], scales[chosen]
    return BestBatches(
        global_batch_size=globals_[chosen],
        local_batch_size=locals_[chosen],
        num_passes=passes[chosen],
        step_s=total,
        progress_per_s=goodput if length_unit == "progress" else np.where(goodput > 0.0, scale / total, 0.0),
        goodput_per_s=goodput,
    )


def _candidates(
    num_workers: Ints, bounds: AdaptiveBatch, initial_batch_size: int, *, is_fixed: bool
) -> tuple[Ints, Ints]:
    """Local batch sizes and passes to try: arrays [sizes, P]; for a fixed batch only one size."""
    workers = np.maximum(num_workers, 1)
    least = np.maximum(bounds.min_size, bounds.min_local_size * workers).astype(np.float64)
    if is_fixed:
        shares = np.maximum(least, min(initial_batch_size, bounds.max_size))[None, :] / workers
    else:
        ratios = np.maximum(bounds.max_size / least, 1.0)
        steps = np.linspace(0.0, 1.0, NUM_BATCH_SIZES)
        shares = least / workers * np.exp(steps[:, None] * np.log(ratios))
    if bounds.max_local_size is None:
        passes = np.ones_like(shares)
    else:
        passes = np.maximum(np.ceil(shares / bounds.max_local_size - _EPSILON), 1.0)
    needs_two = (num_workers == 1) & (shares > initial_batch_size + _EPSILON)
    passes = np.where(needs_two, np.maximum(passes, 2.0), passes)
    locals_ = np.ceil(shares / passes - _EPSILON)
    # Rounding up must not exceed the bounds.
    locals_ = np.minimum(locals_, np.floor(bounds.max_size / (workers * passes)))
    return locals_.astype(np.int64), passes.astype(np.int64)


def _is_known(noise: GradientNoise | None) -> bool:
    return noise is not None and noise.grad_var >= 0.0 and 0.0 < noise.grad_sqr + noise.grad_var < np.inf


def learning_rate_factor(rule: LearningRateRule, noise: GradientNoise | None, scale: float) -> float:
    """Return the factor of the learning rate at `scale` times the initial batch.

    `linear`: `scale` (Goyal et al., 2017; for SGD). `sqrt`: its square root (for Adam and similar optimizers).
    `adascale`: the gain, so that a step moves as far as it makes progress (Johnson et al., 2020, section 3; for SGD); 1
    from scale 1 on while the noise is not known. `none`: 1.
    """
    if rule == "linear":
        return scale
    if rule == "sqrt":
        return math.sqrt(scale)
    if rule == "adascale":
        return float(gain(noise, scale))
    return 1.0
