"""Algorithm 2 against every allocation of a small grid, and what still holds where returns do not diminish."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_studies.rivals.solvers.marginal import clipped_slot_costs, share_out, slot_costs
from springtide_studies.rivals.solvers.minimum_share import Demands, FreeDevices, minimum_shares, progressive_filling

SLOT_S = 1.0


def all_sizes(count: int, num_jobs: int) -> list[list[int]]:
    return [list(range(1, count + 1)) for _ in range(num_jobs)]


def demands_for(works, deadlines_s, curves) -> Demands:
    num = len(curves[0])
    return Demands(
        np.array(works), np.array(deadlines_s), np.tile(np.arange(1, num + 1), (len(works), 1)), np.array(curves)
    )


def least_device_time(work, deadline_s, rates, level) -> float:
    """By the definition: the slot at `level`, then the least share of what is left."""
    sizes = tuple(range(1, len(rates) + 1))
    rate = rates[level - 1] if level else 0.0
    if work <= rate * SLOT_S:
        return level * work / rate
    rest = progressive_filling(
        FreeDevices(np.array([SLOT_S]), np.array([len(rates)])), work - rate * SLOT_S, deadline_s, sizes, rates
    )
    return np.inf if rest is None else level * SLOT_S + rest.device_s


concave = st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4).map(
    lambda rises: tuple(np.cumsum(sorted(rises, reverse=True)).tolist())
)
anything = st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4).map(lambda rises: tuple(np.cumsum(rises).tolist()))
job = st.tuples(st.floats(0.2, 8.0), st.floats(1.5, 12.0))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(job, anything), min_size=1, max_size=4))
def test_costs_are_the_device_time_of_the_refilled_schedule(drawn) -> None:
    works, deadlines_s = [d[0][0] for d in drawn], [d[0][1] for d in drawn]
    costs = slot_costs(demands_for(works, deadlines_s, [d[1] for d in drawn]), 0.0, SLOT_S)
    for row, ((work, deadline_s), rates) in enumerate(drawn):
        free = FreeDevices(np.array([0.0]), np.array([4]))
        clipped = clipped_slot_costs(free, work, deadline_s, (1, 2, 3, 4), rates, SLOT_S)
        for level in range(5):
            wanted = least_device_time(work, deadline_s, rates, level)
            assert costs[row, level] == pytest.approx(wanted)
            assert clipped[level] == pytest.approx(wanted)


@settings(max_examples=150, deadline=None)
@given(job, anything, st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_costs_with_few_devices_free(drawn, rates, counts) -> None:
    work, deadline_s = drawn
    free = FreeDevices(np.array([0.0, SLOT_S, 3.0]), np.array(counts))
    costs = clipped_slot_costs(free, work, deadline_s, (1, 2, 3, 4), rates, SLOT_S)
    for level in range(5):
        rate = rates[level - 1] if level else 0.0
        if work <= rate * SLOT_S:
            assert costs[level] == pytest.approx(level * work / rate)
            continue
        after = FreeDevices(np.array([SLOT_S, 3.0]), np.array(counts[1:]))
        rest = progressive_filling(after, work - rate * SLOT_S, deadline_s, (1, 2, 3, 4), rates)
        wanted = np.inf if rest is None else level * SLOT_S + rest.device_s
        assert costs[level] == pytest.approx(wanted)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(job, concave), min_size=1, max_size=3), st.integers(1, 7))
def test_the_greedy_choice_is_optimal_where_returns_diminish(drawn, num_devices: int) -> None:
    """Formulas (4) to (7): of all allocations of the next slot that keep every deadline and leave nothing idle.

    No job may end within the slot: the device time of the part of it that is used, n / speed(n), need not be convex.
    """
    drawn = [((work + rates[-1] * SLOT_S, deadline_s + SLOT_S), rates) for (work, deadline_s), rates in drawn]
    drawn = sorted(drawn, key=lambda d: d[0][1])
    works, deadlines_s = [d[0][0] for d in drawn], [d[0][1] for d in drawn]
    demands = demands_for(works, deadlines_s, [d[1] for d in drawn])
    shares = minimum_shares(demands, 0.0, num_devices)
    if not shares.fits.all() or shares.clipped:
        return
    # A switch that falls into the slot is made at its start, as in whole slots.
    switched = shares.switch_s < SLOT_S
    base = [int(n) for n in np.where(switched, shares.high, shares.low)]
    if sum(base) > num_devices:
        return
    costs = slot_costs(demands, 0.0, SLOT_S)
    given_levels = share_out(
        base, all_sizes(4, len(base)), num_devices - sum(base), lambda row, level: float(costs[row, level])
    )
    used = min(num_devices, 4 * len(base))
    assert sum(given_levels) == used
    best = min(
        sum(costs[row, level] for row, level in enumerate(path))
        for path in itertools.product(*(range(low, 5) for low in base))
        if sum(path) == used
    )
    assert sum(costs[row, level] for row, level in enumerate(given_levels)) == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(job, anything), min_size=1, max_size=4), st.integers(0, 9))
def test_every_step_is_the_best_one_and_nothing_useful_stays_idle(drawn, num_free: int) -> None:
    """What holds for any curve: each level given had the largest return then, and no job can still use what is left."""
    works, deadlines_s = [d[0][0] for d in drawn], [d[0][1] + 100.0 for d in drawn]
    costs = slot_costs(demands_for(works, deadlines_s, [d[1] for d in drawn]), 0.0, SLOT_S)
    steps: list[int] = []

    def cost(row: int, level: int) -> float:
        return float(costs[row, level])

    before = [0] * len(drawn)
    for num in range(1, num_free + 1):
        after = share_out([0] * len(drawn), all_sizes(4, len(drawn)), num, cost)
        grown = [row for row in range(len(drawn)) if after[row] != before[row]]
        if not grown:
            assert sum(before) == 4 * len(drawn)
            break
        assert len(grown) == 1
        row = grown[0]
        assert after[row] == before[row] + 1
        gains = [costs[r, before[r]] - costs[r, before[r] + 1] for r in range(len(drawn)) if before[r] < 4]
        assert costs[row, before[row]] - costs[row, after[row]] == pytest.approx(max(gains))
        steps.append(row)
        before = after


def test_best_effort_and_deadlines_are_weighed_together() -> None:
    # Both may grow from one device to two; the linear job wastes nothing.
    demands = demands_for([100.0, 100.0], [np.inf, 300.0], [(1.0, 1.2, 1.3, 1.4), (1.0, 2.0, 3.0, 4.0)])
    costs = slot_costs(demands, 0.0, SLOT_S)
    levels = share_out([1, 1], all_sizes(4, 2), 3, lambda row, level: float(costs[row, level]))
    assert levels == [1, 4]
    upside_down = share_out([1, 1], all_sizes(4, 2), 3, lambda row, level: float(costs[row, level]), is_reversed=True)
    assert upside_down == [4, 1]


def test_levels_that_do_not_fit_leave_room_for_smaller_ones() -> None:
    sizes = [[1, 2, 4], [1, 2, 4]]
    levels = share_out([2, 0], sizes, 1, lambda row, level: 0.0)
    assert levels == [2, 1]


def test_ties_go_to_who_has_the_devices() -> None:
    sizes = [[1, 2], [1, 2]]
    assert share_out([0, 0], sizes, 2, lambda row, level: 1e9 + 1e-9 * row) == [2, 0]
    assert share_out([0, 0], sizes, 2, lambda row, level: 1e9 + 1e-9 * row, held=[0, 2]) == [0, 2]
