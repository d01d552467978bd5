"""Applies events and actions in order; consecutive ones of one kind for one job become a single edit of its record.

The result is the same as if they were applied one by one, but a job with 64 workers is edited once, not 64 times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from springtide.control.edits import settled, with_new_workers, with_readiness
from springtide.control.effects import apply_action
from springtide.control.records import JobRecord, PlatformState, ReplicaRecord, ReplicaState, ServiceRecord
from springtide.control.transitions import apply_event
from springtide.core.actions import Action, StartReplica, StopReplica
from springtide.core.events import Event, ReplicaReady, ReplicaStopped
from springtide.core.workload import replicas_for


def apply_events(events: Sequence[Event], state: PlatformState, now_s: float) -> None:
    """Apply the events to `state`, in order."""
    for kind, run in _runs(events):
        if len(run) > 1 and kind is ReplicaReady and _apply_ready(run, state, now_s):
            continue
        if len(run) > 1 and kind is ReplicaStopped and _apply_stopped(run, state, now_s):
            continue
        for event in run:
            apply_event(event, state, now_s)
    _update_tide(state, now_s)


def apply_actions(actions: Sequence[Action], state: PlatformState, now_s: float) -> None:
    """Apply the actions to `state`, in order. The executor carries them out afterwards."""
    for kind, run in _runs(actions):
        if len(run) > 1 and kind is StartReplica and _apply_starts(run, state, now_s):
            continue
        if len(run) > 1 and kind is StopReplica and all(stop.grace_s for stop in run) and _apply_stops(run, state):
            continue
        for action in run:
            apply_action(action, state, now_s)


def _update_tide(state: PlatformState, now_s: float) -> None:
    """Record how many devices the services need from now on."""
    if not state.services:
        return
    needed = sum(
        _needed_replicas(record)
        for record in state.services.live.values()
        # Services on shares are not counted: they need no whole device.
        if record.is_served and record.service.share is None
    )
    state.tide = state.tide.noted(now_s, needed)


def _needed_replicas(record: ServiceRecord) -> int:
    demand = record.in_flight + record.queued
    if record.wanted_replicas is not None:
        return max(record.min_replicas, min(record.max_replicas, record.wanted_replicas))
    return replicas_for(record.service, demand, record.min_replicas, record.max_replicas)


def _runs(items: Sequence[Any]) -> Iterator[tuple[type, list[Any]]]:
    key: Callable[[Any], tuple[type, object]] = lambda item: (type(item), getattr(item, "workload_id", None))  # noqa: E731
    for (kind, _), run in groupby(items, key=key):
        yield kind, list(run)


def _apply_ready(run: Sequence[ReplicaReady], state: PlatformState, now_s: float) -> bool:
    record = state.jobs.get(run[0].workload_id)
    reported = {event.replica_id: event for event in run}
    if record is None or len(reported) < len(run):
        return False
    num_ready = 0
    replicas: list[ReplicaRecord] = []
    for replica in record.replicas:
        if replica.replica_id in reported and replica.state is ReplicaState.STARTING:
            num_ready += 1
            replica = with_readiness(replica, reported[replica.replica_id], now_s)
        replicas.append(replica)
    state.num_stale_events += len(run) - num_ready
    if num_ready:
        state.jobs[record.workload_id] = replace(record, replicas=tuple(replicas))
    return True


def _apply_stopped(run: Sequence[ReplicaStopped], state: PlatformState, now_s: float) -> bool:
    """Only if every one of them was expected to exit: any other exit is a loss, which has a transition of its own."""
    record = state.jobs.get(run[0].workload_id)
    if record is None:
        return False
    by_id = {replica.replica_id: replica for replica in record.replicas}
    gone = [event.replica_id for event in run]
    if len(set(gone)) < len(gone) or not all(
        name in by_id and _is_expected_to_exit(record, by_id[name]) for name in gone
    ):
        return False
    service_s = record.spent.finished_service_s
    for name in gone:
        service_s = by_id[name].charged(service_s, now_s)
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


def _is_expected_to_exit(record: JobRecord, replica: ReplicaRecord) -> bool:
    name = replica.replica_id
    return replica.state is ReplicaState.STOPPING or (
        name in record.group.previous_members and name not in record.group.members
    )


def _apply_starts(run: Sequence[StartReplica], state: PlatformState, now_s: float) -> bool:
    first = run[0]
    record = state.jobs.get(first.workload_id)
    if record is None or any(action.generation != first.generation for action in run):
        return False
    state.jobs[record.workload_id] = with_new_workers(record, run, now_s)
    return True


def _apply_stops(run: Sequence[StopReplica], state: PlatformState) -> bool:
    record = state.jobs.get(run[0].workload_id)
    if record is None:
        return False
    stopping = {action.replica_id for action in run}
    state.jobs[record.workload_id] = replace(
        record,
        replicas=tuple(
            replace(r, state=ReplicaState.STOPPING) if r.replica_id in stopping else r for r in record.replicas
        ),
    )
    return True
