"""How each action changes the platform's state when it is decided: one function per action."""

from __future__ import annotations

from functools import singledispatch

from msgspec.structs import replace

from springtide.control.edits import (
    find,
    put,
    record_of,
    with_new_replicas,
    with_new_workers,
    with_replica,
    with_service_state,
)
from springtide.control.records import JobRecord, PlatformState, ReplicaState, ServiceRecord, StateReason
from springtide.core import actions
from springtide.core.decision import Drain
from springtide.core.job_parts import DeadlinePromise
from springtide.core.workload import JobState, ReplicaId


@singledispatch
def apply_action(action: object, state: PlatformState, now_s: float) -> None:
    """Apply one action to `state`. The executor carries it out afterwards."""
    raise AssertionError(f"no transition for {type(action).__name__}")


@apply_action.register
def _(action: actions.StartReplica, state: PlatformState, now_s: float) -> None:
    record = record_of(state, action.workload_id)
    if isinstance(record, ServiceRecord):
        put(state, with_service_state(with_new_replicas(record, (action,), now_s)))
    else:
        put(state, with_new_workers(record, (action,), now_s))


@apply_action.register
def _(action: actions.StopReplica, state: PlatformState, now_s: float) -> None:
    record, replica = find(state, action.workload_id, action.replica_id)
    if record is None or replica is None:
        return
    record = with_replica(record, replace(replica, state=ReplicaState.STOPPING))
    if isinstance(record, JobRecord) and action.grace_s == 0.0 and _is_needed_by_group(record, action.replica_id):
        # Without a grace the member does not wait for a step boundary, so the others must form a new group at once.
        record = replace(record, group=replace(record.group, is_broken=True))
    put(state, record)


def _is_needed_by_group(record: JobRecord, replica_id: ReplicaId) -> bool:
    """Whether the present group, or the one being formed, needs the worker."""
    if record.state is JobState.PREEMPTING or record.state.is_terminal:
        return False
    # A forced change does not need the members that leave.
    is_forced = not record.group.is_confirmed and record.group.oldest_generation == record.group.generation
    return replica_id in record.group.members or (replica_id in record.group.previous_members and not is_forced)


@apply_action.register
def _(action: actions.ResizeJob, state: PlatformState, now_s: float) -> None:
    record = state.jobs[action.job_id]
    living = {replica.replica_id for replica in record.replicas}
    old_members = dict.fromkeys((*record.group.members, *record.group.previous_members))
    named = set(action.replica_ids)
    is_first_group = not record.group.state_holders
    state.jobs[action.job_id] = replace(
        record,
        group=replace(
            record.group,
            generation=action.generation,
            oldest_generation=action.generation if action.forced else record.group.oldest_generation,
            members=action.replica_ids,
            previous_members=tuple(member for member in old_members if member in living),
            state_holders=action.replica_ids if is_first_group else record.group.state_holders,
            is_confirmed=False,
            is_broken=False,
        ),
        runs_as=replace(record.runs_as, global_batch_size=action.global_batch_size, plan=action.functions),
        replicas=tuple(replace(r, has_trained=True) if r.replica_id in named else r for r in record.replicas),
        changes=replace(record.changes, resizing_since_s=now_s),
        lifecycle=replace(record.lifecycle, reason=StateReason(action.reason, action.change))
        if action.reason
        else record.lifecycle,
    )


@apply_action.register
def _(action: actions.PreemptJob, state: PlatformState, now_s: float) -> None:
    record = state.jobs[action.job_id]
    stopping = set(action.replica_ids)
    state.jobs[action.job_id] = replace(
        record,
        group=replace(record.group.dissolved(), generation=action.generation),
        lifecycle=replace(record.lifecycle, state=JobState.PREEMPTING, reason=StateReason(action.reason)),
        changes=replace(record.changes, num_preemptions=record.changes.num_preemptions + 1),
        replicas=tuple(
            replace(replica, state=ReplicaState.STOPPING) if replica.replica_id in stopping else replica
            for replica in record.replicas
        ),
    )


@apply_action.register
def _(action: actions.SetShare, state: PlatformState, now_s: float) -> None:
    record, replica = find(state, action.workload_id, action.replica_id)
    if record is not None and replica is not None:
        put(state, with_replica(record, replace(replica, share=action.share)))


@apply_action.register
def _(action: actions.AdmitJob, state: PlatformState, now_s: float) -> None:
    record = state.jobs[action.job_id]
    state.jobs[action.job_id] = replace(
        record,
        promise=DeadlinePromise(admitted_at_s=now_s, promised_finish_s=action.finish_s),
        lifecycle=replace(record.lifecycle, reason=StateReason(action.reason)) if action.reason else record.lifecycle,
    )


@apply_action.register
def _(action: actions.DrainNode, state: PlatformState, now_s: float) -> None:
    if action.node_id not in state.nodes:
        return
    known = state.drains.get(action.node_id)
    is_same = known is not None and known.pool == action.pool
    drain = Drain(
        pool=action.pool,
        since_s=known.since_s if known is not None and is_same else now_s,
        reclaim_since_s=now_s if action.is_reclaim else None,
        reason=action.reason,
        cost_s=action.cost_s,
    )
    state.drains = {**state.drains, action.node_id: drain}


@apply_action.register
def _(action: actions.LabelNode, state: PlatformState, now_s: float) -> None:
    state.drains = {node_id: drain for node_id, drain in state.drains.items() if node_id != action.node_id}
    node = state.nodes.get(action.node_id)
    if node is not None and node.pool != action.pool:
        state.labels = {**state.labels, action.node_id: action.pool}
        state.nodes[action.node_id] = replace(node, pool=action.pool, home=node.owner)


@apply_action.register
def _(action: actions.EndJob, state: PlatformState, now_s: float) -> None:
    record = state.jobs[action.job_id]
    assert not record.state.is_terminal, f"{action.job_id} ends twice"
    state.jobs[action.job_id] = replace(
        record,
        lifecycle=replace(
            record.lifecycle,
            state=action.state,
            reason=StateReason(action.reason),
            ended_at_s=now_s,
            alternatives=action.alternatives,
        ),
        group=record.group.dissolved(),
    )
