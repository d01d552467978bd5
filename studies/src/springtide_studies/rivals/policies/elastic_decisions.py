"""Decisions of elastic policies: kept until something material changes or their moment comes, and placed here.

A plan takes several turns to be carried out and progress is reported often; neither needs a new decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from springtide.core.decision import EMPTY, Plan, PoolAllocation, Refusal, Schedule, Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.fingerprint import Fingerprints
from springtide.scheduling.placement.allocation_ledger import (
    AllocationLedger,
    most_workers,
    serve_demand,
    serve_minimum,
)
from springtide.scheduling.placement.placing import place
from springtide.scheduling.replicas import next_idle_at_s
from springtide_studies.rivals.policies.elastic_jobs import READS, CurveTable, ElasticRow

Allocations = Mapping[WorkloadId, PoolAllocation]
_KEYS = ("rule", "fingerprint", "cluster", "at_s", "until_s", "devices", "ledgers")
_NOTHING = PoolAllocation(device_ids=())


class ElasticVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of a policy: devices by job, the jobs that it promised an end or refused, when to decide again."""

    counts: Mapping[WorkloadId, int]
    until_s: float | None = None
    admitted: Mapping[WorkloadId, float] = EMPTY
    refused: Mapping[WorkloadId, str] = EMPTY
    future: Mapping[WorkloadId, Schedule] = EMPTY
    ledgers: Mapping[str, Any] = EMPTY


class DerivedShares:
    """Values derived from the snapshots of one policy: rows of jobs, and the last decision if it is still valid.

    It only saves time (see springtide.scheduling.decisions.cache): with an empty one the decisions are the same. `rule`
    names the policy with its parameters; no policy takes up the memory of another.
    """

    def __init__(self, rule: str, *, only_doublings: bool = True) -> None:
        self.rule = rule
        self.curves = CurveTable(only_doublings=only_doublings)
        self._fingerprints = Fingerprints(READS, rule)
        self._placed: tuple[Any, Allocations] | None = None

    def recall(self, snapshot: Snapshot, rows: Sequence[ElasticRow], slot_s: float | None) -> Plan | None:
        """The plan that is still valid, or None if it is time to decide.

        With `slot_s`, new jobs and freed devices wait until so long after the last decision; lost nodes do not.
        """
        memory = own_memory(snapshot, self.rule)
        if memory is None:
            return None
        until_s, now_s = memory["until_s"], snapshot.now_s
        if memory["fingerprint"] == self._fingerprints.of(snapshot, rows):
            if until_s is None or now_s < until_s:
                return self._plan(snapshot, self._allocations(snapshot, memory), memory, until_s)
        elif slot_s is not None and now_s < memory["at_s"] + slot_s and not snapshot.services:
            if memory["cluster"] != self._fingerprints.nodes(snapshot.cluster):
                return None
            most = {row.job_id: most_workers(row.view) for row in rows}
            kept = {job_id: given for job_id, given in self._allocations(snapshot, memory).items() if job_id in most}
            if any(given.num_devices > most[job_id] for job_id, given in kept.items()):
                # Its owner allows it fewer devices now.
                return None
            return self._plan(snapshot, kept, memory, memory["at_s"] + slot_s)
        return None

    def plan(
        self,
        snapshot: Snapshot,
        rows: Sequence[ElasticRow],
        verdict: ElasticVerdict,
        slot_s: float | None = None,
    ) -> Plan:
        """The plan of a decision, with devices chosen and the memory."""
        counts = {**service_shares(snapshot).counts, **verdict.counts}
        before = own_memory(snapshot, self.rule)
        wanted: Allocations = EMPTY if before is None else self._allocations(snapshot, before)
        elastic = [row.job_id for row in rows if row.view.job.elastic and row.job_id in counts]
        allocations = place(
            counts,
            snapshot,
            movable=frozenset(elastic),
            # A job that is still moving to the devices of the last decision should not be sent elsewhere.
            wanted={
                job_id: given.device_ids
                for job_id, given in wanted.items()
                if given.device_ids != snapshot.allocations.get(job_id, _NOTHING).device_ids
            },
        )
        index = {device_id: number for number, device_id in enumerate(snapshot.cluster.device_ids())}
        until_s = verdict.until_s
        if until_s is not None and slot_s is not None:
            until_s = max(until_s, snapshot.now_s + slot_s)
        kept = [row for row in rows if row.job_id not in verdict.refused]
        memory = {
            "rule": self.rule,
            "fingerprint": self._fingerprints.of(snapshot, kept),
            "cluster": self._fingerprints.nodes(snapshot.cluster),
            "at_s": snapshot.now_s,
            "until_s": until_s,
            "devices": {
                workload_id: [index[device_id] for device_id in given.device_ids]
                for workload_id, given in allocations.items()
            },
            "ledgers": dict(verdict.ledgers),
        }
        self._placed = (memory, allocations)
        plan = self._plan(snapshot, allocations, memory, until_s)
        refusals = {job_id: Refusal(reason=reason) for job_id, reason in verdict.refused.items()}
        return msgspec.structs.replace(plan, admitted=verdict.admitted, rejected=refusals, future=verdict.future)

    def _allocations(self, snapshot: Snapshot, memory: Mapping[str, Any]) -> Allocations:
        """The devices in a memory; none if the nodes have changed."""
        if memory["cluster"] != self._fingerprints.nodes(snapshot.cluster):
            # Numbers of devices are meaningless on other nodes.
            return EMPTY
        if self._placed is None or self._placed[0] is not memory:
            device_ids = snapshot.cluster.device_ids()
            batch_of = {view.job.job_id: view.job.global_batch_size for view in snapshot.jobs}
            placed = {
                WorkloadId(workload_id): PoolAllocation(
                    device_ids=tuple([device_ids[number] for number in numbers]),
                    global_batch_size=batch_of.get(WorkloadId(workload_id)),
                )
                for workload_id, numbers in memory["devices"].items()
            }
            self._placed = (memory, placed)
        return self._placed[1]

    def _plan(
        self, snapshot: Snapshot, allocations: Allocations, memory: Mapping[str, Any], until_s: float | None
    ) -> Plan:
        idle_at_s = next_idle_at_s(snapshot.services, snapshot.now_s) if snapshot.services else None
        moments = [moment for moment in (until_s, idle_at_s) if moment is not None]
        return Plan(
            allocations=allocations,
            reasons=_reasons(snapshot, allocations),
            revisit_at_s=min(moments, default=None),
            memory=memory,
        )


def own_memory(snapshot: Snapshot, rule: str) -> Mapping[str, Any] | None:
    """The memory of the policy with that rule; None if it is of another policy or format."""
    memory = snapshot.memory
    is_own = isinstance(memory, dict) and memory.get("rule") == rule and memory.keys() == set(_KEYS)
    return memory if is_own else None


def service_shares(snapshot: Snapshot) -> AllocationLedger:
    """A ledger in which the services have what they need; the rest is for jobs."""
    shares = AllocationLedger(snapshot)
    if snapshot.services:
        serve_minimum(shares)
        serve_demand(shares)
    return shares


def _reasons(snapshot: Snapshot, allocations: Allocations) -> dict[WorkloadId, str]:
    """One reason for each workload whose number of devices changes or that waits."""
    reasons: dict[WorkloadId, str] = {}
    names = [view.job.job_id for view in snapshot.jobs] + [view.service.service_id for view in snapshot.services]
    for workload_id in names:
        given, held = allocations.get(workload_id, _NOTHING), snapshot.allocations.get(workload_id, _NOTHING)
        if given is held and given is not _NOTHING:
            continue
        before, after = len(held.device_ids), len(given.device_ids)
        if after > before:
            devices = "1 device" if after == 1 else f"{after} devices"
            reasons[workload_id] = f"{devices}, which others can spare" if before else f"starting on {devices}"
        elif before and not after:
            reasons[workload_id] = "others need its devices now, for deadlines or more speed"
        elif after < before:
            reasons[workload_id] = "others need the devices for their deadlines, or gain more speed from them"
        elif not after:
            reasons[workload_id] = "waiting: others need the devices now, for deadlines or more speed"
        elif set(given.device_ids) != set(held.device_ids):
            reasons[workload_id] = "moved aside, so that all lie close together"
    return reasons
