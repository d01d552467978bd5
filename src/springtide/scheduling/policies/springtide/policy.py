"""Springtide: every promised deadline has a place in one plan over all time to come, and the plan makes room.

A job is promised its deadline if a schedule for it fits beside those of all other promises, the cost of every change
included. If none fits, the other jobs are planned anew around it; if that fails too, it is refused. Idle devices speed
up the jobs that gain most. See docs/policies/springtide.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

from springtide.core.decision import EMPTY, Allocation, Plan, PoolAllocation, Refusal, Snapshot, TimeClaim
from springtide.core.errors import InvalidRequest
from springtide.core.resources import DeviceId, Topology
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.cache import RowTable
from springtide.scheduling.decisions.fingerprint import Fingerprints, Reads, RowChanges
from springtide.scheduling.families.learning import FamilyMemory
from springtide.scheduling.policies.springtide.accelerators.plans import MixedPlans
from springtide.scheduling.policies.springtide.capacity import capacity_matters
from springtide.scheduling.policies.springtide.decision import Decision
from springtide.scheduling.policies.springtide.memory import State, decode, deviates, is_mixed, refresh_entry
from springtide.scheduling.policies.springtide.reasons import ReservedFuture, claims_of, reasons_of, same_reasons
from springtide.scheduling.policies.springtide.rows import READS, PromiseRow
from springtide.scheduling.replicas import next_idle_at_s
from springtide.solvers.reservations.reservation_table import Entry


class DerivedPromises:
    """Values derived from earlier snapshots and the memory, kept for the next decision (see decisions/cache.py)."""

    def __init__(self) -> None:
        self.table: RowTable[PromiseRow] = RowTable(lambda view, _: PromiseRow(view))
        self.fingerprints = Fingerprints(READS)
        self.families = FamilyMemory()
        # The last plan, its memory, and the state that this memory encodes.
        self.memory: Any = None
        self.state: State | None = None
        self.plan: Plan | None = None
        # The allocations that were decided, also of jobs that the plan stops first (`State.stop_first`).
        self.wanted: Mapping[WorkloadId, PoolAllocation] = EMPTY
        # What every workload held when the last plan was returned.
        self.held: Mapping[WorkloadId, Allocation] = EMPTY
        # Whether no job deviated from the last plan when it was returned.
        self.is_checked = False
        self._topology: Topology | None = None
        self.index_of: dict[DeviceId, int] = {}
        # In a cluster of several models, what is derived for each.
        self.mixed: MixedPlans[DerivedPromises] | None = None

    def number_devices(self, topology: Topology) -> None:
        """Number the devices of the cluster, if it is another one than the last time."""
        if self._topology is not topology:
            self._topology = topology
            self.index_of = {device_id: number for number, device_id in enumerate(topology.device_ids())}


class Springtide(msgspec.Struct, frozen=True, kw_only=True):
    """`reserve_fraction` of the devices is promised to no job, for failures; without failures they run spare work.

    `effort` bounds the search for room by planning other jobs anew, in intervals of time looked at; the default takes
    some hundredths of a second. It is not in seconds, so that the same input gives the same plan. While there are jobs
    that may change their batch, sizes and batches are chosen anew every `revisit_s`.

    No job gets devices beyond what it needs that bring, on average, less than `efficiency` (0 to 1) of what a device
    brings where the job needs the fewest device-seconds.
    """

    reserve_fraction: float = 0.0
    effort: int = 240_000
    revisit_s: float = 60.0
    efficiency: float = 0.0

    reads: ClassVar[Reads] = READS

    def __post_init__(self) -> None:
        if not 0.0 <= self.efficiency <= 1.0:
            raise InvalidRequest(f"efficiency must be between 0 and 1, not {self.efficiency:g}")

    def make_derived(self) -> DerivedPromises:
        """An empty object to keep derived values in."""
        return DerivedPromises()

    def decide(self, snapshot: Snapshot, derived: DerivedPromises | None = None) -> Plan:
        """Return the plan for this snapshot."""
        derived = derived or DerivedPromises()
        if is_mixed(snapshot):
            derived.mixed = derived.mixed or MixedPlans(DerivedPromises)
            return derived.mixed.plan(self._decide, snapshot)
        return self._decide(snapshot, derived)

    def _decide(self, snapshot: Snapshot, derived: DerivedPromises) -> Plan:
        """The plan for devices that are all of one model."""
        table, memory = derived.table, snapshot.memory
        rows = table.read(snapshot)
        cluster = derived.fingerprints.nodes(snapshot.cluster)
        fingerprint = derived.fingerprints.of(snapshot, rows, table.changes)
        is_known = derived.state is not None and derived.memory is memory and derived.state.cluster == cluster
        if is_known and derived.state is not None:
            state = derived.state
            for row in table.fresh:
                refresh_entry(state, row)
        else:
            state = decode(memory, table.by_id, snapshot, cluster, snapshot.cluster.device_ids())
        is_valid = (
            state.fingerprint == fingerprint
            and memory is not None
            and (state.until_s is None or snapshot.now_s < state.until_s)
            and not any(deviates(row, state) for row in (table.fresh if is_known and derived.is_checked else rows))
            and not (
                (snapshot.capacity or len(state.reservations.steps) > 1)
                and capacity_matters(state, snapshot, self.reserve_fraction, table.by_id)
            )
        )
        # While the plan stays the same, a job that does not deviate from it can do so only after its next report.
        derived.is_checked = is_valid
        if not is_valid:
            plan, state = self._decide_anew(snapshot, derived, state, cluster)
        elif not is_known or derived.plan is None:
            plan = _restored_plan(snapshot, derived, state)
        else:
            plan = _updated_plan(snapshot, derived, state, derived.plan)
        derived.memory, derived.state, derived.plan, derived.held = plan.memory, state, plan, snapshot.allocations
        return plan

    def _decision(
        self, snapshot: Snapshot, derived: DerivedPromises, state: State, cluster: str, *, only_least: bool
    ) -> Decision:
        decision = Decision(
            snapshot,
            state,
            derived.table,
            cluster,
            memory=derived.families,
            reserve_fraction=self.reserve_fraction,
            effort=self.effort,
            revisit_s=self.revisit_s,
            efficiency=self.efficiency,
            only_least=only_least,
        )
        decision.run()
        return decision

    def _decide_anew(
        self, snapshot: Snapshot, derived: DerivedPromises, state: State, cluster: str
    ) -> tuple[Plan, State]:
        """A new plan, and the state that its memory encodes.

        Services do not move: where a promised job would be late since replicas beyond guaranteed minimums lie in its
        way, they get none if that keeps it in time."""
        rows = derived.table.rows
        decision = self._decision(snapshot, derived, state, cluster, only_least=False)
        if (late := decision.newly_late()) and decision.has_beyond_least():
            before = decode(snapshot.memory, derived.table.by_id, snapshot, cluster, snapshot.cluster.device_ids())
            without = self._decision(snapshot, derived, before, cluster, only_least=True)
            if without.newly_late() < late:
                decision, state = without, before
        kept = [row for row in rows if row.job_id not in decision.rejected]
        # A refused job is not in the next snapshot.
        state.fingerprint = derived.fingerprints.of(snapshot, kept, RowChanges())
        derived.number_devices(snapshot.cluster)
        memory = state.encode(derived.index_of, snapshot.allocations)
        derived.wanted = decision.allocations
        plan = _build_plan(snapshot, state, derived.wanted, kept, decision.rejected, memory)
        return replace(plan, trades=decision.trades), state


def _restored_plan(snapshot: Snapshot, derived: DerivedPromises, state: State) -> Plan:
    """The plan that is still valid, rebuilt from the memory."""
    rows = derived.table.rows
    batch_of = {row.job_id: row.view.job.global_batch_size for row in rows} | state.batches
    wanted: dict[WorkloadId, PoolAllocation] = {}
    for workload_id, devices in state.devices.items():
        held = snapshot.allocations.get(workload_id)
        batch = batch_of.get(workload_id)
        if held is not None and held.device_ids == tuple(devices) and held.global_batch_size == batch:
            wanted[workload_id] = held
        else:
            wanted[workload_id] = PoolAllocation(device_ids=tuple(devices), global_batch_size=batch)
    derived.wanted = wanted
    return _build_plan(snapshot, state, wanted, rows, EMPTY, snapshot.memory)


def _updated_plan(snapshot: Snapshot, derived: DerivedPromises, state: State, plan: Plan) -> Plan:
    """The plan that is still valid, from the last plan: only reasons and admissions of some jobs may differ."""
    assert isinstance(plan.future, ReservedFuture)
    rows, before, now = derived.table.rows, derived.held, snapshot.allocations
    future = plan.future.at(snapshot.now_s)
    changed = derived.table.fresh
    if now is not before:
        changed_ids = {job_id for job_id, allocation in now.items() if before.get(job_id) is not allocation}
        changed_ids |= before.keys() - now.keys()
        by_id = derived.table.by_id
        changed = changed + [by_id[job_id] for job_id in changed_ids if job_id in by_id]
    if not (changed or snapshot.services or plan.rejected):
        # What should have ended meanwhile is not said to be in time any more.
        claims = {who: claim for who, claim in plan.claims.items() if not _is_past(claim, snapshot.now_s)}
        return replace(
            plan, future=future, claims=claims if len(claims) < len(plan.claims) else plan.claims, trades=EMPTY
        )
    allocations = _without_stopped_jobs(snapshot, state, derived.wanted)
    reasons = same_reasons(plan.reasons, changed, snapshot, allocations, rows, state)
    return Plan(
        allocations=allocations,
        admitted=_admitted(rows, state.reservations.entries),
        future=future,
        reasons=reasons,
        claims=claims_of(reasons, snapshot, allocations, state),
        conditions=state.conditions,
        price_s=state.price_s,
        revisit_at_s=_revisit_at_s(snapshot, state),
        memory=snapshot.memory,
    )


def _build_plan(
    snapshot: Snapshot,
    state: State,
    allocations: Mapping[WorkloadId, PoolAllocation],
    rows: list[PromiseRow],
    rejected: Mapping[WorkloadId, Refusal],
    memory: Any,
) -> Plan:
    allocations = _without_stopped_jobs(snapshot, state, allocations)
    reasons = reasons_of(snapshot, allocations, rows, state)
    return Plan(
        allocations=allocations,
        admitted=_admitted(rows, state.reservations.entries),
        rejected=rejected,
        future=ReservedFuture(
            {WorkloadId(key): entry.runs for key, entry in state.reservations.entries.items()}, snapshot.now_s
        ),
        reasons=reasons,
        claims=claims_of(reasons, snapshot, allocations, state),
        conditions=state.conditions,
        price_s=state.price_s,
        revisit_at_s=_revisit_at_s(snapshot, state),
        memory=memory,
    )


def _without_stopped_jobs(
    snapshot: Snapshot, state: State, wanted: Mapping[WorkloadId, PoolAllocation]
) -> Mapping[WorkloadId, PoolAllocation]:
    """The wanted allocations without those of jobs that must be stopped first and still hold other devices."""
    stopping: set[WorkloadId] = set()
    for job_id in state.stop_first:
        held = snapshot.allocations.get(job_id)
        if held is not None and job_id in wanted and not set(held.device_ids) <= set(wanted[job_id].device_ids):
            stopping.add(job_id)
    return {job_id: given for job_id, given in wanted.items() if job_id not in stopping} if stopping else wanted


def _admitted(rows: Sequence[PromiseRow], entries: Mapping[str, Entry]) -> dict[WorkloadId, float]:
    return {
        row.job_id: entries[row.job_id].end_s
        for row in rows
        if row.view.promise.admitted_at_s is None
        and row.job_id in entries
        and entries[row.job_id].is_promised
        and entries[row.job_id].runs
    }


def _is_past(claim: TimeClaim, now_s: float) -> bool:
    return claim.code == "kept_in_time" and claim.at_s is not None and claim.at_s <= now_s


def _revisit_at_s(snapshot: Snapshot, state: State) -> float | None:
    idle_at_s = next_idle_at_s(snapshot.services, snapshot.now_s) if snapshot.services else None
    return min([moment for moment in (state.until_s, idle_at_s) if moment is not None], default=None)
