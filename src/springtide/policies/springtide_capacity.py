"""What promises of the policy `springtide` may count on over the time to come: of what there is, what is told."""

from __future__ import annotations

from collections.abc import Container, Mapping

from springtide.core.decision import Snapshot
from springtide.core.workload import WorkloadId
from springtide.policies.springtide_memory import State
from springtide.policies.springtide_rows import Row
from springtide.solvers.plan_capacity import Steps, changed, compared, constant, falls_of, trimmed


def counted_on(snapshot: Snapshot, reserve_fraction: float, num_serving: int) -> Steps:
    """How many devices promises may use from each moment on: those told, until the next such moment no more than
    there are, less the reserve and `num_serving` devices of services."""
    steps = _told(snapshot, len(snapshot.cluster.device_ids()))
    return changed(steps, lambda count: max(0, count - int(count * reserve_fraction) - num_serving))


def _told(snapshot: Snapshot, num_there: int) -> Steps:
    if not snapshot.capacity:
        return constant(num_there)
    steps = trimmed([(step.from_s, step.num_devices) for step in snapshot.capacity], snapshot.now_s)
    return ((0.0, min(num_there, steps[0][1])), *steps[1:])


def falls_told(snapshot: Snapshot) -> tuple[float, ...]:
    """When devices go away, once for every node's worth of them."""
    if not snapshot.capacity:
        return ()
    unit = max((len(node.devices) for node in snapshot.cluster.nodes), default=1)
    return falls_of(_told(snapshot, len(snapshot.cluster.device_ids())), snapshot.now_s, unit)


def is_roomier(before: Steps, after: Steps, now_s: float) -> bool:
    """Whether there are more devices at any moment to come."""
    return before != after and any(to_be > there for _, _, there, to_be in compared(before, after, now_s))


def matters(state: State, snapshot: Snapshot, reserve_fraction: float, jobs: Container[WorkloadId]) -> bool:
    """Whether the capacity that is told now is a reason to decide anew: what is promised does not fit any more, or
    there is more of it and somebody waits for that."""
    num_serving = 0
    if snapshot.services:
        num_serving = sum(count for who, count in state.held.items() if who not in jobs)
    steps = counted_on(snapshot, reserve_fraction, num_serving)
    book = state.book
    if steps == trimmed(book.steps, snapshot.now_s):
        return False
    if bool(state.waiting) and is_roomier(book.steps, steps, snapshot.now_s):
        return True
    return not book.has_room(steps, snapshot.now_s)


def note_taken(state: State, rows: Mapping[WorkloadId, Row], now_s: float) -> None:
    """Jobs whose workers all run although not all of their devices are shown any more: those are being taken.

    What they have done is not lost, but they hold nothing that they could go on with for free.
    """
    for key, entry in state.book.entries.items():
        row = rows.get(WorkloadId(key))
        if row is None or not entry.held or WorkloadId(key) in state.devices:
            continue
        if row.view.num_replicas >= entry.held and row.view.runnable_at_s <= now_s:
            entry.held, entry.residual_s = 0, 0.0
