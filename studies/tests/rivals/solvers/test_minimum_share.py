"""Algorithm 1 against every allocation of a small grid, and Theorem 1."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_studies.rivals.solvers.minimum_share import (
    Demands,
    FreeDevices,
    MinimumShare,
    doubling_sizes,
    forward_filling,
    meets_linear,
    minimum_shares,
    play_in_turn,
    progressive_filling,
)

CONCAVE = (1.0, 1.75, 2.25, 2.5)
SUPERLINEAR = (1.0, 1.5, 4.0, 4.5)


def free_of(*counts: int) -> FreeDevices:
    return FreeDevices(np.arange(len(counts), dtype=float), np.array(counts))


def work_of(share: MinimumShare, end_s: float, sizes, rates) -> float:
    speed = dict(zip(sizes, rates, strict=True)) | {0: 0.0}
    lengths = np.diff(np.append(share.times_s, end_s))
    return float(sum(speed[int(n)] * length for n, length in zip(share.counts, lengths, strict=True)))


def best_by_hand(counts, work, rates):
    """The least device time over all allocations of whole slots that do the work; None if there is none."""
    speed = (0.0, *rates)
    found = None
    for path in itertools.product(*(range(min(count, len(rates)) + 1) for count in counts)):
        if sum(speed[n] for n in path) >= work - 1e-12 and (found is None or sum(path) < found):
            found = sum(path)
    return found


def demands_of(rows) -> Demands:
    """Rows of (work, deadline, sizes, rates), sorted by deadline."""
    width = max(len(row[2]) for row in rows)

    def padded(values):
        return [*values, *[values[-1]] * (width - len(values))]

    return Demands(
        np.array([row[0] for row in rows], dtype=float),
        np.array([row[1] for row in rows], dtype=float),
        np.array([padded(row[2]) for row in rows]),
        np.array([padded(row[3]) for row in rows], dtype=float),
    )


def check_schedules(demands: Demands, shares, now_s: float, num_devices: int) -> None:
    """No device twice, nothing below zero, and every job that fits does its work in time."""
    moments = {now_s, *shares.free.times_s.tolist()}
    for row in range(len(demands.work)):
        if not shares.fits[row]:
            continue
        end_s = float(demands.deadlines_s[row])
        share = schedule_of(shares, row, now_s)
        moments.update(share.times_s.tolist())
        sizes, rates = demands.sizes[row].tolist(), demands.steps_per_s[row].tolist()
        assert work_of(share, end_s, sizes, rates) >= demands.work[row] * (1 - 1e-6) - 1e-9
    for moment_s in sorted(moments):
        used = 0
        for row in range(len(demands.work)):
            if shares.fits[row] and moment_s < demands.deadlines_s[row]:
                share = schedule_of(shares, row, now_s)
                at = int(np.searchsorted(share.times_s, moment_s, side="right")) - 1
                used += int(share.counts[at]) if at >= 0 else 0
        assert used <= num_devices
        at = int(np.searchsorted(shares.free.times_s, moment_s, side="right")) - 1
        assert shares.free.counts[at] == num_devices - used


def schedule_of(shares, row: int, now_s: float) -> MinimumShare:
    if row in shares.clipped:
        return shares.clipped[row]
    switch_s = float(shares.switch_s[row])
    counts = np.array([shares.low[row], shares.high[row]])
    times_s = np.array([now_s, switch_s])
    if switch_s <= now_s:
        counts, times_s = counts[1:], times_s[1:]
    return MinimumShare(0, switch_s, times_s, counts, 0.0)


def test_levels_are_powers_of_two() -> None:
    assert doubling_sizes(0) == ()
    assert doubling_sizes(1) == (1,)
    assert doubling_sizes(12) == (1, 2, 4, 8)


def test_the_example_of_the_paper() -> None:
    # Figure 4: A and B hold three of four devices for one unit of time, job C needs 3 units of work within 2.
    share = progressive_filling(free_of(1, 4), 3.0, 2.0, (1, 2, 4), (1.0, 1.5, 2.0))
    assert share is not None
    assert share.counts.tolist() == [1, 4]
    assert share.device_s == pytest.approx(5.0)
    alone = progressive_filling(free_of(4), 3.0, 2.0, (1, 2, 4), (1.0, 1.5, 2.0))
    assert alone is not None
    assert alone.counts.tolist() == [2]
    assert alone.device_s == pytest.approx(4.0)
    assert progressive_filling(free_of(1, 2), 3.0, 2.0, (1, 2, 4), (1.0, 1.5, 2.0)) is None


def test_a_share_is_held_as_late_as_it_can_be() -> None:
    share = progressive_filling(free_of(4), 3.0, 10.0, (1, 2), (1.0, 1.5))
    assert share is not None
    assert (share.switch_s, share.counts.tolist()) == (7.0, [0, 1])


@pytest.mark.parametrize("rates", [CONCAVE, SUPERLINEAR])
def test_one_job_against_every_allocation_of_the_grid(rates: tuple[float, ...]) -> None:
    sizes = (1, 2, 3, 4)
    rng = np.random.default_rng(3)
    for _ in range(150):
        counts = tuple(int(count) for count in rng.integers(0, 5, size=4))
        work = float(rng.uniform(0.3, 11.0))
        share = progressive_filling(free_of(*counts), work, 4.0, sizes, rates)
        best = best_by_hand(counts, work, rates)
        if best is not None:
            assert share is not None, (counts, work)
        if share is None:
            continue
        assert work_of(share, 4.0, sizes, rates) == pytest.approx(work)
        if rates is CONCAVE and best is not None:
            # A switch inside a slot saves at most the one device for the one slot that the grid must round up to.
            assert share.device_s <= best + 1e-9
            assert best <= share.device_s + max(sizes)


@pytest.mark.parametrize("change_s", [0.0, 0.25])
def test_changes_are_paid_for(change_s: float) -> None:
    share = progressive_filling(free_of(1, 4, 4), 3.0, 3.0, (1, 2), (1.0, 1.5), change_s=change_s)
    assert share is not None
    done, before = 0.0, 0
    speed = {0: 0.0, 1: 1.0, 2: 1.5}
    for start_s, end_s, count in zip(share.times_s, [*share.times_s[1:], 3.0], share.counts, strict=True):
        paid_s = change_s if count and count != before else 0.0
        done, before = done + speed[int(count)] * (end_s - start_s - paid_s), int(count)
    assert done >= 3.0 - 1e-9
    impossible = progressive_filling(free_of(1), 2.9, 3.0, (1,), (1.0,), change_s=0.25)
    assert impossible is None


def test_forward_filling_takes_what_is_free_when_it_is_free() -> None:
    share = forward_filling(free_of(1, 0, 4), 5.0, (1, 2), (1.0, 1.5))
    assert share.counts.tolist() == [1, 0, 2]
    assert share.switch_s == pytest.approx(2.0 + 4.0 / 1.5)
    assert forward_filling(free_of(0), 1.0, (1,), (1.0,)).switch_s == np.inf


curves = st.lists(st.floats(0.05, 3.0), min_size=1, max_size=3).map(lambda rises: tuple(np.cumsum(rises).tolist()))
jobs = st.tuples(st.floats(0.1, 40.0), st.floats(0.5, 20.0), curves)


@settings(max_examples=150, deadline=None)
@given(st.lists(jobs, min_size=1, max_size=7), st.integers(1, 9), st.booleans())
def test_whatever_fits_is_possible(drawn, num_devices: int, late_jobs_claim: bool) -> None:
    rows = sorted(((w, d, tuple(1 << k for k in range(len(c))), c) for w, d, c in drawn), key=lambda row: row[1])
    demands = demands_of(rows)
    shares = minimum_shares(demands, 0.0, num_devices, late_jobs_claim=late_jobs_claim)
    if not late_jobs_claim:
        check_schedules(demands, shares, 0.0, num_devices)
    assert shares.free.counts.min() >= 0
    assert sum(shares.counts_now(0.0)) == num_devices - shares.free.counts[0]


@settings(max_examples=150, deadline=None)
@given(st.lists(jobs, min_size=1, max_size=7), st.integers(1, 9))
def test_all_at_once_is_the_same_as_one_after_the_other(drawn, num_devices: int) -> None:
    """The prefix that is taken as it is must be what progressive filling finds job by job."""
    rows = sorted(((w, d, tuple(1 << k for k in range(len(c))), c) for w, d, c in drawn), key=lambda row: row[1])
    demands = demands_of(rows)
    shares = minimum_shares(demands, 0.0, num_devices)
    free = FreeDevices(np.array([0.0]), np.array([num_devices]))
    for row, (work, deadline_s, sizes, rates) in enumerate(rows):
        share = progressive_filling(free, work, deadline_s, sizes, rates)
        assert (share is not None) == bool(shares.fits[row])
        if share is None:
            continue
        mine = schedule_of(shares, row, 0.0)
        times_s = np.unique(np.concatenate((free.times_s, share.times_s, [deadline_s])))
        held = share.counts[np.searchsorted(share.times_s, times_s, side="right") - 1]
        held[times_s >= deadline_s] = 0
        for start_s, end_s, count in zip(times_s, [*times_s[1:], np.inf], held, strict=True):
            if end_s - start_s < 1e-6 or start_s >= deadline_s:
                continue
            middle_s = (start_s + min(end_s, deadline_s)) / 2
            assert mine.counts[int(np.searchsorted(mine.times_s, middle_s, side="right")) - 1] == count
        counts = free.counts[np.searchsorted(free.times_s, times_s, side="right") - 1] - held
        free = FreeDevices(times_s, counts)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 8), st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=6
    ),
    st.integers(1, 5),
)
def test_linear_jobs_are_admitted_exactly_if_theorem_1_holds(drawn, num_devices: int) -> None:
    sizes = tuple(range(1, num_devices + 1))
    rows = sorted(
        ((work, deadline_s, sizes, tuple(k * n for n in sizes)) for work, deadline_s, k in drawn), key=lambda r: r[1]
    )
    shares = minimum_shares(demands_of(rows), 0.0, num_devices, stops_at_misfit=True)
    holds = meets_linear([row[0] / row[3][0] for row in rows], [row[1] for row in rows], num_devices)
    assert bool(shares.fits.all()) == holds


def test_a_job_that_cannot_be_in_time_takes_nothing_or_all_it_can_use() -> None:
    demands = demands_of([(10.0, 1.0, (1, 2), (1.0, 1.5)), (2.0, 4.0, (1, 2), (1.0, 1.5))])
    shares = minimum_shares(demands, 0.0, 2)
    assert shares.fits.tolist() == [False, True]
    assert shares.counts_now(0.0) == [0, 0]
    claimed = minimum_shares(demands, 0.0, 2, late_jobs_claim=True)
    assert claimed.fits.tolist() == [False, False]
    assert claimed.counts_now(0.0) == [2, 0]


def test_a_share_begins_at_the_slot_before_its_last_moment() -> None:
    share = progressive_filling(free_of(4), 3.0, 10.5, (1, 2), (1.0, 1.5), slot_s=4.0)
    assert share is not None
    assert share.switch_s == 4.0
    shares = minimum_shares(demands_of([(3.0, 10.5, (1, 2), (1.0, 1.5))]), 0.0, 4, slot_s=4.0)
    assert shares.switch_s.tolist() == [4.0]


@settings(max_examples=100, deadline=None)
@given(st.lists(jobs, min_size=1, max_size=6), st.integers(1, 9))
def test_edf_played_forward_step_by_step(drawn, num_devices: int) -> None:
    rows = sorted(((w, d, tuple(1 << k for k in range(len(c))), c) for w, d, c in drawn), key=lambda row: row[1])
    ends_s = play_in_turn(demands_of(rows), 0.0, num_devices)
    left, now_s, ended = [row[0] for row in rows], 0.0, {}
    while len(ended) < len(rows):
        room, speeds = num_devices, {}
        for row, (_, _, sizes, rates) in enumerate(rows):
            fitting = [(size, rate) for size, rate in zip(sizes, rates, strict=True) if size <= room]
            if row not in ended and fitting:
                room -= fitting[-1][0]
                speeds[row] = fitting[-1][1]
        step_s = min(left[row] / rate for row, rate in speeds.items())
        now_s += step_s
        for row, rate in speeds.items():
            left[row] -= rate * step_s
            if left[row] <= 1e-9:
                ended[row] = now_s
    assert ends_s.tolist() == pytest.approx([ended[row] for row in range(len(rows))], rel=1e-5, abs=1e-5)
