"""Which servers to take back from jobs, as a mixed-integer program: the least cost that the greedy ways can reach."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from springtide.core.errors import InvalidRequest
from springtide.solvers.reclaim import ReclaimChoice, Server, Victim, cost_of
from springtide_studies.bounds import highs

# A count, not a time: a choice must not depend on how fast the machine is.
NODE_LIMIT = 20_000


def reclaim_exactly(servers: Sequence[Server], victims: Sequence[Victim], num_needed: int) -> ReclaimChoice:
    """The least cost at which servers with `num_needed` devices can be had, by HiGHS; all if they do not suffice.

    min sum_j shrink_j y_j + (stop_j - shrink_j) z_j over binary x (server taken), y (job touched), z (job stopped):
    y_j >= x_s for every server s of j, sum_s held_js x_s <= spare_j + held_j z_j, sum_s devices_s x_s >= needed.
    Raises InvalidRequest without the solver.
    """
    if not highs.is_available():
        raise InvalidRequest("choosing servers exactly needs SciPy: pip install 'springtide[solvers]'")
    if sum(server.num_devices for server in servers) <= num_needed:
        everyone = tuple(range(len(servers)))
        return ReclaimChoice(servers=everyone, cost=cost_of(servers, victims, everyone))
    if num_needed <= 0:
        return ReclaimChoice(servers=(), cost=0.0)
    chosen = _solve(servers, victims, num_needed)
    return ReclaimChoice(servers=chosen, cost=cost_of(servers, victims, chosen))


def _solve(servers: Sequence[Server], victims: Sequence[Victim], num_needed: int) -> tuple[int, ...]:
    sparse: Any = importlib.import_module("scipy.sparse")
    num_servers, num_jobs = len(servers), len(victims)
    entries: list[tuple[int, int, float]] = []
    low: list[float] = []

    def row(bound: float, terms: Iterable[tuple[int, float]]) -> None:
        entries.extend((len(low), column, value) for column, value in terms)
        low.append(bound)

    held: list[list[tuple[int, int]]] = [[] for _ in victims]
    for number, server in enumerate(servers):
        for job, count in server.jobs.items():
            held[job].append((number, count))
            row(0.0, [(num_servers + job, 1.0), (number, -1.0)])
    for job, mine in enumerate(held):
        total = sum(count for _, count in mine)
        stop = (num_servers + num_jobs + job, float(total))
        row(-float(victims[job].num_spare), [stop, *((number, -float(count)) for number, count in mine)])
    row(float(num_needed), [(number, float(server.num_devices)) for number, server in enumerate(servers)])
    at, columns, values = zip(*entries, strict=True)
    num_columns = num_servers + 2 * num_jobs
    matrix = sparse.csr_matrix((values, (at, columns)), shape=(len(low), num_columns))
    costs = np.zeros(num_columns)
    costs[num_servers : num_servers + num_jobs] = [victim.shrink_cost for victim in victims]
    costs[num_servers + num_jobs :] = [victim.stop_cost - victim.shrink_cost for victim in victims]
    found = highs.solve(
        costs,
        np.ones(num_columns),
        (np.zeros(num_columns), np.ones(num_columns)),
        (matrix, np.array(low), np.full(len(low), np.inf)),
        node_limit=NODE_LIMIT,
        mip_rel_gap=0.0,
    )
    if found.x is None:
        raise InvalidRequest(f"no choice of servers was found within {NODE_LIMIT} nodes; ask for fewer servers at once")
    return tuple(number for number in range(num_servers) if found.x[number] > 0.5)
