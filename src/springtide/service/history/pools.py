"""The history of pools: when each node had which label, the loans and reclaims, and their effects on workloads.

Part of the HistoryIndex and built like it from the steps of the journal; only the newest entries are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from springtide.core import actions, events
from springtide.core.ports import Step
from springtide.core.resources import DeviceId, Node, NodeId, Pool
from springtide.core.status.pools import (
    AffectedJob,
    Effect,
    Handover,
    HandoverState,
    LoanInterval,
    PoolSize,
    ReclaimKind,
)
from springtide.core.workload import TrainingJob, WorkloadId
from springtide.service.histogram import Histogram
from springtide.service.history.keeping import packed, unpack

MAX_HANDOVERS = 500
MAX_LOANS = 2_000
MAX_SIZES = 5_000
# A drain that was called off within this time and moved no workload is only counted.
LEAST_DRAIN_S = 1.0
RECLAIM_BOUNDS_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0)
# A change of the label to a higher rank is a reclaim, to a lower one a loan.
_TOWARDS_SERVICES: Mapping[Pool, int] = MappingProxyType({"training": 0, "shared": 1, "inference": 2})
_EFFECT_TEXTS: Mapping[Effect, str] = MappingProxyType(
    {
        "stopped": "gives all its devices back",
        "shrunk": "goes on with fewer workers",
        "moved": "goes on elsewhere",
        "forced": "lost workers whose grace was over",
    }
)


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the history of `workload_id` or, if that is empty, a mark on the node."""

    kind: str
    text: str
    workload_id: str = ""
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class PoolTotals:
    """Counts since the platform was created. `reclaim_s`: from the order to leave to the new label."""

    num_loans: int
    num_reclaims: dict[ReclaimKind, int]
    reclaim_s: Histogram
    reclaim_cost_s: float
    num_called_off: int = 0


@dataclass(slots=True)
class _Holder:
    """A replica that holds a device."""

    workload_id: WorkloadId
    name: str
    is_job: bool
    device_id: DeviceId
    node_id: NodeId
    more_devices: tuple[DeviceId, ...] = ()


@dataclass(slots=True)
class _PendingHandover:
    """A handover under way. `present` holds the jobs' replicas that were on the node when it was reclaimed."""

    action: actions.DrainNode
    demanded_at_s: float
    reason: str = ""
    cost_s: float = 0.0
    reclaim_at_s: float | None = None
    present: dict[str, _Holder] = field(default_factory=dict)
    affected: dict[WorkloadId, AffectedJob] = field(default_factory=dict)


_KEPT: Mapping[str, Any] = MappingProxyType(
    {
        "_at_s": float,
        "_nodes": dict[NodeId, Node],
        "_labels": dict[NodeId, Pool],
        "_node_of": dict[DeviceId, NodeId],
        "_held": dict[str, _Holder],
        "_num_members": dict[WorkloadId, int],
        "_pending": dict[NodeId, _PendingHandover],
        "_done": list[Handover],
        "_waiting_for_service": dict[NodeId, Handover],
        "_loans_open": dict[NodeId, LoanInterval],
        "_loans": list[LoanInterval],
        "_sizes": list[PoolSize],
        "_num_loans": int,
        "_num_reclaims": dict[ReclaimKind, int],
        "_reclaim_s": Histogram,
        "_reclaim_cost_s": float,
        "_num_called_off": int,
    }
)


class PoolHistory:
    """Takes the journaled steps in order. Not thread-safe: its owner must lock it against readers."""

    def __init__(self) -> None:
        self._at_s = 0.0
        self._nodes: dict[NodeId, Node] = {}
        self._labels: dict[NodeId, Pool] = {}
        self._node_of: dict[DeviceId, NodeId] = {}
        self._held: dict[str, _Holder] = {}
        self._num_members: dict[WorkloadId, int] = {}
        self._pending: dict[NodeId, _PendingHandover] = {}
        self._done: deque[Handover] = deque(maxlen=MAX_HANDOVERS)
        self._waiting_for_service: dict[NodeId, Handover] = {}
        self._loans_open: dict[NodeId, LoanInterval] = {}
        self._loans: deque[LoanInterval] = deque(maxlen=MAX_LOANS)
        self._sizes: deque[PoolSize] = deque(maxlen=MAX_SIZES)
        self._num_loans = 0
        self._num_reclaims: dict[ReclaimKind, int] = {"interrupting": 0, "shrinking": 0, "idle": 0}
        self._reclaim_s = Histogram(RECLAIM_BOUNDS_S)
        self._reclaim_cost_s = 0.0
        self._num_called_off = 0

    def add(self, step: Step) -> list[Note]:
        """Add the journal's next step. Returns the lines and marks that it gives rise to."""
        self._at_s = step.now_s
        notes: list[Note] = []
        for event in step.events:
            self._apply_event(event)
        # First note which replicas must leave: the same step may contain the actions that make them leave.
        for action in step.actions:
            if isinstance(action, actions.DrainNode):
                notes += self._drain(action)
        for action in step.actions:
            notes += self._apply_action(action)
        self._note_size()
        return notes

    def kept(self) -> bytes:
        """What the history keeps, for the journal's next snapshot."""
        return packed(self, _KEPT)

    def take(self, data: bytes) -> None:
        """Go on from what `kept` returned. Raises JournalError."""
        unpack(self, _KEPT, data)

    def handovers(self) -> tuple[Handover, ...]:
        """The newest loans and reclaims, including those under way, in the order of their demand."""
        under_way = [self._as_handover(pending, "draining") for pending in self._pending.values()]
        return tuple(sorted([*self._done, *under_way], key=lambda handover: handover.demanded_at_s))

    def loans(self, since_s: float = 0.0) -> tuple[LoanInterval, ...]:
        """When nodes were labelled for another pool than their owner."""
        past = [loan for loan in self._loans if loan.end_s is None or loan.end_s >= since_s]
        return tuple(sorted([*past, *self._loans_open.values()], key=lambda loan: loan.start_s))

    def sizes(self, since_s: float = 0.0) -> tuple[PoolSize, ...]:
        """How many devices services could hold and how many the inference pool owns, from `since_s` on."""
        later = [size for size in self._sizes if size.at_s > since_s]
        earlier = [size for size in self._sizes if size.at_s <= since_s]
        return (*earlier[-1:], *later)

    def last_reclaim_of(self, workload_id: str) -> Handover | None:
        """The newest reclaim that stopped, shrank or moved the job; None if none is kept."""
        for handover in reversed(self.handovers()):
            if any(job.workload_id == workload_id for job in handover.affected):
                return handover
        return None

    def totals(self) -> PoolTotals:
        """The counts since the platform was created."""
        return PoolTotals(
            self._num_loans, dict(self._num_reclaims), self._reclaim_s, self._reclaim_cost_s, self._num_called_off
        )

    # --- events -------------------------------------------------------------------------------------------------------

    def _apply_event(self, event: events.Event) -> None:
        match event:
            case events.NodeJoined():
                self._join(event.node)
            case events.NodeLost():
                self._lose(event.node_id)
            case events.JobsArchived():
                for job_id in event.job_ids:
                    self._num_members.pop(job_id, None)
            case events.ReplicaStopped() | events.ReplicaLost():
                self._held.pop(event.replica_id, None)
            case events.ReplicaReady():
                holder = self._held.get(event.replica_id)
                if holder is not None and not holder.is_job:
                    self._serve(holder.node_id)
            case _:
                pass

    def _join(self, node: Node) -> None:
        known, label = self._nodes.get(node.node_id), self._labels.get(node.node_id)
        if label is not None and node.owner != "shared":
            # A node that comes back has the label that it had before it was lost.
            node = replace(node, pool=label, home=node.owner)
        self._nodes[node.node_id] = node
        self._node_of |= {device.device_id: node.node_id for device in node.devices}
        if known is None or known.pool != node.pool or known.owner != node.owner:
            self._follow_loan(node)

    def _lose(self, node_id: NodeId) -> None:
        node = self._nodes.pop(node_id, None)
        if node is None:
            return
        self._held = {replica: holder for replica, holder in self._held.items() if holder.node_id != node_id}
        pending = self._pending.pop(node_id, None)
        if pending is not None:
            self._done.append(self._as_handover(pending, "lost", node))
        self._waiting_for_service.pop(node_id, None)
        self._end_loan(node_id)

    def _serve(self, node_id: NodeId) -> None:
        waiting = self._waiting_for_service.pop(node_id, None)
        if waiting is None:
            return
        for index, handover in enumerate(self._done):
            if handover == waiting:
                self._done[index] = replace(handover, serving_at_s=self._at_s)

    # --- actions ------------------------------------------------------------------------------------------------------

    def _drain(self, action: actions.DrainNode) -> list[Note]:
        node = self._nodes.get(action.node_id)
        if node is None:
            return []
        known = self._pending.get(action.node_id)
        if known is not None and known.action.pool != action.pool:
            self._call_off(known)
            known = None
        if known is None:
            known = self._pending[action.node_id] = _PendingHandover(action=action, demanded_at_s=self._at_s)
        known.action = action
        if action.is_reclaim or not known.affected:
            # A reclaim that has turned into a plain drain, because the others may stay, keeps its reason and cost.
            known.reason, known.cost_s = action.reason, max(known.cost_s, action.cost_s)
        if not action.is_reclaim:
            known.reclaim_at_s = None
            return []
        if known.reclaim_at_s is not None:
            return []
        known.reclaim_at_s = self._at_s
        known.present = {
            replica: holder
            for replica, holder in self._held.items()
            if holder.node_id == action.node_id and holder.is_job
        }
        return [Note("reclaim", f"{action.node_id} is reclaimed: {action.reason}", node_id=action.node_id)]

    def _apply_action(self, action: actions.Action) -> list[Note]:
        match action:
            case actions.StartReplica():
                self._start(action)
            case actions.ResizeJob():
                return self._resize(action)
            case actions.PreemptJob():
                before, self._num_members[action.job_id] = self._num_members.get(action.job_id, 0), 0
                return self._affect(action.job_id, "stopped", before, 0)
            case actions.StopReplica(grace_s=0.0):
                holder = self._held.get(action.replica_id)
                before = self._num_members.get(action.workload_id, 0)
                if holder is not None and holder.is_job:
                    return self._affect(action.workload_id, "forced", before, max(0, before - 1), action.replica_id)
            case actions.LabelNode():
                return self._label(action)
            case _:
                pass
        return []

    def _start(self, action: actions.StartReplica) -> None:
        node_id = self._node_of.get(action.device_id)
        if node_id is None or action.replica_id in self._held:
            return
        self._held[action.replica_id] = _Holder(
            workload_id=action.workload_id,
            name=action.workload.name,
            is_job=isinstance(action.workload, TrainingJob),
            device_id=action.device_id,
            more_devices=action.more_devices,
            node_id=node_id,
        )

    def _resize(self, action: actions.ResizeJob) -> list[Note]:
        before = self._num_members.get(action.job_id, 0)
        after = self._num_members[action.job_id] = len(action.replica_ids)
        staying = set(action.replica_ids)
        notes: list[Note] = []
        for pending in self._pending.values():
            mine = {replica for replica, holder in pending.present.items() if holder.workload_id == action.job_id}
            if mine and not mine & staying:
                notes += self._note_effect(
                    pending, action.job_id, "shrunk" if after < before else "moved", before, after
                )
        return notes

    def _affect(self, job_id: WorkloadId, effect: Effect, before: int, after: int, replica_id: str = "") -> list[Note]:
        """Note an effect on a job, or on one replica of it, for every node that it had to leave."""
        notes: list[Note] = []
        for pending in self._pending.values():
            mine = [replica for replica, holder in pending.present.items() if holder.workload_id == job_id]
            if mine and (not replica_id or replica_id in mine):
                notes += self._note_effect(pending, job_id, effect, before, after)
        return notes

    def _note_effect(
        self, pending: _PendingHandover, job_id: WorkloadId, effect: Effect, before: int, after: int
    ) -> Iterator[Note]:
        known = pending.affected.get(job_id)
        if known is not None and (known.effect == effect or known.effect == "stopped"):
            return
        name = next(holder.name for holder in pending.present.values() if holder.workload_id == job_id)
        first = before if known is None else known.num_workers_before
        pending.affected[job_id] = AffectedJob(
            workload_id=job_id,
            name=name,
            effect=effect,
            num_workers_before=first,
            num_workers_after=after,
        )
        node_id, reason = pending.action.node_id, pending.reason
        yield Note("reclaim", f"{_EFFECT_TEXTS[effect]}, {node_id} is reclaimed: {reason}", workload_id=job_id)

    def _label(self, action: actions.LabelNode) -> list[Note]:
        node = self._nodes.get(action.node_id)
        if node is None:
            return []
        pending = self._pending.pop(action.node_id, None)
        if node.pool == action.pool:
            if pending is not None:
                self._call_off(pending)
            return []
        if pending is None:
            # The node held no replica and was labelled without a drain.
            drain = actions.DrainNode(node_id=action.node_id, pool=action.pool, reason=action.reason)
            pending = _PendingHandover(action=drain, demanded_at_s=self._at_s, reason=action.reason)
        handover = replace(self._as_handover(pending, "done"), labelled_at_s=self._at_s)
        self._done.append(handover)
        self._waiting_for_service.pop(action.node_id, None)
        self._labels[action.node_id] = action.pool
        self._nodes[action.node_id] = replace(node, pool=action.pool, home=node.owner)
        self._follow_loan(self._nodes[action.node_id])
        self._count(handover)
        if handover.kind == "reclaim":
            self._waiting_for_service[action.node_id] = handover
        verb = "returns to" if handover.is_return else "goes to"
        text = f"{action.node_id} {verb} {action.pool}" + (f": {handover.reason}" if handover.reason else "")
        return [Note("loan" if handover.kind == "loan" else "label", text, node_id=action.node_id)]

    def _call_off(self, pending: _PendingHandover) -> None:
        self._num_called_off += 1
        if pending.affected or self._at_s - pending.demanded_at_s >= LEAST_DRAIN_S:
            self._done.append(self._as_handover(pending, "called off"))

    def _count(self, handover: Handover) -> None:
        if handover.kind == "loan":
            self._num_loans += 1
            return
        self._num_reclaims[handover.reclaim_kind] += 1
        self._reclaim_cost_s += handover.cost_s
        if handover.reclaim_at_s is not None and handover.labelled_at_s is not None:
            self._reclaim_s = self._reclaim_s.plus(handover.labelled_at_s - handover.reclaim_at_s)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _as_handover(self, pending: _PendingHandover, state: HandoverState, node: Node | None = None) -> Handover:
        node = node or self._nodes[pending.action.node_id]
        to_pool = pending.action.pool
        effects = {job.effect for job in pending.affected.values()}
        kind: ReclaimKind = "shrinking" if effects else "idle"
        if effects & {"stopped", "forced"}:
            kind = "interrupting"
        return Handover(
            node_id=node.node_id,
            num_devices=len(node.devices),
            kind="reclaim" if _TOWARDS_SERVICES[to_pool] > _TOWARDS_SERVICES[node.pool] else "loan",
            from_pool=node.pool,
            to_pool=to_pool,
            is_return=to_pool == node.owner,
            state=state,
            demanded_at_s=pending.demanded_at_s,
            reclaim_at_s=pending.reclaim_at_s,
            reason=pending.reason,
            cost_s=pending.cost_s,
            reclaim_kind=kind,
            affected=tuple(pending.affected.values()),
        )

    def _follow_loan(self, node: Node) -> None:
        self._end_loan(node.node_id)
        if node.is_loaned:
            self._loans_open[node.node_id] = LoanInterval(
                node_id=node.node_id, owner=node.owner, pool=node.pool, start_s=self._at_s, end_s=None
            )

    def _end_loan(self, node_id: NodeId) -> None:
        loan = self._loans_open.pop(node_id, None)
        if loan is not None:
            self._loans.append(replace(loan, end_s=self._at_s))

    def _note_size(self) -> None:
        if all(node.pool == "shared" == node.owner for node in self._nodes.values()):
            return
        holders = [holder for holder in self._held.values() if holder.is_job]
        training = {device for holder in holders for device in (holder.device_id, *holder.more_devices)}
        num_open = num_owned = 0
        for node in self._nodes.values():
            if node.owner != "training":
                num_owned += len(node.devices)
            if node.pool == "inference":
                num_open += len(node.devices)
            elif node.pool == "shared":
                num_open += sum(device.device_id not in training for device in node.devices)
        last = self._sizes[-1] if self._sizes else None
        if last is None or (last.num_open, last.num_owned) != (num_open, num_owned):
            self._sizes.append(PoolSize(at_s=self._at_s, num_open=num_open, num_owned=num_owned))
