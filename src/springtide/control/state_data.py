"""The platform's state as data, from which the same state can be built again."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from springtide.control.records import JobRecord, PlatformState, ServiceRecord
from springtide.core.decision import Drain
from springtide.core.decoding import decode_msgpack
from springtide.core.errors import JournalError
from springtide.core.job_parts import JobOutcome
from springtide.core.resources import Node, NodeId, Pool
from springtide.core.tide import Tide
from springtide.core.workload import WorkloadId


class StateData(msgspec.Struct, frozen=True, kw_only=True):
    """A PlatformState: its records in order of arrival, and the ids of those that are live in their own order.

    `memory` is JSON, in which a policy also gets its memory back from a journal.
    """

    jobs: tuple[JobRecord, ...]
    services: tuple[ServiceRecord, ...]
    live_jobs: tuple[WorkloadId, ...]
    live_services: tuple[WorkloadId, ...]
    nodes: tuple[Node, ...]
    labels: dict[NodeId, Pool]
    drains: dict[NodeId, Drain]
    tide: Tide
    memory: bytes = b"null"
    revisit_at_s: float | None = None
    is_stopping: bool = False
    num_stale_events: int = 0
    change_times_s: tuple[float, ...] = ()
    watched_from_s: float = 0.0
    outcomes: tuple[JobOutcome, ...] = ()


class PlatformSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state after a step of the journal, and what readers of the journal keep of the steps up to there, by name."""

    state: StateData
    kept: dict[str, bytes] = {}


_PLAIN = ("revisit_at_s", "is_stopping", "num_stale_events", "change_times_s", "watched_from_s", "tide", "outcomes")


def data_of(state: PlatformState) -> StateData:
    """The state as data."""
    return StateData(
        jobs=tuple(state.jobs.values()),
        services=tuple(state.services.values()),
        live_jobs=tuple(state.jobs.live),
        live_services=tuple(state.services.live),
        nodes=tuple(state.nodes.values()),
        labels=dict(state.labels),
        drains=dict(state.drains),
        memory=msgspec.json.encode(state.memory),
        **{name: getattr(state, name) for name in _PLAIN},
    )


def state_of(data: StateData) -> PlatformState:
    """The state that `data_of` was given. Its tables derive their indexes anew, and count every record as changed."""
    plain: dict[str, Any] = {name: getattr(data, name) for name in _PLAIN}
    state = PlatformState(labels=data.labels, drains=data.drains, memory=msgspec.json.decode(data.memory), **plain)
    for job in data.jobs:
        state.jobs[job.workload_id] = job
    for service in data.services:
        state.services[service.workload_id] = service
    for node in data.nodes:
        state.nodes[node.node_id] = node
    # A service that was removed and deployed again stands behind younger ones here, but not among the records.
    state.jobs.live = {workload_id: state.jobs[workload_id] for workload_id in data.live_jobs}
    state.services.live = {workload_id: state.services[workload_id] for workload_id in data.live_services}
    return state


def encode_snapshot(snapshot: PlatformSnapshot) -> bytes:
    """The snapshot as it is stored."""
    return zlib.compress(msgspec.msgpack.encode(snapshot), 1)


def decode_snapshot(blob: bytes) -> PlatformSnapshot:
    """Return what `encode_snapshot` was given. Raises JournalError."""
    try:
        return decode_msgpack(zlib.decompress(blob), PlatformSnapshot)
    except (ValueError, TypeError, RecursionError, zlib.error) as error:
        raise JournalError(f"a snapshot of the journal cannot be read: {error}") from error
