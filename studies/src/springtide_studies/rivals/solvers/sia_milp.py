"""One size for each job within a number of devices, at the least cost: Sia's integer program, and its exact table."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest
from springtide_studies.bounds import highs

# Branching stops here, by a count and not by the clock: the answer must not depend on how fast the machine is. HiGHS
# needs a handful of nodes for thousands of jobs, as the relaxation has at most two fractional ones.
NODE_LIMIT = 1000
# The published artifact's gap.
REL_GAP = 1e-4


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that a job may get, in devices and ascending, and what each costs; getting none costs extra."""

    sizes: tuple[int, ...]
    costs: tuple[float, ...]


def choose_sizes(offers: Sequence[Offer], capacity: int, waiting_cost: float) -> tuple[int, ...]:
    """Choose a size for each job (0: none) so that the sum of costs is least, by HiGHS.

    min sum_jk cost_jk x_jk + waiting_cost (num_jobs - sum x), sum_k x_jk <= 1, sum size_jk x_jk <= capacity, x binary
    (Sia, SOSP'23, section 3.4). Where HiGHS finds nothing within `NODE_LIMIT` nodes `choose_by_table` does.
    Raises InvalidRequest without the solver.
    """
    if not highs.is_available():
        raise InvalidRequest(
            "the policy sia solves an integer program in every round and needs SciPy: pip install 'springtide[solvers]'"
            ", or sia:solver=table, which solves the same program without it"
        )
    sizes = np.array([size for offer in offers for size in offer.sizes], dtype=float)
    costs = np.array([cost for offer in offers for cost in offer.costs], dtype=float)
    if not len(sizes):
        return (0,) * len(offers)
    sparse: Any = importlib.import_module("scipy.sparse")
    job_of = np.repeat(np.arange(len(offers)), [len(offer.sizes) for offer in offers])
    # One row a job, at most one size each; the last row counts the devices.
    ones = np.ones(len(sizes))
    columns = np.arange(len(sizes))
    matrix = sparse.csr_matrix(
        (
            np.concatenate([ones, sizes]),
            (np.concatenate([job_of, np.full(len(sizes), len(offers))]), np.concatenate([columns, columns])),
        ),
        shape=(len(offers) + 1, len(sizes)),
    )
    highest = np.append(np.ones(len(offers)), float(capacity))
    found = highs.solve(
        costs - waiting_cost,
        ones,
        (0.0, 1.0),
        (matrix, np.full(len(offers) + 1, -np.inf), highest),
        node_limit=NODE_LIMIT,
        mip_rel_gap=REL_GAP,
        # Of so small a program there is little to simplify; with it HiGHS takes longer.
        presolve=False,
    )
    if found.x is None:
        return choose_by_table(offers, capacity, waiting_cost)
    chosen = np.zeros(len(offers), dtype=np.int64)
    is_chosen = found.x > 0.5
    chosen[job_of[is_chosen]] = sizes[is_chosen].astype(np.int64)
    return tuple(chosen.tolist())


def choose_by_table(offers: Sequence[Offer], capacity: int, waiting_cost: float) -> tuple[int, ...]:
    """The same choice by dynamic programming over the devices given away: exact, with one row for each job.

    Of equal choices the one that leaves later jobs the fewest devices, and of equal sizes the smaller, is taken.
    """
    least: NDArray[np.float64] = np.zeros(capacity + 1)
    taken = np.zeros((len(offers), capacity + 1), dtype=np.int64)
    for row, offer in enumerate(offers):
        best = least + waiting_cost
        for size, cost in zip(offer.sizes, offer.costs, strict=True):
            if size > capacity:
                continue
            with_it = least[: capacity + 1 - size] + cost
            is_less = with_it < best[size:] - 1e-12
            best[size:][is_less] = with_it[is_less]
            taken[row, size:][is_less] = size
        least = best
    chosen, left = [0] * len(offers), capacity
    for row in reversed(range(len(offers))):
        chosen[row] = int(taken[row, left])
        left -= chosen[row]
    return tuple(chosen)
