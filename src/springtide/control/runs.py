"""Runs of like events or actions of one job, applied as one edit: a group of 64 is changed once, not 64 times.

The outcome is exactly that of applying them one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from springtide.control.edits import settled, with_start
from springtide.control.effects import apply_action
from springtide.control.records import JobRecord, PlatformState, ReplicaRecord, ReplicaState, ServiceRecord
from springtide.control.transitions import apply_event
from springtide.core.actions import Action, StartReplica, StopReplica
from springtide.core.events import Event, ReplicaReady, ReplicaStopped
from springtide.core.workload import replicas_for


def apply_events(events: Sequence[Event], state: PlatformState, now_s: float) -> None:
    """Bring `state` up to date with what happened, in order."""
    for kind, run in _runs(events):
        if len(run) > 1 and kind is ReplicaReady and _take_ready(run, state):
            continue
        if len(run) > 1 and kind is ReplicaStopped and _take_stopped(run, state, now_s):
            continue
        for event in run:
            apply_event(event, state, now_s)
    _note_tide(state, now_s)


def apply_actions(actions: Sequence[Action], state: PlatformState, now_s: float) -> None:
    """Bring `state` up to date with actions that are about to be carried out, in order."""
    for kind, run in _runs(actions):
        if len(run) > 1 and kind is StartReplica and _take_starts(run, state, now_s):
            continue
        if len(run) > 1 and kind is StopReplica and all(stop.grace_s for stop in run) and _take_stops(run, state):
            continue
        for action in run:
            apply_action(action, state, now_s)


def _note_tide(state: PlatformState, now_s: float) -> None:
    """Remember how many devices the services need from now on."""
    if not state.services:
        return
    needed = sum(
        _needed(record)
        for record in state.services.live.values()
        # A service on shares needs no device of its own.
        if record.is_served and record.service.share is None
    )
    state.tide = state.tide.noted(now_s, needed)


def _needed(record: ServiceRecord) -> int:
    demand = record.in_flight + record.queued
    if record.wanted_replicas is not None:
        return max(record.min_replicas, min(record.max_replicas, record.wanted_replicas))
    return replicas_for(record.service, demand, record.min_replicas, record.max_replicas)


def _runs(items: Sequence[Any]) -> Iterator[tuple[type, list[Any]]]:
    key: Callable[[Any], tuple[type, object]] = lambda item: (type(item), getattr(item, "workload_id", None))  # noqa: E731
    for (kind, _), run in groupby(items, key=key):
        yield kind, list(run)


def _take_ready(run: Sequence[ReplicaReady], state: PlatformState) -> bool:
    record = state.jobs.get(run[0].workload_id)
    told = {event.replica_id: event for event in run}
    if record is None or len(told) < len(run):
        return False
    num_ready = 0
    replicas: list[ReplicaRecord] = []
    for replica in record.replicas:
        if replica.replica_id in told and replica.state is ReplicaState.STARTING:
            num_ready += 1
            event = told[replica.replica_id]
            replica = replace(replica, state=ReplicaState.READY, address=event.address, phases_s=event.phases_s)
        replicas.append(replica)
    state.num_stale_events += len(run) - num_ready
    if num_ready:
        state.jobs[record.workload_id] = replace(record, replicas=tuple(replicas))
    return True


def _take_stopped(run: Sequence[ReplicaStopped], state: PlatformState, now_s: float) -> bool:
    """Only where every one of them was to go: a worker that leaves unasked is a loss, which is looked at alone."""
    record = state.jobs.get(run[0].workload_id)
    if record is None:
        return False
    by_id = {replica.replica_id: replica for replica in record.replicas}
    gone = [event.replica_id for event in run]
    if len(set(gone)) < len(gone) or not all(name in by_id and _may_go(record, by_id[name]) for name in gone):
        return False
    service_s = record.spent.finished_service_s
    for name in gone:
        service_s = service_s + now_s - by_id[name].started_at_s
    left = set(gone)
    state.jobs[record.workload_id] = settled(
        replace(
            record,
            replicas=tuple(r for r in record.replicas if r.replica_id not in left),
            spent=replace(record.spent, finished_service_s=service_s),
            group=record.group.without(left),
        )
    )
    return True


def _may_go(record: JobRecord, replica: ReplicaRecord) -> bool:
    name = replica.replica_id
    return replica.state is ReplicaState.STOPPING or (
        name in record.group.previous_members and name not in record.group.members
    )


def _take_starts(run: Sequence[StartReplica], state: PlatformState, now_s: float) -> bool:
    first = run[0]
    record = state.jobs.get(first.workload_id)
    if record is None or any(action.generation != first.generation for action in run):
        return False
    state.jobs[record.workload_id] = with_start(record, run, now_s)
    return True


def _take_stops(run: Sequence[StopReplica], state: PlatformState) -> bool:
    record = state.jobs.get(run[0].workload_id)
    if record is None:
        return False
    asked = {action.replica_id for action in run}
    state.jobs[record.workload_id] = replace(
        record,
        replicas=tuple(
            replace(r, state=ReplicaState.STOPPING) if r.replica_id in asked else r for r in record.replicas
        ),
    )
    return True
