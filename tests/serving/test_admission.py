"""Admission: bounded, and honest about time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from springtide.serving.admission import QueueState, calls_ahead, estimated_answer_s, refusal, smooth


def state(**changes):
    base = {"num_queued": 0, "max_queue": 10, "num_calls_ahead": 1, "num_ready": 1, "call_s": 0.1}
    return QueueState(**{**base, **changes})


@given(
    st.integers(0, 20), st.integers(0, 20), st.integers(0, 4), st.none() | st.floats(0.0001, 10), st.floats(0.01, 60)
)
def test_a_refusal_has_a_reason_that_holds_and_a_sensible_retry(queued, ahead, ready, call_s, timeout_s):
    current = state(num_queued=queued, num_calls_ahead=ahead, num_ready=ready, call_s=call_s)
    refused, answer_s = refusal(current, timeout_s), estimated_answer_s(current)
    is_full, is_late = queued >= 10, ahead > 0 and answer_s is not None and answer_s > 0.8 * timeout_s
    assert (refused is not None) == (is_full or is_late)
    if refused is not None:
        assert 1 <= refused.retry_after_s <= 60
        assert ("full" in refused.reason) == is_full


def test_the_estimate_counts_calls_over_the_replicas_and_the_own_call():
    assert calls_ahead(9, 2, 4, is_batchable=True) == 4
    assert calls_ahead(9, 2, 4, is_batchable=False) == 11
    assert estimated_answer_s(state(num_calls_ahead=4, num_ready=2, call_s=0.5)) == 1.5
    assert estimated_answer_s(state(num_ready=0)) is None
    assert estimated_answer_s(state(call_s=None)) is None


def test_with_nothing_ahead_a_wrong_estimate_is_put_to_the_test():
    assert refusal(state(num_calls_ahead=0, call_s=100.0), 1.0) is None
    assert refusal(state(num_calls_ahead=1, call_s=100.0), 1.0) is not None


def test_smoothing_starts_at_the_first_and_moves_towards_the_next():
    assert smooth(None, 3.0) == 3.0
    assert 1.0 < smooth(1.0, 2.0) < 2.0
