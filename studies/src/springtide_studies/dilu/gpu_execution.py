"""A modelled GPU: kernels of several tenants share SMs and bandwidth, an arm gates their launches tick by tick.

Kernels are never preempted: tokens gate launches, and what is launched runs to its end. The host runs ahead of the
device by a bounded number of launches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from springtide.serving.share_control import Observation, ShareIteration
from springtide_studies.dilu.gpu_execution_work import IterationPlan, Kernel, ModelledTenant, percentile

TICK_S = 0.005
# How late a tick comes at the mean, drawn exponentially: a daemon is woken by a loaded host.
JITTER_S = 0.0002
# How many launched kernels may wait on the device or run.
QUEUE_DEPTH = 3
WARM_UP_S = 1.0
_TINY = 1e-12


class KernelObservation(msgspec.Struct, frozen=True, kw_only=True):
    """What an arm is told of a tenant at a tick: what our control sees, and the blocks launched since the last one."""

    observation: Observation
    num_blocks: float


class SharingArm(Protocol):
    """A way to share the device.

    `tick_s` is how often it is asked (0.0: never), `counts_blocks` whether its budgets are in blocks instead of
    seconds of the whole device, `kernel_factor` by how much each kernel is longer for its sake.
    """

    name: str
    tick_s: float
    counts_blocks: bool
    kernel_factor: float

    def cap(self, tenant: ModelledTenant) -> float:
        """Return the fraction of the SMs that kernels of this tenant can fill at most."""
        ...

    def tick(self, seen: Mapping[str, KernelObservation], tick_s: float) -> Mapping[str, float]:
        """Return what each tenant may launch until the next tick (infinity: anything)."""
        ...


class TenantFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant got. Latencies are of requests that came after the warm-up and ended, or are late already."""

    tenant_id: str
    is_slo: bool
    iterations_per_s: float
    requests_per_s: float = 0.0
    num_requests: int = 0
    p50_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0
    violation_fraction: float = 0.0
    used_fraction: float = 0.0


class _Stream:
    """One tenant in the making: what it runs, what is launched, what it may still launch."""

    def __init__(self, tenant: ModelledTenant, arm: SharingArm) -> None:
        self.tenant = tenant
        self.cap = arm.cap(tenant)
        self.factor = arm.kernel_factor
        self.counts_blocks = arm.counts_blocks
        self.budget = math.inf
        self.plan: IterationPlan | None = None
        self.batch: Sequence[float] = ()
        self.started_s = 0.0
        self.phase_end_s = math.inf
        self.is_waiting = False
        self.num_launched = self.num_done = 0
        self.remaining_s = 0.0
        self.sm = self.bandwidth = 0.0
        self.next_arrival = 0
        self.used_s = self.total_used_s = 0.0
        self.blocks = 0.0
        self.finished: list[ShareIteration] = []
        self.num_iterations = 0
        self.served: list[tuple[float, float]] = []

    def begin(self, now_s: float) -> None:
        """Start an iteration if there is work."""
        tenant = self.tenant
        if tenant.is_slo:
            first = self.next_arrival
            arrivals = tenant.arrivals
            last = first
            while last < len(arrivals) and last - first < tenant.max_batch_size and arrivals[last] <= now_s + _TINY:
                last += 1
            if last == first:
                self.plan = None
                self.phase_end_s = arrivals[first] if first < len(arrivals) else math.inf
                return
            self.batch = arrivals[first:last]
            self.next_arrival = last
            self.plan = tenant.plans[last - first]
        else:
            self.plan = tenant.plans[tenant.max_batch_size]
        self.started_s = now_s
        self.is_waiting = False
        self.num_launched = self.num_done = 0
        self.phase_end_s = now_s + self.plan.host_s

    def phase_ended(self, now_s: float) -> None:
        """The host work, the wait at the end, or the time without requests is over."""
        if self.plan is None:
            self.begin(now_s)
        elif self.is_waiting:
            self._end(now_s)
        else:
            self.phase_end_s = math.inf
            self.launch()

    def launch(self) -> None:
        """Launch what the budget and the queue allow; begin the first of it if nothing runs."""
        plan = self.plan
        if plan is None or self.is_waiting or self.phase_end_s < math.inf:
            return
        was_empty = self.num_launched == self.num_done
        num_kernels = len(plan.kernels)
        while self.budget > _TINY and self.num_launched < num_kernels:
            if self.num_launched - self.num_done >= QUEUE_DEPTH:
                break
            kernel = plan.kernels[self.num_launched]
            self.num_launched += 1
            self.blocks += kernel.num_blocks
            self.budget -= kernel.num_blocks if self.counts_blocks else kernel.device_s
        if was_empty and self.num_launched > self.num_done:
            self._start(plan.kernels[self.num_done])

    def _start(self, kernel: Kernel) -> None:
        width = min(self.cap, kernel.sm_fraction)
        self.remaining_s = kernel.duration_s * self.factor * (kernel.sm_fraction / width)
        self.sm = width
        self.bandwidth = kernel.bandwidth_fraction * (width / kernel.sm_fraction)

    def kernel_ended(self, now_s: float) -> None:
        """The running kernel is done: the next one that is launched runs."""
        plan = self.plan
        assert plan is not None
        self.num_done += 1
        self.remaining_s = self.sm = self.bandwidth = 0.0
        if self.num_done == len(plan.kernels):
            self.is_waiting = True
            self.phase_end_s = now_s + plan.idle_s
            if plan.idle_s <= 0.0:
                self._end(now_s)
            return
        if self.num_launched > self.num_done:
            self._start(plan.kernels[self.num_done])
        self.launch()

    def _end(self, now_s: float) -> None:
        self.num_iterations += now_s >= WARM_UP_S
        size = len(self.batch) if self.tenant.is_slo else self.tenant.max_batch_size
        self.finished.append(ShareIteration(batch_size=size, duration_s=now_s - self.started_s))
        self.served += [(arrived_s, now_s) for arrived_s in self.batch]
        self.begin(now_s)

    def seen(self, now_s: float, tick_s: float) -> KernelObservation:
        """Return what was observed since the last tick, and reset the counts."""
        arrivals = self.tenant.arrivals
        num_queued = 0
        while self.next_arrival + num_queued < len(arrivals) and arrivals[self.next_arrival + num_queued] <= now_s:
            num_queued += 1
        is_running = self.plan is not None
        observation = Observation(
            used_fraction=self.used_s / tick_s,
            iteration_s=max(_TINY, now_s - self.started_s) if is_running else 0.0,
            batch_size=(len(self.batch) if self.tenant.is_slo else self.tenant.max_batch_size) if is_running else 0,
            finished=tuple(self.finished),
            num_queued=num_queued,
        )
        blocks, self.blocks, self.used_s = self.blocks, 0.0, 0.0
        self.finished.clear()
        return KernelObservation(observation=observation, num_blocks=blocks)


def run_device(
    tenants: Sequence[ModelledTenant], arm: SharingArm, horizon_s: float, seed: int = 0
) -> dict[str, TenantFigures]:
    """Let the tenants run on one device for so long under this arm and say what each got.

    Running kernels go at full speed while the SM fractions and the bandwidth fractions sum to at most 1 each, else
    slower by the larger sum. `seed` draws how late ticks come.
    """
    streams = [_Stream(tenant, arm) for tenant in tenants]
    jitters = np.random.default_rng(seed).exponential(JITTER_S, size=4096).tolist()
    now_s, last_tick_s, num_ticks = 0.0, 0.0, 0
    next_tick_s = math.inf
    if arm.tick_s:
        next_tick_s = arm.tick_s
        _tick(streams, arm, 0.0, arm.tick_s)
    for stream in streams:
        stream.begin(0.0)
    while now_s < horizon_s:
        demand = bandwidth = 0.0
        for stream in streams:
            demand += stream.sm
            bandwidth += stream.bandwidth
        slowness = max(1.0, demand, bandwidth)
        until_s = min(next_tick_s, horizon_s)
        for stream in streams:
            if stream.phase_end_s < until_s:
                until_s = stream.phase_end_s
            if stream.sm and now_s + stream.remaining_s * slowness < until_s:
                until_s = now_s + stream.remaining_s * slowness
        done_s = (until_s - now_s) / slowness
        now_s = until_s
        for stream in streams:
            if stream.sm:
                stream.remaining_s -= done_s
                stream.used_s += done_s * stream.sm
                stream.total_used_s += done_s * stream.sm
                if stream.remaining_s <= _TINY:
                    stream.kernel_ended(now_s)
            if stream.phase_end_s <= now_s:
                stream.phase_ended(now_s)
        if now_s >= next_tick_s:
            _tick(streams, arm, now_s, now_s - last_tick_s)
            last_tick_s = now_s
            num_ticks += 1
            due_s = (num_ticks + 1) * arm.tick_s
            next_tick_s = max(due_s, now_s + _TINY) + jitters[num_ticks % len(jitters)]
    return {stream.tenant.tenant_id: _figures(stream, horizon_s) for stream in streams}


def _tick(streams: Sequence[_Stream], arm: SharingArm, now_s: float, tick_s: float) -> None:
    """Ask the arm for budgets. Debts of launches that went over the last budget are carried, savings are not."""
    budgets = arm.tick({stream.tenant.tenant_id: stream.seen(now_s, tick_s) for stream in streams}, tick_s)
    for stream in streams:
        added = budgets[stream.tenant.tenant_id]
        stream.budget = added if math.isinf(stream.budget) else min(0.0, stream.budget) + added
        stream.launch()


def _figures(stream: _Stream, horizon_s: float) -> TenantFigures:
    tenant = stream.tenant
    measured_s = horizon_s - WARM_UP_S
    served = [(arrived_s, ended_s) for arrived_s, ended_s in stream.served if arrived_s >= WARM_UP_S]
    latencies = sorted(ended_s - arrived_s for arrived_s, ended_s in served)
    # A request that still waits at the end counts if it is late already, with the time it has waited.
    waiting = [*stream.batch] if stream.plan is not None else []
    waiting += [arrived_s for arrived_s in tenant.arrivals[stream.next_arrival :] if arrived_s < horizon_s]
    late = [horizon_s - arrived_s for arrived_s in waiting if WARM_UP_S <= arrived_s < horizon_s - tenant.slo_s]
    latencies = sorted([*latencies, *late])
    num_missed = sum(latency_s > tenant.slo_s for latency_s in latencies)
    plan, fraction = stream.plan, 0.0
    if plan is not None and not tenant.is_slo:
        fraction = stream.num_done / len(plan.kernels)
    return TenantFigures(
        tenant_id=tenant.tenant_id,
        is_slo=tenant.is_slo,
        iterations_per_s=(stream.num_iterations + fraction) / measured_s,
        requests_per_s=len(served) / measured_s,
        num_requests=len(latencies),
        p50_s=percentile(latencies, 0.5),
        p95_s=percentile(latencies, 0.95),
        p99_s=percentile(latencies, 0.99),
        violation_fraction=num_missed / len(latencies) if latencies else 0.0,
        used_fraction=stream.total_used_s / horizon_s,
    )
