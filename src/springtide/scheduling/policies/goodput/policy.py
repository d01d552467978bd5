"""Goodput: devices and batches so that the jobs' completion times, as predicted goodput has them, sum up to the least.

Springtide's own policy for training without promises. See docs/policies/goodput.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from springtide.core.decision import JobView, Plan, PlannedRun, PoolAllocation, Schedule, Snapshot
from springtide.core.resources import DeviceId, Node, Topology
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.fingerprint import (
    BOUNDS,
    NODES,
    SERVICES,
    Fingerprints,
    Projection,
    Reads,
    of_rows,
)
from springtide.scheduling.decisions.rounds import Round, RoundDecision, decide_in_rounds
from springtide.scheduling.families.candidates import JobCandidates, is_waiting, read_rows
from springtide.scheduling.families.family import JobFamily
from springtide.scheduling.families.learning import FamilyMemory
from springtide.scheduling.placement.placing import place
from springtide.scheduling.policies.goodput.reasons import reasons_of
from springtide.solvers.share_dp import best_shares, work_weights

Counts = Mapping[WorkloadId, int]

# A job may be moved, so that a group of workers becomes compact, if it runs this many times as long as a move costs.
MOVE_PAYS = 60.0


class JobNews(NamedTuple):
    """The parts of a job whose change is a reason to decide anew. `has_news`: it is the first measured one of its
    family."""

    job_id: WorkloadId
    view: JobView
    has_news: bool
    is_waiting: bool


READS = Reads(
    jobs=(
        of_rows(BOUNDS),
        Projection("family", ("job", "learnt.step_times"), attrgetter("has_news")),
        Projection("back-off", ("restarts.starts_at_s", "num_replicas"), attrgetter("is_waiting")),
    ),
    services=SERVICES,
    nodes=NODES,
    job_id="job_id",
    also=(
        "global_batch_size",
        "learnt.noise",
        "equivalent_steps",
        "progress.progress_at_s",
        "changes.resized_at_s",
        "state",
        "progress.step",
        "submitted_at_s",
        "learnt.throughput_samples_per_s",
        "total_equivalent_steps",
        "total_steps",
    ),
)


class DerivedFamilies:
    """Derived from the memory and from earlier snapshots, kept for the next decision (see decisions/cache.py)."""

    def __init__(self, memory: FamilyMemory) -> None:
        self.memory = memory
        self.fingerprints = Fingerprints(READS)
        self.news: dict[WorkloadId, JobNews] = {}


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Minimises the sum of completion times by predicted goodput.

    With `round_s` 0 it decides at every arrival and end and every `revisit_s`; otherwise only at multiples of
    `round_s`. `company` is how many future jobs are counted beside the present ones. A change is charged as if its jobs
    were changed again within `horizon_s`.

    Three parts can be switched off to measure their effect: jobs of a family learn from each other (`learns`), the
    batch is chosen (`adapts_batch`), jobs are weighted by their remaining work (`by_remaining`).
    """

    round_s: float = 0.0
    revisit_s: float = 60.0
    company: float = 3.0
    horizon_s: float = 300.0
    learns: bool = True
    adapts_batch: bool = True
    by_remaining: bool = True

    reads: ClassVar[Reads] = READS

    def make_derived(self) -> DerivedFamilies:
        """An empty object to keep derived values in."""
        return DerivedFamilies(FamilyMemory(learns=self.learns, adapts=self.adapts_batch))

    def decide(self, snapshot: Snapshot, derived: DerivedFamilies | None = None) -> Plan:
        """Return the plan for this snapshot."""
        known = derived or self.make_derived()

        def is_due(snapshot: Snapshot, state: Any) -> bool:
            """Whether anything has changed since the last decision."""
            return state is None or state["fingerprint"] != self._fingerprint(snapshot, known.memory.read(state), known)

        plan = decide_in_rounds(
            repr(self),
            self.round_s or self.revisit_s,
            snapshot,
            lambda this_round: self._decide(this_round, known),
            foresee=_foresee,
            is_due=None if self.round_s else is_due,
        )
        if self.round_s or plan.revisit_at_s is None:
            return plan
        # The end of a back-off is a change as well, and no event tells of it.
        ends_s = [view.restarts.starts_at_s for view in snapshot.jobs if is_waiting(view, snapshot.now_s)]
        return msgspec.structs.replace(plan, revisit_at_s=min([plan.revisit_at_s, *ends_s]))

    def _fingerprint(self, snapshot: Snapshot, families: Mapping[str, JobFamily], known: DerivedFamilies) -> str:
        news: dict[WorkloadId, JobNews] = {}
        for view in snapshot.jobs:
            job_id = view.job.job_id
            has_news = bool(view.learnt.step_times) and known.memory.key_of(view.job) not in families
            waits, before = is_waiting(view, snapshot.now_s), known.news.get(job_id)
            if before is None or before.view is not view or before[2:] != (has_news, waits):
                before = JobNews(job_id, view, has_news, waits)
            news[job_id] = before
        known.news = news
        return known.fingerprints.of(snapshot, list(news.values()))

    def _decide(self, now: Round, known: DerivedFamilies) -> RoundDecision:
        snapshot, state = now.snapshot, now.state
        memory = known.memory
        families = memory.learn(state, snapshot.jobs, snapshot.now_s)
        capacity = len(now.devices)
        speeds = memory.speeds(snapshot.jobs, snapshot, families, capacity)
        rows = read_rows(snapshot.jobs, snapshot, now.held, memory.key_of, families, speeds, capacity)
        counts = self._share_out(rows, snapshot, capacity)
        placed = _place(counts, now, _movable(rows, counts, snapshot))
        allocations = {
            row.job_id: self._with_batch(row, placed[row.job_id], snapshot) for row in rows if row.job_id in placed
        }
        kept = {
            "fingerprint": self._fingerprint(snapshot, families, known),
            **memory.write(families, snapshot.jobs),
            "runs": {
                row.job_id: [
                    counts[row.job_id],
                    _whole(snapshot.now_s + row.stall_s + row.seconds_on(counts[row.job_id])),
                ]
                for row in rows
                if counts.get(row.job_id)
            },
        }
        memory.keep(kept, families)
        return RoundDecision(
            allocations=allocations,
            reasons=reasons_of(rows, counts, {who: given.device_ids for who, given in placed.items()}, now),
            state=kept,
        )

    def _share_out(self, rows: list[JobCandidates], snapshot: Snapshot, capacity: int) -> dict[WorkloadId, int]:
        """The number of devices for each job."""
        counts = {row.job_id: min(row.held, capacity) for row in rows if row.is_fixed}
        free = capacity - sum(counts.values())
        able = [row for row in rows if not row.is_fixed]
        able.sort(key=lambda row: (-row.least_s, -_deadline_s(row), -row.view.submitted_at_s))
        costs = [np.array([snapshot.overheads.cost_s(size) for size in row.sizes.tolist()]) for row in able]
        # A job without devices pays for a start in any case, so that cost counts as work left, not as a loss now.
        speeds = [
            1.0 / (row.seconds if row.held else row.seconds + cost) for row, cost in zip(able, costs, strict=True)
        ]
        if self.by_remaining:
            weights = work_weights([row.sizes for row in able], speeds, free, self.company)
        else:
            weights = np.array([float(row.seconds[0]) for row in able])
        values = []
        for row, speed, weight, cost in zip(able, speeds, weights.tolist(), costs, strict=True):
            lost_s = np.where(row.sizes == row.held, row.stall_s, cost) if row.held else 0.0
            reach_s = np.minimum(row.seconds, self.horizon_s)
            values.append(weight * speed * reach_s / (reach_s + lost_s))
        for row, count in zip(able, best_shares([row.sizes for row in able], values, free), strict=True):
            counts[row.job_id] = count
        return counts

    def _with_batch(self, row: JobCandidates, given: PoolAllocation, snapshot: Snapshot) -> PoolAllocation:
        """The allocation with the best batch on it."""
        node_of = snapshot.cluster.node_of
        num_nodes = len({node_of[device] for device in given.device_ids})
        size = row.batch_on(num_nodes, given.num_devices, adapts=self.adapts_batch)
        return msgspec.structs.replace(given, global_batch_size=size)


def _deadline_s(row: JobCandidates) -> float:
    deadline_s = row.view.job.goal.deadline_s
    return math.inf if deadline_s is None else deadline_s


def _whole(end_s: float) -> float | None:
    return float(round(end_s)) if math.isfinite(end_s) else None


def _movable(rows: Sequence[JobCandidates], counts: Counts, snapshot: Snapshot) -> frozenset[WorkloadId]:
    """The jobs that may be moved to make a group compact: the rest of their run is long compared with a move."""
    return frozenset(
        row.job_id
        for row in rows
        if row.held
        and row.view.job.elastic
        and row.seconds_on(counts[row.job_id]) > MOVE_PAYS * snapshot.overheads.cost_s(max(counts[row.job_id], 1))
    )


def _place(counts: Counts, now: Round, movable: frozenset[WorkloadId]) -> dict[WorkloadId, PoolAllocation]:
    """Devices for the counts, of those that services leave; a job that keeps its count keeps its devices."""
    snapshot = now.snapshot
    free = set(now.devices)
    cluster = snapshot.cluster
    if len(free) < len(cluster.device_ids()):
        cluster = Topology(
            nodes=tuple(
                _part(node, free) for node in cluster.nodes if any(device.device_id in free for device in node.devices)
            )
        )
    before = {who: PoolAllocation(device_ids=tuple(devices)) for who, devices in now.held.items() if devices}
    reduced = msgspec.structs.replace(snapshot, cluster=cluster, services=(), allocations=before)
    return {who: given for who, given in place(dict(counts), reduced, movable=movable).items() if given.device_ids}


def _part(node: Node, free: set[DeviceId]) -> Node:
    return msgspec.structs.replace(node, devices=tuple(device for device in node.devices if device.device_id in free))


def _foresee(snapshot: Snapshot, state: Any) -> Mapping[WorkloadId, Schedule]:
    """Each job's run to its end as it is now, if its end can be predicted."""
    if state is None:
        return {}
    live = {view.job.job_id for view in snapshot.jobs}
    return {
        WorkloadId(job_id): (PlannedRun(start_s=snapshot.now_s, end_s=end_s, num_devices=count),)
        for job_id, (count, end_s) in state["runs"].items()
        if job_id in live and end_s is not None and end_s > snapshot.now_s
    }
