"""Corrects the model of a worker's step by measurements: a Gaussian process over the log ratio of measured to modelled.

Computation and synchronisation are corrected separately: a measured configuration shows how fast this code computes on
this service and how fast gradients are exchanged, and both apply to other configurations the more similar they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from springtide.core.function_search import FunctionMeasurement, FunctionSearch
from springtide.core.functions import FunctionPlan, FunctionService, MemorySize
from springtide.perf.functions.bill import StepHabits, StepSizes, step_usd
from springtide.perf.functions.collective_time import sync_time_s
from springtide.perf.functions.scale import compute_speed
from springtide.perf.functions.workers.surface import (
    SAVED_FACTOR,
    Surface,
    WorkSettings,
    exchange_store,
    step_overhead_s,
)
from springtide.solvers.search.gaussian_process import Fit, Floats, Trend

# Steps vary by more than the statistical error of their mean, because load and samples differ.
NOISE_FLOOR = 0.02
# The variation of the same function from run to run, as a standard deviation of the logarithm.
RUN_SHIFT = 0.08
# Length scales in doublings, for the coordinates log2 of workers, memory, batch and gradient. Computation depends
# little on the number of workers beyond their shares, an exchange little on the batch.
_COMPUTE_LENGTHS = (4.0, 1.5, 4.0, 3.0)
_SYNC_LENGTHS = (1.5, 1.5, 8.0, 3.0)
_PRICE_LENGTHS = (3.0, 3.0, 6.0, 6.0)
# The parts of the model's error that are common to all configurations, and local to similar ones.
_BIAS_PART, _LOCAL_PART = 0.8, 0.6
# Factors of these parts from which the marginal likelihood chooses, with a prior that prefers 1.
_BIAS_FACTORS = (1.0, 2.0, 4.0)
_LOCAL_FACTORS = (0.5, 1.0, 2.0)
_FACTOR_SPREAD = 0.7
_PRICE_DEVIATION, _PRICE_NOISE = 0.15, 0.03
# How many observations are used: those of this run, and the newest of earlier ones.
_MAX_OBSERVED = 64
_LEAST_RATIO = 0.02
# The assumed deviation of single steps, relative to the step: the least, and the most if saves obscure it.
_LEAST_DEVIATION, _MOST_DEVIATION = 0.03, 0.12


class NetStep(msgspec.Struct, frozen=True, kw_only=True):
    """A measured step without overheads: its two parts, and the deviation of single steps."""

    compute_s: float
    sync_s: float
    deviation_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.sync_s


def net_step(measured: FunctionMeasurement, save_s: float) -> NetStep:
    """Split a measured step into its parts; some of the steps include saving a state, which takes `save_s`.

    Time that is neither computation nor exchange counts as saving (see `overheads.py`), at most as much as if half of
    the steps, and one more by chance, had a save; the rest (updates, reading samples) counts as computation. If the
    parts were not reported, everything counts as computation.
    """
    step_s, parts_s = measured.step_s, measured.compute_s + measured.sync_s
    if measured.compute_s <= 0 or parts_s <= 0:
        return NetStep(compute_s=step_s, sync_s=0.0, deviation_s=measured.deviation_s)
    scale = min(1.0, step_s / parts_s)
    compute_s, sync_s = measured.compute_s * scale, measured.sync_s * scale
    if measured.plan.num_replicas == 1:
        compute_s, sync_s = compute_s + sync_s, 0.0
    rest_s = max(0.0, step_s - compute_s - sync_s)
    saved_s = min(rest_s, save_s * (0.5 + 1.0 / max(1, measured.num_steps)))
    # Part of the deviation comes from the difference between steps with and without a save.
    lumps = saved_s * max(0.0, save_s - saved_s)
    deviation_s = math.sqrt(max(measured.deviation_s**2 - lumps, 0.0))
    deviation_s = max(deviation_s, min(measured.deviation_s, _LEAST_DEVIATION * step_s))
    if saved_s > _LEAST_DEVIATION * step_s:
        deviation_s = min(deviation_s, _MOST_DEVIATION * step_s)
    return NetStep(compute_s=compute_s + rest_s - saved_s, sync_s=sync_s, deviation_s=deviation_s)


class PlanModel(msgspec.Struct, frozen=True, kw_only=True):
    """The uncorrected prediction of a step of one plan, in its two parts."""

    compute_s: float
    sync_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.sync_s


def plan_model(
    service: FunctionService, search: FunctionSearch, plan: FunctionPlan, global_batch_size: int, gradient_bytes: int
) -> PlanModel | None:
    """The uncorrected prediction for one plan with any collective; None if its memory size is not known."""
    size = size_of(service, search, plan.stages[0].memory_mb)
    if size is None or len(plan.stages) != 1:
        return None
    model = search.model
    factor = size_factor(search, gradient_bytes)
    share = -(-global_batch_size // plan.num_replicas)
    passes = -(-share // model.micro_batch_size)
    contention = 1.0
    if service.total_vcpus is not None:
        contention = max(1.0, plan.num_replicas * size.vcpus / service.total_vcpus)
    compute_s = (model.fixed_s * passes + share * model.sample_s) * factor / compute_speed(size.vcpus) * contention
    compute_s += step_overhead_s(service)
    store = exchange_store(service, search.has_parameter_store)
    sync_s = sync_time_s(
        plan.collective,
        plan.num_replicas,
        model.parameter_bytes * factor,
        size.bytes_per_s,
        store.latency_s,
        plan.num_chunks,
        plan.num_in_flight,
        shards=plan.num_shards,
        total_bytes_per_s=store.total_bytes_per_s,
    )
    return PlanModel(compute_s=compute_s, sync_s=sync_s)


def plan_usd(
    service: FunctionService, search: FunctionSearch, plan: FunctionPlan, step_s: float, gradient_bytes: int
) -> float:
    """The cost of a step of the plan, by prices, if it takes `step_s`."""
    habits = StepHabits(
        lifetime_s=service.lifetime_s, start_s=service.cold_start_s, has_parameter_store=search.has_parameter_store
    )
    num_bytes = round(search.model.parameter_bytes * size_factor(search, gradient_bytes))
    held = StepSizes(parameter_bytes=(num_bytes,), state_factor=SAVED_FACTOR)
    return step_usd(plan, service.prices, step_s, held, habits)


def size_of(service: FunctionService, search: FunctionSearch, memory_mb: int) -> MemorySize | None:
    """The size with this much memory, of the search space or of the service; None if there is none."""
    return next((size for size in (*search.space.sizes, *service.sizes) if size.memory_mb == memory_mb), None)


def size_factor(search: FunctionSearch, gradient_bytes: int) -> float:
    """The present size of the model over its profiled size; 1 if nothing is exchanged."""
    if gradient_bytes <= 0 or search.model.parameter_bytes <= 0:
        return 1.0
    return gradient_bytes / search.model.parameter_bytes


class _PartsSeen(msgspec.Struct, frozen=True):
    """Predicted seconds of the two parts, and the deviations of their logarithms."""

    compute_s: Floats
    sync_s: Floats
    compute_deviation: Floats
    sync_deviation: Floats

    def each(self, belief: Belief) -> tuple[tuple[_Part, Floats, Floats], ...]:
        return (
            (belief.compute, self.compute_s, self.compute_deviation),
            (belief.sync, self.sync_s, self.sync_deviation),
        )


class Prediction:
    """A corrected surface: `step_s` (the median), `spread` (the deviation of its logarithm), `step_usd`.

    A step of t seconds costs `base_usd` + t x `usd_per_s`. `surface` is the uncorrected model; `num_steps` counts the
    steps measured at each configuration with the present batch and model size.
    """

    def __init__(
        self, belief: Belief, surface: Surface, step_s: Floats, spread: Floats, price_ratio: Floats, parts: _PartsSeen
    ) -> None:
        self._belief = belief
        self._parts = parts
        self.surface = surface
        self.step_s = step_s
        self.spread = spread
        self.base_usd: Floats = surface.step_base_usd * price_ratio
        self.usd_per_s: Floats = surface.usd_per_s * price_ratio
        self.num_steps: npt.NDArray[np.int64] = np.zeros(surface.shape, dtype=np.int64)

    @property
    def step_usd(self) -> Floats:
        return np.asarray(self.base_usd + self.step_s * self.usd_per_s)

    def beside(self, row: int, column: int) -> Floats:
        """The deviation of the log ratio of each step to the step at this place.

        Errors that both have in common cancel: a configuration next to a measured one may have the same error, but its
        ratio to the measured one is well known.
        """
        coordinates = _grid_coordinates(self.surface)
        point = [float(np.broadcast_to(one, self.surface.shape)[row, column]) for one in coordinates]
        variance: Floats = np.zeros(self.surface.shape)
        for part, seconds, deviation in self._parts.each(self._belief):
            share = seconds / self.step_s
            here = share[row, column]
            covariance, own = part.beside(coordinates, point)
            variance = variance + (share * deviation) ** 2 + here**2 * own - 2.0 * share * here * covariance
        return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


class _Observed:
    """Observed log ratios of one part, with their coordinates and noise."""

    def __init__(self, lengths: tuple[float, ...]) -> None:
        self.lengths = lengths
        self.points: list[tuple[float, ...]] = []
        self.values: list[float] = []
        self.noise: list[float] = []
        self.is_own: list[bool] = []

    def add(self, point: tuple[float, ...], ratio: float, noise: float, is_own: bool) -> None:
        self.points.append(point)
        self.values.append(math.log(max(ratio, _LEAST_RATIO)))
        self.noise.append(noise)
        self.is_own.append(is_own)


class _Part:
    """The posterior of one part's log ratio: the most likely trend, and the fit."""

    def __init__(self, observed: _Observed, deviation: float, *, is_chosen: bool = True) -> None:
        self._columns = [np.array(column) for column in zip(*observed.points, strict=True)]
        self._own = np.array(observed.is_own, dtype=np.float64)
        self.trend = Trend(bias=_BIAS_PART * deviation, local=_LOCAL_PART * deviation, lengths=observed.lengths)
        self._fit: Fit | None = None
        if not observed.values:
            return
        best = -math.inf
        for bias in _BIAS_FACTORS if is_chosen else (1.0,):
            for local in _LOCAL_FACTORS if is_chosen else (1.0,):
                trend = Trend(
                    bias=bias * _BIAS_PART * deviation, local=local * _LOCAL_PART * deviation, lengths=observed.lengths
                )
                fit = Fit(self._among(trend), np.array(observed.values), np.array(observed.noise))
                preference = -0.5 * (math.log(bias) ** 2 + math.log(local) ** 2) / _FACTOR_SPREAD**2
                if fit.log_likelihood + preference > best:
                    best, self.trend, self._fit = fit.log_likelihood + preference, trend, fit

    def _among(self, trend: Trend) -> Floats:
        columns = self._columns
        same_run = self._own[:, None] == self._own[None]
        among = trend.at([column[:, None] for column in columns], columns)
        return np.asarray(among + RUN_SHIFT**2 * same_run)

    def at(self, coordinates: Sequence[Floats]) -> tuple[Floats, Floats]:
        """Mean and deviation at points given coordinate by coordinate, broadcast together."""
        # Predictions also contain the random shift of this run.
        variance = self.trend.variance + (RUN_SHIFT**2 if self._fit is not None else 0.0)
        if self._fit is None:
            shape = np.broadcast_shapes(*(one.shape for one in coordinates))
            return np.zeros(shape), np.full(shape, math.sqrt(variance))
        return self._fit.posterior(self._across(coordinates), variance)

    def _across(self, coordinates: Sequence[Floats]) -> Floats:
        across = self.trend.at([one[..., None] for one in coordinates], self._columns)
        return np.asarray(across + RUN_SHIFT**2 * self._own)

    def beside(self, coordinates: Sequence[Floats], point: Sequence[float]) -> tuple[Floats, float]:
        """The covariance of each of the coordinates with one point, and that point's variance."""
        alone = [np.array([value]) for value in point]
        prior = self.trend.at([one[..., None] for one in coordinates], alone)[..., 0]
        if self._fit is None:
            return np.asarray(prior), self.trend.variance
        here = self._fit.whitened(self._across(alone))[0]
        among = self._fit.whitened(self._across(coordinates)) @ here
        return np.asarray(prior + RUN_SHIFT**2 - among), float(self.trend.variance + RUN_SHIFT**2 - here @ here)


class Belief:
    """The corrected model of a job's steps, after `measurements` of this run and those of earlier runs in `search`."""

    def __init__(
        self, service: FunctionService, search: FunctionSearch, measurements: Sequence[FunctionMeasurement] = ()
    ) -> None:
        self.service = service
        self.search = search
        self.measurements = tuple(measurements)
        compute, sync, price = _Observed(_COMPUTE_LENGTHS), _Observed(_SYNC_LENGTHS), _Observed(_PRICE_LENGTHS)
        own = self.measurements[-_MAX_OBSERVED:]
        room = _MAX_OBSERVED - len(own)
        for measured, is_own in (
            *((each, False) for each in search.earlier[-room:] if room),
            *((each, True) for each in own),
        ):
            self._add_measurement(measured, is_own, compute, sync, price)
        self.compute = _Part(compute, search.error_fraction)
        self.sync = _Part(sync, search.error_fraction)
        self._price = _Part(price, _PRICE_DEVIATION, is_chosen=False)
        self.has_observed = bool(compute.values)

    def _add_measurement(
        self, measured: FunctionMeasurement, is_own: bool, compute: _Observed, sync: _Observed, price: _Observed
    ) -> None:
        plan, batch = measured.plan, measured.global_batch_size
        known = plan_model(self.service, self.search, plan, batch, measured.gradient_bytes)
        if known is None or measured.step_s <= 0 or batch < 1 or known.step_s <= 0:
            return
        point = coordinates_of(
            plan.num_replicas, plan.stages[0].memory_mb, batch, size_factor(self.search, measured.gradient_bytes)
        )
        size = size_of(self.service, self.search, plan.stages[0].memory_mb)
        save_s = 0.0 if size is None else SAVED_FACTOR * max(0, measured.gradient_bytes) / size.bytes_per_s
        parts = net_step(measured, save_s)
        noise = math.hypot(NOISE_FLOOR, parts.deviation_s / parts.step_s / math.sqrt(max(1, measured.num_steps)))
        if measured.compute_s > 0 and known.compute_s > 0:
            compute.add(point, parts.compute_s / known.compute_s, noise, is_own)
            if plan.num_replicas > 1 and known.sync_s > 0:
                sync.add(point, parts.sync_s / known.sync_s, noise, is_own)
        else:
            # Without separate times, the same error is assumed for both parts.
            ratio = parts.step_s / known.step_s
            compute.add(point, ratio, math.hypot(noise, 0.1), is_own)
            if plan.num_replicas > 1:
                sync.add(point, ratio, math.hypot(noise, 0.1), is_own)
        if measured.usd > 0 and is_own:
            # At the measured time, so that the ratio is the error of the price alone.
            expected_usd = plan_usd(self.service, self.search, plan, measured.step_s, measured.gradient_bytes)
            price.add(point, measured.usd / max(expected_usd, 1e-12), _PRICE_NOISE, is_own)

    def predict(self, settings: WorkSettings) -> Prediction:
        surface = Surface(self.service, self.search.space, self.search.model, settings)
        coordinates = _grid_coordinates(surface)
        compute_log, compute_deviation = self.compute.at(coordinates)
        sync_log, sync_deviation = self.sync.at(coordinates)
        compute_s = surface.compute_s * np.exp(compute_log)
        sync_s = surface.sync_s * np.exp(sync_log)
        step_s = np.maximum(compute_s + sync_s, 1e-9)
        # Assumes that the errors of both parts have the same sign, as on a slow machine.
        spread = (compute_s * compute_deviation + sync_s * sync_deviation) / step_s
        price_log, _ = self._price.at(coordinates)
        parts = _PartsSeen(compute_s, sync_s, compute_deviation, sync_deviation)
        found = Prediction(self, surface, step_s, np.maximum(spread, 1e-3), np.exp(price_log), parts)
        for measured in self.measurements:
            place = surface.place(measured.plan)
            if place is not None and is_here(measured, settings, self.search):
                found.num_steps[place] = measured.num_steps
        return found


def is_here(measured: FunctionMeasurement, settings: WorkSettings, search: FunctionSearch) -> bool:
    """Whether the measurement has the batch of `settings` and about its model size."""
    factor = size_factor(search, measured.gradient_bytes)
    is_same_size = math.isclose(factor, settings.size_factor, rel_tol=0.02)
    return measured.global_batch_size == settings.global_batch_size and is_same_size


def coordinates_of(num_workers: int, memory_mb: int, global_batch_size: int, factor: float) -> tuple[float, ...]:
    """The coordinates of a configuration: logarithms, so that length scales are in doublings."""
    return math.log2(num_workers), math.log2(memory_mb), math.log2(global_batch_size), math.log2(factor)


def _grid_coordinates(surface: Surface) -> list[Floats]:
    settings = surface.settings
    return [
        np.log2(surface.workers.astype(np.float64))[:, None],
        np.log2(surface.memory_mb)[None],
        np.full((1, 1), math.log2(settings.global_batch_size)),
        np.full((1, 1), math.log2(settings.size_factor)),
    ]
