"""Scaling curves, fitted to measured throughput, and speed curves: optimizer steps a second by number of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import msgspec
import numpy as np

from springtide.core.decision import JobView, Same
from springtide.core.job_parts import LearntSpeed
from springtide.core.workload import TrainingJob

# The assumed fraction of a step's time on one worker that does not scale with workers, before anything is measured.
PRIOR_SERIAL_FRACTION = 0.1
# The prior counts like this many measurements, so that a single noisy one does not distort the curve.
PRIOR_WEIGHT = 0.25

Source = Literal["profile", "measured", "guess"]


class ScalingCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a sample on n workers: `parallel_s / n + serial_s` (Amdahl's law for one global batch).

    If `is_measured` is False, only the shape is meaningful, not the scale.
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


@lru_cache(maxsize=4096)
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


class SpeedCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of one job: `steps_per_s[n]` is its speed on n devices (index 0 is 0.0; compact placement).

    `sizes` are the useful numbers of devices, ascending: within the job's bounds, and each faster than every smaller
    one. `doubling_sizes` are those that are powers of two. With the `source` "guess" only the shape is meaningful, not
    the scale.
    """

    steps_per_s: tuple[float, ...]
    sizes: tuple[int, ...]
    doubling_sizes: tuple[int, ...]
    source: Source

    def rate(self, num_devices: int) -> float:
        """Steps a second on `num_devices`. More devices than the curve covers bring no further speed."""
        return self.steps_per_s[min(num_devices, len(self.steps_per_s) - 1)]


def interpolate(profile_steps_per_s: Mapping[int, float], most: int) -> tuple[float, ...]:
    """Return steps/s for 0 .. min(most, largest profiled count), linear between the profiled counts.

    Entries that are not finite and positive are ignored. Below the smallest profiled count the rate is 0.0: the job
    does not run there.
    """
    points = sorted((n, rate) for n, rate in profile_steps_per_s.items() if n >= 1 and rate > 0 and math.isfinite(rate))
    if not points:
        return (0.0,)
    rates = [0.0] * (min(most, points[-1][0]) + 1)
    for (low, low_rate), (high, high_rate) in zip(points, points[1:] or points, strict=False):
        for n in range(low, min(high, len(rates) - 1) + 1):
            share = (n - low) / (high - low) if high > low else 0.0
            rates[n] = low_rate + share * (high_rate - low_rate)
    return tuple(rates)


def curve_of(view: JobView) -> SpeedCurve:
    """The speed curve of a job within the bounds in force.

    A profile gives the shape, and measurements scale it (by the geometric mean of measured over profiled speeds).
    Without a profile a curve is fitted to the measurements; without either it is a guess. A job on functions has one
    place, with the speed of its recommended plan.
    """
    job = view.job
    if job.menu is not None:
        rate = 1.0 / job.menu.options[job.menu.recommended].step_s
        return SpeedCurve(steps_per_s=(0.0, rate), sizes=(1,), doubling_sizes=(1,), source="profile")
    most = min(view.bounds.max_workers, job.num_virtual_shards) if job.elastic else view.bounds.max_workers
    return _curve_of(Same(job), Same(view.learnt), view.bounds.min_workers, most)


@lru_cache(maxsize=4096)
def _curve_of(job: Same[TrainingJob], learnt: Same[LearntSpeed], least: int, most: int) -> SpeedCurve:
    """The curve for the same job and measurements again, without a look at the numbers."""
    of = job.value
    measured = learnt.value.throughput_samples_per_s
    return _curve(
        tuple(of.profile_steps_per_s.items()),
        tuple((n, rate / of.global_batch_size) for n, rate in measured.items()),
        least,
        most,
        of.devices_each,
    )


@lru_cache(maxsize=4096)
def _curve(
    profile: tuple[tuple[int, float], ...],
    measured: tuple[tuple[int, float], ...],
    least: int,
    most: int,
    each: int,
) -> SpeedCurve:
    known = {n: rate for n, rate in measured if rate > 0 and n >= 1}
    rates = interpolate(dict(profile), most)
    source: Source = "profile"
    if len(rates) > 1:
        ratios = [math.log(rate / rates[n]) for n, rate in known.items() if n < len(rates) and rates[n] > 0]
        if ratios:
            scale = math.exp(sum(ratios) / len(ratios))
            rates = tuple(rate * scale for rate in rates)
    else:
        fitted = fit_scaling(known)
        rates = (0.0, *(fitted.samples_per_s(n) for n in range(1, most + 1)))
        source = "measured" if fitted.is_measured else "guess"
    sizes: list[int] = []
    fastest = 0.0
    for n in range(max(each, least), len(rates), each):
        if rates[n] > fastest:
            sizes.append(n)
            fastest = rates[n]
    return SpeedCurve(
        steps_per_s=rates,
        sizes=tuple(sizes),
        doubling_sizes=tuple(n for n in sizes if n & (n - 1) == 0),
        source=source,
    )
