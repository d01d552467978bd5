"""The least mean completion time with full knowledge: a linear program over slots of time."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest

SLOT_S = 600.0
# A job whose cheapest device-seconds are below this share of a slot of the cluster is left out and runs at once.
_SMALL_FRACTION = 0.01
_MAX_SLOTS = 2_000
# So small a part of the slots after the last release is tried first: most schedules are done long before the horizon.
_FIRST_PART = 4


class BoundJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job: when it may start, and the seconds it takes alone on each number of devices."""

    release_s: float
    time_s: Mapping[int, float]


def lower_hull(time_s: Mapping[int, float]) -> list[tuple[int, float]]:
    """Numbers of devices with their times that a mix of others never beats in both time and device-seconds."""
    hull: list[tuple[float, float, int]] = []
    for area, time, count in sorted((count * time, time, count) for count, time in time_s.items() if np.isfinite(time)):
        if hull and time >= hull[-1][1]:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], (area, time)):
            hull.pop()
        hull.append((area, time, count))
    return [(count, time) for _, time, count in hull]


def _is_above(left: Sequence[float], middle: Sequence[float], right: Sequence[float]) -> bool:
    return (middle[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (middle[0] - left[0])


def jct_bound(
    jobs: Sequence[BoundJob], num_devices: int, *, slot_s: float = SLOT_S, is_tight: bool = False
) -> list[float]:
    """Seconds from release to end for each job: their mean is what no schedule beats on `num_devices`.

    A fraction of a job is done in a slot on some number of devices. What is done in a slot counts as done at its begin,
    so a job's end is at least the mean begin of its slots, and at least the time it takes on the devices it uses.
    A slot has `num_devices` for its length, and a job does not run beside itself. Devices can change at every slot and
    changes cost nothing, so the bound holds for schedules that resize and preempt. Jobs that hold next to nothing are
    let run at once.

    With `is_tight` half of its shortest time is added to the mean begin: no job is faster than on its best number of
    devices, so on average its parts are done at least that long before its end. Raises InvalidRequest without SciPy.
    """
    if importlib.util.find_spec("scipy") is None:
        raise InvalidRequest("the bound needs SciPy; install it with pip install springtide[solvers]")
    hulls = [lower_hull({count: time for count, time in job.time_s.items() if count <= num_devices}) for job in jobs]
    if not all(hulls):
        raise InvalidRequest("a job runs on no number of devices that there is; leave it out or give more devices")
    ends_s = [hull[-1][1] for hull in hulls]
    smallest = [min(count * time for count, time in hull) for hull in hulls]
    large = [index for index, area in enumerate(smallest) if area > _SMALL_FRACTION * num_devices * slot_s]
    if large:
        chosen, sizes = [jobs[index] for index in large], [hulls[index] for index in large]
        halves_s = [0.5 * hull[-1][1] if is_tight else 0.0 for hull in sizes]
        solved = _solve(chosen, sizes, halves_s, num_devices, slot_s)
        for index, end_s in zip(large, solved, strict=True):
            ends_s[index] = end_s
    return ends_s


def _horizon(
    jobs: Sequence[BoundJob], hulls: Sequence[list[tuple[int, float]]], num_devices: int, slot_s: float
) -> int:
    """So many slots that one job after the other would be done in them, each on its fastest number of devices."""
    last_s = max(job.release_s for job in jobs)
    # Side by side as far as whole jobs fit; half of the cluster at least is then in use.
    work_s = sum(count * time for (count, time) in (hull[-1] for hull in hulls)) * 2.0 / num_devices
    longest_s = max(hull[-1][1] for hull in hulls)
    return min(_MAX_SLOTS, int((last_s + work_s + longest_s) / slot_s) + 1)


class _Columns:
    """The program's variables, fraction by job, slot and number of devices, and where they stand in its rows."""

    def __init__(
        self, jobs: Sequence[BoundJob], hulls: Sequence[list[tuple[int, float]]], num_slots: int, slot_s: float
    ) -> None:
        owner, slot, row, times_s, widths, waits_s = [], [], [], [], [], []
        lengths_s: list[float] = []
        for index, (job, hull) in enumerate(zip(jobs, hulls, strict=True)):
            for number in range(int(job.release_s // slot_s), num_slots):
                begin_s = max(job.release_s, number * slot_s)
                for count, time in hull:
                    owner.append(index)
                    slot.append(number)
                    row.append(len(lengths_s))
                    times_s.append(time)
                    widths.append(count)
                    waits_s.append(begin_s - job.release_s)
                lengths_s.append((number + 1) * slot_s - begin_s)
        self.owner, self.slot, self.row = np.array(owner), np.array(slot), np.array(row)
        self.time_s, self.width, self.wait_s = np.array(times_s), np.array(widths), np.array(waits_s)
        self.length_s: NDArray[np.float64] = np.array(lengths_s)


def _solve(
    jobs: Sequence[BoundJob],
    hulls: Sequence[list[tuple[int, float]]],
    halves_s: Sequence[float],
    num_devices: int,
    slot_s: float,
) -> list[float]:
    most = _horizon(jobs, hulls, num_devices, slot_s)
    last = int(max(job.release_s for job in jobs) // slot_s)
    num_slots = min(most, last + 1 + max(1, (most - last) // _FIRST_PART))
    while True:
        found, is_settled = _solve_within(jobs, hulls, halves_s, num_devices, slot_s, num_slots)
        if found is not None and (is_settled or num_slots == most):
            return found
        if num_slots == most:
            raise InvalidRequest("the bound was not found; give more devices or fewer jobs")
        num_slots = min(most, last + 1 + 2 * (num_slots - last - 1))


def _solve_within(
    jobs: Sequence[BoundJob],
    hulls: Sequence[list[tuple[int, float]]],
    halves_s: Sequence[float],
    num_devices: int,
    slot_s: float,
    num_slots: int,
) -> tuple[list[float] | None, bool]:
    """The ends with so many slots (none if they are too few), and whether more slots would change nothing.

    That is so where nothing is done in the last slot, after all releases: none of its limits binds, and a later slot
    costs as much or more.
    """
    sparse: Any = importlib.import_module("scipy.sparse")
    optimize: Any = importlib.import_module("scipy.optimize")
    num_jobs = len(jobs)
    columns = _Columns(jobs, hulls, num_slots, slot_s)
    size = len(columns.owner)
    every = np.arange(size)

    def rows(values: NDArray[np.float64], where: NDArray[Any], count: int, ends: Any) -> Any:
        return sparse.hstack([sparse.csr_matrix((values, (where, every)), shape=(count, size)), ends])

    no_ends, own_ends = sparse.csr_matrix((num_slots, num_jobs)), -sparse.eye(num_jobs)
    at_most = [
        rows(columns.time_s * columns.width, columns.slot, num_slots, no_ends),
        rows(columns.time_s, columns.row, len(columns.length_s), sparse.csr_matrix((len(columns.length_s), num_jobs))),
        rows(columns.wait_s, columns.owner, num_jobs, own_ends),
        rows(columns.time_s, columns.owner, num_jobs, own_ends),
    ]
    limits = [np.full(num_slots, num_devices * slot_s), columns.length_s, -np.array(halves_s), np.zeros(num_jobs)]
    solved = optimize.linprog(
        np.concatenate([np.zeros(size), np.ones(num_jobs)]),
        A_ub=sparse.vstack(at_most).tocsr(),
        b_ub=np.concatenate(limits),
        A_eq=rows(np.ones(size), columns.owner, num_jobs, sparse.csr_matrix((num_jobs, num_jobs))).tocsr(),
        b_eq=np.ones(num_jobs),
        bounds=(0, None),
        method="highs",
    )
    if solved.x is None:
        return None, False
    ends_s: list[float] = solved.x[size:].tolist()
    return ends_s, not solved.x[:size][columns.slot == num_slots - 1].any()
