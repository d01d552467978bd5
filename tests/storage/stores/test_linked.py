"""A link takes its time: bytes in a row, latencies beside each other, both directions at once. No test waits for it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.storage.virtual_pace import VirtualTime
from springtide.core.errors import InvalidRequest, ObjectMissing
from springtide.storage.stores.linked import SMALL_BYTES, DuplexLink, Lane, Lanes, LinkedStore
from springtide.storage.stores.open import memory_store

MB = 1_000_000


def linked(time, **link):
    return LinkedStore(memory_store(), DuplexLink(**link), time.pace())


def test_a_put_takes_its_bytes_and_the_latency_and_is_visible_only_then():
    time = VirtualTime()
    store = linked(time, up_bytes_per_s=10 * MB, latency_s=0.03)
    seen = []
    time.at(0.0, lambda: seen.append(store.store.keys("")))
    store.put("a", bytes(5 * MB))
    assert time.now_s == pytest.approx(0.53)
    assert seen == [[]]
    assert store.put_if_absent("a", bytes(MB)) is False
    assert time.now_s == pytest.approx(0.66)


def test_a_get_takes_as_long_and_a_miss_takes_the_latency():
    time = VirtualTime()
    store = linked(time, down_bytes_per_s=2 * MB, latency_s=0.1)
    store.store.put("a", bytes(MB))
    assert len(store.get("a")) == MB
    assert time.now_s == pytest.approx(0.6)
    with pytest.raises(ObjectMissing):
        store.get("b")
    assert time.now_s == pytest.approx(0.7)


def test_waiting_costs_nothing_of_the_link_until_something_is_there():
    time = VirtualTime()
    store = linked(time, down_bytes_per_s=2 * MB, latency_s=0.1)
    with pytest.raises(ObjectMissing):
        store.wait("a", 0.0)
    assert time.sleeps == []
    store.store.put("a", bytes(MB))
    store.wait("a", 5.0)
    assert time.now_s == pytest.approx(0.6)


def test_requests_in_flight_share_the_rate_and_overlap_their_latencies():
    lanes = Lanes(DuplexLink(up_bytes_per_s=MB, down_bytes_per_s=MB, latency_s=0.5), VirtualTime().pace())
    ends = [lanes.up.reserve(0.0, MB) + lanes.link.latency_s for _ in range(4)]
    assert ends == pytest.approx([1.5, 2.5, 3.5, 4.5])
    assert lanes.down.reserve(0.0, MB) == pytest.approx(1.0)
    assert lanes.up.reserve(10.0, MB) == pytest.approx(11.0)


def test_a_record_does_not_queue_behind_a_large_object_but_its_bytes_count():
    lane = Lane(MB)
    lane.reserve(0.0, 50 * MB)
    assert lane.reserve(1.0, SMALL_BYTES) == pytest.approx(1.0 + SMALL_BYTES / MB)
    assert lane.reserve(1.0, 20_000) == pytest.approx(50.0 + (SMALL_BYTES + 20_000) / MB)


@given(st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(0, 3 * SMALL_BYTES)), min_size=1, max_size=40))
def test_neither_kind_of_object_is_carried_faster_than_the_rate(requests):
    """Whatever comes when: all large ones together, and all small ones together, keep to the rate."""
    for is_small in (True, False):
        lane = Lane(MB)
        now_s = 0.0
        total_bytes = 0
        first_s = None
        end_s = 0.0
        for pause_s, num_bytes in requests:
            now_s += pause_s
            if (num_bytes <= SMALL_BYTES) == is_small:
                first_s = now_s if first_s is None else first_s
                total_bytes += num_bytes
                end_s = max(end_s, lane.reserve(now_s, num_bytes))
        if first_s is not None:
            assert end_s - first_s >= total_bytes / MB - 1e-9


def test_two_stores_of_one_machine_share_its_lanes():
    time = VirtualTime()
    lanes = Lanes(DuplexLink(up_bytes_per_s=MB), time.pace())
    objects, parameters = LinkedStore(memory_store(), lanes), LinkedStore(memory_store(), lanes)
    lanes.up.reserve(0.0, MB)
    parameters.put("a", bytes(MB))
    assert time.now_s == pytest.approx(2.0)
    objects.put("b", bytes(MB))
    assert time.now_s == pytest.approx(3.0)


def test_the_rest_passes_through_after_the_latency():
    time = VirtualTime()
    store = linked(time, latency_s=0.25)
    store.put("a/b", b"1")
    assert store.keys("a/") == ["a/b"]
    store.delete(["a/b"])
    assert time.now_s == pytest.approx(0.75)
    assert store.requests() == store.store.requests()
    assert store.requests().num_deletes == 1
    store.close()


@given(st.floats(1.0, 1e12) | st.just(math.inf), st.floats(1.0, 1e12) | st.just(math.inf), st.floats(0.0, 10.0))
def test_a_link_travels_through_the_environment(up, down, latency_s):
    link = DuplexLink(up_bytes_per_s=up, down_bytes_per_s=down, latency_s=latency_s)
    environment = {"PATH": "/bin", **link.to_environment()}
    assert (DuplexLink.from_environment(environment) or DuplexLink()) == link


@pytest.mark.parametrize(
    "environment",
    [
        {"SPRINGTIDE_LINK_UP_BYTES_PER_S": "fast"},
        {"SPRINGTIDE_LINK_UP_BYTES_PER_S": "0"},
        {"SPRINGTIDE_LINK_DOWN_BYTES_PER_S": "-1"},
        {"SPRINGTIDE_LINK_DOWN_BYTES_PER_S": "nan"},
        {"SPRINGTIDE_LINK_LATENCY_S": "inf"},
        {"SPRINGTIDE_LINK_LATENCY_S": "-1"},
    ],
)
def test_what_no_link_can_be_is_refused(environment):
    with pytest.raises(InvalidRequest, match=r"link's|numbers"):
        DuplexLink.from_environment(environment)


def test_no_variables_mean_no_link():
    assert DuplexLink.from_environment({}) is None
    assert DuplexLink().to_environment() == {}
