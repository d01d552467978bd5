"""The selection of schedules solved exactly on small cases, to measure what the primal-dual method leaves (HiGHS).

FaPES (SoCC 2024), section 5.3, problem (1)-(5): all feasible schedules of every job as columns, one chosen for each.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from springtide.core.errors import InvalidRequest
from springtide.solvers.schedule_planning import (
    Board,
    Floats,
    Placed,
    RoundDemand,
    RoundStretch,
    Servers,
    Shapes,
    plan_job,
)

# Columns are every placement in every round; beyond this many the case is not small.
MAX_COLUMNS = 400_000


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One feasible schedule of a job: when it ends (seconds) and what it holds in each round, () = nothing."""

    finish_s: float
    placed: tuple[Placed, ...]


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of completion times (seconds) over the jobs of one case: by the primal-dual method and at best.

    A case in which the method leaves a job without a schedule has no sum: `planned_s` is infinite.
    """

    planned_s: float
    exact_s: float
    num_jobs: int
    num_columns: int

    @property
    def fraction(self) -> float:
        """What the method loses, as a fraction of the best sum."""
        return self.planned_s / self.exact_s - 1.0


def is_available() -> bool:
    """Whether the solver is installed."""
    return importlib.util.find_spec("scipy") is not None


def columns_of(servers: Servers, lengths_s: Floats, demand: RoundDemand) -> list[Column]:
    """Every schedule of a job that ends within the rounds and holds nothing after its end.

    Raises InvalidRequest if there are more than `MAX_COLUMNS`.
    """
    shapes = Shapes(servers, demand)
    placements = list(_placements(servers, demand))
    rates = [shapes.rate_of(placed) if placed else 0.0 for placed in placements]
    found: list[Column] = []
    starts_s = np.concatenate(([0.0], np.cumsum(lengths_s)))

    def extend(number: int, left: float, chosen: tuple[Placed, ...]) -> None:
        """All ways to go on from round `number` with so much work left."""
        if number == len(lengths_s):
            return
        before = chosen[-1] if chosen else demand.held
        for placed, rate in zip(placements, rates, strict=True):
            length_s = float(lengths_s[number])
            lost_s = 0.0 if not placed or placed == before else demand.setup_s
            if rate > 0.0 and left <= rate * (length_s - lost_s) * (1.0 + 1e-9):
                ends_s = float(starts_s[number]) + lost_s + left / rate
                found.append(Column(finish_s=ends_s, placed=(*chosen, placed)))
                if len(found) > MAX_COLUMNS:
                    raise InvalidRequest("too many schedules to look at all; give fewer rounds, servers or sizes")
            else:
                done = rate * max(0.0, length_s - lost_s)
                extend(number + 1, left - done, (*chosen, placed))

    extend(0, float(demand.work), ())
    return found


def _placements(servers: Servers, demand: RoundDemand) -> Iterator[Placed]:
    sizes = {int(size) for size in demand.sizes} | {0}
    options = [range(0, int(capacity) + 1, demand.unit) for capacity in servers.capacity]
    for counts in itertools.product(*options):
        if sum(counts) in sizes:
            yield tuple((server, count) for server, count in enumerate(counts) if count)


def solve_selection(servers: Servers, num_rounds: int, columns: Sequence[Sequence[Column]]) -> tuple[Column, ...]:
    """Choose one column for each job so that no server is over its capacity in any round; least sum of ends.

    The paper's (2) says at most one, which a minimum would answer with none: here it is exactly one. Raises
    InvalidRequest without the solver, or if not all jobs fit.
    """
    if not is_available():
        raise InvalidRequest("the exact plan needs SciPy: pip install springtide[solvers]")
    optimize: Any = importlib.import_module("scipy.optimize")
    sparse: Any = importlib.import_module("scipy.sparse")
    flat = [(job, column) for job, of_job in enumerate(columns) for column in of_job]
    num_servers = len(servers.capacity)
    rows: list[int] = []
    cols: list[int] = []
    values: list[int] = []
    for index, (job, column) in enumerate(flat):
        rows.append(job)
        cols.append(index)
        values.append(1)
        for number, placed in enumerate(column.placed):
            for server, count in placed:
                rows.append(len(columns) + number * num_servers + server)
                cols.append(index)
                values.append(count)
    shape = (len(columns) + num_rounds * num_servers, len(flat))
    upper = np.concatenate([np.ones(len(columns)), np.tile(servers.capacity, num_rounds)])
    lower = np.concatenate([np.ones(len(columns)), np.full(num_rounds * num_servers, -np.inf)])
    answer = optimize.milp(
        c=np.array([column.finish_s for _, column in flat]),
        integrality=np.ones(len(flat)),
        bounds=optimize.Bounds(0.0, 1.0),
        constraints=[optimize.LinearConstraint(sparse.csc_matrix((values, (rows, cols)), shape=shape), lower, upper)],
        options={"mip_rel_gap": 1e-4},
    )
    if answer.x is None:
        raise InvalidRequest("not all of these jobs fit into these rounds; give more rounds or fewer jobs")
    return tuple(column for (_, column), chosen in zip(flat, answer.x, strict=True) if chosen > 0.5)


def measure_gap(
    servers: Servers,
    lengths_s: Floats,
    demands: Sequence[RoundDemand],
    *,
    prices: Sequence[tuple[float, float]],
    round_s: float,
) -> tuple[Gap, ...]:
    """Plan the jobs exactly, and in the order given by the primal-dual method: one Gap for each pair of prices.

    The method may plan beyond `lengths_s`, within which the exact plan has to end. Raises InvalidRequest.
    """
    columns = [columns_of(servers, lengths_s, demand) for demand in demands]
    exact_s = sum(column.finish_s for column in solve_selection(servers, len(lengths_s), columns))
    gaps = []
    for low, high in prices:
        board = Board(servers, np.concatenate([lengths_s] * 4), round_s, low=low, high=high)
        planned_s = 0.0
        for demand in demands:
            schedule = plan_job(board, demand)
            if schedule is None:
                planned_s = math.inf
                break
            board.book(schedule)
            planned_s += schedule.finish_s
        gaps.append(
            Gap(planned_s=planned_s, exact_s=exact_s, num_jobs=len(demands), num_columns=sum(map(len, columns)))
        )
    return tuple(gaps)


def random_case(seed: int, *, num_rounds: int = 4, most_jobs: int = 5) -> tuple[Servers, Floats, list[RoundDemand]]:
    """Two servers of four devices, rounds of 600 s, and 2 to `most_jobs` jobs: a case for the gap.

    Speeds grow as a power from 0.5 to 0.95 of the devices; work is drawn so that a job takes from half a round to
    most of the time on half the cluster.
    """
    rng = np.random.default_rng(np.random.SeedSequence([seed, 5]))
    servers = Servers(capacity=np.array([4, 4]), switches=np.zeros((2, 1), dtype=np.int64))
    sizes = np.array([2, 4, 6, 8])
    demands = []
    for _ in range(int(rng.integers(2, most_jobs + 1))):
        alone = sizes ** rng.uniform(0.5, 0.95)
        spread = rng.uniform(0.7, 1.0)
        rates = np.stack([alone, alone * spread, alone * spread * 0.8], axis=1)
        demands.append(
            RoundDemand(work=float(rng.uniform(300.0, 600.0 * num_rounds)), sizes=sizes, rates=rates, unit=2)
        )
    return servers, np.full(num_rounds, 600.0), demands


def literal_prices(demands: Sequence[RoundDemand]) -> tuple[float, float]:
    """The paper's bounds: the shortest completion time of any job on all devices, the longest on the least."""
    low = min(demand.work / float(demand.rates.max()) for demand in demands)
    return low, max(low, *[demand.work / float(demand.rates[0, 0]) for demand in demands])


def used(stretches: Sequence[RoundStretch], num_rounds: int) -> tuple[Placed, ...]:
    """A schedule's placements round by round, as columns have them."""
    found: list[Placed] = [()] * num_rounds
    for stretch in stretches:
        found[stretch.first : stretch.last + 1] = [stretch.placed] * (stretch.last + 1 - stretch.first)
    return tuple(found)
