"""The schedules' registry, how they are cut, and that they are values."""

from __future__ import annotations

import msgspec
import pytest

from springtide.collectives.schedule import COLLECTIVES, make_schedule, rank_steps
from springtide.collectives.steps import CollectiveSchedule, Get, Put, bounds
from springtide.core.errors import InvalidRequest
from springtide.testing.collective_schedules import traffic


def test_parts_cover_everything_and_differ_by_one():
    parts = bounds(3, 14, 4)
    assert parts == [(3, 5), (5, 8), (8, 11), (11, 14)]
    assert bounds(0, 2, 4) == [(0, 0), (0, 1), (1, 1), (1, 2)]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_schedule_is_a_value(name):
    schedule = make_schedule(name, 4, 37, 3)
    assert msgspec.json.decode(msgspec.json.encode(schedule), type=CollectiveSchedule) == schedule
    assert schedule == make_schedule(name, 4, 37, 3)
    assert hash(schedule) == hash(make_schedule(name, 4, 37, 3))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_one_worker_asks_the_store_for_nothing(name):
    assert make_schedule(name, 1, 100, 4).ranks == ((),)


def test_pieces_that_hold_nothing_are_not_sent():
    moved = [traffic(steps) for steps in make_schedule("duplex", 8, 3, 4).ranks]
    assert sum(one.num_puts for one in moved) == 3 * 7 + 3
    assert sum(one.num_gets for one in moved) == 2 * 3 * 7


def test_the_order_of_duplex_is_raw_chunk_by_chunk_then_sums():
    steps = make_schedule("duplex", 3, 12, 2).ranks[0]
    assert [step.key for step in steps if isinstance(step, Put)] == [
        *("raw/1.0.0", "raw/2.0.0", "raw/1.1.0", "raw/2.1.0"),
        *("sum/0.0", "sum/0.1"),
    ]
    assert [step.key for step in steps if isinstance(step, Get)] == [
        *("raw/0.0.2", "raw/0.0.1", "raw/0.1.2", "raw/0.1.1"),
        *("sum/2.0", "sum/1.0", "sum/2.1", "sum/1.1"),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ring", 0, 2, 10), "no collective 'ring'; choose one of lambdaml"),
        (("duplex", 2, 2, 10), "rank 2 of 2"),
        (("duplex", 0, 0, 10), "rank 0 of 0"),
        (("duplex", 0, 2, -1), "-1 elements"),
        (("duplex", 0, 2, 10, 0), "0 chunks"),
    ],
)
def test_what_cannot_be_is_refused(arguments, said):
    with pytest.raises(InvalidRequest, match=said):
        rank_steps(*arguments)
