"""Shares of a capacity that minimise the sum of completion times: weights of the jobs' work, and the best shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Weights of many jobs are set in blocks of one job and one more for every so many before it.
JOBS_PER_BLOCK = 8
LEAST_ADDED = 0.1
# So few rows are faster one by one than all at once.
FEW_ROWS = 16
# The exact search visits jobs x sizes x capacity cells; above this number, shares follow the concave hulls instead.
MAX_CELLS = 6_000_000


class _Hulls:
    """The largest value of a part of the capacity for the jobs so far, as segments of falling slope."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.slopes: Floats = np.zeros(0)
        self.widths: Floats = np.zeros(0)
        self.ends: Floats = np.zeros(1)
        self.values: Floats = np.zeros(1)

    def value(self, capacity: Floats | Ints) -> Floats:
        """The largest value of each capacity."""
        return np.interp(capacity, self.ends, self.values)

    def add(self, slopes: Floats, widths: Floats) -> None:
        """Add the segments of a job, slopes falling; segments beyond the capacity are dropped."""
        index = np.searchsorted(-self.slopes, -slopes, side="right")
        all_slopes = np.insert(self.slopes, index, slopes)
        all_widths = np.insert(self.widths, index, widths)
        ends = np.concatenate(([0.0], np.cumsum(all_widths)))
        num = min(int(np.searchsorted(ends, self.capacity, side="left")), len(all_slopes))
        self.slopes, self.widths, self.ends = all_slopes[:num], all_widths[:num], ends[: num + 1]
        self.values = np.concatenate(([0.0], np.cumsum(self.slopes * self.widths)))


def concave_hull(sizes: Ints, values: Floats) -> list[int]:
    """Which entries form the upper concave hull from (0, 0), by rising size; sizes ascending, falling values left out.

    >>> concave_hull(np.array([1, 2, 4]), np.array([1.0, 1.1, 3.0]))
    [0, 2]
    """
    kept: list[int] = []
    xs, ys = sizes.tolist(), values.tolist()
    for index, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if y <= (ys[kept[-1]] if kept else 0.0):
            continue
        while kept:
            last = kept[-1]
            x0, y0 = (xs[kept[-2]], ys[kept[-2]]) if len(kept) > 1 else (0, 0.0)
            if (ys[last] - y0) * (x - x0) > (y - y0) * (xs[last] - x0):
                break
            kept.pop()
        kept.append(index)
    return kept


def work_weights(sizes: Sequence[Ints], speeds: Sequence[Floats], capacity: int, company: float) -> Floats:
    """What one unit of each job's work costs all jobs together, in seconds of completion time. Shape [J].

    Jobs are given in the order in which they end, the last one first; `sizes[j]` (ascending) and `speeds[j]` (work a
    second) are its choices. To minimise the sum of completion times, a capacity has to be shared at every moment so
    that the sum of weight times speed is largest, with weights that stay the same while the job lives, and that
    largest sum is the number of jobs alive: the maximum principle, with the Hamiltonian zero at the free end. That
    gives the weights one after the other, from the job that is alone at the end: the m-th is the one at which the best
    shares of the first m are worth m. For equal jobs of speed k^p it is heSRPT (Berg, Vesilo, Harchol-Balter, 2020,
    Theorem 4). `company` is how many others are expected to keep those jobs company in the long run: it raises every
    sum. Shares are taken to be divisible along each job's concave hull. A job without any speed weighs nothing.
    """
    weights = np.zeros(len(sizes))
    hulls = _Hulls(float(capacity))
    number = 0
    for index, (job_sizes, job_speeds) in enumerate(zip(sizes, speeds, strict=True)):
        fits = (job_sizes <= capacity) & (job_speeds > 0.0)
        xs, ys = job_sizes[fits], job_speeds[fits]
        if not len(xs):
            continue
        number += 1
        missing = np.maximum(number + company - hulls.value(capacity - xs), 0.0)
        weight = float(np.min(missing / ys))
        weights[index] = weight
        chosen = concave_hull(xs, ys)
        corner_sizes = np.concatenate(([0.0], xs[chosen].astype(np.float64)))
        corner_values = np.concatenate(([0.0], ys[chosen] * weight))
        widths = np.diff(corner_sizes)
        hulls.add(np.diff(corner_values) / widths, widths)
    return weights


def work_weights_of_many(sizes: Ints, speeds: Floats, capacity: int, company: float) -> Floats:
    """The same as `work_weights`, in blocks of jobs that grow with the number before them. Shape [J].

    `sizes` and `speeds` have the shape [J, S]; a speed of 0 is no choice. Within a block the largest sum of values is
    taken to grow in proportion to the number of jobs, as it does at the whole capacity.
    """
    weights = np.zeros(len(sizes))
    speeds = np.where(sizes <= capacity, speeds, 0.0)
    able = np.flatnonzero((speeds > 0.0).any(axis=1))
    hulls = _Hulls(float(capacity))
    first = 0
    while first < len(able):
        block = able[first : first + 1 + first // JOBS_PER_BLOCK]
        xs, ys = sizes[block], speeds[block]
        before = first + company
        number = before + np.arange(len(block))[:, None]
        whole = float(hulls.value(np.array(float(capacity))))
        given_up = (whole - hulls.value(np.maximum(capacity - xs, 0))) * (number / before if before else 1.0)
        # Each job adds one to the largest sum; what earlier blocks added too much or too little is made up for.
        missing = max(LEAST_ADDED, 1.0 + (before - whole) / len(block)) + given_up
        weight = np.min(np.divide(missing, ys, out=np.full_like(ys, np.inf), where=ys > 0.0), axis=1)
        weights[block] = weight
        _, slopes, widths = hull_segments(xs, ys * weight[:, None])
        order = np.argsort(-slopes, kind="stable")
        hulls.add(slopes[order], widths[order])
        first += len(block)
    return weights


def hull_segments(sizes: Ints, values: Floats) -> tuple[Ints, Floats, Floats]:
    """The segments of the upper concave hull of each row from (0, 0): its row, slope, and width in units of size.

    `sizes` and `values` have the shape [J, S]; values that are not positive are left out. The segments of a row are in
    order of size.
    """
    num_jobs, num_sizes = sizes.shape
    at_size, at_value = np.zeros(num_jobs), np.zeros(num_jobs)
    rows: list[Ints] = []
    slopes: list[Floats] = []
    widths: list[Floats] = []
    alive = np.arange(num_jobs)
    for _ in range(num_sizes):
        if len(alive) <= FEW_ROWS:
            few = _hull_segments_of_few(alive, sizes[alive], values[alive], at_size[alive], at_value[alive])
            rows.append(few[0])
            slopes.append(few[1])
            widths.append(few[2])
            break
        more = sizes[alive] - at_size[alive, None]
        gain = values[alive] - at_value[alive, None]
        slope = np.divide(gain, more, out=np.full(gain.shape, -np.inf), where=more > 0)
        # Of equal slopes the farthest, so that no corner lies on a straight line.
        best = num_sizes - 1 - np.argmax(slope[:, ::-1], axis=1)
        index = np.arange(len(alive))
        steepest = slope[index, best]
        rises = steepest > 0.0
        if not rises.all():
            alive, best, index, steepest = alive[rises], best[rises], index[rises], steepest[rises]
        rows.append(alive)
        slopes.append(steepest)
        widths.append(more[index, best])
        at_size[alive], at_value[alive] = sizes[alive, best], values[alive, best]
    if not rows:
        return np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0)
    return np.concatenate(rows), np.concatenate(slopes), np.concatenate(widths)


def _hull_segments_of_few(
    numbers: Ints, sizes: Ints, values: Floats, sizes_at: Floats, values_at: Floats
) -> tuple[Ints, Floats, Floats]:
    """The same from these corners on, for rows with these numbers, one by one: the next segment of each row, then those
    after it, and so on."""
    rounds: list[list[tuple[int, float, float]]] = [[] for _ in range(sizes.shape[1])]
    given = (numbers.tolist(), sizes.tolist(), values.tolist(), sizes_at.tolist(), values_at.tolist())
    for row, xs, ys, at_size, at_value in zip(*given, strict=True):
        for segments in rounds:
            best, steepest = -1, 0.0
            for index, x in enumerate(xs):
                if x > at_size and (slope := (ys[index] - at_value) / (x - at_size)) >= steepest and slope > 0.0:
                    best, steepest = index, slope
            if best < 0:
                break
            segments.append((row, steepest, xs[best] - at_size))
            at_size, at_value = float(xs[best]), ys[best]
    found = [segment for segments in rounds for segment in segments]
    rows, slopes, widths = zip(*found, strict=True) if found else ((), (), ())
    return np.array(rows, dtype=np.int64), np.array(slopes, dtype=np.float64), np.array(widths, dtype=np.float64)


def best_shares(sizes: Sequence[Ints], values: Sequence[Floats], capacity: int) -> list[int]:
    """The choice of one size (or 0, worth nothing) for each job with the largest sum of values within the capacity.

    Exact by dynamic programming over the capacity up to `MAX_CELLS` cells; above that along the concave hulls, one
    segment after the other by value per unit, which is the best for divisible shares. Ties go to the earlier job and
    the smaller size. Returns one size for each job.
    """
    if not sizes or capacity <= 0:
        return [0] * len(sizes)
    num_cells = sum(len(choices) for choices in sizes) * (capacity + 1)
    if num_cells <= MAX_CELLS:
        return _exact(sizes, values, capacity)
    return [int(share) for share in shares_along_hulls(_padded(sizes), _padded(values), capacity)]


def _exact(sizes: Sequence[Ints], values: Sequence[Floats], capacity: int) -> list[int]:
    best = np.zeros(capacity + 1)
    choices: list[NDArray[np.int32]] = []
    for job_sizes, job_values in zip(sizes, values, strict=True):
        after = best.copy()
        chosen = np.zeros(capacity + 1, dtype=np.int32)
        for size, value in zip(job_sizes.tolist(), job_values.tolist(), strict=True):
            if size > capacity or value <= 0.0:
                continue
            trial = best[: capacity + 1 - size] + value
            is_better = trial > after[size:]
            after[size:][is_better] = trial[is_better]
            chosen[size:][is_better] = size
        best = after
        choices.append(chosen)
    left = int(np.argmax(best))
    shares = [0] * len(sizes)
    for index in range(len(sizes) - 1, -1, -1):
        shares[index] = int(choices[index][left])
        left -= shares[index]
    return shares


def shares_along_hulls(sizes: Ints, values: Floats, capacity: int) -> Ints:
    """Shares along the concave hulls, one segment after the other by value per unit: the best for divisible shares.

    `sizes` and `values` have the shape [J, S]. Returns one size (or 0) for each job. Shape [J].
    """
    rows, slopes, widths = hull_segments(sizes, values)
    shares = np.zeros(len(sizes), dtype=np.int64)
    # A row's segments have falling slopes and are in order, so that each is met after those before it.
    order = np.lexsort((np.arange(len(rows)), rows, -slopes))
    blocked: set[int] = set()
    left = capacity
    for row, width in zip(rows[order].tolist(), widths[order].astype(np.int64).tolist(), strict=True):
        if width <= left and row not in blocked:
            shares[row] += width
            left -= width
        else:
            blocked.add(row)
    return shares


def marginal_value(sizes: Ints, values: Floats, capacity: int) -> float:
    """What the last unit of the capacity is worth along the concave hulls; 0.0 if they do not take all of it.

    `sizes` and `values` have the shape [J, S]. Without any capacity it is what the first unit would be worth.
    """
    _, slopes, widths = hull_segments(sizes, values)
    order = np.argsort(-slopes, kind="stable")
    index = int(np.searchsorted(np.cumsum(widths[order]), capacity, side="left"))
    return float(slopes[order][index]) if index < len(order) else 0.0


def _padded(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Rows of different lengths as one array, with zeros behind their ends."""
    found = np.zeros((len(rows), max(map(len, rows))), dtype=rows[0].dtype)
    for index, row in enumerate(rows):
        found[index, : len(row)] = row
    return found
