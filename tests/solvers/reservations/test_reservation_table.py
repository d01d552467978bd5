"""Fitting, admission, repair and spare devices: whatever comes, every promise in the book holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.solvers.reservations import enlarge_all, verify
from springtide.solvers.reservations.fit import (
    Costs,
    FitTask,
    PlannedStretch,
    fill,
    fit,
    start_later,
    start_now,
    work_done,
)
from springtide.solvers.reservations.profile import FreeProfile
from springtide.solvers.reservations.reservation_table import Entry, ReservationTable

EFFORT = 100_000


def _costs(change_s: float = 2.0, largest: int = 64, *, reserves: bool = False) -> Costs:
    later = [0.0, *(change_s + math.log2(n) for n in range(1, largest + 1))]
    return Costs(later.__getitem__, later, later if reserves else [0.0] * len(later))


def _linear(sizes: Sequence[int] = (1, 2, 4, 8)) -> tuple[tuple[float, ...], tuple[int, ...]]:
    return tuple(float(n) for n in range(sizes[-1] + 1)), tuple(sizes)


def _entry(key: str, work: float, deadline_s: float, sizes: Sequence[int] = (1, 2, 4, 8)) -> Entry:
    rates, allowed = _linear(sizes)
    return Entry(key, work, deadline_s, rates, allowed)


def _table(capacity: int, now_s: float = 0.0, *, reserves: bool = False) -> ReservationTable:
    costs = _costs(reserves=reserves)
    reservations = ReservationTable(capacity, now_s, costs)
    reservations.begin(now_s, costs, EFFORT)
    return reservations


def test_the_cheapest_size_that_makes_the_deadline_is_taken() -> None:
    rates, sizes = _linear()
    profile = FreeProfile(8, 0.0)
    (run,) = start_now(profile, FitTask(100.0, 60.0, 0.0, rates, sizes), 0.0, 60.0, _costs())
    assert run == PlannedStretch(0.0, 3.0 + 50.0, 2, 3.0)


def test_whoever_goes_on_pays_only_what_is_left_of_the_last_change() -> None:
    rates, sizes = _linear()
    task = FitTask(100.0, 200.0, 0.0, rates, sizes, held=2, residual_s=1.5)
    runs = start_now(FreeProfile(8, 0.0), task._replace(sizes=(2,)), 0.0, 200.0, _costs())
    assert runs == (PlannedStretch(0.0, 51.5, 2, 1.5),)


def test_later_starts_where_there_is_room() -> None:
    rates, sizes = _linear()
    profile = FreeProfile(8, 0.0)
    profile.take(0.0, 100.0, 8)
    (run,) = start_later(profile, FitTask(80.0, 200.0, 0.0, rates, sizes), 0.0, 200.0, _costs())
    assert (run.start_s, run.num_devices) == (100.0, 8)
    assert start_later(profile, FitTask(80.0, 105.0, 0.0, rates, sizes), 0.0, 105.0, _costs()) == ()


def test_filling_pays_for_every_change() -> None:
    rates, sizes = _linear()
    profile = FreeProfile(8, 0.0)
    profile.take(0.0, 50.0, 6)
    runs = fill(profile, FitTask(200.0, 100.0, 0.0, rates, sizes), 0.0, 100.0, _costs(), sizes)
    assert [run.num_devices for run in runs] == [2, 8]
    assert work_done(runs, rates, math.inf) == pytest.approx(200.0)
    assert runs[0] == PlannedStretch(0.0, 50.0, 2, 3.0)
    assert runs[1].overhead_s == 5.0


def test_a_gap_too_short_for_its_change_is_left_alone() -> None:
    rates, sizes = _linear()
    profile = FreeProfile(8, 0.0)
    profile.take(2.0, 50.0, 8)
    (run,) = fill(profile, FitTask(80.0, 100.0, 0.0, rates, sizes), 0.0, 100.0, _costs(), sizes)
    assert run.start_s == 50.0


def test_others_are_planned_anew_before_a_job_is_refused() -> None:
    reservations = _table(8)
    assert reservations.admit(_entry("loose", 400.0, 500.0))
    enlarge_all(reservations)
    assert reservations.entries["loose"].size_at(0.0) == 8
    # All devices are in use until 55 s, and this one cannot wait so long.
    assert reservations.admit(_entry("tight", 120.0, 40.0))
    assert reservations.entries["tight"].size_at(0.0) == 4
    assert reservations.entries["loose"].size_at(0.0) <= 4
    assert verify(reservations) == []


def test_nobody_gets_in_at_the_price_of_a_promise() -> None:
    reservations = _table(8)
    assert reservations.admit(_entry("first", 400.0, 60.0))
    before = reservations.entries["first"].runs
    assert not reservations.admit(_entry("second", 400.0, 60.0))
    assert list(reservations.entries) == ["first"]
    assert reservations.entries["first"].runs == before
    assert verify(reservations) == []


def test_a_job_that_is_taken_out_leaves_its_devices_to_the_next() -> None:
    reservations = _table(8)
    assert reservations.admit(_entry("first", 400.0, 60.0))
    assert not reservations.admit(_entry("second", 400.0, 60.0))
    reservations.drop("first")
    assert reservations.profile.free == [8]
    assert reservations.admit(_entry("second", 400.0, 60.0))
    assert verify(reservations) == []


def test_a_late_job_stands_in_nobodys_way() -> None:
    reservations = _table(8)
    late = _entry("late", 4000.0, 10.0)
    reservations.put(late)
    assert late.is_late
    assert late.size_at(0.0) == 8
    assert reservations.admit(_entry("new", 80.0, 30.0))
    assert reservations.entries["new"].end_s <= 30.0
    assert verify(reservations) == []


def test_less_capacity_is_taken_only_if_every_promise_holds_or_by_force() -> None:
    reservations = _table(8)
    assert reservations.admit(_entry("a", 300.0, 100.0))
    assert reservations.admit(_entry("b", 300.0, 100.0))
    assert not reservations.set_capacity(4)
    assert reservations.capacity == 8
    assert verify(reservations) == []
    reservations.force_capacity(4)
    assert sum(entry.is_late for entry in reservations.entries.values()) == 1
    assert verify(reservations) == []


def test_spare_devices_move_nobody_who_would_gain_less_than_a_change_costs() -> None:
    reservations = _table(8)
    entry = _entry("short", 4.0, 100.0)
    assert reservations.admit(entry)
    reservations.commit()
    reservations.begin(3.0, reservations.costs, EFFORT)
    enlarge_all(reservations)
    assert entry.size_at(3.0) == 1


def test_verify_finds_what_is_wrong() -> None:
    reservations = _table(2)
    entry = _entry("a", 100.0, 20.0)
    entry.runs = (PlannedStretch(0.0, 23.0, 4, 3.0),)
    reservations.load(entry)
    faults = verify(reservations)
    assert len(faults) == 3  # steps left, after the deadline, more devices than there are


curves = st.lists(st.floats(0.3, 3.0), min_size=4, max_size=4).map(
    # Any speeds on 1, 2, 4, 8 devices: concave, convex, falling.
    lambda gains: dict(zip((1, 2, 4, 8), np.cumprod(gains).tolist(), strict=True))
)
jobs = st.lists(
    st.tuples(st.floats(0.0, 60.0), st.floats(1.0, 200.0), st.floats(5.0, 300.0), curves), min_size=1, max_size=10
)


def _drawn(index: int, work: float, deadline_s: float, profile: dict[int, float]) -> Entry:
    rates = [0.0] * 9
    for n in range(1, 9):
        rates[n] = profile[1 << (n.bit_length() - 1)]
    sizes: list[int] = []
    for n in (1, 2, 4, 8):
        if not sizes or rates[n] > rates[sizes[-1]]:
            sizes.append(n)
    return Entry(f"job-{index}", work, deadline_s, tuple(rates), tuple(sizes))


@settings(max_examples=60, deadline=None)
@given(jobs, st.integers(1, 12), st.booleans())
def test_a_plan_that_is_carried_out_keeps_every_promise(
    arrivals: list[tuple[float, float, float, dict[int, float]]], capacity: int, reserves: bool
) -> None:
    costs = _costs(reserves=reserves)
    reservations = ReservationTable(capacity, 0.0, costs)
    moments = sorted((at_s, index) for index, (at_s, *_) in enumerate(arrivals))
    promised: dict[str, float] = {}
    ended: dict[str, float] = {}
    now_s = 0.0
    for _ in range(400):
        planned = [
            edge
            for entry in reservations.entries.values()
            for run in entry.runs
            for edge in (run.start_s, run.end_s)
            if edge > now_s
        ]
        if moments:
            planned.append(max(now_s, moments[0][0]))
        if not planned:
            break
        now_s = min(planned)
        reservations.begin(now_s, costs, EFFORT)
        for key in [key for key, entry in reservations.entries.items() if entry.end_s <= now_s]:
            # What was planned has been done by then: no step is left.
            assert reservations.entries[key].left <= 1e-6 * max(1.0, reservations.entries[key].work)
            # Who had nothing left when it was planned anew ends in that instant, which is no moment of its own here.
            ended[key] = reservations.entries[key].end_s
            reservations.drop(key)
        while moments and moments[0][0] <= now_s:
            _, index = moments.pop(0)
            _, work, slack_s, profile = arrivals[index]
            entry = _drawn(index, work, now_s + slack_s, profile)
            if reservations.admit(entry):
                promised[entry.key] = entry.deadline_s
        enlarge_all(reservations)
        assert verify(reservations) == []
        anew = FreeProfile(capacity, now_s)
        for entry in reservations.entries.values():
            for run in entry.runs:
                anew.take(run.start_s, run.end_s, run.num_devices)
        assert (anew.times, anew.free) == (reservations.profile.times, reservations.profile.free)
        reservations.commit()
    assert not reservations.entries
    assert ended.keys() == promised.keys()
    assert all(ended[key] <= deadline_s + 1e-6 for key, deadline_s in promised.items())


@settings(max_examples=60, deadline=None)
@given(st.floats(1.0, 100.0), st.floats(2.0, 200.0), curves, st.integers(0, 7))
def test_alone_whatever_can_be_done_at_a_constant_size_is_found(
    work: float, deadline_s: float, profile: dict[int, float], taken: int
) -> None:
    costs = _costs()
    entry = _drawn(0, work, deadline_s, profile)
    free = FreeProfile(8, 0.0)
    free.take(0.0, math.inf, taken)
    can = any(n <= 8 - taken and costs.later[n] + work / entry.rates[n] <= deadline_s for n in entry.sizes)
    runs = fit(free, entry.task(), 0.0, costs)
    assert bool(runs) == can
    if runs:
        assert runs[-1].end_s <= deadline_s
        assert work_done(runs, entry.rates, math.inf) == pytest.approx(work)
