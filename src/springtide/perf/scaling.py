"""Scaling curves: how many samples a second a training job makes on n workers, fitted from what was measured."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import msgspec
import numpy as np

# Of the time of a step on one worker, the part that more workers do not shorten, before anything is measured.
PRIOR_SERIAL_FRACTION = 0.1
# A prior counts like this many measurements, so that one noisy reading never bends the curve out of shape.
PRIOR_WEIGHT = 0.25


class ScalingCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a sample on n workers: `parallel_s / n + serial_s` (Amdahl's law for one global batch).

    `is_measured` False says that only the shape means anything, not the scale.
    """

    parallel_s: float
    serial_s: float
    is_measured: bool

    def samples_per_s(self, num_workers: int) -> float:
        """Throughput on `num_workers` >= 1; 0 on none."""
        if num_workers < 1:
            return 0.0
        return 1.0 / (self.parallel_s / num_workers + self.serial_s)

    def speedup(self, num_workers: int) -> float:
        """Throughput relative to one worker."""
        return self.samples_per_s(num_workers) / self.samples_per_s(1)


def fit_scaling(throughput_samples_per_s: Mapping[int, float]) -> ScalingCurve:
    """Fit a curve to measured throughput by world size (samples/s): least squares on seconds a sample, both parts >= 0.

    Without measurements the prior's shape is returned with one second a sample.
    """
    return _fit(tuple(throughput_samples_per_s.items()))


@functools.lru_cache(maxsize=4096)
def _fit(throughput_samples_per_s: tuple[tuple[int, float], ...]) -> ScalingCurve:
    """Fit once what is asked for at every decision: between two of them few jobs have measured anything new."""
    points = {n: 1.0 / rate for n, rate in throughput_samples_per_s if n >= 1 and rate > 0}
    if not points:
        return ScalingCurve(parallel_s=1.0 - PRIOR_SERIAL_FRACTION, serial_s=PRIOR_SERIAL_FRACTION, is_measured=False)
    # The prior enters as one weak equation that ties the serial part to the parallel one; every equation is
    # scaled by its own size, so that relative errors count.
    rows = [[1.0 / n / seconds, 1.0 / seconds] for n, seconds in points.items()]
    targets = [1.0] * len(rows)
    scale_s = float(np.mean([n * seconds for n, seconds in points.items()]))
    rows.append([-PRIOR_SERIAL_FRACTION * PRIOR_WEIGHT / scale_s, (1 - PRIOR_SERIAL_FRACTION) * PRIOR_WEIGHT / scale_s])
    targets.append(0.0)
    matrix, wanted = np.array(rows), np.array(targets)
    parallel_s, serial_s = np.linalg.lstsq(matrix, wanted, rcond=None)[0]
    if serial_s < 0:
        parallel_s, serial_s = float(matrix[:, 0] @ wanted / (matrix[:, 0] @ matrix[:, 0])), 0.0
    elif parallel_s < 0:
        parallel_s, serial_s = 0.0, float(matrix[:, 1] @ wanted / (matrix[:, 1] @ matrix[:, 1]))
    return ScalingCurve(parallel_s=float(parallel_s), serial_s=float(serial_s), is_measured=True)
