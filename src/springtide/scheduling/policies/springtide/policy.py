"""Springtide: every promised deadline has a place in one plan over all time to come, and the plan makes room.

A job is promised its deadline if a schedule for it fits beside the schedules of all promises, with the price of every
change in it; if none fits, the others are planned anew around it before it is refused. Idle devices speed up the
jobs that gain most. See docs/policies/springtide.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

from springtide.core.decision import EMPTY, Allocation, Plan, PoolAllocation, Refusal, Snapshot
from springtide.core.resources import DeviceId, Topology
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.cache import RowTable
from springtide.scheduling.decisions.fingerprint import Fingerprints, Reads, RowChanges
from springtide.scheduling.policies.springtide.capacity import matters
from springtide.scheduling.policies.springtide.decision import Decision, deviates
from springtide.scheduling.policies.springtide.memory import State, decode, renew
from springtide.scheduling.policies.springtide.reasons import ReservedFuture, reasons_of, same_reasons
from springtide.scheduling.policies.springtide.rows import READS, PromiseRow
from springtide.scheduling.replicas import next_idle_at_s
from springtide.solvers.reservations.reservation_table import Entry


class DerivedPromises:
    """What follows from the snapshots seen and the memory, kept for the next decision (see decisions/cache.py)."""

    def __init__(self) -> None:
        self.table: RowTable[PromiseRow] = RowTable(lambda view, _: PromiseRow(view))
        self.fingerprints = Fingerprints(READS)
        # The last plan with the memory in it, as the state that it stands for.
        self.memory: Any = None
        self.state: State | None = None
        self.plan: Plan | None = None
        # Before any job was asked to let go of its devices first.
        self.wanted: Mapping[WorkloadId, PoolAllocation] = EMPTY
        # What was held when the plan was said.
        self.held: Mapping[WorkloadId, Allocation] = EMPTY
        self.is_checked = False
        self._topology: Topology | None = None
        self.index_of: dict[DeviceId, int] = {}

    def number_devices(self, topology: Topology) -> None:
        """Number the devices of a cluster that was not seen before."""
        if self._topology is not topology:
            self._topology = topology
            self.index_of = {device_id: number for number, device_id in enumerate(topology.device_ids())}


class Springtide(msgspec.Struct, frozen=True, kw_only=True):
    """`reserve_fraction` of the devices is promised to no job, for failures (the devices still run what is spare).

    `effort` bounds how long a decision looks for room by planning others anew: so many intervals of time are looked
    at, some hundredths of a second's worth. A bound in steps, not seconds, so that the same input gives the same plan.
    """

    reserve_fraction: float = 0.0
    effort: int = 240_000

    reads: ClassVar[Reads] = READS

    def make_derived(self) -> DerivedPromises:
        """An empty object to keep derived values in."""
        return DerivedPromises()

    def decide(self, snapshot: Snapshot, derived: DerivedPromises | None = None) -> Plan:
        """Return the plan for this snapshot."""
        derived = derived or DerivedPromises()
        table, memory = derived.table, snapshot.memory
        rows = table.read(snapshot)
        cluster = derived.fingerprints.nodes(snapshot.cluster)
        fingerprint = derived.fingerprints.of(snapshot, rows, table.changes)
        is_seen = derived.state is not None and derived.memory is memory and derived.state.cluster == cluster
        if is_seen and derived.state is not None:
            state = derived.state
            for row in table.fresh:
                renew(state, row)
        else:
            state = decode(memory, table.by_id, snapshot, cluster, snapshot.cluster.device_ids())
        stands = (
            state.fingerprint == fingerprint
            and memory is not None
            and (state.until_s is None or snapshot.now_s < state.until_s)
            and not any(deviates(row, state) for row in (table.fresh if is_seen and derived.is_checked else rows))
            and not (
                (snapshot.capacity or len(state.book.steps) > 1)
                and matters(state, snapshot, self.reserve_fraction, table.by_id)
            )
        )
        # A job that has not reported anew since then says the same again, as long as the plan is the same.
        derived.is_checked = stands
        if not stands:
            plan = self._decide_anew(snapshot, derived, state, cluster)
        elif not is_seen or derived.plan is None:
            plan = _recalled(snapshot, derived, state)
        else:
            plan = _continued(snapshot, derived, state, derived.plan)
        derived.memory, derived.state, derived.plan, derived.held = plan.memory, state, plan, snapshot.allocations
        return plan

    def _decide_anew(self, snapshot: Snapshot, derived: DerivedPromises, state: State, cluster: str) -> Plan:
        rows = derived.table.rows
        decision = Decision(
            snapshot, state, derived.table, cluster, reserve_fraction=self.reserve_fraction, effort=self.effort
        )
        decision.run()
        kept = [row for row in rows if row.job_id not in decision.rejected]
        # A job that is refused will not be there the next time.
        state.fingerprint = derived.fingerprints.of(snapshot, kept, RowChanges())
        derived.number_devices(snapshot.cluster)
        memory = state.encode(derived.index_of)
        derived.wanted = decision.allocations
        return _say(snapshot, state, derived.wanted, kept, decision.rejected, memory)


def _recalled(snapshot: Snapshot, derived: DerivedPromises, state: State) -> Plan:
    """The plan that stands, from what is remembered of it."""
    rows = derived.table.rows
    batch_of = {row.job_id: row.view.job.global_batch_size for row in rows}
    wanted: dict[WorkloadId, PoolAllocation] = {}
    for who, devices in state.devices.items():
        held = snapshot.allocations.get(who)
        batch = batch_of.get(who)
        if held is not None and held.device_ids == tuple(devices) and held.global_batch_size == batch:
            wanted[who] = held
        else:
            wanted[who] = PoolAllocation(device_ids=tuple(devices), global_batch_size=batch)
    derived.wanted = wanted
    return _say(snapshot, state, wanted, rows, EMPTY, snapshot.memory)


def _continued(snapshot: Snapshot, derived: DerivedPromises, state: State, plan: Plan) -> Plan:
    """The plan that stands, from the last plan: only some rows are fresh, or hold something else now."""
    assert isinstance(plan.future, ReservedFuture)
    rows, before, now = derived.table.rows, derived.held, snapshot.allocations
    future = plan.future.at(snapshot.now_s)
    changed = derived.table.fresh
    if now is not before:
        moved = {who for who, given in now.items() if before.get(who) is not given} | (before.keys() - now.keys())
        by_id = derived.table.by_id
        changed = changed + [by_id[who] for who in moved if who in by_id]
    if not (changed or snapshot.services or plan.rejected):
        return replace(plan, future=future)
    allocations = _without_detours(snapshot, state, derived.wanted)
    return Plan(
        allocations=allocations,
        admitted=_admitted(rows, state.book.entries),
        future=future,
        reasons=same_reasons(plan.reasons, changed, snapshot, allocations, rows, state.book, state.notes),
        revisit_at_s=_revisit_at_s(snapshot, state),
        memory=snapshot.memory,
    )


def _say(
    snapshot: Snapshot,
    state: State,
    allocations: Mapping[WorkloadId, PoolAllocation],
    rows: list[PromiseRow],
    rejected: Mapping[WorkloadId, Refusal],
    memory: Any,
) -> Plan:
    allocations = _without_detours(snapshot, state, allocations)
    return Plan(
        allocations=allocations,
        admitted=_admitted(rows, state.book.entries),
        rejected=rejected,
        future=ReservedFuture(
            {WorkloadId(key): entry.runs for key, entry in state.book.entries.items()}, snapshot.now_s
        ),
        reasons=reasons_of(snapshot, allocations, rows, state.book, state.notes),
        revisit_at_s=_revisit_at_s(snapshot, state),
        memory=memory,
    )


def _without_detours(
    snapshot: Snapshot, state: State, wanted: Mapping[WorkloadId, PoolAllocation]
) -> Mapping[WorkloadId, PoolAllocation]:
    """A job on a detour gets none for now: it has to let go of devices that the job on its new ones waits for."""
    leaving: set[WorkloadId] = set()
    for who in state.detours:
        held = snapshot.allocations.get(who)
        if held is not None and who in wanted and not set(held.device_ids) <= set(wanted[who].device_ids):
            leaving.add(who)
    return {who: given for who, given in wanted.items() if who not in leaving} if leaving else wanted


def _admitted(rows: Sequence[PromiseRow], entries: Mapping[str, Entry]) -> dict[WorkloadId, float]:
    return {
        row.job_id: entries[row.job_id].end_s
        for row in rows
        if row.view.promise.admitted_at_s is None
        and row.can_promise
        and row.job_id in entries
        and entries[row.job_id].runs
    }


def _revisit_at_s(snapshot: Snapshot, state: State) -> float | None:
    idle_at_s = next_idle_at_s(snapshot.services, snapshot.now_s) if snapshot.services else None
    return min([moment for moment in (state.until_s, idle_at_s) if moment is not None], default=None)
