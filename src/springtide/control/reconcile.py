"""Turns the difference between a Plan and the platform's state into actions.

Releases come before grants, a device is granted only once no replica holds it, and a group changes one step at a time:
while a ResizeJob waits for its confirmation, only the loss of a member leads to a new action for that job. Called again
with the same plan after its actions took effect, `reconcile` returns nothing (a fixed point).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from springtide.control.edits import END_GRACE_S, HUNG, stop_of
from springtide.control.grants import Grants, by_workers
from springtide.control.incremental import Worklist, function_plan
from springtide.control.pools import pool_actions
from springtide.control.records import JobRecord, PlatformState, ReplicaRecord, ReplicaState, ServiceRecord
from springtide.control.releases.replicas import service_actions
from springtide.core.actions import Action, AdmitJob, EndJob, PreemptJob, ResizeJob, StartReplica
from springtide.core.decision import EMPTY, Plan, PoolAllocation
from springtide.core.functions import FunctionPlan
from springtide.core.reasons import ChosenPlan, GroupChange, workers_text
from springtide.core.resources import DeviceId
from springtide.core.shares import Share
from springtide.core.workload import JobState, ReplicaId, WorkloadId

_NO_DEVICES = PoolAllocation(device_ids=())


def reconcile(state: PlatformState, plan: Plan, now_s: float, worklist: Worklist | None = None) -> list[Action]:
    """Return the actions that lead from what is held towards what the plan wants. Does not change `state`.

    The caller marks every record that changes between calls in `worklist`; without it all records are checked.
    """
    if plan.pools or state.drains:
        labels = pool_actions(state, plan)
        if labels:
            # Labels decide which workloads may start on a node, so grants wait for the next round.
            return labels
    may_grant = Grants(state, plan)
    releases: list[Action] = []
    starts: list[Action] = []
    if worklist is None or state.is_stopping:
        records: Iterable[JobRecord | ServiceRecord] = state.live_records()
    else:
        records = _records_to_check(state, worklist, plan)
    for record in records:
        workload_id = record.workload_id
        planned = plan.allocations.get(workload_id, _NO_DEVICES)
        each = record.job.devices_each if isinstance(record, JobRecord) else record.service.devices_each
        allocation, more = by_workers(record, planned, each) if each > 1 else (planned, EMPTY)
        held = {replica.device_id: replica.share for replica in record.replicas}
        free = may_grant.grantable(record, allocation, held, more)
        why = "the platform is shutting down" if state.is_stopping else plan.reasons.get(workload_id, "")
        is_leaving = False
        if isinstance(record, ServiceRecord):
            actions = _whole(service_actions(record, allocation, free, why, now_s), more)
        else:
            reclaimed = may_grant.reclaimed(record) if state.drains else ()
            is_leaving = bool(reclaimed)
            actions = _whole(_reconcile_job(record, plan, allocation, free, why, now_s, reclaimed), more)
        if allocation.share is not None:
            actions += may_grant.change_shares(record, allocation, allocation.share, why)
        if actions:
            may_grant.add(actions)
        elif worklist is not None and not is_leaving and _holds_all(held, planned, more):
            worklist.mark_settled(workload_id, planned)
        for action in actions:
            (starts if isinstance(action, StartReplica) else releases).append(action)
    return releases + starts


def _records_to_check(state: PlatformState, worklist: Worklist, plan: Plan) -> Iterator[JobRecord | ServiceRecord]:
    """The records to check, in order of arrival."""
    live: list[WorkloadId] = []
    for workload_id in worklist.pending(plan, state.drains):
        if workload_id in state.jobs.live or workload_id in state.services.live:
            live.append(workload_id)
        else:
            # It has ended, and may have left the state since.
            worklist.forget(workload_id)
    for workload_id in sorted(live, key=state.place_of):
        yield state.jobs.live.get(workload_id) or state.services.live[workload_id]


def _holds_all(
    held: Mapping[DeviceId, Share | None], wanted: PoolAllocation, more: Mapping[DeviceId, tuple[DeviceId, ...]]
) -> bool:
    """Whether the workload waits for no device: then only a change of its record or of the plan leads to an action.

    A share may stay as it is where the change would be from or to the whole device: that is not made in place.
    """
    share = wanted.share
    beside = {device for lead, devices in more.items() if lead in held for device in devices} if more else ()
    return all(
        device in beside or (device in held and (share is None or held[device] is None or held[device] == share))
        for device in wanted.device_ids
    )


def _whole(actions: list[Action], more: Mapping[DeviceId, tuple[DeviceId, ...]]) -> list[Action]:
    """The actions; what starts a worker that holds several devices names all of them."""
    return [
        replace(action, more_devices=more[action.device_id]) if more and isinstance(action, StartReplica) else action
        for action in actions
    ]


# --- jobs -----------------------------------------------------------------------------------------------------------


def _reconcile_job(
    record: JobRecord,
    plan: Plan,
    allocation: PoolAllocation,
    free: Sequence[DeviceId],
    why: str,
    now_s: float,
    reclaimed: Sequence[tuple[ReplicaRecord, float]],
) -> list[Action]:
    job_id, lifecycle = record.workload_id, record.lifecycle
    refusal = plan.rejected.get(job_id)
    if refusal is not None and lifecycle.outcome is None:
        lifecycle = replace(
            lifecycle,
            outcome=JobState.REJECTED,
            outcome_reason=refusal.reason,
            alternatives=refusal.alternatives,
        )
        record = replace(record, lifecycle=lifecycle)
    functions = function_plan(allocation)
    chosen = None if functions is None else ChosenPlan(plan=functions, why=plan.plan_reasons.get(job_id, ""))
    actions = _change_group(record, allocation, chosen, free, why, now_s, reclaimed)
    finish_s = plan.admitted.get(job_id)
    if finish_s is not None and record.promise.admitted_at_s is None and not lifecycle.state.is_terminal:
        actions.insert(
            0, AdmitJob(job_id=job_id, finish_s=finish_s, cause="plan", reason=why or "its deadline is promised")
        )
    return actions


def _change_group(
    record: JobRecord,
    allocation: PoolAllocation,
    chosen: ChosenPlan | None,
    free: Sequence[DeviceId],
    why: str,
    now_s: float,
    reclaimed: Sequence[tuple[ReplicaRecord, float]],
) -> list[Action]:
    """The next step of the job's group of workers towards its allocation, or towards its end."""
    wanted, state = allocation.device_ids, record.lifecycle.state
    by_s = min([grace_over_s for _, grace_over_s in reclaimed], default=math.inf)
    if state.is_terminal:
        return _stop_all(record, record.reason)
    if record.lifecycle.outcome is not None:
        end = EndJob(
            job_id=record.workload_id,
            state=record.lifecycle.outcome,
            cause="outcome",
            reason=record.lifecycle.outcome_reason,
            alternatives=record.lifecycle.alternatives,
        )
        return [end, *_stop_all(record, record.lifecycle.outcome_reason)]
    if state is JobState.PREEMPTING:
        return _stop_all(record, record.reason)
    batch = _batch(record, allocation)
    if not record.group.members and not record.group.previous_members:
        return _form_first_group(record, allocation, chosen, batch, free, why, now_s)
    if now_s >= by_s:
        # Before any recovery, so that one forced change covers both.
        return _evict(record, [replica for replica, grace_over_s in reclaimed if now_s >= grace_over_s])
    if record.group.is_broken:
        return _recover(record)
    if not record.group.is_confirmed:
        return []
    if not wanted or record.bounds.is_paused:
        return _preempt(record, _leaving_reason(record, why), by_s - now_s)
    members = {r.device_id for r in record.replicas if r.replica_id in record.group.members}
    if reclaimed and not members & set(wanted):
        # A move without a pause needs warm workers first, and a reclaimed node cannot wait for them.
        return _preempt(record, why or "its devices are reclaimed", by_s - now_s)
    if not record.job.elastic:
        # Its number of workers is fixed, so it keeps its devices until it ends or is preempted.
        return _stop_leavers(record)
    if chosen is not None and chosen.plan != record.runs_as.plan and set(wanted) == members:
        change = GroupChange(code="plan", why=why, chosen=chosen)
        return [_change(record, [r for r in record.replicas if r.device_id in members], batch, change, chosen.plan)]
    return _resize(record, allocation, batch, free, why, now_s)


def _leaving_reason(record: JobRecord, why: str) -> str:
    """Why a job without an allocation gives up its devices."""
    if record.bounds.is_paused:
        return record.bounds.pause_reason or "paused by its owner"
    if record.move is not None and record.is_moving:
        return f"it moves to functions: {record.move.reason}"
    return why or "its devices are needed"


def _stop_all(record: JobRecord, reason: str) -> list[Action]:
    return [
        stop_of(record, replica, END_GRACE_S, reason)
        for replica in record.replicas
        if replica.state is not ReplicaState.STOPPING
    ]


def _batch(record: JobRecord, allocation: PoolAllocation) -> int:
    """The global batch size that the job is to train with."""
    if record.job.is_on_functions:
        # On functions the batch follows the job's own schedule.
        return record.batch_size
    if record.job.batch is None:
        return record.job.global_batch_size
    return allocation.global_batch_size or record.batch_size


def _form_first_group(
    record: JobRecord,
    allocation: PoolAllocation,
    chosen: ChosenPlan | None,
    batch: int,
    free: Sequence[DeviceId],
    why: str,
    now_s: float,
) -> list[Action]:
    """No worker trains yet: start the first workers, form the first group, or stop the workers that were started."""
    job, wanted = record.job, allocation.device_ids
    if record.replicas:
        living = [r for r in record.replicas if r.state is not ReplicaState.STOPPING]
        if len(living) < len(record.replicas) and record.state is not JobState.STARTING:
            return _stop_all(record, record.reason)
        if not wanted or record.bounds.is_paused:
            return _stop_all(record, why or "its devices are needed")
        kept = [r for r in living if r.device_id in wanted] if job.elastic else living
        if not kept:
            return _stop_all(record, why or "its devices are needed")
        actions: list[Action] = [stop_of(record, r, END_GRACE_S, why) for r in living if r not in kept]
        if all(r.state is ReplicaState.READY for r in kept):
            members = tuple(r.replica_id for r in kept)
            change = GroupChange(
                code="start",
                after=len(members),
                why=why if job.is_on_functions else "",
                chosen=chosen,
            )
            actions.append(
                ResizeJob(
                    job_id=record.workload_id,
                    generation=record.group.generation,
                    replica_ids=members,
                    global_batch_size=batch,
                    functions=None if chosen is None else chosen.plan,
                    cause="replicas ready",
                    reason=change.text(),
                    change=change,
                )
            )
        return actions
    if not wanted or record.bounds.is_paused or now_s < record.restarts.starts_at_s or len(free) < len(wanted):
        return []
    reason = why or f"starting on {workers_text(len(free))}"
    begun = None if chosen is None else GroupChange(code="start", after=len(free), why=reason, chosen=chosen)
    return _start(record, free, record.group.generation + 1, reason, allocation.share, begun)


def _start(
    record: JobRecord,
    devices: Sequence[DeviceId],
    generation: int,
    reason: str,
    share: Share | None,
    change: GroupChange | None,
) -> list[Action]:
    job, is_fresh = record.job, generation > record.group.generation
    return [
        StartReplica(
            workload=job,
            replica_id=ReplicaId(f"{job.job_id}.{number}"),
            device_id=device_id,
            generation=generation,
            restore=record.saved.checkpoint if is_fresh else None,
            share=share,
            cause="plan",
            reason=reason,
            change=change,
        )
        for number, device_id in enumerate(devices, start=record.next_replica)
    ]


def _recover(record: JobRecord) -> list[Action]:
    """A member was lost or a collective failed: the survivors of the last group form a new one at once."""
    living = {r.replica_id for r in record.replicas if r.state is not ReplicaState.STOPPING}
    trained = {m for m in (*record.group.members, *record.group.previous_members) if m in living}
    survivors = tuple(m for m in record.group.members if m in trained)
    if not survivors:
        # Only members that were about to leave survive. They hold the model's state, so they go on training.
        survivors = tuple(m for m in record.group.previous_members if m in trained)
    if not survivors:
        return _stop_all(record, record.reason)
    if not set(survivors) & set(record.group.state_holders):
        # The member that was to carry the state in a move is lost: one that was about to leave takes its place.
        leaving_holders = [m for m in record.group.previous_members if m in trained and m in record.group.state_holders]
        most = _most_workers(record)
        survivors = (*leaving_holders[:1], *survivors)[: max(1, most)]
    change = GroupChange(code="recover", after=len(survivors))
    return [
        ResizeJob(
            job_id=record.workload_id,
            generation=record.group.generation + 1,
            replica_ids=survivors,
            global_batch_size=record.batch_size,
            functions=record.runs_as.plan,
            forced=True,
            cause="member lost",
            reason=change.text(),
            change=change,
        )
    ]


def _evict(record: JobRecord, overstaying: Sequence[ReplicaRecord]) -> list[Action]:
    """Stop the workers that are still on a reclaimed node when their grace is over; the other members go on."""
    reason = "the grace of the reclaim is over"
    if not record.job.elastic:
        return _preempt(record, reason, 0.0)
    return [stop_of(record, replica, 0.0, reason) for replica in overstaying]


def _preempt(record: JobRecord, reason: str, at_most_s: float = math.inf) -> list[Action]:
    living = {r.replica_id: r for r in record.replicas}
    members = tuple(m for m in record.group.members if m in living)
    warming = [r for r in record.replicas if r.replica_id not in members and r.state is not ReplicaState.STOPPING]
    preempt = PreemptJob(
        job_id=record.workload_id,
        generation=record.group.generation + 1,
        replica_ids=members,
        grace_s=max(0.0, min(record.job.grace_s, at_most_s)),
        cause="plan",
        reason=reason,
    )
    return [preempt, *(stop_of(record, r, END_GRACE_S, reason) for r in warming)]


def _stop_leavers(record: JobRecord) -> list[Action]:
    """Stop workers that are out of the group. They exit by themselves at the switch; this is the backstop."""
    return [
        stop_of(record, r, record.job.grace_s, "no longer a member")
        for r in record.replicas
        if r.has_trained and r.replica_id not in record.group.members and r.state is not ReplicaState.STOPPING
    ]


def _resize(
    record: JobRecord, allocation: PoolAllocation, batch: int, free: Sequence[DeviceId], why: str, now_s: float
) -> list[Action]:
    """Move a running job to its new allocation: warm the joiners first, then change the membership once."""
    wanted = allocation.device_ids
    by_id = {r.replica_id: r for r in record.replicas}
    members = [by_id[m] for m in record.group.members]
    outsiders = [r for r in record.replicas if r.replica_id not in record.group.members]
    actions: list[Action] = _stop_leavers(record)
    joiners = [r for r in outsiders if r.state is not ReplicaState.STOPPING and not r.has_trained]
    actions += [stop_of(record, r, END_GRACE_S, HUNG) for r in joiners if r.is_hung]
    unwanted = [r for r in joiners if r.device_id not in wanted and not r.is_hung]
    actions += [stop_of(record, r, END_GRACE_S, why or "no longer needed") for r in unwanted]
    joiners = [r for r in joiners if r.device_id in wanted and not r.is_hung]
    if free and now_s >= record.restarts.grows_at_s:
        if _most_workers(record) == 1 and members[0].device_id not in wanted:
            # No worker joins its group, so none is started only to wait for it.
            return actions + _preempt(record, why or "it moves to another device")
        reason = why or f"growing to {workers_text(len(wanted))}"
        begun = GroupChange(code="resize", before=len(members), after=len(wanted), why=why)
        return actions + _start(record, free, record.group.generation, reason, allocation.share, begun)
    keep = [r for r in members if r.device_id in wanted]
    ready = [r for r in joiners if r.state is ReplicaState.READY]
    is_warming = len(ready) < len(joiners)
    leaves = len(keep) < len(members)
    # What the policy says now is of the plan that began when the joiners were started: they are among what it holds.
    why_begun = _why_started(ready) or why
    if leaves and not keep:
        # Workers beyond those that it has now are not waited for: others may wait for the devices that it leaves.
        is_enough = len(ready) >= min(len(members), len(wanted))
        return actions + (_move(record, members, ready, batch, why_begun) if is_enough else [])
    # Growth alone waits until every joiner is warm: one switch for all. A shrink frees devices for others, so at once.
    changes = leaves or (bool(ready) and not is_warming)
    if not changes and (batch == record.batch_size or joiners):
        # A new batch size was chosen for the group with its joiners, so it waits for them.
        return actions
    if not changes:
        change = GroupChange(code="batch", before=record.batch_size, after=batch, why=why)
        return [*actions, _change(record, keep, batch, change)]
    before, after = len(members), len(keep) + len(ready)
    change = GroupChange(code="resize", before=before, after=after, why=why_begun if after >= before else why)
    last = record.lifecycle.reason.change
    if last is not None and last.code == "move" and after == last.after:
        # The second half of a move: the old member leaves that has carried the state.
        change = replace(last, code="resize")
    return [*actions, _change(record, (*keep, *ready), batch, change)]


def _why_started(joiners: Sequence[ReplicaRecord]) -> str:
    """Why these workers were started, where the policy had said it."""
    return next((joiner.why for joiner in joiners if joiner.why), "")


def _move(
    record: JobRecord, members: Sequence[ReplicaRecord], ready: Sequence[ReplicaRecord], batch: int, why: str
) -> list[Action]:
    """Move a job to devices of which it holds none. The state only travels within a group, so one old member stays.

    That member leaves with the next change, when the joiners hold the state. If the job's bounds allow no extra worker,
    one joiner is left out of this first group; a job with a single worker is preempted and starts again instead.
    """
    most = _most_workers(record)
    joiners = ready if len(ready) < most else ready[:-1]
    if not joiners:
        return _preempt(record, why or "it moves to another device")
    change = GroupChange(code="move", before=len(members), after=len(ready), why=why)
    return [_change(record, (members[0], *joiners), batch, change)]


def _most_workers(record: JobRecord) -> int:
    return min(record.bounds.max_workers, record.job.num_virtual_shards)


def _change(
    record: JobRecord,
    group: Sequence[ReplicaRecord],
    batch: int,
    change: GroupChange,
    functions: FunctionPlan | None = None,
) -> ResizeJob:
    return ResizeJob(
        job_id=record.workload_id,
        generation=record.group.generation + 1,
        replica_ids=tuple(r.replica_id for r in group),
        global_batch_size=batch,
        functions=functions or record.runs_as.plan,
        cause="plan",
        reason=change.text(),
        change=change,
    )
