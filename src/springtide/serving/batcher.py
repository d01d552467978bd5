"""Which queued requests form the next batch for a replica. Pure functions: the present time is an argument."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

_PEAK_DECAY_FRACTION = 0.95


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """One request in the queue. Only requests of the same `key` (method and parameters) may share a batch.

    `deadline_s` is on the same clock as `arrived_at_s`. A request that is not batchable is always sent alone.
    """

    request_id: int
    arrived_at_s: float
    deadline_s: float
    num_items: int = 1
    num_bytes: int = 0
    key: str = ""
    is_batchable: bool = True


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How large a batch may be, and how long its oldest request may wait for others."""

    max_batch_size: int
    batch_wait_s: float
    max_batch_bytes: int = 8 << 20


class RequestBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Send these requests now. `expired` are those that must be refused first. Both may be empty.

    With `is_short` its oldest request has waited as long as it may, and fewer came than were expected.
    """

    request_ids: tuple[int, ...] = ()
    expired: tuple[int, ...] = ()
    num_items: int = 0
    is_short: bool = False


class WaitUntil(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing to send before `at_s`, unless another request arrives."""

    at_s: float
    expired: tuple[int, ...] = ()


def form_batch(
    queue: Sequence[Waiting],
    now_s: float,
    limits: BatchLimits,
    *,
    expected_requests: float | None = None,
    call_s: float = 0.0,
) -> RequestBatch | WaitUntil:
    """Form a batch of the oldest live request and, in order, all that may join it. Call it when a replica is free.

    A batch is complete when it holds `max_batch_size` items, when the next request of its key would not fit, when its
    oldest request has waited `batch_wait_s`, or when it holds `expected_requests` requests: more than lately arrived
    together are not worth waiting for. A single request above the item or byte limit is sent alone (the replica splits
    it). An empty queue gives an empty RequestBatch.

    `call_s` is the expected duration of the call. Requests that it would answer too late count as expired, as long as
    there are others that can be answered in time: under overload the replica works for these only.
    """
    horizon_s = now_s + call_s
    if not any(waiting.deadline_s > horizon_s for waiting in queue):
        # No request can be answered in time by this estimate. Only a call can show whether it is wrong, so try.
        horizon_s = now_s
    expired = tuple(waiting.request_id for waiting in queue if waiting.deadline_s <= horizon_s)
    live = [waiting for waiting in queue if waiting.deadline_s > horizon_s] if expired else queue
    if not live:
        return RequestBatch(expired=expired)
    oldest = live[0]
    chosen = [oldest.request_id]
    num_items, num_bytes = oldest.num_items, oldest.num_bytes
    is_complete = not oldest.is_batchable or num_items >= limits.max_batch_size
    if not is_complete:
        for waiting in live[1:]:
            if not waiting.is_batchable or waiting.key != oldest.key:
                continue
            if (
                num_items + waiting.num_items > limits.max_batch_size
                or num_bytes + waiting.num_bytes > limits.max_batch_bytes
            ):
                # Skipping it could let small requests overtake a large one forever.
                is_complete = True
                break
            chosen.append(waiting.request_id)
            num_items += waiting.num_items
            num_bytes += waiting.num_bytes
    is_complete = is_complete or num_items >= limits.max_batch_size
    if not is_complete and expected_requests is not None:
        # To the nearest number: the peak comes close to 1 and, in floating point, never down to it.
        is_complete = len(chosen) >= math.floor(expected_requests + 0.5)
    # Waiting for others may take at most half of the time that a request has.
    wait_until_s = min(
        oldest.arrived_at_s + limits.batch_wait_s, oldest.arrived_at_s + (oldest.deadline_s - oldest.arrived_at_s) / 2
    )
    if is_complete or now_s >= wait_until_s:
        is_short = not is_complete and expected_requests is not None
        return RequestBatch(request_ids=tuple(chosen), expired=expired, num_items=num_items, is_short=is_short)
    return WaitUntil(at_s=wait_until_s, expired=expired)


def expected_requests_after(previous: float, num_in_system: int) -> float:
    """Return the recent peak of requests in the system, updated by an arrival that makes it `num_in_system`.

    With a single client it comes to 1, so that requests do not wait for others; the peak decays by 5 % with each
    arrival, and ends where a wait has brought fewer (`RequestBatch.is_short`).
    """
    return max(float(num_in_system), 1.0 + (previous - 1.0) * _PEAK_DECAY_FRACTION)


def worthwhile_wait_s(batch_wait_s: float, call_s: float | None, slo_s: float | None = None) -> float:
    """Return how long a request may usefully wait for others, if a call of the replica lately took `call_s`.

    A request that is sent at once delays later ones by at most one call, so a longer wait costs more than it saves.
    Without a known duration of a call no request waits. With an objective, waiting takes at most half of the time that
    the call leaves of it.
    """
    if call_s is None:
        return 0.0
    spare_s = math.inf if slo_s is None else max(0.0, slo_s - call_s) / 2
    return min(batch_wait_s, call_s, spare_s)
