"""Sia: one of a few sizes for each job, chosen for all of them by an integer program over predicted goodput.

Jayaram Subramanya et al., "Sia: Heterogeneity-aware, goodput-optimized ML-cluster scheduling", SOSP 2023, section 3,
on devices of one kind, with the settings of its published artifact (siasosp23/artifacts). Every round each job is
offered 1, 2, 4... devices of a node and whole nodes, at most twice what it has run on. What a size is worth is its
predicted goodput at the best batch over that of the least size, in the power -0.5; another size than the present one is
worth less by what restarts have cost the job. Jobs' lengths play no part. docs/policies/sia.md names every difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from springtide.core.decision import JobView, Plan, PoolAllocation, Snapshot
from springtide.core.errors import InvalidRequest
from springtide.core.resources import Topology
from springtide.core.workload import JobState, WorkloadId
from springtide.perf.curve import curve_of
from springtide.perf.goodput import BestBatches, best_batches
from springtide.perf.step_estimate import fit_model
from springtide.scheduling.decisions.rounds import Round, RoundDecision, decide_in_rounds
from springtide.scheduling.placement.allocation_ledger import most_workers
from springtide.scheduling.placement.gangs import fixed_size
from springtide.scheduling.placement.placing import place
from springtide_studies.bounds import highs
from springtide_studies.rivals.solvers.sia_milp import Offer, choose_by_table, choose_sizes

# The artifact's: costs are rounded to so many digits, and none is above the largest.
_DIGITS = 2
_LARGEST_COST = 3000.0


class Sia(msgspec.Struct, frozen=True, kw_only=True):
    """Services first, by load; then all jobs, every `round_s`.

    `power` is the fairness (below 0: the harmonic kind), `waiting_cost` the price of a job that gets nothing, against 1
    for one that gets its least size. `restart_s` is what a restart is reckoned to cost; none: what the platform says.
    `solver` is the integer program ("highs", needs SciPy) or a table that solves the same ("table").
    """

    round_s: float = 60.0
    power: float = -0.5
    waiting_cost: float = 1.1
    restart_s: float | None = None
    max_workers: int = 64
    solver: Literal["highs", "table"] = "highs"

    def __post_init__(self) -> None:
        if self.power >= 0.0:
            raise InvalidRequest(f"sia minimises a sum of powers below zero: power={self.power} must be below 0")
        if self.solver == "highs" and not highs.is_available():
            # Fails when the policy is chosen, not in the middle of the first round.
            choose_sizes((), 0, self.waiting_cost)

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        return decide_in_rounds(repr(self), self.round_s, snapshot, self._decide)

    def _decide(self, now: Round) -> RoundDecision:
        state = now.state or {"restarts": {}, "ran": {}, "changed_s": {}}
        history = _JobHistory(now, state)
        width = _widest_node(now)
        total = len(now.devices)
        counts: dict[WorkloadId, int] = {}
        asking: list[JobView] = []
        for view in now.snapshot.jobs:
            if self._is_pinned(history, view):
                counts[view.job.job_id] = len(now.held[view.job.job_id])
            elif view.restarts.starts_at_s <= now.snapshot.now_s or now.held[view.job.job_id]:
                asking.append(view)
        left = total - sum(counts.values())
        offers = [self._offer(history, view, total, width) for view in asking]
        solve = choose_sizes if self.solver == "highs" else choose_by_table
        for view, size in zip(asking, solve(offers, left, self.waiting_cost), strict=True):
            if size:
                counts[view.job.job_id] = size
        allocations = _place(now, counts, history)
        return RoundDecision(allocations=allocations, state=history.remember(allocations))

    def _is_pinned(self, history: _JobHistory, view: JobView) -> bool:
        """Whether the job keeps its devices: it is restarting, or it runs and cannot change their number."""
        held = len(history.now.held[view.job.job_id])
        if not held:
            return False
        if not view.job.elastic:
            return held == fixed_size(view, len(history.now.devices))
        since_s = history.now.snapshot.now_s - history.changed_s.get(view.job.job_id, -math.inf)
        return since_s < self._restart_s(history.now.snapshot) and held <= most_workers(view)

    def _restart_s(self, snapshot: Snapshot) -> float:
        return snapshot.overheads.cost_s(1) if self.restart_s is None else self.restart_s

    def _offer(self, history: _JobHistory, view: JobView, total: int, width: int) -> Offer:
        """The sizes for one job and their costs, by speedup; a size other than the present one pays for a restart."""
        if not view.job.elastic:
            size = fixed_size(view, total)
            return Offer(sizes=(size,), costs=(self._cost(float(size)),)) if size else Offer(sizes=(), costs=())
        sizes = self._sizes(history, view, total, width)
        held = len(history.now.held[view.job.job_id])
        speedups = _speedups(view, sizes, width, held)
        factor = self._restart_factor(history, view) if held else 1.0
        costs = [
            self._cost(speedup if size == held else speedup * factor)
            for size, speedup in zip(sizes, speedups, strict=True)
        ]
        kept = [(size, cost) for size, cost in zip(sizes, costs, strict=True) if cost < _LARGEST_COST]
        return Offer(sizes=tuple(size for size, _ in kept), costs=tuple(cost for _, cost in kept))

    def _sizes(self, history: _JobHistory, view: JobView, total: int, width: int) -> list[int]:
        """Powers of two within a node, then whole nodes, up to twice the most it has run on, within its bounds.

        If none of these is within the bounds, the minimum.
        """
        least = max(1, view.bounds.min_workers)
        bounds = view.job.batch
        largest = view.job.global_batch_size if bounds is None else bounds.max_size // bounds.min_local_size
        held = len(history.now.held[view.job.job_id])
        most = max(2 * history.ran[view.job.job_id], held, least)
        most = min(most, self.max_workers, most_workers(view), max(1, largest))
        sizes = [size for size in _configurations(width, min(most, total)) if size >= least]
        return sizes or ([least] if least <= total else [])

    def _restart_factor(self, history: _JobHistory, view: JobView) -> float:
        """The part of its life that a job would have run after one more restart (Pollux, section 4.2.1, as in Sia)."""
        age_s = history.now.snapshot.now_s - view.submitted_at_s
        cost_s = self._restart_s(history.now.snapshot)
        if age_s < cost_s or age_s + cost_s <= 0.0:
            return 1.0
        return max(age_s - history.restarts.get(view.job.job_id, 0) * cost_s, 0.0) / (age_s + cost_s)

    def _cost(self, speedup: float) -> float:
        return min(round(speedup**self.power, _DIGITS), _LARGEST_COST) if speedup > 0.0 else _LARGEST_COST


class _JobHistory:
    """The history of jobs that is remembered from round to round."""

    def __init__(self, now: Round, state: Mapping[str, Any]) -> None:
        self.now = now
        self.restarts: Mapping[str, int] = state["restarts"]
        self.changed_s: Mapping[str, float] = state["changed_s"]
        self.ran = {
            view.job.job_id: max(_most_run(view, len(now.held[view.job.job_id])), state["ran"].get(view.job.job_id, 0))
            for view in now.snapshot.jobs
        }

    def remember(self, allocations: Mapping[WorkloadId, PoolAllocation]) -> dict[str, Any]:
        """The state after this round: a first start is no restart, any other change of devices is one."""
        restarts: dict[str, int] = {}
        changed_s: dict[str, float] = {}
        for view in self.now.snapshot.jobs:
            job_id = view.job.job_id
            given = allocations.get(job_id)
            is_changed = given is not None and sorted(given.device_ids) != sorted(self.now.held[job_id])
            if is_changed or job_id in self.restarts:
                restarts[job_id] = self.restarts.get(job_id, -1) + is_changed
            if is_changed:
                changed_s[job_id] = self.now.snapshot.now_s
            elif given is not None and job_id in self.changed_s:
                changed_s[job_id] = self.changed_s[job_id]
        ran = {job_id: count for job_id, count in self.ran.items() if count}
        return {"restarts": restarts, "ran": ran, "changed_s": changed_s}


def _configurations(width: int, most: int) -> list[int]:
    """Sia's sizes on nodes of `width` devices (section 3.3): 1, 2, 4... below a node, then whole nodes."""
    within = [1 << power for power in range(width.bit_length()) if 1 << power < width]
    return [size for size in (*within, *range(width, most + 1, width)) if size <= most] if width else []


def _widest_node(now: Round) -> int:
    """The largest number of devices on one node that no service takes."""
    node_of = now.snapshot.cluster.node_of
    on_node: dict[str, int] = {}
    for device in now.devices:
        on_node[node_of[device]] = on_node.get(node_of[device], 0) + 1
    return max(on_node.values(), default=0)


def _most_run(view: JobView, held: int) -> int:
    """The largest number of workers that the job is known to have run on."""
    measured = max((sum(step.placement) for step in view.learnt.step_times), default=0)
    return max(held if view.state is JobState.RUNNING else 0, measured, *view.learnt.throughput_samples_per_s, 0)


def _speedups(view: JobView, sizes: Sequence[int], width: int, held: int) -> list[float]:
    """Goodput on each size over the least goodput among them; 0.0 where the job cannot run.

    A job whose steps were never measured is as fast as its known curve says. Without a curve, the smallest size is
    worth 1, and larger ones up to the `held` devices are worth their proportion.
    """
    best = _best(view, [(-(-size // width), size) for size in sizes])
    if best is not None:
        rates = best.goodput_per_s.tolist()
    else:
        curve = curve_of(view)
        if curve.source == "guess":
            return [size / sizes[0] if size <= max(held, sizes[0]) else 0.0 for size in sizes]
        rates = [curve.rate(size) for size in sizes]
    least = min((rate for rate in rates if rate > 0.0), default=1.0)
    return [rate / least for rate in rates]


def _best(view: JobView, pairs: Sequence[tuple[int, int]]) -> BestBatches | None:
    model = fit_model(view.learnt.step_times)
    if model is None or not pairs:
        return None
    return best_batches(model, view.learnt.noise, pairs, view.job.batch, view.job.global_batch_size)


def _place(now: Round, counts: Mapping[WorkloadId, int], history: _JobHistory) -> dict[WorkloadId, PoolAllocation]:
    """Devices for the counts, of those that no service takes, and the best batch of each job on them.

    A job that keeps its count keeps its devices, unless it has to make room for one that would be scattered otherwise.
    """
    snapshot = now.snapshot
    free = frozenset(now.devices)
    cluster = snapshot.cluster
    if len(free) < len(cluster.device_ids()):
        nodes = [
            replace(node, devices=tuple(device for device in node.devices if device.device_id in free))
            for node in cluster.nodes
        ]
        cluster = Topology(nodes=tuple(node for node in nodes if node.devices))
    batch_of = {view.job.job_id: view.job.global_batch_size for view in snapshot.jobs}
    held = {
        job_id: PoolAllocation(device_ids=devices, global_batch_size=batch_of[job_id])
        for job_id, devices in now.held.items()
        if devices
    }
    movable = {view.job.job_id for view in snapshot.jobs if view.job.elastic}
    placed = place(counts, replace(snapshot, cluster=cluster, services=(), allocations=held), movable=movable)
    views = {view.job.job_id: view for view in snapshot.jobs}
    return {
        job_id: PoolAllocation(
            device_ids=given.device_ids, global_batch_size=_batch(views[job_id], given, snapshot.cluster)
        )
        for job_id, given in placed.items()
    }


def _batch(view: JobView, given: PoolAllocation, cluster: Topology) -> int | None:
    """The batch with the highest goodput on these devices; None for a job with a fixed batch."""
    bounds = view.job.batch
    if bounds is None:
        return None
    num_nodes = len({cluster.node_of[device] for device in given.device_ids})
    best = _best(view, [(num_nodes, given.num_devices)])
    if best is None:
        return min(max(view.job.global_batch_size, bounds.min_local_size * given.num_devices), bounds.max_size)
    return min(max(int(best.global_batch_size[0]), bounds.min_size), bounds.max_size)
