"""Which waiting requests go together into one call of a replica. Pure: the present instant is an argument."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

_PEAK_DECAY_FRACTION = 0.95


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """One request in the queue. Only requests of the same `key` (method and parameters) may share a batch.

    `deadline_s` is an instant on the clock of `arrived_at_s`. An unbatchable request always goes alone.
    """

    request_id: int
    arrived_at_s: float
    deadline_s: float
    num_items: int = 1
    num_bytes: int = 0
    key: str = ""
    is_batchable: bool = True


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How large a batch may be and how long its oldest request may wait for company."""

    max_batch_size: int
    batch_wait_s: float
    max_batch_bytes: int = 8 << 20


class RequestBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Send these now. `expired` are the requests that must be refused first. Both may be empty."""

    request_ids: tuple[int, ...] = ()
    expired: tuple[int, ...] = ()
    num_items: int = 0


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
    """Take the oldest live request and, in order, all that may join it; call it when a replica could start at once.

    A batch is complete when it holds `max_batch_size` items, when the next candidate of its key would not fit, when
    its oldest request has waited `batch_wait_s`, or when it holds `expected_requests` requests: to wait for more
    company than there has been lately would only cost time. A single request above the item or byte limit goes
    alone (the replica cuts it up). An empty queue gives an empty Batch.

    `call_s` is how long the answer will probably take. Requests that could not be answered in time count as expired
    too, as long as there are others that could: under overload the replica works for these only.
    """
    horizon_s = now_s + call_s
    if not any(waiting.deadline_s > horizon_s for waiting in queue):
        # The estimate may be wrong, and only trying corrects it.
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
                # Passing over it would let small requests overtake a large one for ever.
                is_complete = True
                break
            chosen.append(waiting.request_id)
            num_items += waiting.num_items
            num_bytes += waiting.num_bytes
    is_complete = is_complete or num_items >= limits.max_batch_size
    if not is_complete and expected_requests is not None:
        is_complete = len(chosen) >= expected_requests
    # Half of the time left is the most that waiting for company may take from a request.
    wait_until_s = min(
        oldest.arrived_at_s + limits.batch_wait_s, oldest.arrived_at_s + (oldest.deadline_s - oldest.arrived_at_s) / 2
    )
    if is_complete or now_s >= wait_until_s:
        return RequestBatch(request_ids=tuple(chosen), expired=expired, num_items=num_items)
    return WaitUntil(at_s=wait_until_s, expired=expired)


def expected_company(previous: float, num_in_system: int) -> float:
    """Return the peak number of requests in the system lately, as seen by an arrival that makes it `num_in_system`.

    A lone client sees 1, for which nothing is worth waiting; the peak fades by 5 % with each arrival.
    """
    return max(float(num_in_system), 1.0 + (previous - 1.0) * _PEAK_DECAY_FRACTION)


def worthwhile_wait_s(batch_wait_s: float, call_s: float | None, slo_s: float | None = None) -> float:
    """Return how long it can pay to wait for company, when a call of the replica lately took `call_s`.

    Sent at once, a request delays those that come after it by at most one call; to wait longer than that costs more
    than it can save. As long as the duration of a call is unknown, nothing waits. Of the time that an objective leaves
    beside the call, waiting takes at most half.
    """
    if call_s is None:
        return 0.0
    spare_s = math.inf if slo_s is None else max(0.0, slo_s - call_s) / 2
    return min(batch_wait_s, call_s, spare_s)
