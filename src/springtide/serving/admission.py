"""Admission to a service's queue: it is bounded, and requests that cannot be answered in time are refused at once.

In time is by the request's own deadline, and by the service's SLO (slo_limit.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

_SMOOTHING_FRACTION = 0.2
_SAFE_FRACTION = 0.8
_MIN_RETRY_AFTER_S = 1.0
_MAX_RETRY_AFTER_S = 60.0
Priority = Literal["high", "normal", "low"]
# "few_calls": an SLO that might be missed by calls of which too few are known.
RefusalKind = Literal["queue", "deadline", "slo", "few_calls"]
# The part of what is admitted that each priority may fill; that of normal ones counts while there are high ones.
_FRACTIONS: Mapping[Priority, float] = MappingProxyType({"high": 1.0, "normal": 0.9, "low": 0.7})


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
    kind: RefusalKind


def calls_ahead(num_queued: int, num_sent: int, max_batch_size: int, *, is_batchable: bool) -> int:
    """Return the number of calls before that of a new request: `num_sent` batches and those of the queue."""
    return num_sent + (num_queued // max_batch_size if is_batchable else num_queued)


def estimated_answer_s(state: QueueState) -> float | None:
    """Return how long a request that arrives now will wait for its answer; None if that is not known."""
    if state.call_s is None or state.num_ready == 0:
        return None
    return state.num_calls_ahead * state.call_s / state.num_ready + state.call_s


def refusal(state: QueueState, timeout_s: float, part: float = 1.0) -> Refused | None:
    """Return None if the request may join the queue, of which such ones may fill the `part`, else why not.

    `timeout_s` is its remaining time.

    A request with no call ahead of it is always admitted: only a call shows whether the estimate still holds.
    """
    answer_s = estimated_answer_s(state)
    if state.num_queued >= part * state.max_queue:
        return Refused(
            kind="queue",
            reason=f"the queue is full ({state.num_queued} of {state.max_queue} requests wait); try again later",
            retry_after_s=bounded_retry_s(answer_s or 0.0),
        )
    if answer_s is not None and state.num_calls_ahead > 0 and answer_s > _SAFE_FRACTION * timeout_s:
        return Refused(
            kind="deadline",
            reason=f"an answer would take about {answer_s:.2g} s, too near to the {timeout_s:.2g} s that the request "
            "allows; try again later or send a longer X-Springtide-Timeout",
            retry_after_s=bounded_retry_s(answer_s - _SAFE_FRACTION * timeout_s),
        )
    return None


def share_of(priority: Priority, *, has_high: bool) -> float:
    """Return which part of the queue, and of the calls that an SLO allows, requests of this priority may fill.

    `has_high` says whether there were requests of high priority lately; without them nothing is kept free for them.
    """
    return 1.0 if priority == "normal" and not has_high else _FRACTIONS[priority]


def smooth(previous_s: float | None, measured_s: float) -> float:
    """Return the moving average of a duration after one more measurement."""
    if previous_s is None:
        return measured_s
    return previous_s + _SMOOTHING_FRACTION * (measured_s - previous_s)


def bounded_retry_s(seconds: float) -> float:
    """The value of Retry-After for a retry that makes sense in so many seconds: whole ones, from 1 to 60."""
    return float(min(max(math.ceil(seconds), _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S))
