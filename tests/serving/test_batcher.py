"""Properties of batching: nothing is lost, doubled, mixed or kept past its time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.serving.batcher import (
    BatchLimits,
    RequestBatch,
    Waiting,
    WaitUntil,
    expected_requests_after,
    form_batch,
    worthwhile_wait_s,
)

LIMITS = BatchLimits(max_batch_size=4, batch_wait_s=0.01, max_batch_bytes=1000)


@st.composite
def queues(draw):
    arrivals = sorted(draw(st.lists(st.floats(0, 1), max_size=20)))
    return [
        Waiting(
            request_id=index,
            arrived_at_s=arrived,
            deadline_s=arrived + draw(st.floats(0.001, 2)),
            num_items=draw(st.integers(0, 6)),
            num_bytes=draw(st.integers(0, 1200)),
            key=draw(st.sampled_from("ab")),
            is_batchable=draw(st.booleans()),
        )
        for index, arrived in enumerate(arrivals)
    ]


@pytest.mark.slow
@given(queues(), st.floats(1, 3), st.none() | st.floats(1, 10))
def test_a_decision_is_sound(queue, now_s, expected):
    decision = form_batch(queue, now_s, LIMITS, expected_requests=expected)
    by_id = {waiting.request_id: waiting for waiting in queue}
    assert set(decision.expired) == {waiting.request_id for waiting in queue if waiting.deadline_s <= now_s}
    live = [waiting for waiting in queue if waiting.deadline_s > now_s]
    if isinstance(decision, WaitUntil):
        assert now_s < decision.at_s <= live[0].arrived_at_s + LIMITS.batch_wait_s
        assert decision.at_s < live[0].deadline_s
        return
    chosen = [by_id[request_id] for request_id in decision.request_ids]
    assert bool(chosen) == bool(live)
    assert len(set(decision.request_ids)) == len(chosen)
    assert not set(decision.request_ids) & set(decision.expired)
    if not chosen:
        return
    assert chosen[0] == live[0], "the oldest always goes first"
    assert decision.num_items == sum(waiting.num_items for waiting in chosen)
    assert decision.request_ids == tuple(sorted(decision.request_ids))
    if len(chosen) > 1:
        assert decision.num_items <= LIMITS.max_batch_size
        assert sum(waiting.num_bytes for waiting in chosen) <= LIMITS.max_batch_bytes
        assert len({waiting.key for waiting in chosen}) == 1
        assert all(waiting.is_batchable for waiting in chosen)


@given(queues(), st.floats(1, 3))
def test_repeating_the_decision_empties_the_queue(queue, now_s):
    taken = []
    while queue:
        decision = form_batch(queue, now_s, LIMITS)
        if isinstance(decision, WaitUntil):
            now_s = decision.at_s
            gone = set(decision.expired)
        else:
            taken += decision.request_ids
            gone = set(decision.request_ids) | set(decision.expired)
            assert gone
        queue = [waiting for waiting in queue if waiting.request_id not in gone]
    assert taken == sorted(set(taken), key=taken.index)


def waiting(request_id, arrived_at_s=0.0, **changes):
    return Waiting(request_id=request_id, arrived_at_s=arrived_at_s, deadline_s=arrived_at_s + 10, **changes)


def test_it_waits_for_company_only_as_long_as_told_and_as_there_has_been():
    assert form_batch([waiting(1)], 0.0, LIMITS) == WaitUntil(at_s=0.01)
    assert form_batch([waiting(1)], 0.01, LIMITS) == RequestBatch(request_ids=(1,), num_items=1)
    assert form_batch([waiting(1)], 0.0, LIMITS, expected_requests=1.0).request_ids == (1,)
    assert form_batch([waiting(1)], 0.0, LIMITS, expected_requests=2.0) == WaitUntil(at_s=0.01)
    assert form_batch([waiting(n) for n in range(9)], 0.0, LIMITS).request_ids == (0, 1, 2, 3)
    assert form_batch([], 0.0, LIMITS) == RequestBatch()


def test_a_large_request_is_not_overtaken_and_an_oversize_one_goes_alone():
    queue = [waiting(1, num_items=2), waiting(2, num_items=3), waiting(3, num_items=1)]
    assert form_batch(queue, 0.0, LIMITS).request_ids == (1,)
    assert form_batch([waiting(1, num_items=9), waiting(2)], 0.0, LIMITS).request_ids == (1,)


def test_the_expected_company_follows_the_peak_and_fades():
    assert expected_requests_after(1.0, 1) == 1.0
    assert expected_requests_after(1.0, 16) == 16.0
    value = 16.0
    for _ in range(100):
        value = expected_requests_after(value, 1)
    assert 1.0 <= value < 1.2


def test_a_lone_client_waits_for_no_one_after_others_have_left():
    for before in (2.0, 16.0, 64.0):
        expected = before
        for _ in range(1000):
            expected = expected_requests_after(expected, 1)
        assert form_batch([waiting(1)], 0.0, LIMITS, expected_requests=expected).request_ids == (1,), expected
    assert form_batch([waiting(1)], 0.0, LIMITS, expected_requests=1.6) == WaitUntil(at_s=0.01)
    assert form_batch([waiting(1)], 0.01, LIMITS, expected_requests=1.6).is_short
    assert not form_batch([waiting(1), waiting(2)], 0.01, LIMITS, expected_requests=2.0).is_short


def test_a_replica_works_only_for_those_it_can_still_answer_in_time():
    doomed = Waiting(request_id=1, arrived_at_s=0.0, deadline_s=1.0)
    fine = Waiting(request_id=2, arrived_at_s=0.5, deadline_s=1.5)
    decision = form_batch([doomed, fine], 0.9, LIMITS, call_s=0.2)
    assert (decision.expired, decision.request_ids) == ((1,), (2,))
    alone = form_batch([doomed], 0.9, LIMITS, call_s=0.2)
    assert (alone.expired, alone.request_ids) == ((), (1,)), "an estimate must not starve a service"


def test_nothing_waits_longer_than_a_call_takes():
    assert worthwhile_wait_s(0.005, None) == 0
    assert worthwhile_wait_s(0.005, 0.0001) == 0.0001
    assert worthwhile_wait_s(0.005, 2.0) == 0.005
