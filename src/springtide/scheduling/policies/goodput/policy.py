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
from springtide.core.workload import TrainingJob, WorkloadId
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
from springtide.scheduling.placement.allocation_ledger import most_workers
from springtide.scheduling.placement.placing import place
from springtide.scheduling.policies.goodput.families import (
    FamilySpeed,
    JobFamily,
    family_key,
    read_family,
    write_family,
)
from springtide.scheduling.policies.goodput.jobs import JobCandidates, is_waiting, read_rows, size_grid
from springtide.scheduling.policies.goodput.reasons import reasons_of
from springtide.solvers.share_dp import best_shares, work_weights

Counts = Mapping[WorkloadId, int]

# How many families are remembered after all of their jobs have ended.
NUM_FAMILIES = 32
# A batch that would change by less than this factor stays as it is: goodput is flat around its best.
SAME_BATCH = 1.2
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

    def __init__(self) -> None:
        self.fingerprints = Fingerprints(READS)
        self.news: dict[WorkloadId, JobNews] = {}
        self.state: Any = None
        self.families: dict[str, JobFamily] = {}
        self.paces: dict[str, FamilySpeed] = {}

    def read(self, state: Any) -> dict[str, JobFamily]:
        """The families of a state."""
        if state is None:
            return {}
        if self.state is not state:
            self.families = {key: read_family(kept) for key, kept in state["families"].items()}
            self.state = state
        return dict(self.families)

    def pace(
        self, key: str, family: JobFamily, sizes: Sequence[int], per_node: int, job: TrainingJob, adapts: bool
    ) -> FamilySpeed:
        """The speeds of a family, computed anew only after new measurements."""
        known = self.paces.get(key)
        if (
            known is None
            or known.family.steps != family.steps
            or known.sizes.tolist() != list(sizes)
            or known.devices_per_node != per_node
        ):
            known = FamilySpeed(family, sizes, per_node, job, adapts=adapts)
        elif known.family != family:
            known = known.with_family(family)
        self.paces[key] = known
        return known


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
        return DerivedFamilies()

    def decide(self, snapshot: Snapshot, derived: DerivedFamilies | None = None) -> Plan:
        """Return the plan for this snapshot."""
        known = derived or DerivedFamilies()

        def is_due(snapshot: Snapshot, state: Any) -> bool:
            """Whether anything has changed since the last decision."""
            return state is None or state["fingerprint"] != self._fingerprint(snapshot, known.read(state), known)

        return decide_in_rounds(
            repr(self),
            self.round_s or self.revisit_s,
            snapshot,
            lambda this_round: self._decide(this_round, known),
            foresee=_foresee,
            is_due=None if self.round_s else is_due,
        )

    def _fingerprint(self, snapshot: Snapshot, families: Mapping[str, JobFamily], known: DerivedFamilies) -> str:
        news: dict[WorkloadId, JobNews] = {}
        for view in snapshot.jobs:
            job_id = view.job.job_id
            has_news = bool(view.learnt.step_times) and self._key(view.job) not in families
            waits, before = is_waiting(view, snapshot.now_s), known.news.get(job_id)
            if before is None or before.view is not view or before[2:] != (has_news, waits):
                before = JobNews(job_id, view, has_news, waits)
            news[job_id] = before
        known.news = news
        return known.fingerprints.of(snapshot, list(news.values()))

    def _key(self, job: TrainingJob) -> str:
        return family_key(job, alone=not self.learns)

    def _decide(self, now: Round, known: DerivedFamilies) -> RoundDecision:
        snapshot, state = now.snapshot, now.state
        families = self._learn(snapshot, state, known)
        capacity = len(now.devices)
        paces = self._paces(snapshot, families, capacity, known)
        rows = read_rows(snapshot, now.held, self._key, families, paces, capacity)
        counts = self._share_out(rows, snapshot, capacity)
        placed = _place(counts, now, _movable(rows, counts, snapshot))
        allocations = {
            row.job_id: self._with_batch(row, placed[row.job_id], snapshot) for row in rows if row.job_id in placed
        }
        kept = {
            "fingerprint": self._fingerprint(snapshot, families, known),
            "families": {key: write_family(family) for key, family in families.items()},
            "jobs": {view.job.job_id: [self._key(view.job), view.equivalent_steps] for view in snapshot.jobs},
            "runs": {
                row.job_id: [
                    counts[row.job_id],
                    _whole(snapshot.now_s + row.stall_s + row.seconds_on(counts[row.job_id])),
                ]
                for row in rows
                if counts.get(row.job_id)
            },
        }
        known.state, known.families = kept, families
        return RoundDecision(
            allocations=allocations,
            reasons=reasons_of(rows, counts, {who: given.device_ids for who, given in placed.items()}, now),
            state=kept,
        )

    def _learn(self, snapshot: Snapshot, state: Any, known: DerivedFamilies) -> dict[str, JobFamily]:
        """The families with the new measurements of their jobs."""
        families = known.read(state)
        live = {view.job.job_id for view in snapshot.jobs}
        for job_id, (key, progress) in (state["jobs"] if state is not None else {}).items():
            if job_id not in live and key in families and progress > 0.0:
                families[key] = families[key].with_length(progress)
        used: dict[str, None] = {}
        for view in snapshot.jobs:
            key = self._key(view.job)
            used[key] = None
            if view.learnt.step_times:
                families[key] = families.get(key, JobFamily()).with_view(view, snapshot.now_s)
        named = [key for key in families if key not in used and not key.startswith("#")]
        named.sort(key=lambda key: (-families[key].used_s, key))
        kept = {*used, *named[:NUM_FAMILIES]}
        return {key: family for key, family in families.items() if key in kept}

    def _paces(
        self, snapshot: Snapshot, families: Mapping[str, JobFamily], capacity: int, known: DerivedFamilies
    ) -> dict[str, FamilySpeed]:
        wanted: dict[str, set[int]] = {}
        job_of: dict[str, TrainingJob] = {}
        for view in snapshot.jobs:
            key = self._key(view.job)
            if key not in families or not families[key].steps:
                continue
            most = min(most_workers(view), capacity)
            wanted.setdefault(key, set()).update(
                (*size_grid(most), view.bounds.min_workers, max(most, 1), view.num_replicas)
            )
            job_of[key] = view.job
        per_node = max((len(node.devices) for node in snapshot.cluster.nodes), default=1)
        return {
            key: known.pace(key, families[key], sorted(sizes - {0}), per_node, job_of[key], self.adapts_batch)
            for key, sizes in wanted.items()
        }

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
        view, bounds = row.view, row.view.job.batch
        if bounds is None:
            return msgspec.structs.replace(given, global_batch_size=view.job.global_batch_size)
        now_size = view.global_batch_size or view.job.global_batch_size
        if row.pace is None or not self.adapts_batch:
            size = max(now_size, bounds.min_local_size * given.num_devices)
        else:
            node_of = snapshot.cluster.node_of
            num_nodes = len({node_of[device] for device in given.device_ids})
            size, rate = row.pace.batch_for(num_nodes, given.num_devices, row.noise)
            is_near = max(size, now_size) <= SAME_BATCH * min(size, now_size)
            if rate <= 0.0 or (is_near and given.num_devices == view.num_replicas):
                size = now_size
        size = min(max(size, bounds.min_size), bounds.max_size)
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
