"""Every schedule is proved for every number of workers; and planted faults are found."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.collectives.schedule import (
    COLLECTIVES,
    make_schedule,
    make_served_schedule,
    rank_steps,
)
from springtide.collectives.steps import CollectiveSchedule, Get, Put, Reduce
from springtide.testing.collective_schedules import find_faults, traffic

ODD_SIZES = (0, 1, 2, 7, 16, 97, 1001)


@pytest.mark.parametrize("n", range(1, 17))
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_schedule_is_right_for_every_number_of_workers(name, n):
    for num_elements in ODD_SIZES:
        for chunks in (1, 3):
            assert find_faults(make_schedule(name, n, num_elements, chunks)) == []


@pytest.mark.slow
@given(
    name=st.sampled_from(COLLECTIVES),
    n=st.integers(1, 16),
    num_elements=st.integers(0, 300),
    chunks=st.integers(1, 9),
)
def test_any_size_and_any_chunks(name, n, num_elements, chunks):
    assert find_faults(make_schedule(name, n, num_elements, chunks)) == []


@given(n=st.integers(1, 16), num_elements=st.integers(0, 300), num_shards=st.integers(1, 40))
def test_shards_fewer_than_as_many_as_and_more_than_workers(n, num_elements, num_shards):
    schedule = make_schedule("smlt", n, num_elements, shards=num_shards)
    assert find_faults(schedule) == []
    assert rank_steps("smlt", n - 1, n, num_elements, shards=num_shards) == schedule.ranks[-1]


@given(n=st.integers(1, 16), num_elements=st.integers(0, 300), chunks=st.integers(1, 9))
def test_a_server_of_its_own_adds_nothing(n, num_elements, chunks):
    schedule = make_served_schedule(n, num_elements, chunks)
    assert len(schedule.ranks) == n + 1
    assert find_faults(schedule) == []


@pytest.mark.parametrize("n", range(2, 17))
def test_what_goes_up_and_down_is_what_the_formulas_say(n):
    size = 120 * n
    share = size // n
    others = size - share
    expected = {
        "lambdaml": (others + share, 2 * others),
        "funcpipe": (others + share, 2 * others),
        "duplex": (others + share, 2 * others),
        "smlt": (size + share, 2 * size),
    }
    for name, amounts in expected.items():
        for steps in make_schedule(name, n, size, 4).ranks:
            moved = traffic(steps)
            assert (moved.elements_up, moved.elements_down) == amounts
    server, *workers = map(traffic, make_schedule("parameter-server", n, size, 4).ranks)
    assert (server.elements_up, server.elements_down) == (size, (n - 1) * size)
    assert {(worker.elements_up, worker.elements_down) for worker in workers} == {(size, size)}
    for moved in map(traffic, make_schedule("all-to-all", n, size, 4).ranks):
        assert (moved.elements_up, moved.elements_down) == (size, (n - 1) * size)


def test_idle_workers_of_few_shards_only_put_and_get():
    steps = make_schedule("smlt", 5, 100, shards=2).ranks[4]
    assert not any(isinstance(step, Reduce) for step in steps)
    assert traffic(steps).elements_down == 100


def with_steps(schedule: CollectiveSchedule, rank: int, steps) -> CollectiveSchedule:
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(steps)
    return msgspec.structs.replace(schedule, ranks=tuple(ranks))


def replaced(schedule: CollectiveSchedule, rank: int, kind, **changes) -> CollectiveSchedule:
    """The schedule with the first step of that kind changed."""
    steps = list(schedule.ranks[rank])
    index = next(i for i, step in enumerate(steps) if isinstance(step, kind))
    steps[index] = msgspec.structs.replace(steps[index], **changes)
    return with_steps(schedule, rank, steps)


SOUND = make_schedule("duplex", 3, 90, 2)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        # FuncPipe's released code begins the sum at zero and never adds the worker's own split.
        (replaced(SOUND, 1, Reduce, addends=(0, 2)), "rank 1 ends with (0, 2)"),
        (replaced(SOUND, 1, Reduce, addends=(0, 1, 1, 2)), "rank 1 ends with (0, 1, 1, 2)"),
        (replaced(SOUND, 1, Reduce, addends=(2, 1, 0)), "rank 1 ends with (2, 1, 0)"),
        (replaced(SOUND, 0, Reduce, after=()), "may not have got yet"),
        (replaced(SOUND, 0, Get, key="raw/9.9.9"), "which no rank writes"),
        (replaced(SOUND, 0, Put, key="sum/0.0"), "written twice"),
        (replaced(SOUND, 0, Put, stop=999), "are not there"),
        (replaced(SOUND, 0, Put, num_readers=2), "is read by 1, not by 2"),
        (replaced(SOUND, 0, Get, is_only_reader=False), "wrong about which other ranks read"),
        (replaced(SOUND, 0, Get, writer=1), "for something else"),
        (replaced(SOUND, 0, Reduce, after=(50,)), "does not come before"),
        (replaced(SOUND, 0, Reduce, stop=10), "adds up a part of what step"),
        (replaced(SOUND, 0, Put, num_readers=0), "is read by 1, not by 0"),
    ],
)
def test_planted_faults_are_found(broken, said):
    assert any(said in fault for fault in find_faults(broken)), find_faults(broken)


def test_a_sum_that_overwrites_what_is_still_going_up_is_found():
    steps = [
        msgspec.structs.replace(step, after=()) if isinstance(step, Get) and step.is_final else step
        for step in SOUND.ranks[0]
    ]
    assert any("in no order" in fault for fault in find_faults(with_steps(SOUND, 0, steps)))


def test_a_gradient_that_is_added_up_while_it_goes_up_is_found():
    schedule = make_schedule("all-to-all", 3, 30)
    steps = [
        msgspec.structs.replace(step, after=step.after[1:]) if isinstance(step, Reduce) else step
        for step in schedule.ranks[0]
    ]
    assert any("in no order" in fault for fault in find_faults(with_steps(schedule, 0, steps)))


def test_two_that_wait_for_each_other_are_found():
    def rank(mine: int, other: int):
        return (
            Get(key=f"raw/{other}", start=0, stop=4, writer=other, is_final=True, is_only_reader=True),
            Put(key=f"raw/{mine}", start=0, stop=4, num_readers=1, after=(0,)),
        )

    circle = CollectiveSchedule(name="circle", num_workers=2, num_elements=4, ranks=(rank(0, 1), rank(1, 0)))
    assert find_faults(circle) == ["some steps wait for each other in a circle"]


def test_an_addend_that_nobody_gets_is_found():
    served = CollectiveSchedule(
        name="served",
        num_workers=1,
        num_elements=4,
        ranks=((), (Reduce(start=0, stop=4, addends=(0,)),)),
    )
    assert any("that it has not got" in fault for fault in find_faults(served))
