"""What of a function service is claimed over time."""

from __future__ import annotations

import math

import pytest

from springtide.scheduling.functions.room import MOMENT_S, ServiceRoom


def test_something_fits_when_enough_of_what_stands_in_its_way_has_ended():
    room = ServiceRoom(10.0, functions=6, places=3)
    room.claim(10.0, 20.0, 4)
    room.claim(15.0, 30.0, 2)
    assert room.free_now() == 2
    assert room.earliest_s(2, 5.0) == 10.0, "it ends when the second claim begins"
    assert room.earliest_s(2, 6.0) == 20.0
    assert room.earliest_s(5, 1.0) == 30.0
    assert room.earliest_s(7, 1.0) == math.inf


def test_a_place_is_needed_however_few_functions():
    room = ServiceRoom(0.0, functions=10, places=1)
    room.claim(0.0, 8.0, 1)
    assert room.earliest_s(1, 1.0) == 8.0
    room.release(1)
    assert room.earliest_s(1, 1.0) == 0.0
    assert ServiceRoom(0.0, functions=10, places=0).earliest_s(1, 1.0) == math.inf


def test_what_ends_now_still_stands_in_the_way_for_a_moment():
    room = ServiceRoom(5.0, functions=1, places=2)
    room.claim(5.0, 5.0, 1)
    assert room.earliest_s(1, 1.0) == pytest.approx(5.0 + MOMENT_S)


def test_what_never_ends_leaves_nothing():
    room = ServiceRoom(0.0, functions=4, places=2)
    room.claim(0.0, math.inf, 3)
    assert room.earliest_s(2, 1.0) == math.inf
    assert room.earliest_s(1, math.inf) == 0.0
