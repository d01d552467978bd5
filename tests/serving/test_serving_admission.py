"""Admission: bounded, and honest about time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from springtide.serving.admission import QueueState, estimated_wait_s, refusal, smooth


def state(**changes):
    base = {"num_queued": 0, "num_in_flight": 0, "max_queue": 10, "num_ready": 1, "request_s": 0.1}
    return QueueState(**{**base, **changes})


@given(
    st.integers(0, 20), st.integers(0, 20), st.integers(0, 4), st.none() | st.floats(0.0001, 10), st.floats(0.01, 60)
)
def test_a_refusal_has_a_reason_that_holds_and_a_sensible_retry(queued, in_flight, ready, request_s, timeout_s):
    current = state(num_queued=queued, num_in_flight=in_flight, num_ready=ready, request_s=request_s)
    refused, wait_s = refusal(current, timeout_s), estimated_wait_s(current)
    is_full, is_late = queued >= 10, wait_s is not None and wait_s > timeout_s
    assert (refused is not None) == (is_full or is_late)
    if refused is not None:
        assert 1 <= refused.retry_after_s <= 60
        assert ("full" in refused.reason) == is_full


def test_the_wait_counts_what_is_ahead_over_the_replicas():
    assert estimated_wait_s(state(num_queued=6, num_in_flight=4, num_ready=2)) == 0.5
    assert estimated_wait_s(state(num_ready=0)) is None
    assert estimated_wait_s(state(request_s=None)) is None


def test_smoothing_starts_at_the_first_and_moves_towards_the_next():
    assert smooth(None, 3.0) == 3.0
    assert 1.0 < smooth(1.0, 2.0) < 2.0
