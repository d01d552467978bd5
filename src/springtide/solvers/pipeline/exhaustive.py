"""Every plan of a small pipeline, tried: what the exact method is checked against. Nothing is bounded or left out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from springtide.core.errors import InvalidRequest
from springtide.solvers.pipeline.problem import Degree, Floats, Indices, PipelineProblem, Stage

MAX_PLANS = 200_000_000
_CHUNK = 1 << 19


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """The shortest step of all plans that hold exactly `memory_mb` over all functions at this degree."""

    memory_mb: float
    step_s: float
    degree: Degree
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class _Plans:
    """Plans down to some layer, one entry each; `code` spells (first, size) of every stage in a mixed base."""

    forward: Floats
    forward_lag: Floats
    backward: Floats
    backward_lag: Floats
    end: Floats
    memory: Floats
    code: Indices

    def part(self, begin: int, end: int) -> _Plans:
        return _Plans(*(getattr(self, name)[begin:end] for name in self.__dataclass_fields__))


def num_plans(problem: PipelineProblem) -> int:
    """How many plans there are at one degree, whether they fit or not: J (J + 1)^(L - 1)."""
    num_layers, num_sizes = problem.forward_s.shape
    return int(num_sizes * (num_sizes + 1) ** (num_layers - 1))


def every_memory(problem: PipelineProblem) -> list[MemoryPoint]:
    """The shortest step for each amount of memory at each degree, over all plans there are.

    The best plan under any weights is among them. Raises InvalidRequest for more than MAX_PLANS plans a degree.
    """
    num_layers, num_sizes = problem.forward_s.shape
    # A plan's code must fit 63 bits.
    if num_plans(problem) > MAX_PLANS or num_layers * np.log2(num_layers * num_sizes + 1) >= 63:
        raise InvalidRequest(
            f"{num_plans(problem)} plans are too many to try each; this check is for up to {MAX_PLANS}, "
            "which 8 layers on 8 sizes are within"
        )
    points: list[MemoryPoint] = []
    for degree in problem.degrees:
        enumeration = _Enumeration(problem, degree)
        enumeration.run()
        points += enumeration.points()
    return points


def best_of(points: list[MemoryPoint], weights: tuple[float, float]) -> tuple[float, MemoryPoint]:
    """The least equation 3a among the points, and the point."""
    values = [(weights[0] * point.memory_mb + weights[1]) * point.step_s for point in points]
    chosen = int(np.argmin(values))
    return values[chosen], points[chosen]


def pareto_front(points: list[MemoryPoint]) -> list[tuple[float, float]]:
    """The (seconds, MB s) of a step that no plan is better than in both, cheapest first."""
    front: list[tuple[float, float]] = []
    for seconds, cost in sorted(((p.step_s, p.step_s * p.memory_mb) for p in points), key=lambda one: (one[1], one[0])):
        if not front or seconds < front[-1][0]:
            front.append((seconds, cost))
    return front


class _Enumeration:
    def __init__(self, problem: PipelineProblem, degree: Degree) -> None:
        self.problem = problem
        self.degree = degree
        self.num_layers, self.num_sizes = len(problem.forward_s), len(problem.memory_mb)
        self.base = self.num_layers * self.num_sizes + 1
        # All memory is in whole units, so that the shortest step of each amount has a place in an array.
        self.unit = int(np.gcd.reduce(problem.memory_mb.astype(np.int64)))
        most = int(problem.memory_mb.max()) // self.unit * self.num_layers
        self.seconds = np.full(most + 1, np.inf)
        self.codes = np.zeros(most + 1, dtype=np.int64)

    def run(self) -> None:
        zero = np.zeros(1)
        self._below(_Plans(zero, zero, zero, zero, zero, zero, np.zeros(1, dtype=np.int64)), self.num_layers, 0)

    def points(self) -> list[MemoryPoint]:
        """What was found, least memory first."""
        return [
            MemoryPoint(
                memory_mb=float(units * self.unit * self.degree.num_replicas),
                step_s=float(self.seconds[units]),
                degree=self.degree,
                stages=self._stages(int(self.codes[units])),
            )
            for units in np.nonzero(np.isfinite(self.seconds))[0]
        ]

    def _below(self, plans: _Plans, end: int, num_stages: int) -> None:
        """Put every stage that ends at `end` below these plans of so many stages, and go on below that."""
        if end == 0:
            self._record(plans)
            return
        if len(plans.code) > _CHUNK:
            for begin in range(0, len(plans.code), _CHUNK):
                self._below(plans.part(begin, begin + _CHUNK), end, num_stages)
            return
        for first in range(end):
            if not self.degree.allows(num_stages + 1 + (first > 0)):
                continue
            sizes = self._sizes(first, end)
            if len(sizes):
                self._below(self._extended(plans, first, end, sizes), first, num_stages + 1)

    def _sizes(self, first: int, end: int) -> Indices:
        problem = self.problem
        known = np.isfinite(problem.forward_s[first:end] + problem.backward_s[first:end]).all(axis=0)
        return np.nonzero(known & (problem.needed_bytes(first, end, self.degree) <= problem.memory_mb * 2.0**20))[0]

    def _extended(self, plans: _Plans, first: int, end: int, sizes: Indices) -> _Plans:
        """Equations 7 to 11 and appendix B, one stage on."""
        problem, lags = self.problem, self.degree.num_micro_batches - 1
        bandwidth = problem.bytes_per_s[sizes]
        forward = problem.forward_s[first:end, sizes].sum(axis=0)
        backward = problem.backward_s[first:end, sizes].sum(axis=0)
        nothing = np.zeros(len(sizes))
        is_last, is_first = end == self.num_layers, first == 0
        upload = nothing if is_last else problem.output_bytes[end - 1] / bandwidth + problem.latency_s
        download = nothing if is_first else problem.output_bytes[first - 1] / bandwidth + problem.latency_s
        gradient_down = nothing if is_last else problem.gradient_bytes[end] / bandwidth + problem.latency_s
        gradient_up = nothing if is_first else problem.gradient_bytes[first] / bandwidth + problem.latency_s
        sync = self.degree.sync_s(problem.parameter_bytes[first:end].sum() / bandwidth, problem.latency_s)

        def each(values: Floats) -> Floats:
            return values[:, None]

        done = each(plans.backward) + gradient_down + backward
        lag = np.maximum(each(plans.backward_lag), np.maximum(gradient_down, backward))
        return _Plans(
            forward=(each(plans.forward) + forward + upload + download).ravel(),
            forward_lag=np.maximum(each(plans.forward_lag), np.maximum(np.maximum(forward, upload), download)).ravel(),
            backward=(done + gradient_up).ravel(),
            backward_lag=np.maximum(lag, gradient_up).ravel(),
            end=np.maximum(each(plans.end), done + lags * lag + sync).ravel(),
            memory=(each(plans.memory) + problem.memory_mb[sizes]).ravel(),
            code=(plans.code[:, None] * self.base + first * self.num_sizes + sizes + 1).ravel(),
        )

    def _record(self, plans: _Plans) -> None:
        seconds = plans.forward + (self.degree.num_micro_batches - 1) * plans.forward_lag + plans.end
        units = np.round(plans.memory / self.unit).astype(np.int64)
        before = self.seconds.copy()
        np.minimum.at(self.seconds, units, seconds)
        better = np.nonzero((seconds == self.seconds[units]) & (seconds < before[units]))[0]
        self.codes[units[better]] = plans.code[better]

    def _stages(self, code: int) -> tuple[Stage, ...]:
        pairs: list[tuple[int, int]] = []
        while code:
            code, rest = divmod(code, self.base)
            pairs.append(divmod(rest - 1, self.num_sizes))
        ends = [first for first, _ in pairs[1:]] + [self.num_layers]
        return tuple((first, end, size) for (first, size), end in zip(pairs, ends, strict=True))
