"""Which jobs of a fixed width make their deadlines on a grid of leases: a packing that proves itself, else a MILP.

The one module that knows SciPy (its HiGHS solver), and only while a program is solved.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest

# Further into the future nothing has to be decided now; leases beyond are counted as free for all jobs that reach them.
HORIZON = 1200
# Branching stops here, by a count and not by the clock: the answer must not depend on how fast the machine is.
NODE_LIMIT = 2000
REL_GAP = 1e-3


class LeaseJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job on the grid: `width` devices in `num_needed` leases, all of them among the next `num_usable`.

    `is_accepted`: it was accepted before, and keeps that against any number of newcomers.
    """

    width: int
    num_needed: int
    num_usable: int
    is_accepted: bool = False


class LeasePlan(msgspec.Struct, frozen=True, kw_only=True):
    """For each job: whether it makes its deadline, and whether it has to run in the lease that begins now."""

    makes_it: tuple[bool, ...]
    runs_now: tuple[bool, ...]


def is_available() -> bool:
    """Whether the solver is installed."""
    return importlib.util.find_spec("scipy") is not None


def plan_leases(jobs: Sequence[LeaseJob], capacity: int) -> LeasePlan:
    """Choose as many jobs as can make their deadlines on `capacity` devices; accepted ones come before all others.

    If all of them fit into a packing there is nothing to choose, and the packing is optimal. Else a mixed-integer
    program chooses (Ye et al., "Chronus", SoCC 2021: one lease is the unit of time, a job runs in whole leases).
    In both what can run later runs later, so that the lease that begins now has room for others.
    Raises InvalidRequest without the solver.
    """
    clipped = [_clip(job) for job in jobs]
    possible = [job.num_needed <= job.num_usable and job.width <= capacity for job in clipped]
    indices = [index for index, fits in enumerate(possible) if fits]
    chosen = [clipped[index] for index in indices]
    part = _pack(chosen, capacity) or _solve(chosen, capacity)
    makes_it, runs_now = [False] * len(jobs), [False] * len(jobs)
    for index, makes, runs in zip(indices, part.makes_it, part.runs_now, strict=True):
        makes_it[index], runs_now[index] = makes, runs
    return LeasePlan(makes_it=tuple(makes_it), runs_now=tuple(runs_now))


def _clip(job: LeaseJob) -> LeaseJob:
    """What of the job has to happen within the horizon."""
    beyond = max(0, job.num_usable - HORIZON)
    if not beyond:
        return job
    return LeaseJob(
        width=job.width,
        num_needed=max(0, job.num_needed - beyond),
        num_usable=HORIZON,
        is_accepted=job.is_accepted,
    )


def _pack(jobs: Sequence[LeaseJob], capacity: int) -> LeasePlan | None:
    """Each job as late as possible, the latest deadline first, the widest of equals first; None if one does not fit."""
    free = np.full(max((job.num_usable for job in jobs), default=0), capacity, dtype=np.int64)
    runs_now = [False] * len(jobs)
    order = sorted(range(len(jobs)), key=lambda index: (-jobs[index].num_usable, -jobs[index].width, index))
    for index in order:
        job = jobs[index]
        if not job.num_needed:
            continue
        slots = np.flatnonzero(free[: job.num_usable] >= job.width)
        if len(slots) < job.num_needed:
            return None
        mine = slots[-job.num_needed :]
        free[mine] -= job.width
        runs_now[index] = bool(mine[0] == 0)
    return LeasePlan(makes_it=(True,) * len(jobs), runs_now=tuple(runs_now))


def _solve(jobs: Sequence[LeaseJob], capacity: int) -> LeasePlan:
    """The mixed-integer program.

    x_j: job j makes its deadline. y_jb: the leases it gets in bucket b, buckets growing by doubling from the single
    lease that begins now. sum_b y_jb = needed_j x_j; sum_j width_j y_jb <= capacity length_b; y_jb is at most the part
    of the bucket before the deadline. Only x and y_j0 are integer: later buckets are decided again when they come. So
    two deadlines within one later bucket may both count on the same room, until the bucket has come near.
    """
    optimize = _optimize()
    edges, last = [0, 1], max(job.num_usable for job in jobs)
    while edges[-1] < last:
        edges.append(min(last, 2 * edges[-1]))
    num_jobs, num_buckets = len(jobs), len(edges) - 1
    widths = np.array([job.width for job in jobs], dtype=float)
    needs = np.array([job.num_needed for job in jobs], dtype=float)
    usable = np.array([job.num_usable for job in jobs])
    low, high = np.array(edges[:-1]), np.array(edges[1:])
    room: NDArray[np.float64] = np.clip(np.minimum(usable[:, None], high) - low, 0, None).astype(float)

    sparse: Any = importlib.import_module("scipy.sparse")
    # Columns: x of every job, then y bucket by bucket.
    by_job = sparse.hstack([sparse.diags(-needs), *[sparse.identity(num_jobs)] * num_buckets]).tocsc()
    by_bucket = sparse.hstack(
        [sparse.csc_matrix((num_buckets, num_jobs)), sparse.kron(sparse.identity(num_buckets), widths[None, :])]
    ).tocsc()
    newcomers = sum(not job.is_accepted for job in jobs)
    worth = np.array([newcomers + 1.0 if job.is_accepted else 1.0 for job in jobs])
    # Far too little to give up a job for: among equal choices the one that leaves most of this lease to others.
    now_cost = 0.5 * widths / (widths.sum() + 1.0)
    found = optimize.milp(
        c=np.concatenate([-worth, now_cost, np.zeros(num_jobs * (num_buckets - 1))]),
        integrality=np.concatenate([np.ones(2 * num_jobs), np.zeros(num_jobs * (num_buckets - 1))]),
        bounds=optimize.Bounds(0.0, np.concatenate([np.ones(num_jobs), room.T.ravel()])),
        constraints=[
            optimize.LinearConstraint(by_job, 0.0, 0.0),
            optimize.LinearConstraint(by_bucket, -np.inf, capacity * (high - low).astype(float)),
        ],
        options={"node_limit": NODE_LIMIT, "mip_rel_gap": REL_GAP},
    )
    if found.x is None:
        # Nothing found within the limit: no new job, and accepted ones get the devices while they last.
        return _keep_accepted(jobs, capacity)
    chosen = np.round(found.x[: 2 * num_jobs]).astype(bool)
    return LeasePlan(makes_it=tuple(chosen[:num_jobs].tolist()), runs_now=tuple(chosen[num_jobs:].tolist()))


def _keep_accepted(jobs: Sequence[LeaseJob], capacity: int) -> LeasePlan:
    left = capacity
    runs_now = [False] * len(jobs)
    for index in sorted(range(len(jobs)), key=lambda i: (jobs[i].num_usable - jobs[i].num_needed, i)):
        if jobs[index].is_accepted and jobs[index].width <= left:
            runs_now[index] = True
            left -= jobs[index].width
    return LeasePlan(makes_it=tuple(job.is_accepted for job in jobs), runs_now=tuple(runs_now))


def _optimize() -> Any:
    if not is_available():
        raise InvalidRequest(
            "the policy chronus solves a mixed-integer program for each lease and needs SciPy: "
            "pip install 'springtide[solvers]'"
        )
    return importlib.import_module("scipy.optimize")
