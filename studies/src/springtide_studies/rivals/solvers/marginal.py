"""Allocation by marginal return: which jobs get the devices that no deadline needs (ElasticFlow §4.2, Algorithm 2).

Pure numbers: what every further level costs a job in device time over its whole life, then a greedy choice by heap.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from springtide_studies.rivals.solvers.minimum_share import ROUNDING_FRACTION, Demands, Floats, FreeDevices

# Gains are sums over a job's whole life; a microsecond of a device is rounding, not a difference.
GAIN_DIGITS = 6

# (row, level index) -> device-seconds of the job's whole life if it has that level in the next slot.
Cost = Callable[[int, int], float]


def slot_costs(demands: Demands, now_s: float, slot_s: float) -> Floats:
    """Device time of every job if it has each of its levels for the next `slot_s` and its least share after that.

    Shape (jobs, levels + 1), the first column is for no device at all. This is the sum over x_i(t) of Algorithm 2
    after line 8, for jobs that find what they need free; inf where the deadline cannot be made any more. A deadline
    of inf stands for best effort (§4.4): what is left runs on the smallest size, some time.
    """
    num, num_levels = demands.sizes.shape
    work = demands.work
    sizes = np.concatenate((np.zeros((num, 1)), demands.sizes), axis=1)
    rates = np.concatenate((np.zeros((num, 1)), demands.steps_per_s), axis=1)
    run_s = np.minimum(slot_s, np.divide(work[:, None], rates, out=np.full_like(rates, np.inf), where=rates > 0))
    left = np.maximum(work[:, None] - rates * slot_s, 0.0)
    # With for ever to go, the smallest size is enough: any time that it needs will do.
    slowest_s = work / rates[:, 1] * (1 + ROUNDING_FRACTION)
    until_s = np.where(np.isinf(demands.deadlines_s), now_s + slot_s + slowest_s, demands.deadlines_s)
    time_s = np.maximum(until_s - now_s - slot_s, 0.0)
    reach = rates * time_s[:, None]
    # Column 0 of `reach` is no device: level 0 is enough only where nothing is left.
    enough = left * (1 - ROUNDING_FRACTION)
    level = (reach[:, None, :] < enough[:, :, None]).sum(axis=2)
    fits = level <= num_levels
    upper = np.minimum(level, num_levels)
    lower = np.maximum(upper - 1, 0)
    rows = np.arange(num)[:, None]
    rise = rates[rows, upper] - rates[rows, lower]
    missing = left - reach[rows, lower]
    late_part_s = np.divide(missing, rise, out=np.zeros_like(missing), where=rise > 0)
    rest = sizes[rows, lower] * time_s[:, None] + (sizes[rows, upper] - sizes[rows, lower]) * late_part_s
    costs: Floats = np.where(fits, sizes * run_s + np.where(left > 0, rest, 0.0), np.inf)
    return costs


def clipped_slot_costs(
    free: FreeDevices,
    work: float,
    deadline_s: float,
    sizes: Sequence[int],
    steps_per_s: Sequence[float],
    slot_s: float,
) -> Floats:
    """The same for one job that others leave only `free` devices, which begins now. Shape (levels + 1,)."""
    now_s = float(free.times_s[0])
    all_sizes = np.concatenate(([0], np.asarray(sizes)))
    rates = np.concatenate(([0.0], np.asarray(steps_per_s, dtype=np.float64)))
    run_s = np.minimum(slot_s, np.divide(work, rates, out=np.full_like(rates, np.inf), where=rates > 0))
    left = np.maximum(work - rates * slot_s, 0.0)
    begins = np.maximum(free.times_s, now_s + slot_s)
    lengths = np.maximum(np.minimum(np.append(begins[1:], np.inf), deadline_s) - begins, 0.0)
    fits = np.searchsorted(np.asarray(sizes), free.counts, side="right")
    levels = np.minimum(np.arange(len(all_sizes))[:, None], fits[None, :])
    totals = rates[levels] @ lengths
    device_s = all_sizes[levels] @ lengths
    costs = np.full(len(all_sizes), np.inf)
    for index, rest in enumerate(left.tolist()):
        level = int(np.searchsorted(totals, rest * (1 - ROUNDING_FRACTION), side="left"))
        if level > len(sizes):
            continue
        costs[index] = all_sizes[index] * run_s[index]
        if rest > 0 and level > 0:
            upper, lower = rates[levels[level]], rates[levels[level - 1]]
            gains = np.cumsum(((upper - lower) * lengths)[::-1])
            extra = np.cumsum(((all_sizes[levels[level]] - all_sizes[levels[level - 1]]) * lengths)[::-1])
            missing = min(rest - totals[level - 1], gains[-1])
            costs[index] += device_s[level - 1] + np.interp(missing, gains, extra, left=_first(missing, gains, extra))
    return costs


def _first(missing: float, gains: Floats, extra: Floats) -> float:
    """Within the last stretch of time the first gain is proportional."""
    return float(extra[0] * missing / gains[0]) if gains[0] > 0 else 0.0


def share_out(
    levels: Sequence[int],
    sizes: Sequence[Sequence[int]],
    num_free: int,
    cost: Cost,
    *,
    held: Sequence[int] | None = None,
    is_reversed: bool = False,
) -> list[int]:
    """Algorithm 2, lines 9-24: give `num_free` devices level by level to the job whose marginal return is largest.

    `levels[i]` is how many levels job i has already (0: none), `sizes[i]` what each level is. The marginal return of
    the next level is the device time that the job then needs less in all, per device added: lines 9 and 22. (It is
    negative where speed grows less than in proportion; "largest" is then what wastes least.) Ties go to jobs that have
    the devices now (`held`, levels), then to the earlier row: jobs of one model tie all the time. Sizes are those at
    which a job is faster than at every smaller one, so the paper's check of the finish time and formula (7) hold by
    construction: no level is given that would not make a job faster. A level that does not fit into what is free is
    not given, a smaller one of another job may be. With `is_reversed` the smallest return wins, as in the published
    artifact; there a job that has nothing comes before all others.

    Optimal for (4)-(7) where returns diminish, that is for concave curves and jobs that do not end within the slot;
    otherwise each single step is still the best one at that moment. Returns the levels. Costs one `cost` per level
    tried.
    """
    given = list(levels)
    heap: list[tuple[float, bool, int]] = []

    def offer(row: int) -> None:
        level = given[row]
        if level >= len(sizes[row]):
            return
        before = sizes[row][level - 1] if level else 0
        added = sizes[row][level] - before
        if added > num_free:
            return
        after_cost = cost(row, level + 1)
        if after_cost == np.inf:
            return
        gain = round((cost(row, level) - after_cost) / added, GAIN_DIGITS)
        if is_reversed:
            gain = np.inf if level == 0 else -gain
        heapq.heappush(heap, (-gain, held is None or level >= held[row], row))

    for row in range(len(given)):
        offer(row)
    while heap and num_free > 0:
        _, _, row = heapq.heappop(heap)
        level = given[row]
        added = sizes[row][level] - (sizes[row][level - 1] if level else 0)
        if added > num_free:
            continue
        given[row] = level + 1
        num_free -= added
        offer(row)
    return given
