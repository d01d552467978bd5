"""Who is let into a service's queue: a bounded queue, and an early no to a request that cannot make its deadline."""

from __future__ import annotations

import math

import msgspec

_SMOOTHING_FRACTION = 0.2
_MIN_RETRY_AFTER_S = 1.0
_MAX_RETRY_AFTER_S = 60.0


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """A service's queue at the moment of an arrival.

    `request_s` is how long one ready replica lately needed per request, batching included (None: not known yet).
    """

    num_queued: int
    num_in_flight: int
    max_queue: int
    num_ready: int
    request_s: float | None = None


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """Not let in. `reason` is a sentence for people, `retry_after_s` when asking again makes sense."""

    reason: str
    retry_after_s: float


def estimated_wait_s(state: QueueState) -> float | None:
    """Return how long a request that arrives now waits before a replica takes it; None where that is not known."""
    if state.request_s is None or state.num_ready == 0:
        return None
    return (state.num_queued + state.num_in_flight) * state.request_s / state.num_ready


def refusal(state: QueueState, timeout_s: float) -> Refused | None:
    """Return None if the request may join the queue, else why not. `timeout_s` is what it has left."""
    wait_s = estimated_wait_s(state)
    if state.num_queued >= state.max_queue:
        return Refused(
            reason=f"the queue is full ({state.num_queued} of {state.max_queue} requests wait); try again later",
            retry_after_s=_bounded(wait_s or 0.0),
        )
    if wait_s is not None and wait_s > timeout_s:
        return Refused(
            reason=f"about {wait_s:.1f} s of work is ahead, more than the {timeout_s:.1f} s that the request allows; "
            "try again later or send a longer X-Springtide-Timeout",
            retry_after_s=_bounded(wait_s - timeout_s),
        )
    return None


def smooth(previous_s: float | None, measured_s: float) -> float:
    """Return the moving average of a duration after one more measurement."""
    if previous_s is None:
        return measured_s
    return previous_s + _SMOOTHING_FRACTION * (measured_s - previous_s)


def _bounded(seconds: float) -> float:
    return float(min(max(math.ceil(seconds), _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S))
