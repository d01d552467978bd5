"""The co-optimisation as a mixed-integer program for HiGHS: a second way to the optimum, with a certified gap.

One program for each degree and range of total memory. A binary says whether a stage (first, end, size) is used; stages
form a path through the cuts. The product of memory and time in the objective is bounded below by its two McCormick
planes over the range; ranges are split at the memory of their best plan until no range can hold a better plan.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from springtide.solvers.pipeline.problem import Floats, PipelineProblem, Stage, StageTables, stage_tables
from springtide_studies.bounds import highs

# A plan better by less than this is not looked for: HiGHS's own tolerances are about as wide.
GAP = 1e-6
_MAX_PROGRAMS = 60
# Memory in these units keeps the columns of memory, time and their product within a few powers of ten.
_MB = 1024.0


@dataclass(frozen=True, kw_only=True)
class MilpSolution:
    """The best plan found, or None, and what no plan is below; equal within GAP where it is proved best."""

    value: float
    bound: float
    stages: tuple[Stage, ...]
    num_replicas: int
    num_programs: int

    @property
    def is_proved(self) -> bool:
        """Whether nothing better than by GAP exists."""
        return self.bound >= self.value * (1.0 - 2.0 * GAP)


@dataclass(order=True)
class _Range:
    """Total memory in GB from `low` to `high`, of one replica; no plan in it is below `bound`."""

    bound: float
    low: float
    high: float = field(compare=False)


def solve_milp(problem: PipelineProblem, weights: tuple[float, float], *, node_limit: int = 20_000) -> MilpSolution:
    """The best plan over all degrees; `value` is infinite where none fits. Raises ImportError without SciPy.

    Beyond `node_limit` branches in one program, what is not proved shows in `bound`.
    """
    best, bound, num_programs = np.inf, np.inf, 0
    stages: tuple[Stage, ...] = ()
    num_replicas = 1
    for degree in problem.degrees:
        program = _Program(stage_tables(problem, degree), weights, node_limit)
        program.run(best)
        num_programs += program.num_programs
        if program.value < best:
            best, stages, num_replicas = program.value, program.stages, degree.num_replicas
        bound = min(bound, program.bound)
    return MilpSolution(
        value=best, bound=min(bound, best), stages=stages, num_replicas=num_replicas, num_programs=num_programs
    )


class _Program:
    """All ranges of memory at one degree. Columns: stages, forward lag, T, P (memory x T), Y, then backward lags."""

    def __init__(self, tables: StageTables, weights: tuple[float, float], node_limit: int) -> None:
        self.tables = tables
        self.price = weights[0] * tables.degree.num_replicas * _MB
        self.offset = weights[1]
        self.node_limit = node_limit
        self.keys = np.argwhere(tables.fits)
        self.num_stages = len(self.keys)
        self.value = np.inf
        self.bound = np.inf
        self.stages: tuple[Stage, ...] = ()
        self.num_programs = 0
        first, end, size = self.keys.T
        self.of_stage = {
            name: getattr(tables, name)[first, end, size]
            for name in (
                "forward_s", "forward_lag_s", "backward_s", "backward_lag_s", "hand_down_s", "sync_s",
            )
        }  # fmt: skip
        self.sizes = tables.memory_mb / _MB
        self.memory = self.sizes[size]
        self.lag, self.time, self.product, self.end, self.back = (self.num_stages + n for n in range(5))
        self.num_columns = self.back + tables.num_layers

    def run(self, best: float) -> None:
        """Split ranges of memory until none can hold a plan better than `best` or the one found."""
        if not self.num_stages:
            return
        rows, low, high = self._rows()
        most = float(self.sizes.max()) * self.tables.num_layers
        ranges = [_Range(0.0, float(self.sizes.min()), most)]
        unit = float(np.gcd.reduce(self.tables.memory_mb.astype(np.int64))) / _MB
        while ranges:
            whole = heapq.heappop(ranges)
            cutoff = min(best, self.value) * (1.0 - GAP)
            if whole.bound >= cutoff or self.num_programs >= _MAX_PROGRAMS:
                self.bound = min(self.bound, whole.bound)
                continue
            found, bound = self._solve(rows, low, high, whole, cutoff)
            bound = max(bound, whole.bound)
            if found is None or bound >= min(best, self.value) * (1.0 - GAP):
                self.bound = min(self.bound, bound)
                continue
            memory = sum(float(self.sizes[size]) for _, _, size in found)
            if whole.high - whole.low < unit / 2:
                self.bound = min(self.bound, bound)
                continue
            split = min(memory, whole.high - unit)
            heapq.heappush(ranges, _Range(bound, whole.low, split))
            heapq.heappush(ranges, _Range(bound, split + unit, whole.high))

    def _solve(
        self, rows: Floats, low: Floats, high: Floats, whole: _Range, cutoff: float
    ) -> tuple[tuple[Stage, ...] | None, float]:
        """The relaxed best plan of the range, and what none in it is below; keeps what is really better."""
        shortest = self._shortest(rows, low, high, whole)
        if shortest is None:
            return None, np.inf
        least = (self.price * whole.low + self.offset) * shortest
        if least >= cutoff:
            return None, least
        longest = min(cutoff / (self.price * whole.low + self.offset), self._longest())
        columns = np.zeros((3, self.num_columns))
        # P >= low T + shortest (memory - low), P >= high T + longest (memory - high), and the range itself.
        for row, (at, slope) in enumerate(((whole.low, shortest), (whole.high, longest))):
            columns[row, : self.num_stages] = -slope * self.memory
            columns[row, self.time], columns[row, self.product] = -at, 1.0
        columns[2, : self.num_stages] = self.memory
        low = np.concatenate([low, [-whole.low * shortest, -whole.high * longest, whole.low]])
        high = np.concatenate([high, [np.inf, np.inf, whole.high]])
        costs = np.zeros(self.num_columns)
        costs[self.product], costs[self.time] = self.price, self.offset
        upper = self._upper()
        upper[self.time] = longest
        result = highs.solve(
            costs,
            self._integrality(),
            (np.zeros(self.num_columns), upper),
            (np.concatenate([rows, columns]), low, high),
            mip_rel_gap=GAP / 10,
            node_limit=self.node_limit,
        )
        self.num_programs += 1
        if result.x is None:
            # Nothing below the cutoff (status 2), or nothing found in time.
            return None, max(least, cutoff if result.status == 2 else 0.0)
        stages = self._path(result.x)
        step_s, memory_mb = self.tables.score(stages)
        value = (self.price / _MB / self.tables.degree.num_replicas * memory_mb + self.offset) * step_s
        if value < self.value:
            self.value, self.stages = value, stages
        bound = result.mip_dual_bound if result.mip_dual_bound is not None else result.fun
        return stages, max(least, float(bound))

    def _shortest(self, rows: Floats, low: Floats, high: Floats, whole: _Range) -> float | None:
        """The least time in the range if stages could be used in part; None where nothing fits it."""
        memory = np.zeros((1, self.num_columns))
        memory[0, : self.num_stages] = self.memory
        costs = np.zeros(self.num_columns)
        costs[self.time] = 1.0
        result = highs.solve(
            costs,
            np.zeros(self.num_columns),
            (np.zeros(self.num_columns), self._upper()),
            (np.concatenate([rows, memory]), np.append(low, whole.low), np.append(high, whole.high)),
        )
        return None if result.x is None else float(result.fun) * (1.0 - 1e-9)

    def _rows(self) -> tuple[Floats, Floats, Floats]:
        """The path through the cuts, and equations 7 to 11 with a maximum as a bound for each of its members."""
        first, end, _ = self.keys.T
        of, num_layers, lags = self.of_stage, self.tables.num_layers, float(self.tables.num_lags)
        rows: list[Floats] = []
        low: list[float] = []

        def at_least_zero(stages: Floats, **columns: float) -> None:
            row = np.zeros(self.num_columns)
            row[: self.num_stages] = stages
            for name, value in columns.items():
                row[getattr(self, name)] = value
            rows.append(row)
            low.append(0.0)

        for cut in range(num_layers + 1):
            row = np.zeros(self.num_columns)
            row[: self.num_stages] = (first == cut).astype(float) - (end == cut)
            rows.append(row)
            low.append({0: 1.0, num_layers: -1.0}.get(cut, 0.0))
        num_equal = len(rows)
        any_lag = np.maximum(of["backward_lag_s"], of["hand_down_s"])
        for layer in range(num_layers):
            covers = (first <= layer) & (layer < end)
            at_least_zero(np.where(covers, -of["forward_lag_s"], 0.0), lag=1.0)
            at_least_zero(np.where(covers, -any_lag, 0.0))
            rows[-1][self.back] = 1.0
        for layer in range(num_layers):
            # The backward lag down to the stage that begins at this layer is no shorter than the one above it.
            for term in (
                np.where(first == layer, of["backward_lag_s"], 0.0),
                np.where(first == layer + 1, of["hand_down_s"], 0.0),
            ):
                at_least_zero(-term)
                rows[-1][self.back + layer] = 1.0
            if layer + 1 < num_layers:
                at_least_zero(np.zeros(self.num_stages))
                rows[-1][self.back + layer], rows[-1][self.back + layer + 1] = 1.0, -1.0
            above = np.where(first >= layer, of["backward_s"], 0.0) + np.where(first > layer, of["hand_down_s"], 0.0)
            at_least_zero(-above - np.where(first == layer, of["sync_s"], 0.0), end=1.0)
            rows[-1][self.back + layer] = -lags
        at_least_zero(-of["forward_s"], time=1.0, lag=-lags, end=-1.0)
        high = np.full(len(rows), np.inf)
        high[:num_equal] = low[:num_equal]
        return np.array(rows), np.array(low), high

    def _upper(self) -> Floats:
        upper = np.full(self.num_columns, np.inf)
        upper[: self.num_stages] = 1.0
        return upper

    def _integrality(self) -> Floats:
        return np.concatenate([np.ones(self.num_stages), np.zeros(self.num_columns - self.num_stages)])

    def _longest(self) -> float:
        """A time that no plan of distinct layers exceeds: every stage's own times as if it were the slowest."""
        mu = self.tables.num_lags + 1
        of = self.of_stage
        worst = of["forward_s"] + of["backward_s"] + of["hand_down_s"] + of["sync_s"]
        return float(mu * self.tables.num_layers * worst.max())

    def _path(self, x: Floats) -> tuple[Stage, ...]:
        """The stages that are used, from the first layer on."""
        used = {int(self.keys[n][0]): self.keys[n] for n in np.nonzero(x[: self.num_stages] > 0.5)[0]}
        stages: list[Stage] = []
        cut = 0
        while cut < self.tables.num_layers:
            first, end, size = (int(part) for part in used[cut])
            stages.append((first, end, size))
            cut = end
        return tuple(stages)
