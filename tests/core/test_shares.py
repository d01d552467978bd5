"""Which shares of a device fit together, and which can be asked for."""

from __future__ import annotations

import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.shares import FREE, Share, has_room, load_of, make_share


def test_tenths_fill_a_device_exactly():
    parts = [make_share(0.1, 0.1) for _ in range(9)]
    assert has_room(load_of(parts), make_share(0.1, 0.1))
    assert not has_room(load_of([*parts, make_share(0.1, 0.1)]), make_share(0.001))


def test_a_holder_of_the_whole_device_needs_it_empty_and_leaves_no_room():
    assert has_room(FREE, None)
    assert not has_room(load_of([make_share(0.1)]), None)
    assert not has_room(load_of([None]), make_share(0.1))
    assert load_of([None]).is_exclusive


def test_limits_and_memory_are_bounds_where_they_are_counted():
    held = load_of([Share(request=0.2, limit=0.9, memory_mb=300)])
    more = Share(request=0.2, limit=0.7, memory_mb=300)
    assert not has_room(held, more)
    assert has_room(held, more, max_limit=1.6)
    assert not has_room(held, more, 500, max_limit=1.6)
    assert has_room(held, more, 600, max_limit=1.6)
    assert not has_room(held, more, max_request=0.3, max_limit=1.6)


def test_without_a_limit_it_is_twice_the_request_and_at_most_the_device():
    assert make_share(0.3) == Share(request=0.3, limit=0.6)
    assert make_share(0.8).limit == 1.0


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ((0.0,), "above 0"),
        ((1.2,), "at most 1"),
        ((float("nan"),), "fraction of a device"),
        ((0.5, 0.4), "between its request"),
        ((0.5, 1.1), "between its request"),
        ((0.5, 0.6, -1), "not negative"),
    ],
)
def test_a_share_that_cannot_be_is_refused(asked, told):
    with pytest.raises(InvalidRequest, match=told):
        make_share(*asked)


def test_several_devices_for_one_worker_are_refused_with_what_to_say_instead() -> None:
    with pytest.raises(InvalidRequest, match="got 2; each worker and replica runs on one device"):
        make_share(2)
