"""Pods refused by a namespace's quota wait; elastic jobs run with fewer workers meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from springtide.backends.control_channel.reactor import Reactor, Timer
from springtide.backends.kubernetes.pods.driver import PodReplica
from springtide.core.events import Event, ScaleRequested
from springtide.core.workload import TrainingJob, WorkloadId

RETRY_S = (1.0, 30.0)
# How long a worker waits for quota before its job's size is limited to the workers that it has.
PATIENCE_S = 5.0
# Bounds on the interval of probing whether such a job may grow again.
PROBE_S = (15.0, 240.0)

# Finds out whether a pod like this replica's would be accepted, and passes on the answer on the I/O thread.
Probe = Callable[[PodReplica, Callable[[bool], None]], None]


class Holders(Protocol):
    """The part of the replica table that quota handling needs."""

    def of_workload(self, workload_id: WorkloadId) -> list[PodReplica]:
        """The living replicas of a job or service."""
        ...


@dataclass
class _Refusal:
    """A namespace without room. `is_trying`: one pod is being created to find out whether it has room again."""

    message: str
    backoff_s: float = 0.0
    retry_at_s: float = 0.0
    is_trying: bool = False
    timer: Timer | None = None


@dataclass
class _Cap:
    """A job limited to `most` workers. `like` is one of the refused replicas, for probes."""

    job: TrainingJob
    most: int
    namespace: str
    like: PodReplica
    backoff_s: float
    timer: Timer


class NamespaceQuota:
    """Runs on the I/O thread, except for `caps`, which is thread-safe. `on_room` is called when a try is due."""

    def __init__(
        self, reactor: Reactor, replicas: Holders, post: Callable[[Event], None], probe: Probe, *, seed: int = 0
    ) -> None:
        self._reactor = reactor
        self._replicas = replicas
        self._post = post
        self._probe = probe
        self._rng = np.random.default_rng(seed)
        self._refusals: dict[str, _Refusal] = {}
        self._caps: dict[WorkloadId, _Cap] = {}
        self._pending_limits: set[WorkloadId] = set()
        self.on_room: Callable[[], None] = lambda: None

    def caps(self) -> dict[WorkloadId, int]:
        """The jobs whose size is limited by quota now, and their largest number of workers."""
        return {workload_id: cap.most for workload_id, cap in list(self._caps.items())}

    # --- pods --------------------------------------------------------------------------------------------------------

    def obstacle(self, namespace: str) -> str:
        """Why a pod of this namespace must wait; empty if it may be created (then it is the one that tries)."""
        refusal = self._refusals.get(namespace)
        if refusal is None:
            return ""
        if refusal.is_trying or time.monotonic() < refusal.retry_at_s:
            return f"waiting for quota in namespace {namespace}: {refusal.message}"
        refusal.is_trying = True
        return ""

    def refused(self, replica: PodReplica, namespace: str, message: str) -> None:
        """A pod was refused for lack of quota."""
        refusal = self._refusals.setdefault(namespace, _Refusal(message))
        refusal.message, refusal.is_trying = message, False
        refusal.backoff_s = min(max(RETRY_S[0], refusal.backoff_s * 2), RETRY_S[1])
        self._try_in(refusal, refusal.backoff_s * float(self._rng.uniform(0.75, 1.25)))
        workload = replica.action.workload if replica.action is not None else None
        if isinstance(workload, TrainingJob) and workload.elastic and workload.job_id not in self._pending_limits:
            self._pending_limits.add(workload.job_id)
            self._reactor.after(PATIENCE_S, lambda: self._limit_job(workload, replica, namespace))

    def accepted(self, namespace: str) -> None:
        """A pod was created: there is room."""
        refusal = self._refusals.pop(namespace, None)
        if refusal is not None:
            if refusal.timer is not None:
                refusal.timer.cancel()
            self._reactor.after(0.0, self.on_room)

    def withdrawn(self, namespace: str) -> None:
        """A try ended without showing whether there is room."""
        refusal = self._refusals.get(namespace)
        if refusal is not None:
            refusal.is_trying = False
            self._try_in(refusal, 0.0)

    def released(self, namespace: str) -> None:
        """A pod is over: there may be room again."""
        refusal = self._refusals.get(namespace)
        if refusal is not None and not refusal.is_trying:
            refusal.backoff_s = 0.0
            self._try_in(refusal, 0.2)
        for cap in self._caps.values():
            if cap.namespace == namespace and cap.backoff_s > PROBE_S[0]:
                self._ask_in(cap, PROBE_S[0] / 4)

    def forget(self, workload_id: WorkloadId) -> None:
        """A job has ended."""
        cap = self._caps.pop(workload_id, None)
        if cap is not None:
            cap.timer.cancel()

    def _try_in(self, refusal: _Refusal, delay_s: float) -> None:
        if refusal.timer is not None:
            refusal.timer.cancel()
        refusal.retry_at_s = time.monotonic() + delay_s
        # Slightly later, so that `retry_at_s` has passed by then.
        refusal.timer = self._reactor.after(delay_s + 0.01, self.on_room)

    # --- jobs --------------------------------------------------------------------------------------------------------

    def _limit_job(self, job: TrainingJob, like: PodReplica, namespace: str) -> None:
        """A worker has waited for quota: if enough others of its job run, limit the job to those."""
        self._pending_limits.discard(job.job_id)
        replicas = [r for r in self._replicas.of_workload(job.job_id) if not r.asked_to_stop and r.lost_reason is None]
        made = [replica for replica in replicas if replica.handle.pod is not None and replica.handle.pod.uid]
        if namespace not in self._refusals or len(made) == len(replicas) or len(made) < max(1, job.min_workers):
            return
        known = self._caps.get(job.job_id)
        if known is not None and known.most == len(made):
            return
        if known is not None:
            known.timer.cancel()
        cap = _Cap(job, len(made), namespace, like, PROBE_S[0], self._reactor.after(0.0, lambda: None))
        self._caps[job.job_id] = cap
        self._ask_in(cap, cap.backoff_s)
        self._post(
            ScaleRequested(
                workload_id=job.job_id,
                minimum=job.min_workers,
                maximum=cap.most,
                reason=f"no quota in namespace {namespace} for more: {self._refusals[namespace].message}",
                is_limit=True,
            )
        )

    def _ask_in(self, cap: _Cap, delay_s: float) -> None:
        cap.timer.cancel()
        cap.timer = self._reactor.after(delay_s, lambda: self._ask(cap))

    def _ask(self, cap: _Cap) -> None:
        if self._caps.get(cap.job.job_id) is cap:
            self._probe(cap.like, lambda has_room: self._answered(cap, has_room))

    def _answered(self, cap: _Cap, has_room: bool) -> None:
        if self._caps.get(cap.job.job_id) is not cap:
            return
        if not has_room:
            cap.backoff_s = min(cap.backoff_s * 2, PROBE_S[1])
            self._ask_in(cap, cap.backoff_s * float(self._rng.uniform(0.75, 1.25)))
            return
        del self._caps[cap.job.job_id]
        job = cap.job
        self._post(
            ScaleRequested(
                workload_id=job.job_id,
                minimum=job.min_workers,
                maximum=job.max_workers,
                reason=f"the quota in namespace {cap.namespace} has room again",
            )
        )
