"""The least number of devices: against every packing of small sets, against known cases, and with a known packing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from springtide.core.errors import InvalidRequest
from springtide_studies.bounds.packing_bound import Size, bound_packing, first_fit

pytest.importorskip("scipy")
CAPACITY = (100, 150, 40)


def best_packing(sizes: Sequence[Size], capacity: Size) -> int:
    """The fewest devices by trying every way, each thing on a device in use or on the next one."""
    best = len(sizes)

    def put(at: int, free: list[Size]) -> None:
        nonlocal best
        if len(free) >= best:
            return
        if at == len(sizes):
            best = len(free)
            return
        for index, room in enumerate(free):
            rest = tuple(a - b for a, b in zip(room, sizes[at], strict=True))
            if min(rest) >= 0:
                put(at + 1, [*free[:index], rest, *free[index + 1 :]])
        put(at + 1, [*free, tuple(a - b for a, b in zip(capacity, sizes[at], strict=True))])

    put(0, [])
    return best


def drawn(seed: int, num: int) -> list[Size]:
    rng = random.Random(seed)
    return [(rng.randint(10, 80), rng.randint(30, 100), rng.randint(3, 40)) for _ in range(num)]


@pytest.mark.parametrize("seed", range(12))
def test_no_packing_is_below_the_bound_and_one_is_as_good_as_found(seed: int) -> None:
    sizes = drawn(seed, 8)
    bound = bound_packing(sizes, CAPACITY)
    best = best_packing(sizes, CAPACITY)
    assert bound.least <= best <= bound.found
    assert bound.relaxed <= bound.least < bound.relaxed + 1
    # The volume bounds it from below: the program must not be weaker.
    for axis in range(3):
        assert bound.relaxed >= sum(size[axis] for size in sizes) / CAPACITY[axis] - 1e-6


def test_halves_that_cannot_meet_need_a_device_each_and_the_volume_does_not_tell() -> None:
    sizes = [(51, 51, 1)] * 10 + [(30, 30, 1)] * 10
    bound = bound_packing(sizes, CAPACITY)
    # 51 + 30 fits, 51 + 51 does not; 30 + 30 + 30 fits: ten devices hold one of each.
    assert (bound.relaxed, bound.least, bound.found) == (pytest.approx(10.0), 10, 10)


def test_the_program_is_below_the_packing_where_halves_help() -> None:
    # Two fit on a device, five things: 2.5 devices relaxed, 3 in truth.
    bound = bound_packing([(50, 10, 10)] * 5, CAPACITY)
    assert (bound.relaxed, bound.least, bound.found) == (pytest.approx(2.5), 3, 3)


def test_resources_that_somebody_takes_nothing_of() -> None:
    sizes = [(0, 0, 40), (100, 0, 0), (0, 150, 0)] * 4
    assert bound_packing(sizes, CAPACITY).least == 4


def test_columns_of_one_program_begin_another() -> None:
    sizes = drawn(1, 30)
    first = bound_packing(sizes, CAPACITY)
    again = bound_packing(sizes[:-1], CAPACITY, first.patterns)
    alone = bound_packing(sizes[:-1], CAPACITY)
    assert again.relaxed == pytest.approx(alone.relaxed)
    assert bound_packing([], CAPACITY).least == 0


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="larger than a device"):
        bound_packing([(101, 1, 1)], CAPACITY)


def test_first_fit_packs_everything_within_the_capacity() -> None:
    sizes = drawn(3, 60)
    packed = first_fit(sizes, CAPACITY)
    assert sorted(kind for column in packed for kind, num in column for _ in range(num)) == sorted(sizes)
    for column in packed:
        for axis in range(3):
            assert sum(kind[axis] * num for kind, num in column) <= CAPACITY[axis]
