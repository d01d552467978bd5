"""How many replicas the gateway advises for one service: the co-scaler, fed once a second by what comes in."""

from __future__ import annotations

import math
from collections import deque

from springtide.core.workload import InferenceService
from springtide.serving.co_scaler import CoScalerState, ScalerLook, co_scale, rules_of

_PERIOD_S = 1.0
# For so many seconds after its start, a gateway still learns which replicas run from before.
_NUM_SETTLING = 10
# A value is the mean over as long as one replica takes for so many requests: single ones tell nothing of a slow model.
_MIN_REQUESTS = 5
_MAX_MEAN = 40


class ReplicaAdvice:
    """The co-scaler of one service, on the gateway's clock. Without a profiled capacity it advises nothing."""

    def __init__(self, service: InferenceService, now_s: float, num_replicas: int) -> None:
        self._service = service
        self._state = CoScalerState(wanted=num_replicas)
        self._num_arrived = 0
        self._counts: deque[tuple[int, float]] = deque(maxlen=_MAX_MEAN)
        self._looked_at_s = now_s
        self._num_looks = 0
        self.reason = ""

    @property
    def wanted(self) -> int | None:
        """How many replicas are wanted; None where the capacity of one replica is not known."""
        if self._service.capacity_per_s is None:
            return None
        return max(self._service.min_replicas, min(self._service.max_replicas, self._state.wanted))

    def apply(self, service: InferenceService, num_replicas: int) -> None:
        """Take over a service as it is deployed now.

        One that gets a capacity begins with the replicas it has, and so does a gateway that has just begun: it must
        not take away what it has yet to hear of.
        """
        is_new = self._service.capacity_per_s is None and service.capacity_per_s is not None
        if is_new or (self._num_looks < _NUM_SETTLING and num_replicas > self._state.wanted):
            self._state = CoScalerState(wanted=num_replicas)
        self._service = service

    def arrived(self) -> None:
        """A request came in, whether it is let in or not."""
        self._num_arrived += 1

    def wake(self) -> None:
        """Requests wait and nothing runs: that does not wait for the next second."""
        if self._state.wanted == 0:
            self._look(ScalerLook(rate_per_s=float(self._num_arrived), num_queued=1))

    def second(self, now_s: float, *, num_queued: int, idle_s: float) -> None:
        """A second has passed, or more where the event loop was late: then its mean counts as one value."""
        elapsed_s = now_s - self._looked_at_s
        if elapsed_s < _PERIOD_S / 2:
            return
        self._looked_at_s = now_s
        self._counts.append((self._num_arrived, elapsed_s))
        self._num_arrived = 0
        self._look(ScalerLook(rate_per_s=self._rate_per_s(), num_queued=num_queued, idle_s=idle_s))

    def _rate_per_s(self) -> float:
        """Requests a second, lately: of the last second where a replica answers five in that, else of more seconds."""
        capacity_per_s = self._service.capacity_per_s or _MIN_REQUESTS
        num_seconds = min(_MAX_MEAN, max(1, math.ceil(_MIN_REQUESTS / capacity_per_s)))
        newest = list(self._counts)[-num_seconds:]
        return sum(count for count, _ in newest) / math.fsum(elapsed_s for _, elapsed_s in newest)

    def _look(self, look: ScalerLook) -> None:
        rules = rules_of(self._service)
        if rules is None:
            return
        self._num_looks += 1
        self._state, advice = co_scale(rules, self._state, look)
        if advice.reason:
            self.reason = advice.reason
