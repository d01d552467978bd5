"""How many replicas the gateway advises for one service: runs the co-scaler once a second on the arrived requests."""

from __future__ import annotations

import math
from collections import deque

from springtide.core.workload import InferenceService
from springtide.serving.co_scaler import CoScalerState, LoadSample, co_scale, rules_of

_PERIOD_S = 1.0
# For this many seconds after its start, a gateway may not know yet all replicas that were running before.
_NUM_SETTLING = 10
# The rate is a mean over the time in which one replica answers this many requests: for a slow model the count of a
# single second says nothing.
_MIN_REQUESTS = 5
_MAX_MEAN = 40


class ReplicaAdvice:
    """The co-scaler of one service, on the gateway's clock. Without a profiled capacity it advises nothing."""

    def __init__(self, service: InferenceService, now_s: float, num_replicas: int) -> None:
        self._service = service
        self._state = CoScalerState(wanted=num_replicas)
        self._num_arrived = 0
        self._counts: deque[tuple[int, float]] = deque(maxlen=_MAX_MEAN)
        self._observed_at_s = now_s
        self._num_observations = 0
        self.reason = ""

    @property
    def wanted(self) -> int | None:
        """How many replicas are wanted; None where the capacity of one replica is not known."""
        if self._service.capacity_per_s is None:
            return None
        return max(self._service.min_replicas, min(self._service.max_replicas, self._state.wanted))

    def apply(self, service: InferenceService, num_replicas: int) -> None:
        """Follow the service as it is deployed now.

        A service that gets a capacity starts from its present number of replicas. So does a gateway that has just
        started: it must not advise fewer replicas only because it has not heard of them yet.
        """
        is_new = self._service.capacity_per_s is None and service.capacity_per_s is not None
        if is_new or (self._num_observations < _NUM_SETTLING and num_replicas > self._state.wanted):
            self._state = CoScalerState(wanted=num_replicas)
        self._service = service

    def arrived(self) -> None:
        """Count a request, admitted or not."""
        self._num_arrived += 1

    def wake(self) -> None:
        """Advise a first replica at once, without waiting for the next second: requests wait and none runs."""
        if self._state.wanted == 0:
            self._advise(LoadSample(rate_per_s=float(self._num_arrived), num_queued=1))

    def tick(self, now_s: float, *, num_queued: int, idle_s: float) -> None:
        """Called once a second. If the event loop was late, the counts are still divided by the real elapsed time."""
        elapsed_s = now_s - self._observed_at_s
        if elapsed_s < _PERIOD_S / 2:
            return
        self._observed_at_s = now_s
        self._counts.append((self._num_arrived, elapsed_s))
        self._num_arrived = 0
        self._advise(LoadSample(rate_per_s=self._rate_per_s(), num_queued=num_queued, idle_s=idle_s))

    def _rate_per_s(self) -> float:
        """The recent request rate: over the last second if a replica answers five requests in it, else over more."""
        capacity_per_s = self._service.capacity_per_s or _MIN_REQUESTS
        num_seconds = min(_MAX_MEAN, max(1, math.ceil(_MIN_REQUESTS / capacity_per_s)))
        newest = list(self._counts)[-num_seconds:]
        return sum(count for count, _ in newest) / math.fsum(elapsed_s for _, elapsed_s in newest)

    def _advise(self, look: LoadSample) -> None:
        rules = rules_of(self._service)
        if rules is None:
            return
        self._num_observations += 1
        self._state, advice = co_scale(rules, self._state, look)
        if advice.reason:
            self.reason = advice.reason
