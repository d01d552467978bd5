"""Capacity that changes over time: step functions, fitting through their falls, and the book of promises in them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
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
from springtide.solvers.reservations.profile import (
    FreeProfile,
    Steps,
    compare,
    constant,
    devices_at,
    falls_of,
    largest,
    mapped,
    pointwise_max,
    trimmed,
)
from springtide.solvers.reservations.reservation_table import Entry, ReservationTable

EFFORT = 100_000
LINEAR = tuple(float(n) for n in range(9))
SIZES = (1, 2, 4, 8)

steps_drawn = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 12)), max_size=6).map(
    lambda later: ((0.0, 8), *sorted((float(from_s), count) for from_s, count in dict(later).items()))
)


def _costs(change_s: float = 2.0, reserve_s: float = 0.0, falls: tuple[float, ...] = ()) -> Costs:
    later = [0.0] + [change_s] * 16
    return Costs(later.__getitem__, later, [0.0] + [reserve_s] * 16, falls)


def _entry(key: str, work: float, deadline_s: float) -> Entry:
    return Entry(key, work, deadline_s, LINEAR, SIZES)


def _table(steps: int | Steps, costs: Costs | None = None, now_s: float = 0.0) -> ReservationTable:
    reservations = ReservationTable(steps, now_s, costs or _costs())
    reservations.begin(now_s, reservations.costs, EFFORT)
    return reservations


@given(steps_drawn, steps_drawn, st.integers(0, 70))
def test_step_functions_agree_with_every_second(one: Steps, other: Steps, now: int) -> None:
    kept = trimmed(one, float(now))
    both = pointwise_max(one, other, float(now))
    for second in range(now, 75):
        assert devices_at(kept, float(second)) == devices_at(one, float(second))
        assert devices_at(both, float(second)) == max(devices_at(one, float(second)), devices_at(other, float(second)))
    assert all(a[1] != b[1] and a[0] < b[0] for a, b in pairwise(kept))
    assert largest(kept) == max(devices_at(one, float(second)) for second in range(now, 75))
    assert devices_at(mapped(one, lambda count: count // 2), 30.0) == devices_at(one, 30.0) // 2
    spans = list(compare(one, other, float(now)))
    assert spans[0][0] == now
    assert spans[-1][1] == math.inf
    assert all(a[1] == b[0] for a, b in pairwise(spans))


@given(steps_drawn)
def test_a_profile_of_steps_is_one_that_use_was_taken_from(steps: Steps) -> None:
    profile = FreeProfile(steps, 0.0)
    other = FreeProfile(20, 0.0)
    for from_s, until_s, count, _ in compare(steps, constant(0), 0.0):
        other.take(from_s, until_s, 20 - count)
    assert (profile.times, profile.free) == (other.times, other.free)


def test_what_is_past_does_not_tell_functions_apart() -> None:
    assert trimmed(((0.0, 4), (10.0, 8), (20.0, 2)), 15.0) == trimmed(((0.0, 6), (12.0, 8), (20.0, 2)), 15.0)
    assert trimmed(((5.0, 4),), 1.0) == ((0.0, 4),)


def test_a_fall_by_more_than_a_node_counts_for_each_of_them() -> None:
    steps = ((0.0, 16), (10.0, 8), (20.0, 12), (30.0, 9))
    assert falls_of(steps, 0.0, 4) == (10.0, 10.0, 30.0)
    assert falls_of(steps, 10.0, 4) == (30.0,)
    assert falls_of(constant(4), 0.0, 4) == ()


def test_who_runs_through_a_fall_has_time_for_a_change_at_it() -> None:
    profile = FreeProfile(8, 0.0)
    task = FitTask(100.0, 200.0, 0.0, LINEAR, (2,))
    (run,) = start_now(profile, task, 0.0, 200.0, _costs(falls=(10.0, 30.0, 90.0)))
    # 50 s of work and the start; two of the falls are inside.
    assert run == PlannedStretch(0.0, 2.0 + 50.0 + 2 * 2.0, 2, 2.0)
    # What is added for one may reach the next.
    (run,) = start_now(profile, task, 0.0, 200.0, _costs(falls=(10.0, 52.5)))
    assert run.end_s == 56.0
    assert start_now(profile, task, 0.0, 55.0, _costs(falls=(10.0, 30.0))) == ()
    (run,) = fit(profile, task._replace(deadline_s=56.0), 0.0, _costs(reserve_s=3.0, falls=(10.0, 30.0)))
    assert run.end_s == 56.0  # The reserve is a wish, the falls are not.


def test_who_starts_later_reckons_with_the_falls_that_are_left() -> None:
    profile = FreeProfile(8, 0.0)
    profile.take(0.0, 20.0, 8)
    (run,) = start_later(profile, FitTask(80.0, 200.0, 0.0, LINEAR, (4,)), 0.0, 200.0, _costs(falls=(10.0, 30.0)))
    assert run == PlannedStretch(20.0, 20.0 + 2.0 + 20.0 + 2.0, 4, 2.0)
    # With the change at its fall it does not fit before others come, so it starts after them.
    profile.take(43.0, 60.0, 8)
    (run,) = start_later(profile, FitTask(80.0, 200.0, 0.0, LINEAR, (4,)), 0.0, 200.0, _costs(falls=(10.0, 30.0)))
    assert run.start_s == 60.0


def test_filling_does_the_work_that_falls_cost() -> None:
    profile = FreeProfile(((0.0, 8), (30.0, 4)), 0.0)
    runs = fill(profile, FitTask(280.0, 100.0, 0.0, LINEAR, SIZES), 0.0, 100.0, _costs(falls=(10.0, 30.0)), SIZES)
    assert [run.num_devices for run in runs] == [8, 4]
    # A change of two seconds on eight devices at the first fall; at the second it changes anyway.
    assert work_done(runs, LINEAR, math.inf) == pytest.approx(280.0 + 2.0 * 8.0)


def test_promises_fit_within_the_capacity_of_every_moment() -> None:
    reservations = _table(((0.0, 8), (50.0, 2)))
    assert not reservations.admit(_entry("long", 800.0, 110.0))
    assert reservations.admit(_entry("short", 320.0, 50.0))
    assert reservations.admit(_entry("small", 90.0, 100.0))
    assert verify(reservations) == []
    assert reservations.entries["short"].end_s <= 50.0


def test_more_to_come_is_counted_on_when_it_comes() -> None:
    reservations = _table(((0.0, 2), (50.0, 8)))
    assert reservations.admit(_entry("wide", 320.0, 95.0))
    assert max(run.num_devices for run in reservations.entries["wide"].runs) == 8
    assert verify(reservations) == []


def test_a_smaller_capacity_changes_only_who_is_in_the_way() -> None:
    reservations = _table(8)
    assert reservations.admit(_entry("boosted", 400.0, 600.0))
    assert reservations.admit(_entry("steady", 80.0, 100.0))
    enlarge_all(reservations)
    steady = reservations.entries["steady"].runs
    assert reservations.set_capacity(((0.0, 8), (20.0, 4)))
    assert reservations.entries["steady"].runs == steady
    assert verify(reservations) == []
    # The same function said otherwise is nothing new.
    before = reservations.entries["boosted"].runs
    assert reservations.set_capacity(((0.0, 8), (10.0, 8), (20.0, 4), (60.0, 4)))
    assert reservations.entries["boosted"].runs is before


def test_who_is_fixed_is_asked_by_nobody() -> None:
    reservations = _table(8)
    assert reservations.admit(_entry("fixed", 400.0, 500.0))
    enlarge_all(reservations)
    fixed = reservations.entries["fixed"]
    before = fixed.runs
    fixed.is_fixed = True
    assert not reservations.admit(_entry("urgent", 200.0, 40.0))
    assert not reservations.set_capacity(4)
    assert reservations.least_size(fixed) == fixed.size_at(0.0)
    enlarge_all(reservations)
    assert fixed.runs is before
    fixed.is_fixed = False
    assert reservations.admit(_entry("urgent", 120.0, 40.0))
    assert verify(reservations) == []


def test_what_does_not_fit_goes_on_with_what_is_there_and_nobody_else_gets_that() -> None:
    reservations = _table(8)
    assert reservations.admit(_entry("a", 300.0, 100.0))
    assert reservations.admit(_entry("b", 300.0, 100.0))
    told = ((0.0, 8), (20.0, 2))
    assert not reservations.has_room(told, 0.0)
    assert not reservations.set_capacity(told)
    runs = {key: entry.runs for key, entry in reservations.entries.items()}
    reservations.lift_capacity(told, 8)
    assert {key: entry.runs for key, entry in reservations.entries.items()} == runs
    assert not any(entry.is_late for entry in reservations.entries.values())
    assert min(reservations.profile.free) >= 0
    assert verify(reservations) == []
    # What is told beyond what they use is free, and no more.
    assert (reservations.profile.at(60.0), reservations.profile.at(90.0)) == (0, 2)
    assert not reservations.admit(_entry("c", 100.0, 60.0))
    # Where the devices are not there any more somebody is late, and nobody is forgotten.
    reservations.lift_capacity(told, 4)
    assert sum(entry.is_late for entry in reservations.entries.values()) == 1
    assert verify(reservations) == []
    assert min(reservations.profile.free) >= 0


@given(steps_drawn, st.lists(st.tuples(st.floats(1.0, 200.0), st.floats(5.0, 120.0)), max_size=6), st.integers(0, 40))
def test_whatever_capacity_comes_the_book_is_sound(steps: Steps, jobs: list[tuple[float, float]], moment: int) -> None:
    reservations = _table(12, _costs(reserve_s=2.0, falls=falls_of(steps, 0.0, 4)))
    for index, (work, deadline_s) in enumerate(jobs):
        reservations.admit(_entry(f"job-{index}", work, deadline_s))
    enlarge_all(reservations)
    reservations.commit()
    now_s = float(moment)
    reservations.begin(now_s, reservations.costs, EFFORT)
    for key in [key for key, entry in reservations.entries.items() if entry.end_s <= now_s]:
        reservations.drop(key)
    if not reservations.set_capacity(steps):
        reservations.lift_capacity(steps, 6)
    assert verify(reservations) == []
    assert min(reservations.profile.free) >= 0
    anew = FreeProfile(reservations.steps, now_s)
    for entry in reservations.entries.values():
        for run in entry.runs:
            anew.take(run.start_s, run.end_s, run.num_devices)
    assert (anew.times, anew.free) == (reservations.profile.times, reservations.profile.free)
