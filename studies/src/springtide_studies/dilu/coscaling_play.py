"""Plays one trace of requests against one way of scaling: queue and batches as in the gateway, replicas that start."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import islice

import msgspec
import numpy as np

from springtide.core.workload import ReplicaId
from springtide.serving.admission import QueueState, calls_ahead, refusal, smooth
from springtide.serving.batcher import (
    BatchLimits,
    Waiting,
    WaitUntil,
    expected_requests_after,
    form_batch,
    worthwhile_wait_s,
)
from springtide.serving.co_scaler import LoadSample
from springtide.serving.router import ReplicaLoad, pick_replica
from springtide_studies.dilu.coscaling_world import Profile, Scaler, ScalingArm, ServedModel
from springtide_studies.workloads.request_rates import draw_arrivals

TIMEOUT_S = 30.0
MAX_QUEUE = 256
# A replica that has just answered is still known to be busy: the vertical control looks every 5 ms.
_TICK_S = 0.005
_ARRIVAL, _READY, _ANSWER, _TIMER, _SECOND = range(5)


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run. `late` are requests answered after the objective, `refused` those that never were.

    `reserved_gpu_s` is device time that no other could be promised, `used_gpu_s` what the batches took;
    `replica_s` counts replicas whatever their size. `replicas` is how many there were at the end of each second.
    """

    num_requests: int
    late: int
    refused: int
    cold_starts: int
    stops: int
    latencies_s: tuple[float, ...]
    reserved_gpu_s: float
    used_gpu_s: float
    replica_s: float
    replicas: tuple[int, ...]


class _Replica:
    """One replica: on its way, ready, or leaving once it has answered what it has."""

    __slots__ = ("batches", "busy_since_s", "free_at_s", "is_leaving", "is_ready", "name", "ordered_at_s")

    def __init__(self, name: ReplicaId, now_s: float) -> None:
        self.name = name
        self.ordered_at_s = now_s
        self.is_ready = False
        self.is_leaving = False
        self.batches: deque[tuple[float, tuple[Waiting, ...]]] = deque()
        self.busy_since_s = 0.0
        self.free_at_s = -1.0


class _Play:
    """The state of one run; `now_s` only moves forward."""

    def __init__(
        self,
        model: ServedModel,
        scaler: Scaler,
        fraction: float | None,
        min_replicas: int,
        arrivals_s: Sequence[float],
        duration_s: int,
    ) -> None:
        self._model = model
        self._fraction = fraction
        self._scaler = scaler
        self._arrivals_s = arrivals_s
        self._duration_s = duration_s
        self._agenda: list[tuple[float, int, int, _Replica | None]] = []
        self._num_events = 0
        self._queue: deque[Waiting] = deque()
        self._live: list[_Replica] = []
        self._leaving: list[_Replica] = []
        self._num_in_flight = 0
        self._num_sent = 0
        self._expected = 1.0
        self._call_s: float | None = None
        self._timer_s: float | None = None
        self._num_this_second = 0
        self._last_busy_s = 0.0
        self.num_requests = len(arrivals_s)
        self.reserved_fraction = model.request if fraction is None else fraction
        self.late = self.refused = self.cold_starts = self.stops = 0
        self.latencies_s: list[float] = []
        self.used_gpu_s = self.replica_s = 0.0
        self.replicas: list[int] = []
        for _ in range(min_replicas):
            # Deployed before the first request, as in the paper's runs; its start counts all the same.
            replica = self._start(0.0)
            replica.is_ready = True

    def run(self) -> None:
        """Play to the last answer."""
        arrivals_s = self._arrivals_s
        for second in range(1, self._duration_s + 1):
            self._put(float(second), _SECOND, None)
        next_index, num_arrivals = 0, len(arrivals_s)
        while next_index < num_arrivals or self._agenda:
            if next_index < num_arrivals and (not self._agenda or arrivals_s[next_index] <= self._agenda[0][0]):
                self._arrive(arrivals_s[next_index], next_index)
                next_index += 1
                continue
            now_s, _, kind, replica = heapq.heappop(self._agenda)
            self._happen(now_s, kind, replica)
        for replica in [*self._live, *self._leaving]:
            self._gone(replica, float(self._duration_s))

    def _put(self, at_s: float, kind: int, replica: _Replica | None) -> None:
        self._num_events += 1
        heapq.heappush(self._agenda, (at_s, self._num_events, kind, replica))

    def _happen(self, now_s: float, kind: int, replica: _Replica | None) -> None:
        if kind == _SECOND:
            self._second(now_s)
        elif kind == _READY:
            assert replica is not None
            if not replica.is_leaving:
                replica.is_ready = True
                self._last_busy_s = now_s
                self._pump(now_s)
        elif kind == _ANSWER:
            assert replica is not None
            self._answer(now_s, replica)
        elif self._timer_s == now_s:
            self._timer_s = None
            self._pump(now_s)

    def _arrive(self, now_s: float, index: int) -> None:
        self._num_this_second += 1
        self._last_busy_s = now_s
        if not self._live:
            # From zero every arm scales at once: the gateway reports a waiting request to the control plane.
            self._start(now_s)
        num_queued = len(self._queue)
        if num_queued:
            num_ready = sum(1 for replica in self._live if replica.is_ready)
            ahead = calls_ahead(num_queued, self._num_sent, self._model.batch_size, is_batchable=True)
            state = QueueState(
                num_queued=num_queued,
                max_queue=MAX_QUEUE,
                num_calls_ahead=ahead,
                num_ready=num_ready,
                call_s=self._call_s,
            )
            if refusal(state, TIMEOUT_S) is not None:
                self.refused += 1
                return
        self._expected = expected_requests_after(self._expected, num_queued + self._num_in_flight + 1)
        self._queue.append(Waiting(request_id=index, arrived_at_s=now_s, deadline_s=now_s + TIMEOUT_S))
        self._pump(now_s)

    def _pump(self, now_s: float) -> None:
        """As the gateway: batches for as long as there are requests and replicas with room."""
        size = self._model.batch_size
        limits = BatchLimits(
            max_batch_size=size,
            batch_wait_s=worthwhile_wait_s(self._model.batch_wait_s, self._call_s, self._model.slo_s),
        )
        while self._queue:
            replica = self._pick()
            if replica is None:
                return
            decision = form_batch(
                # All have the same time to live: a request that is not among the first cannot be in the batch.
                list(islice(self._queue, 2 * size)),
                now_s,
                limits,
                expected_requests=self._expected,
                call_s=(self._call_s or 0.0) * (1 + len(replica.batches)),
            )
            for _ in decision.expired:
                self._queue.popleft()
                self.refused += 1
            if isinstance(decision, WaitUntil):
                if self._timer_s != decision.at_s:
                    self._timer_s = decision.at_s
                    self._put(decision.at_s, _TIMER, None)
                return
            if decision.request_ids:
                self._send(now_s, replica, tuple(self._queue.popleft() for _ in decision.request_ids))

    def _pick(self) -> _Replica | None:
        ready = {replica.name: replica for replica in self._live if replica.is_ready}
        least = min((len(replica.batches) for replica in ready.values()), default=2)
        if least >= 2 or (least == 1 and len(self._queue) < self._model.batch_size):
            # No replica has room: most arrivals of an overload end here.
            return None
        loads = [ReplicaLoad(replica_id=name, num_outstanding=len(replica.batches)) for name, replica in ready.items()]
        chosen = pick_replica(loads)
        if chosen is None and len(self._queue) >= self._model.batch_size:
            chosen = pick_replica(loads, max_outstanding=2)
        return None if chosen is None else ready[chosen]

    def _send(self, now_s: float, replica: _Replica, batch: tuple[Waiting, ...]) -> None:
        replica.batches.append((now_s, batch))
        self._num_in_flight += len(batch)
        self._num_sent += 1
        if len(replica.batches) == 1:
            self._begin(now_s, replica)

    def _begin(self, now_s: float, replica: _Replica) -> None:
        """A batch begins; from request to limit it goes as soon as the control has seen that the replica works."""
        size, model = len(replica.batches[0][1]), self._model
        if now_s - replica.free_at_s > _TICK_S:
            replica.busy_since_s = now_s
        if self._fraction is not None:
            taken_s = model.batch_s(size, self._fraction)
            self.used_gpu_s += taken_s * self._fraction
        else:
            slow_s, fast_s = model.batch_s(size, model.request), model.batch_s(size, model.reachable_limit)
            head_s = min(slow_s, max(0.0, model.reaction_s - (now_s - replica.busy_since_s)))
            rest_s = (1.0 - head_s / slow_s) * fast_s
            taken_s = head_s + rest_s
            self.used_gpu_s += head_s * model.request + rest_s * model.reachable_limit
        self._put(now_s + taken_s, _ANSWER, replica)

    def _answer(self, now_s: float, replica: _Replica) -> None:
        sent_at_s, batch = replica.batches.popleft()
        self._call_s = smooth(self._call_s, now_s - max(sent_at_s, replica.free_at_s))
        replica.free_at_s = now_s
        self._last_busy_s = now_s
        self._num_in_flight -= len(batch)
        self._num_sent -= 1
        for waiting in batch:
            latency_s = now_s - waiting.arrived_at_s
            self.latencies_s.append(latency_s)
            self.late += latency_s > self._model.slo_s
        if replica.batches:
            self._begin(now_s, replica)
        elif replica.is_leaving:
            self._leaving.remove(replica)
            self._gone(replica, now_s)
        self._pump(now_s)

    def _second(self, now_s: float) -> None:
        is_busy = self._queue or self._num_in_flight or any(not replica.is_ready for replica in self._live)
        if is_busy:
            self._last_busy_s = now_s
        look = LoadSample(
            rate_per_s=float(self._num_this_second), num_queued=len(self._queue), idle_s=now_s - self._last_busy_s
        )
        self._num_this_second = 0
        wanted = self._scaler.look(look)
        while len(self._live) < wanted:
            self._start(now_s)
        while len(self._live) > max(wanted, 1 if is_busy else 0):
            self._stop(now_s)
        self.replicas.append(len(self._live))

    def _start(self, now_s: float) -> _Replica:
        self.cold_starts += 1
        replica = _Replica(ReplicaId(f"r{self.cold_starts}"), now_s)
        self._live.append(replica)
        self._put(now_s + self._model.cold_start_s, _READY, replica)
        return replica

    def _stop(self, now_s: float) -> None:
        """A replica that is not ready goes first, then the one with least to do, the youngest of equals; it drains."""
        replica = min(reversed(self._live), key=lambda one: (one.is_ready, len(one.batches)))
        self._live.remove(replica)
        replica.is_leaving = True
        self.stops += 1
        if replica.batches:
            self._leaving.append(replica)
        else:
            self._gone(replica, now_s)

    def _gone(self, replica: _Replica, now_s: float) -> None:
        self.replica_s += max(0.0, min(now_s, float(self._duration_s)) - replica.ordered_at_s)


def play(
    model: ServedModel, profile: Profile, arm: ScalingArm, arrivals_s: Sequence[float], rates_per_s: Sequence[float]
) -> RunFigures:
    """Play sorted arrivals (seconds from 0) over as many seconds as there are rates; the rates are prior knowledge.

    It is deterministic: the same arrivals give the same figures.
    """
    fraction = None if arm.fraction is None else arm.fraction(model)
    scaler = arm.make(profile, rates_per_s)
    return _figures(_Play(model, scaler, fraction, arm.min_replicas, arrivals_s, len(rates_per_s)))


def profile_of(model: ServedModel, *, seed: int = 0, duration_s: int = 240, max_late_fraction: float = 0.01) -> Profile:
    """Find what one replica answers within the objective, by bisection over steady Poisson loads, within 2 %."""
    return Profile(
        request_per_s=_served_per_s(model, model.request, seed, duration_s, max_late_fraction),
        limit_per_s=_served_per_s(model, None, seed, duration_s, max_late_fraction),
    )


class _Fixed:
    """As many replicas as there are."""

    def look(self, look: LoadSample) -> int:
        return 1


def _served_per_s(
    model: ServedModel, fraction: float | None, seed: int, duration_s: int, max_late_fraction: float
) -> float:
    low, high = 0.0, model.capacity_per_s(model.reachable_limit if fraction is None else fraction)
    while high - low > 0.02 * high:
        middle = (low + high) / 2
        arrivals_s = draw_arrivals(np.full(duration_s, middle), seed).tolist()
        figures = _figures(_Play(model, _Fixed(), fraction, 1, arrivals_s, duration_s))
        if figures.late + figures.refused > max_late_fraction * figures.num_requests:
            high = middle
        else:
            low = middle
    return low


def _figures(world: _Play) -> RunFigures:
    world.run()
    return RunFigures(
        num_requests=world.num_requests,
        late=world.late,
        refused=world.refused,
        cold_starts=world.cold_starts,
        stops=world.stops,
        latencies_s=tuple(sorted(world.latencies_s)),
        reserved_gpu_s=world.replica_s * world.reserved_fraction,
        used_gpu_s=world.used_gpu_s,
        replica_s=world.replica_s,
        replicas=tuple(world.replicas),
    )
