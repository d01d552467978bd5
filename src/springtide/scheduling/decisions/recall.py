"""Keeps a decided plan until something material changes or its time comes: the memory of policies that plan ahead.

It takes several turns of the loop to carry out a plan, and progress is reported all the time; neither is a reason to
decide anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from springtide.core.decision import Plan, PoolAllocation, Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.fingerprint import BOUNDS, LENGTH, NODES, SERVICES, Fingerprints, Reads
from springtide.scheduling.placement.allocation_ledger import AllocationLedger
from springtide.scheduling.placement.topology import layout_of
from springtide.scheduling.replicas import next_idle_at_s

# The version of the memory's format. Memory of another version is ignored, like that of another policy.
_FORMAT = 1

State = Mapping[str, Any]
Decide = Callable[[AllocationLedger, State], tuple[float | None, dict[str, Any]]]


# A change of these is a reason to decide anew: the jobs with their bounds, the nodes, and what the services want.
MATERIAL = Reads(jobs=(BOUNDS, LENGTH), services=SERVICES, nodes=NODES)


def recall_reads(*also: str) -> Reads:
    """The reads of a policy that decides by `decide_once`: the material ones, and `also` these fields of jobs."""
    return replace(MATERIAL, also=also)


def recall_fingerprints(rule: str, reads: Reads = MATERIAL) -> Fingerprints:
    """The fingerprints that `decide_once` compares, for a policy to keep from one decision to the next."""
    return Fingerprints(reads, f"{_FORMAT} {rule}")


def decide_once(rule: str, snapshot: Snapshot, decide: Decide, fingerprints: Fingerprints | None = None) -> Plan:
    """Return the last plan while it is valid, or a new one by `decide`.

    `rule` names the policy with its parameters: a policy ignores the memory of another. `decide` fills the ledger and
    returns when to decide again at the latest (None: only when something changes), and its state for the next
    decision in plain values. `fingerprints` are those that the caller keeps (`recall_fingerprints` of the same rule).
    """
    fingerprint = (fingerprints or recall_fingerprints(rule)).of(snapshot)
    rule = f"{_FORMAT} {rule}"
    memory = snapshot.memory if isinstance(snapshot.memory, dict) else {}
    if memory.get("fingerprint") == fingerprint and (memory["until_s"] is None or snapshot.now_s < memory["until_s"]):
        return _recalled(snapshot, memory)
    shares = AllocationLedger(snapshot)
    until_s, state = decide(shares, memory["state"] if memory.get("rule") == rule else {})
    assert until_s is None or until_s > snapshot.now_s
    plan = shares.plan(until_s)
    address_of = layout_of(snapshot.cluster).address_of
    why: dict[str, list[str]] = {}
    for workload_id, reason in plan.reasons.items():
        why.setdefault(reason, []).append(workload_id)
    devices = {
        workload_id: [address_of[device_id] for device_id in allocation.device_ids]
        for workload_id, allocation in plan.allocations.items()
    }
    return replace(
        plan,
        memory={
            "rule": rule,
            "fingerprint": fingerprint,
            "until_s": until_s,
            "devices": devices,
            "why": why,
            "state": state,
        },
    )


def _recalled(snapshot: Snapshot, memory: Mapping[str, Any]) -> Plan:
    device_at = layout_of(snapshot.cluster).device_at
    batch_of = {view.job.job_id: view.job.global_batch_size for view in snapshot.jobs}
    idle_at_s = next_idle_at_s(snapshot.services, snapshot.now_s)
    moments = [moment for moment in (memory["until_s"], idle_at_s) if moment is not None]
    return Plan(
        allocations={
            WorkloadId(workload_id): PoolAllocation(
                device_ids=tuple([device_at[number] for number in numbers]),
                global_batch_size=batch_of.get(WorkloadId(workload_id)),
            )
            for workload_id, numbers in memory["devices"].items()
        },
        reasons={
            WorkloadId(workload_id): reason
            for reason, workload_ids in memory["why"].items()
            for workload_id in workload_ids
        },
        revisit_at_s=min(moments, default=None),
        memory=memory,
    )
