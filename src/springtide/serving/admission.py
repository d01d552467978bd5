"""Admission to a service's queue: it is bounded, and requests that cannot meet their deadline are refused at once."""

from __future__ import annotations

import math

import msgspec

_SMOOTHING_FRACTION = 0.2
_SAFE_FRACTION = 0.8
_MIN_RETRY_AFTER_S = 1.0
_MAX_RETRY_AFTER_S = 60.0


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """A service's queue when a request arrives.

    `num_calls_ahead` counts the calls of replicas (batches, sent or still to be formed) before the request's own;
    `call_s` is the recent duration of one call (None: not known yet).
    """

    num_queued: int
    max_queue: int
    num_calls_ahead: int
    num_ready: int
    call_s: float | None = None


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A refused request. `reason` is a sentence for people, `retry_after_s` says when a retry makes sense."""

    reason: str
    retry_after_s: float


def calls_ahead(num_queued: int, num_sent: int, max_batch_size: int, *, is_batchable: bool) -> int:
    """Return the number of calls before that of a new request: `num_sent` batches and those of the queue."""
    return num_sent + (num_queued // max_batch_size if is_batchable else num_queued)


def estimated_answer_s(state: QueueState) -> float | None:
    """Return how long a request that arrives now will wait for its answer; None if that is not known."""
    if state.call_s is None or state.num_ready == 0:
        return None
    return state.num_calls_ahead * state.call_s / state.num_ready + state.call_s


def refusal(state: QueueState, timeout_s: float) -> Refused | None:
    """Return None if the request may join the queue, else why not. `timeout_s` is its remaining time.

    A request with no call ahead of it is always admitted: only a call shows whether the estimate still holds.
    """
    answer_s = estimated_answer_s(state)
    if state.num_queued >= state.max_queue:
        return Refused(
            reason=f"the queue is full ({state.num_queued} of {state.max_queue} requests wait); try again later",
            retry_after_s=bounded_retry_s(answer_s or 0.0),
        )
    if answer_s is not None and state.num_calls_ahead > 0 and answer_s > _SAFE_FRACTION * timeout_s:
        return Refused(
            reason=f"an answer would take about {answer_s:.2g} s, too near to the {timeout_s:.2g} s that the request "
            "allows; try again later or send a longer X-Springtide-Timeout",
            retry_after_s=bounded_retry_s(answer_s - _SAFE_FRACTION * timeout_s),
        )
    return None


def smooth(previous_s: float | None, measured_s: float) -> float:
    """Return the moving average of a duration after one more measurement."""
    if previous_s is None:
        return measured_s
    return previous_s + _SMOOTHING_FRACTION * (measured_s - previous_s)


def bounded_retry_s(seconds: float) -> float:
    """The value of Retry-After for a retry that makes sense in so many seconds: whole ones, from 1 to 60."""
    return float(min(max(math.ceil(seconds), _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S))
