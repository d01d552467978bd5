"""The load of a service as reported to the control plane: a sliding window over requests, and when to report it."""

from __future__ import annotations

import math
from collections import deque

from springtide.core.events import LoadObserved
from springtide.core.workload import WorkloadId

_WINDOW_S = 10.0
# A sample once a second of requests that take milliseconds is noisy, so demand is averaged over these seconds.
_DEMAND_WINDOW_S = 5.0
_LATENCY_WINDOW_S = 60.0
_MAX_LATENCIES = 512
_REPEAT_S = 10.0
_NOTICEABLE_FRACTION = 0.25


class LoadWindow:
    """Counts arrivals and ends of one service's requests. Every instant comes from the caller's clock."""

    def __init__(self, service_id: WorkloadId, now_s: float) -> None:
        self._service_id = service_id
        self._born_at_s = now_s
        self._arrivals: deque[tuple[float, int]] = deque()
        self._num_arrivals = 0
        self._durations: deque[tuple[float, float]] = deque()
        self._latencies: deque[tuple[float, float]] = deque(maxlen=_MAX_LATENCIES)
        self._last_busy_at_s = now_s

    def arrived(self, now_s: float) -> None:
        """A request arrived, whether it is admitted or not."""
        bucket_s = math.floor(now_s * 4) / 4
        if self._arrivals and self._arrivals[-1][0] == bucket_s:
            self._arrivals[-1] = (bucket_s, self._arrivals[-1][1] + 1)
        else:
            self._arrivals.append((bucket_s, 1))
        self._num_arrivals += 1
        self._last_busy_at_s = max(self._last_busy_at_s, now_s)

    def ended(self, now_s: float, latency_s: float | None) -> None:
        """A request was answered after `latency_s`, or abandoned (None)."""
        if latency_s is not None:
            self._latencies.append((now_s, latency_s))
            self.refused(now_s, latency_s)
        self._last_busy_at_s = max(self._last_busy_at_s, now_s)

    def refused(self, now_s: float, spent_s: float) -> None:
        """Count `spent_s` in the system as demand: of a request that more replicas would have let in, too."""
        bucket_s = math.floor(now_s * 4) / 4
        before_s = self._durations.pop()[1] if self._durations and self._durations[-1][0] == bucket_s else 0.0
        self._durations.append((bucket_s, before_s + spent_s))

    def busy(self, now_s: float) -> None:
        """The service was busy until now for another reason than a request; for example, a replica became ready."""
        self._last_busy_at_s = max(self._last_busy_at_s, now_s)

    def observe(
        self, now_s: float, *, in_flight: int, queued: int, loading: bool, wanted: int | None = None
    ) -> LoadObserved:
        """Return the load as of now. `idle_s` is 0 while a request is queued or in flight, or a replica is `loading`.

        `in_flight` is reported as the present number, or as the mean demand over the last seconds minus the queue, if
        that is larger (Little's law: time spent in the system by requests, over the window in which they ended).
        `wanted` is the co-scaler's advice, passed on.
        """
        while self._arrivals and self._arrivals[0][0] < now_s - _WINDOW_S:
            self._num_arrivals -= self._arrivals.popleft()[1]
        while self._latencies and self._latencies[0][0] < now_s - _LATENCY_WINDOW_S:
            self._latencies.popleft()
        while self._durations and self._durations[0][0] < now_s - _DEMAND_WINDOW_S:
            self._durations.popleft()
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
        """The mean number of requests in the system over the last seconds."""
        window_s = min(_DEMAND_WINDOW_S, max(now_s - self._born_at_s, 1.0))
        return round(sum(spent_s for _, spent_s in self._durations) / window_s)


def is_worth_reporting(
    previous: LoadObserved | None, previous_at_s: float, current: LoadObserved, now_s: float, idle_limit_s: float
) -> bool:
    """Return whether `current` differs enough from what was reported at `previous_at_s` to be reported again.

    It is reported for the first time, after a change of the wanted replicas, between busy and idle, when the queue
    becomes empty or not, when the idle time crosses the service's limit, after a change of rate or concurrency by a
    quarter, and every 10 s in any case. It is also reported if the service was less idle than the control plane
    assumes, which extrapolates the last reported idle time.
    """
    if previous is None or now_s - previous_at_s >= _REPEAT_S:
        return True
    assumed_idle_s = previous.idle_s + now_s - previous_at_s
    if assumed_idle_s - current.idle_s >= idle_limit_s / 3:
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
