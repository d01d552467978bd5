"""Invocations run in threads of their own, and each end is told once."""

import queue
import threading

import pytest

from springtide.backends.functions.provider import InvocationEnd, Invocations
from springtide.core.errors import InvalidRequest

LIMIT_S = 10.0


def returned(identity):
    return InvocationEnd(invocation_id=identity, outcome="returned", payload=b"{}")


def test_what_a_call_returns_is_told_once_with_its_id():
    ends = queue.Queue()
    invocations = Invocations(limit=4)
    identities = {invocations.start(returned, ends.put) for _ in range(4)}
    told = {ends.get(timeout=LIMIT_S).invocation_id for _ in range(4)}
    assert told == identities
    assert ends.empty()
    assert len(identities) == 4


def test_start_does_not_wait_for_the_call():
    ends, may_end = queue.Queue(), threading.Event()
    invocations = Invocations(limit=1)

    def call(identity):
        may_end.wait(LIMIT_S)
        return returned(identity)

    invocations.start(call, ends.put)
    assert invocations.num_running == 1
    may_end.set()
    assert ends.get(timeout=LIMIT_S).outcome == "returned"


def test_more_than_the_limit_are_throttled_and_nothing_is_called():
    ends, may_end, called = queue.Queue(), threading.Event(), []

    def call(identity):
        called.append(identity)
        may_end.wait(LIMIT_S)
        return returned(identity)

    invocations = Invocations(limit=1)
    first = invocations.start(call, ends.put)
    second = invocations.start(call, ends.put)
    end = ends.get(timeout=LIMIT_S)
    assert (end.invocation_id, end.outcome, end.duration_s) == (second, "throttled", 0.0)
    assert end.retry_after_s
    may_end.set()
    assert ends.get(timeout=LIMIT_S).invocation_id == first
    assert called == [first]


def test_whatever_breaks_is_lost_with_its_reason():
    def call(identity):
        raise RuntimeError("no such thing")

    ends = queue.Queue()
    Invocations(limit=1).start(call, ends.put)
    end = ends.get(timeout=LIMIT_S)
    assert end.outcome == "lost"
    assert end.duration_s is None
    assert "no such thing" in end.error


def test_after_close_nobody_is_told_and_nothing_begins():
    ends, may_end, has_ended = queue.Queue(), threading.Event(), threading.Event()

    def call(identity):
        may_end.wait(LIMIT_S)
        has_ended.set()
        return returned(identity)

    invocations = Invocations(limit=2)
    invocations.start(call, ends.put)
    invocations.close()
    with pytest.raises(InvalidRequest, match="closed"):
        invocations.start(call, ends.put)
    may_end.set()
    assert has_ended.wait(LIMIT_S)
    for thread in threading.enumerate():
        if thread.name.startswith("invoke-"):
            thread.join(LIMIT_S)
    assert ends.empty()
