"""What a service's load looks like to the control plane: a sliding window over requests, and when to speak of it."""

from __future__ import annotations

import math
from collections import deque

from springtide.core.events import LoadObserved
from springtide.core.workload import WorkloadId

_WINDOW_S = 10.0
# A look once a second at requests of milliseconds finds anything from none to many: what they occupied over some
# seconds is what a replica less would have to bear.
_DEMAND_WINDOW_S = 5.0
_LATENCY_WINDOW_S = 60.0
_MAX_LATENCIES = 512
_REPEAT_S = 10.0
_NOTICEABLE_FRACTION = 0.25


class LoadWindow:
    """Counts arrivals and ends of one service's requests. Every instant comes from the caller's clock.

    `loading` says that a replica is on its way: a service that loads is busy, however few requests it has.
    """

    def __init__(self, service_id: WorkloadId, now_s: float) -> None:
        self._service_id = service_id
        self._born_at_s = now_s
        self._arrivals: deque[tuple[float, int]] = deque()
        self._num_arrivals = 0
        self._spent: deque[tuple[float, float]] = deque()
        self._latencies: deque[tuple[float, float]] = deque(maxlen=_MAX_LATENCIES)
        self._last_busy_at_s = now_s

    def arrived(self, now_s: float) -> None:
        """A request came in, whether it is let in or not."""
        bucket_s = math.floor(now_s * 4) / 4
        if self._arrivals and self._arrivals[-1][0] == bucket_s:
            self._arrivals[-1] = (bucket_s, self._arrivals[-1][1] + 1)
        else:
            self._arrivals.append((bucket_s, 1))
        self._num_arrivals += 1
        self._last_busy_at_s = max(self._last_busy_at_s, now_s)

    def ended(self, now_s: float, latency_s: float | None) -> None:
        """A request was answered after `latency_s`, or given up (None)."""
        if latency_s is not None:
            self._latencies.append((now_s, latency_s))
            bucket_s = math.floor(now_s * 4) / 4
            before_s = self._spent.pop()[1] if self._spent and self._spent[-1][0] == bucket_s else 0.0
            self._spent.append((bucket_s, before_s + latency_s))
        self._last_busy_at_s = max(self._last_busy_at_s, now_s)

    def busy(self, now_s: float) -> None:
        """Something else than a request kept the service busy until now: a replica became ready, say."""
        self._last_busy_at_s = max(self._last_busy_at_s, now_s)

    def observe(
        self, now_s: float, *, in_flight: int, queued: int, loading: bool, wanted: int | None = None
    ) -> LoadObserved:
        """Return the load as of now. `idle_s` is 0 while anything is queued, in flight or loading.

        `in_flight` is reported as those of this moment, or as the mean over the last seconds if with the queue that is
        more (Little's law: the time that requests spent here, by the time in which they ended). `wanted` is the
        co-scaler's advice, handed on as it is.
        """
        while self._arrivals and self._arrivals[0][0] < now_s - _WINDOW_S:
            self._num_arrivals -= self._arrivals.popleft()[1]
        while self._latencies and self._latencies[0][0] < now_s - _LATENCY_WINDOW_S:
            self._latencies.popleft()
        while self._spent and self._spent[0][0] < now_s - _DEMAND_WINDOW_S:
            self._spent.popleft()
        if in_flight or queued or loading:
            self._last_busy_at_s = max(self._last_busy_at_s, now_s)
        latencies = sorted(latency_s for _, latency_s in self._latencies)
        window_s = min(_WINDOW_S, max(now_s - self._born_at_s, 1.0))
        return LoadObserved(
            service_id=self._service_id,
            arrivals_per_s=round(self._num_arrivals / window_s, 3),
            in_flight=max(in_flight, self._mean_demand(now_s) - queued),
            queued=queued,
            idle_s=round(max(0.0, now_s - self._last_busy_at_s), 3),
            latency_p50_s=_percentile(latencies, 0.50),
            latency_p99_s=_percentile(latencies, 0.99),
            wanted_replicas=wanted,
        )

    def _mean_demand(self, now_s: float) -> int:
        """How many requests were here at once, on average over the last seconds."""
        window_s = min(_DEMAND_WINDOW_S, max(now_s - self._born_at_s, 1.0))
        return round(sum(spent_s for _, spent_s in self._spent) / window_s)


def is_worth_telling(
    previous: LoadObserved | None, previous_at_s: float, current: LoadObserved, now_s: float, idle_limit_s: float
) -> bool:
    """Return whether `current` differs enough from what was reported at `previous_at_s` to be reported again.

    Reported are: the first one, another number of wanted replicas, a change between busy and quiet, a queue that
    appears or goes, the crossing of the service's idle limit, a change of rate or concurrency by a quarter, and
    anything every 10 s. Also reported is that a service believed idle was not: a receiver of "quiet" counts the seconds
    on from there.
    """
    if previous is None or now_s - previous_at_s >= _REPEAT_S:
        return True
    believed_idle_s = previous.idle_s + now_s - previous_at_s
    if believed_idle_s - current.idle_s >= idle_limit_s / 3:
        return True
    was_busy, is_busy = previous.in_flight + previous.queued > 0, current.in_flight + current.queued > 0
    return (
        previous.wanted_replicas != current.wanted_replicas
        or was_busy != is_busy
        or (previous.queued > 0) != (current.queued > 0)
        or (previous.idle_s < idle_limit_s) != (current.idle_s < idle_limit_s)
        or _differs(previous.arrivals_per_s, current.arrivals_per_s, 1.0)
        or _differs(previous.in_flight + previous.queued, current.in_flight + current.queued, 2.0)
    )


def _differs(previous: float, current: float, floor: float) -> bool:
    return abs(current - previous) > max(floor, _NOTICEABLE_FRACTION * previous)


def _percentile(ordered: list[float], fraction: float) -> float | None:
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, math.ceil(fraction * len(ordered)) - 1)], 6)
