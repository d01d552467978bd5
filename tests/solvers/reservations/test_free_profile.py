"""The free profile against an array with one number for every second."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from springtide.solvers.reservations.profile import FreeProfile

HORIZON = 40
CAPACITY = 16

uses = st.lists(
    st.tuples(st.integers(0, HORIZON - 1), st.integers(1, HORIZON), st.integers(1, 6)).filter(lambda u: u[0] < u[1]),
    max_size=12,
)


def _build(taken: list[tuple[int, int, int]]) -> tuple[FreeProfile, list[int]]:
    profile = FreeProfile(CAPACITY, 0.0)
    seconds = [CAPACITY] * (HORIZON + 1)
    for start, end, count in taken:
        profile.take(float(start), float(end), count)
        for second in range(start, end):
            seconds[second] -= count
    return profile, seconds


@given(uses, st.integers(0, HORIZON - 1), st.integers(1, HORIZON))
def test_least_and_at_agree_with_every_second(taken: list[tuple[int, int, int]], start: int, length: int) -> None:
    profile, seconds = _build(taken)
    end = min(HORIZON, start + length)
    assert profile.least(float(start), float(end)) == min(seconds[start:end])
    assert profile.at(float(start)) == seconds[start]


@given(uses, st.integers(1, 6), st.integers(1, 20), st.integers(0, 20), st.integers(0, 30))
def test_earliest_is_the_first_second_from_which_all_are_free(
    taken: list[tuple[int, int, int]], count: int, duration: int, not_before: int, latest: int
) -> None:
    profile, seconds = _build(taken)
    endless = seconds + [CAPACITY] * 100
    expected = next((at for at in range(not_before, latest + 1) if min(endless[at : at + duration]) >= count), None)
    assert profile.earliest(count, float(duration), float(not_before), float(latest)) == expected


@given(uses, st.randoms(use_true_random=False))
def test_the_form_does_not_depend_on_the_history(taken: list[tuple[int, int, int]], rng: object) -> None:
    profile, _ = _build(taken)
    shuffled = list(taken)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    other, _ = _build([*shuffled, (3, 9, 2)])
    other.take(3.0, 9.0, -2)
    assert (other.times, other.free) == (profile.times, profile.free)
    assert all(a != b for a, b in zip(profile.free, profile.free[1:], strict=False))


@given(uses, st.integers(0, HORIZON))
def test_forgetting_the_past_leaves_the_future(taken: list[tuple[int, int, int]], now: int) -> None:
    profile, seconds = _build(taken)
    twin = profile.copy()
    twin.forget_before(float(now))
    assert twin.times[0] == now
    for second in range(now, HORIZON + 1):
        assert twin.at(float(second)) == seconds[second]
    # What began in the past is given back from now on.
    for start, end, count in taken:
        twin.take(float(start), float(end), -count)
    assert (twin.times, twin.free) == ([float(now)], [CAPACITY])


def test_use_without_end_stays() -> None:
    profile = FreeProfile(8, 0.0)
    profile.take(5.0, math.inf, 3)
    assert (profile.times, profile.free) == ([0.0, 5.0], [8, 5])
    assert profile.earliest(6, 10.0, 0.0, 100.0) is None
    assert profile.earliest(6, 5.0, 0.0, 100.0) == 0.0


@given(uses, uses, st.integers(0, HORIZON - 1), st.booleans())
def test_what_is_taken_all_at_once_is_what_is_taken_one_after_the_other(
    before: list[tuple[int, int, int]], more: list[tuple[int, int, int]], now: int, is_endless: bool
) -> None:
    stretches = [(float(start), math.inf if is_endless and end == HORIZON else float(end), n) for start, end, n in more]
    one, other = _build(before)[0], _build(before)[0]
    for profile in (one, other):
        profile.forget_before(float(now))
    for start_s, end_s, count in stretches:
        one.take(start_s, end_s, count)
    other.take_all(stretches)
    assert (one.times, one.free) == (other.times, other.free)
