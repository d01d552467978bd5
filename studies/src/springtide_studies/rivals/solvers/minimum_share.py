"""Minimum satisfactory share: how few devices make a deadline, for one job and for a set of jobs (ElasticFlow §4.1).

Pure numbers: devices that are free over time, speeds, work and deadlines in; shares and their schedules out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Work is a sum of products of floats; a shortfall below this part of it is rounding, not lateness.
ROUNDING_FRACTION = 1e-9


class FreeDevices(NamedTuple):
    """A step function: `counts[k]` devices are free from `times_s[k]` to `times_s[k + 1]`, the last ones for ever."""

    times_s: Floats
    counts: Ints


class MinimumShare(NamedTuple):
    """The least that makes a deadline.

    `level` is the index of the highest size used (-1: nothing is left to do). From `switch_s` on the job has that
    size, before it the next smaller one, both as far as devices are free. `times_s` and `counts` are the schedule,
    a step function that ends at the deadline; `device_s` is its sum.
    """

    level: int
    switch_s: float
    times_s: Floats
    counts: Ints
    device_s: float


def doubling_sizes(most: int) -> tuple[int, ...]:
    """The powers of two up to `most`: the levels that keep buddy allocation free of fragments (§4.3)."""
    return tuple(1 << k for k in range(max(0, most).bit_length()))


def meets_linear(device_s: Sequence[float], deadlines_s: Sequence[float], num_devices: int) -> bool:
    """Theorem 1: whether jobs whose speed grows in proportion to their devices can all meet their deadlines.

    `device_s` is work over speed per device (M/k), `deadlines_s` counts from now. In the order of deadlines no prefix
    of the jobs may need more device time than there is until its last deadline.
    """
    needed = 0.0
    for deadline_s, mine in sorted(zip(deadlines_s, device_s, strict=True)):
        needed += mine
        if needed > num_devices * deadline_s * (1 + ROUNDING_FRACTION):
            return False
    return True


def progressive_filling(
    free: FreeDevices,
    work: float,
    deadline_s: float,
    sizes: Sequence[int],
    steps_per_s: Sequence[float],
    *,
    slot_s: float = 0.0,
    change_s: float = 0.0,
) -> MinimumShare | None:
    """Algorithm 1, lines 11-22: the smallest level j such that x(t) = min(j, free(t)) does `work` by the deadline.

    `sizes` ascend and so do their speeds. The levels are raised one by one over the whole time, and within the last
    one from the deadline backwards, as the paper's inner loop runs: the later part has level j, the earlier part
    still the level below. So a share is held as late as it can be, devices near now stay free for a job that needs
    them sooner, and what is left of them is for Algorithm 2. (Line 15 of the paper sums over t; it must be over the
    jobs that were filled before.) Time is continuous here: the switch falls where the work is just done, or, with
    `slot_s`, at the multiple of it before that, since in the paper a whole slot has one size.

    `change_s` is lost at every change to another number of devices, the start included. Returns None if even the
    largest size does not make it. `free.times_s[0]` is now.
    """
    end = int(np.searchsorted(free.times_s, deadline_s, side="left"))
    if work <= 0:
        return MinimumShare(-1, deadline_s, free.times_s[:0], free.counts[:0], 0.0)
    if end == 0:
        return None
    starts = free.times_s[:end]
    lengths = np.diff(np.append(starts, deadline_s))
    fits = np.searchsorted(np.asarray(sizes), free.counts[:end], side="right")
    rate_of = np.concatenate(([0.0], np.asarray(steps_per_s, dtype=np.float64)))
    size_of = np.concatenate(([0], np.asarray(sizes)))
    if change_s:
        levels = np.minimum(np.arange(len(size_of))[:, None], fits[None, :])
        return _fill_with_changes(starts, lengths, rate_of[levels], size_of[levels], work, change_s)
    enough = work * (1 - ROUNDING_FRACTION)
    # A level that is not enough with everything free need not be tried.
    level = max(1, int(np.searchsorted(rate_of * (deadline_s - starts[0]), enough, side="left")))
    while level < len(size_of):
        upper = rate_of[np.minimum(fits, level)]
        if upper @ lengths >= enough:
            break
        level += 1
    else:
        return None
    below, above = np.minimum(fits, level - 1), np.minimum(fits, level)
    lower = rate_of[below]
    gains = np.cumsum(((upper - lower) * lengths)[::-1])
    missing = min(work - lower @ lengths, gains[-1])
    at = int(np.searchsorted(gains, missing, side="left"))
    k = end - 1 - at
    inside = gains[at] - missing
    switch_s = float(starts[k] + (inside / (upper[k] - lower[k]) if upper[k] > lower[k] else 0.0))
    if slot_s:
        switch_s = max(float(starts[k]), switch_s // slot_s * slot_s)
    return _share(starts, lengths, size_of[below], size_of[above], k, switch_s, level - 1)


def _fill_with_changes(
    starts: Floats, lengths: Floats, rates: Floats, counts: Ints, work: float, change_s: float
) -> MinimumShare | None:
    """The same search where every change costs; a stretch shorter than its change counts as a loss."""
    num = len(starts)
    for level in range(1, len(rates)):
        below, above = rates[level - 1], rates[level]
        for k in range(num - 1, -1, -1):
            # The switch falls into segment k: the number of changes is the same wherever it does.
            sizes_before, sizes_after = counts[level - 1, : k + 1], counts[level, k:]
            path = np.concatenate((sizes_before, sizes_after))
            speeds = np.concatenate((below[: k + 1], above[k:]))
            changed = np.concatenate(([path[0] > 0], (path[1:] != path[:-1]) & (path[1:] > 0)))
            lost = float((speeds * changed).sum()) * change_s
            at_start = float(below[:k] @ lengths[:k] + above[k:] @ lengths[k:]) - lost
            if at_start < work * (1 - ROUNDING_FRACTION):
                continue
            rise = above[k] - below[k]
            inside = min((at_start - work) / rise, lengths[k]) if rise > 0 else 0.0
            switch_s = float(starts[k] + max(0.0, inside))
            return _share(starts, lengths, counts[level - 1], counts[level], k, switch_s, level - 1)
    return None


def _share(
    starts: Floats, lengths: Floats, before: Ints, after: Ints, k: int, switch_s: float, level: int
) -> MinimumShare:
    times_s = np.insert(starts, k + 1, switch_s)
    counts = np.concatenate((before[: k + 1], after[k:]))
    ends = np.append(starts[1:], starts[-1] + lengths[-1])
    device_s = float(
        before[:k] @ lengths[:k]
        + before[k] * (switch_s - starts[k])
        + after[k] * (ends[k] - switch_s)
        + after[k + 1 :] @ lengths[k + 1 :]
    )
    keep = np.diff(times_s, append=starts[-1] + lengths[-1]) > 0
    return MinimumShare(level, switch_s, times_s[keep], counts[keep], device_s)


def forward_filling(free: FreeDevices, work: float, sizes: Sequence[int], steps_per_s: Sequence[float]) -> MinimumShare:
    """As much as is free, as soon as it is free, up to the largest size, until `work` is done: how EDF fills.

    `deadline_s` does not enter. The schedule ends when the work is done, which is `switch_s`: inf if nothing is free
    for ever.
    """
    starts = free.times_s
    levels = np.searchsorted(np.asarray(sizes), free.counts, side="right")
    rates = np.concatenate(([0.0], np.asarray(steps_per_s, dtype=np.float64)))[levels]
    counts = np.concatenate(([0], np.asarray(sizes)))[levels]
    done = np.concatenate(([0.0], np.cumsum(rates[:-1] * np.diff(starts))))
    k = int(np.searchsorted(done, work, side="left")) - 1
    k = max(k, 0)
    end_s = float(starts[k] + (work - done[k]) / rates[k]) if rates[k] > 0 else np.inf
    times_s = starts[: k + 1]
    spans = np.diff(np.append(times_s, end_s))
    held = counts[: k + 1]
    keep = spans > 0
    device_s = float(held[held > 0] @ spans[held > 0])
    return MinimumShare(len(sizes) - 1, end_s, times_s[keep], held[keep], device_s)


class Demands(NamedTuple):
    """Jobs in the order of their deadlines, one row each: what they have to do until when, and how fast they are.

    `sizes` and `steps_per_s` are (jobs, levels), ascending; a job with fewer levels repeats its last one.
    """

    work: Floats
    deadlines_s: Floats
    sizes: Ints
    steps_per_s: Floats


class MinimumShares(NamedTuple):
    """Minimum shares of a set of jobs.

    Before `switch_s` a job has `low` devices and from then to its deadline `high`, unless its row is in `clipped`:
    then others left it less, and its schedule stands there. `fits` is False where the deadline cannot be made;
    such a job has no share, or what it gets beyond its deadline stands in `clipped`.
    """

    fits: Bools
    low: Ints
    high: Ints
    switch_s: Floats
    clipped: dict[int, MinimumShare]
    free: FreeDevices

    @property
    def first_misfit(self) -> int:
        """The row of the first job that does not make its deadline; the number of jobs if all do."""
        return int(np.argmin(self.fits)) if not self.fits.all() else len(self.fits)

    def counts_now(self, now_s: float) -> list[int]:
        """Devices of every job at `now_s`, the start of the schedules."""
        counts: list[int] = np.where(self.switch_s <= now_s, self.high, self.low).tolist()
        for row, share in self.clipped.items():
            counts[row] = int(share.counts[0]) if len(share.counts) else 0
        return counts


def alone(demands: Demands, now_s: float, slot_s: float = 0.0) -> MinimumShares:
    """The minimum share of every job as if it had the cluster for itself. All jobs at once; `free` is empty."""
    time_s = np.maximum(demands.deadlines_s - now_s, 0.0)
    work = demands.work
    reach = demands.steps_per_s * time_s[:, None]
    level = (reach < (work * (1 - ROUNDING_FRACTION))[:, None]).sum(axis=1)
    num_levels = demands.sizes.shape[1]
    fits = level < num_levels
    rows = np.arange(len(work))
    upper = np.minimum(level, num_levels - 1)
    lower = np.maximum(upper - 1, 0)
    is_first = upper == 0
    low = np.where(is_first, 0, demands.sizes[rows, lower])
    low_rate = np.where(is_first, 0.0, demands.steps_per_s[rows, lower])
    high = demands.sizes[rows, upper]
    rise = demands.steps_per_s[rows, upper] - low_rate
    missing = work - low_rate * time_s
    late_part_s = np.divide(missing, rise, out=np.zeros_like(work), where=rise > 0)
    switch_s = demands.deadlines_s - late_part_s
    if slot_s:
        switch_s = switch_s // slot_s * slot_s
    switch_s = np.clip(switch_s, now_s, np.maximum(demands.deadlines_s, now_s))
    nothing = FreeDevices(np.empty(0), np.empty(0, dtype=np.int64))
    return MinimumShares(fits, np.where(fits, low, 0), np.where(fits, high, 0), switch_s, {}, nothing)


def minimum_shares(
    demands: Demands,
    now_s: float,
    num_devices: int,
    *,
    slot_s: float = 0.0,
    stops_at_misfit: bool = False,
    late_jobs_claim: bool = False,
) -> MinimumShares:
    """Algorithm 1, lines 1-9: fill all jobs in the order of their deadlines, each into what the others left.

    All shares are computed as if each job were alone, and the longest prefix of them that fits together is taken as
    it is: progressive filling would find the same. Only jobs behind it are filled one by one. `slot_s` as there. With
    `stops_at_misfit` the first job that does not fit ends the work (admission needs no more); the rest of the
    result is then not filled. With `late_jobs_claim` a job that cannot make its deadline takes all it can use at its
    turn, as under EDF, until its work is done; otherwise it takes nothing.
    """
    shares = alone(demands, now_s, slot_s)
    num = len(demands.work)
    if num == 0:
        return shares._replace(free=FreeDevices(np.array([now_s]), np.array([num_devices])))
    if stops_at_misfit and not shares.fits.all():
        return shares
    ends_s = np.maximum(demands.deadlines_s, now_s)
    moments = np.concatenate((np.full(num, now_s), shares.switch_s, ends_s))
    changes = np.concatenate((shares.low, shares.high - shares.low, -shares.high))
    times_s, slots = np.unique(moments, return_inverse=True)
    owners = np.tile(np.arange(num), 3)

    def free_after(prefix: int) -> Ints:
        taken = np.bincount(slots, weights=np.where(owners < prefix, changes, 0), minlength=len(times_s))
        free: Ints = num_devices - np.cumsum(taken).round().astype(np.int64)
        return free

    free = free_after(num)
    bad = shares.first_misfit if late_jobs_claim else num
    if free.min() >= 0 and bad == num:
        return shares._replace(free=FreeDevices(times_s, free))
    good, bad = 0, min(bad + 1, num)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if free_after(middle).min() >= 0 else (good, middle)
    ledger = _Ledger(times_s, free_after(good))
    return _fill_rest(demands, shares, ledger, good, ends_s, slot_s, stops_at_misfit, late_jobs_claim)


def _fill_rest(
    demands: Demands,
    shares: MinimumShares,
    ledger: _Ledger,
    first: int,
    ends_s: Floats,
    slot_s: float,
    stops_at_misfit: bool,
    late_jobs_claim: bool,
) -> MinimumShares:
    """Fill the jobs from row `first` on one by one."""
    lows, highs, switches = shares.low.tolist(), shares.high.tolist(), shares.switch_s.tolist()
    ends = ends_s.tolist()
    fits = shares.fits.copy()
    clipped: dict[int, MinimumShare] = {}
    for row in range(first, len(lows)):
        if fits[row] and ledger.take(lows[row], highs[row], switches[row], ends[row]):
            continue
        work, sizes, rates = float(demands.work[row]), demands.sizes[row], demands.steps_per_s[row]
        end_s, share = ends[row], None
        if fits[row]:
            share = progressive_filling(ledger.free(), work, end_s, sizes, rates, slot_s=slot_s)
        if share is None:
            fits[row] = False
            if stops_at_misfit:
                break
            if not late_jobs_claim:
                continue
            share = forward_filling(ledger.free(), work, sizes, rates)
            end_s = share.switch_s
            if end_s == np.inf:
                continue
        clipped[row] = share
        ledger.take_schedule(share, end_s)
    return shares._replace(
        fits=fits,
        low=np.where(fits, shares.low, 0),
        high=np.where(fits, shares.high, 0),
        clipped=clipped,
        free=ledger.free(),
    )


def play_in_turn(demands: Demands, now_s: float, num_devices: int) -> Floats:
    """When every job ends if each in turn takes all it can use of what those before it leave: EDF, played forward.

    Every job holds the largest size that is free at each moment. inf for a job that never gets a device. While jobs
    run on their largest size from now on there is nothing to search for.
    """
    ends_s = np.full(len(demands.work), np.inf)
    ledger = _Ledger(np.array([now_s]), np.array([num_devices], dtype=np.int64))
    fastest_s = now_s + demands.work / demands.steps_per_s[:, -1]
    most = demands.sizes[:, -1].tolist()
    num_at_once = int((np.cumsum(demands.sizes[:, -1]) <= num_devices).sum())
    if num_at_once:
        ends_s[:num_at_once] = fastest_s[:num_at_once]
        order = np.argsort(ends_s[:num_at_once], kind="stable")
        held = np.cumsum(demands.sizes[order, -1])
        times_s = np.concatenate(([now_s], ends_s[order]))
        counts = num_devices - held[-1] + np.concatenate(([0], held))
        ledger = _Ledger(times_s, counts)
    for row in range(num_at_once, len(most)):
        share = forward_filling(ledger.free(), float(demands.work[row]), demands.sizes[row], demands.steps_per_s[row])
        if share.switch_s < np.inf:
            ends_s[row] = share.switch_s
            ledger.take_schedule(share, share.switch_s)
    return ends_s


class _Ledger:
    """Free devices over time while jobs are filled one by one. Room for new moments is set aside beforehand."""

    def __init__(self, times_s: Floats, counts: Ints) -> None:
        self._moments: list[float] = times_s.tolist()
        self._times_s, self._counts = times_s, counts.copy()

    def free(self) -> FreeDevices:
        return FreeDevices(self._times_s, self._counts)

    def take(self, low: int, high: int, switch_s: float, end_s: float) -> bool:
        """Take `low` until the switch and `high` until the end, both known moments, if they are free throughout."""
        switch, end = bisect_left(self._moments, switch_s), bisect_left(self._moments, end_s)
        counts = self._counts
        if (low and switch and counts[:switch].min() < low) or (switch < end and counts[switch:end].min() < high):
            return False
        if low:
            counts[:switch] -= low
        counts[switch:end] -= high
        return True

    def take_schedule(self, share: MinimumShare, end_s: float) -> None:
        """Take a schedule that was filled into what is free here; only its switch, or its end, may be a new moment."""
        if not len(share.times_s):
            return
        at = bisect_left(self._moments, share.switch_s)
        if at == len(self._moments) or self._moments[at] != share.switch_s:
            self._moments.insert(at, share.switch_s)
            self._times_s = np.insert(self._times_s, at, share.switch_s)
            self._counts = np.insert(self._counts, at, self._counts[at - 1])
        end = bisect_left(self._moments, end_s)
        # A schedule begins now.
        held = np.searchsorted(share.times_s, self._times_s[:end], side="right") - 1
        self._counts[:end] -= share.counts[held]
