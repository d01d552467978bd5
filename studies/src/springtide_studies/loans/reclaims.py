"""What reclaiming servers from training took, and how many servers were on loan, from the journaled steps."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from springtide.core.actions import DrainNode, LabelNode, PreemptJob, ResizeJob
from springtide.core.events import JobResized
from springtide.core.resources import Node, NodeId, Pool, admits
from springtide.core.workload import ReplicaId, WorkloadId

# Replicas that start this soon after a node's new label are the ones for which it was reclaimed.
_TAKEN_FOR_S = 1.0


@dataclass(slots=True)
class Reclaim:
    """One server that training was made to give up, from the drain that made its jobs leave.

    `labelled_s` is when it was free, `served_s` when the last of the replicas that then started there was ready; both
    stay None where the reclaim was called off. `stopped` are the jobs that were preempted or lost a worker by force for
    it, `shrunk` those that only left it. `cost_s` is the policy's estimate of its cost, `lost_device_s` the cost: the
    device-seconds in which workers stood still to save and to resume, and of steps that were done again.
    """

    node_id: NodeId
    pool: Pool
    drained_s: float
    cost_s: float = 0.0
    labelled_s: float | None = None
    served_s: float | None = None
    is_called_off: bool = False
    stopped: dict[WorkloadId, None] = field(default_factory=dict)
    shrunk: dict[WorkloadId, None] = field(default_factory=dict)
    lost_device_s: float = 0.0
    num_starting: int = 0

    @property
    def is_interrupting(self) -> bool:
        """Whether a job was stopped for it."""
        return bool(self.stopped)


@dataclass(slots=True)
class _Disturbed:
    """A job that left servers: for which reclaims, and its `lost_of` before."""

    reclaims: dict[NodeId, Reclaim]
    lost_device_s: float


def nothing_lost(job_id: WorkloadId) -> float:
    return 0.0


class Reclaims:
    """Follows every reclaim from its drain to the replicas that serve there, and every job until it trains again.

    `lost_of(job_id)` is how many device-seconds of work a job has had to do again so far.
    """

    def __init__(self, lost_of: Callable[[WorkloadId], float] = nothing_lost) -> None:
        self.all: list[Reclaim] = []
        self.num_cordons = 0
        self.lost_of = lost_of
        self._open: dict[NodeId, Reclaim] = {}
        self._labelled: dict[NodeId, Reclaim] = {}
        self._starting: dict[ReplicaId, Reclaim] = {}
        self._workers: dict[ReplicaId, tuple[WorkloadId, NodeId]] = {}
        self._members: dict[WorkloadId, tuple[ReplicaId, ...]] = {}
        self._saving: dict[ReplicaId, tuple[float, tuple[Reclaim, ...]]] = {}
        self._disturbed: dict[WorkloadId, _Disturbed] = {}

    # --- servers -----------------------------------------------------------------------------------------------------

    def drain(self, action: DrainNode, now_s: float) -> None:
        """A node is drained: a reclaim if jobs have to leave at once, otherwise only a cordon."""
        if admits(action.pool, is_job=True):
            return
        if not action.is_reclaim:
            self.num_cordons += 1
        elif action.node_id not in self._open:
            reclaim = Reclaim(node_id=action.node_id, pool=action.pool, drained_s=now_s, cost_s=action.cost_s)
            self.all.append(reclaim)
            self._open[action.node_id] = reclaim

    def label(self, action: LabelNode, now_s: float) -> None:
        """A node has its new label, or keeps its old one because the reclaim was called off."""
        self._labelled.pop(action.node_id, None)
        reclaim = self._open.pop(action.node_id, None)
        if reclaim is None:
            return
        if action.pool == reclaim.pool:
            reclaim.labelled_s = now_s
            self._labelled[action.node_id] = reclaim
        else:
            reclaim.is_called_off = True

    def lose(self, node_id: NodeId) -> None:
        self._labelled.pop(node_id, None)
        reclaim = self._open.pop(node_id, None)
        if reclaim is not None:
            reclaim.is_called_off = True

    # --- replicas on the nodes ---------------------------------------------------------------------------------------

    def start(
        self, replica_id: ReplicaId, workload_id: WorkloadId, node_id: NodeId, now_s: float, *, is_job: bool
    ) -> None:
        if is_job:
            self._workers[replica_id] = (workload_id, node_id)
            return
        reclaim = self._labelled.get(node_id)
        if reclaim is not None and reclaim.labelled_s is not None and now_s - reclaim.labelled_s <= _TAKEN_FOR_S:
            reclaim.num_starting += 1
            self._starting[replica_id] = reclaim

    def serve(self, replica_id: ReplicaId, now_s: float) -> None:
        reclaim = self._starting.pop(replica_id, None)
        if reclaim is not None:
            reclaim.num_starting -= 1
            if reclaim.num_starting == 0:
                reclaim.served_s = now_s

    def stop(self, replica_id: ReplicaId, now_s: float) -> None:
        """A replica is asked to end: if it still trains on a reclaimed node, its job is interrupted."""
        job_id, node_id = self._workers.get(replica_id, (WorkloadId(""), NodeId("")))
        reclaim = self._open.get(node_id)
        if reclaim is not None and replica_id in self._members.get(job_id, ()):
            reclaim.stopped[job_id] = None
            self._disturb(job_id, (reclaim,))

    def preempt(self, action: PreemptJob, now_s: float) -> None:
        """A job is preempted, for every one of its servers that is being reclaimed."""
        self._members.pop(action.job_id, None)
        reclaims = self._reclaims_under(action.replica_ids)
        for reclaim in reclaims:
            reclaim.stopped[action.job_id] = None
        if reclaims:
            self._disturb(action.job_id, reclaims)
            self._saving |= dict.fromkeys(action.replica_ids, (now_s, reclaims))

    def resize(self, action: ResizeJob, now_s: float) -> None:
        """A group changes: the job shrinks for every reclaimed server that one of its workers leaves."""
        before = self._members.get(action.job_id, ())
        self._members[action.job_id] = action.replica_ids
        named = set(action.replica_ids)
        reclaims = self._reclaims_under(r for r in before if r not in named)
        for reclaim in reclaims:
            if action.job_id not in reclaim.stopped:
                reclaim.shrunk[action.job_id] = None
        if reclaims:
            self._disturb(action.job_id, reclaims)

    def resume(self, event: JobResized) -> None:
        """A group has formed: its pause and its lost work are charged to the reclaims that caused the change."""
        disturbed = self._disturbed.pop(event.job_id, None)
        if disturbed is not None:
            again_s = self.lost_of(event.job_id) - disturbed.lost_device_s
            _charge(disturbed.reclaims.values(), event.pause_s * event.world_size + again_s)

    def leave(self, replica_id: ReplicaId, now_s: float) -> None:
        self._workers.pop(replica_id, None)
        reclaim = self._starting.pop(replica_id, None)
        if reclaim is not None:
            reclaim.num_starting -= 1
        saving = self._saving.pop(replica_id, None)
        if saving is not None:
            since_s, reclaims = saving
            _charge(reclaims, now_s - since_s)

    def _reclaims_under(self, replica_ids: Iterable[ReplicaId]) -> tuple[Reclaim, ...]:
        nodes = {self._workers[r][1]: None for r in replica_ids if r in self._workers}
        return tuple(self._open[node_id] for node_id in nodes if node_id in self._open)

    def _disturb(self, job_id: WorkloadId, reclaims: Sequence[Reclaim]) -> None:
        disturbed = self._disturbed.get(job_id)
        if disturbed is None:
            disturbed = self._disturbed[job_id] = _Disturbed({}, self.lost_of(job_id))
        disturbed.reclaims |= {reclaim.node_id: reclaim for reclaim in reclaims}

    # --- figures -----------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Counts, seconds, and device-seconds estimated and lost; None where there is no value."""
        done = [reclaim for reclaim in self.all if not reclaim.is_called_off]
        label_s = [r.labelled_s - r.drained_s for r in done if r.labelled_s is not None]
        serve_s = [r.served_s - r.drained_s for r in done if r.served_s is not None]
        return {
            "reclaims": len(done),
            "reclaims_called_off": len(self.all) - len(done),
            "reclaims_interrupting": sum(r.is_interrupting for r in done),
            "reclaims_shrinking": sum(bool(r.shrunk) and not r.is_interrupting for r in done),
            "jobs_interrupted": sum(len(r.stopped) for r in done),
            "cordons": self.num_cordons,
            "reclaim_label_p50_s": percentile(label_s, 50),
            "reclaim_label_p95_s": percentile(label_s, 95),
            "reclaim_label_max_s": max(label_s, default=None),
            "reclaim_p50_s": percentile(serve_s, 50),
            "reclaim_p95_s": percentile(serve_s, 95),
            "reclaim_max_s": max(serve_s, default=None),
            "reclaim_reckoned_device_s": sum(r.cost_s for r in done),
            "reclaim_lost_device_s": sum(r.lost_device_s for r in done),
        }


def _charge(reclaims: Iterable[Reclaim], device_s: float) -> None:
    """Split a cost evenly between the reclaims."""
    shared = list(reclaims)
    for reclaim in shared:
        reclaim.lost_device_s += device_s / len(shared)


class Loans:
    """How many servers were on loan over time: `lent` of inference to training, `borrowed` by inference from training.

    `time_s`, `lent` and `borrowed` have an entry for each moment at which that changed. A server labelled shared counts
    as lent if inference owns it.
    """

    def __init__(self) -> None:
        self.time_s = array("d")
        self.lent = array("l")
        self.borrowed = array("l")
        self.num_loans = 0
        self._nodes: dict[NodeId, tuple[Pool, Pool]] = {}
        self._end_s = 0.0

    def join(self, node: Node, now_s: float) -> None:
        """A node joins, under the label that it had before or, if it is new, the one that it brings."""
        pool = self._nodes.get(node.node_id, (node.pool, node.owner))[0]
        self._nodes[node.node_id] = (pool, node.owner)
        self._note(now_s)

    def lose(self, node_id: NodeId, now_s: float) -> None:
        """A node is gone and no longer on loan."""
        self._nodes.pop(node_id, None)
        self._note(now_s)

    def label(self, action: LabelNode, now_s: float) -> None:
        known = self._nodes.get(action.node_id)
        if known is None or known[0] == action.pool:
            return
        pool, owner = known
        self.num_loans += pool == owner
        self._nodes[action.node_id] = (action.pool, owner)
        self._note(now_s)

    def finish(self, now_s: float) -> None:
        self._end_s = now_s

    def _note(self, now_s: float) -> None:
        lent = sum(owner == "inference" and pool != owner for pool, owner in self._nodes.values())
        borrowed = sum(owner == "training" and pool != owner for pool, owner in self._nodes.values())
        if self.time_s and self.time_s[-1] == now_s:
            self.lent[-1], self.borrowed[-1] = lent, borrowed
            return
        self.time_s.append(now_s)
        self.lent.append(lent)
        self.borrowed.append(borrowed)

    def summary(self) -> dict[str, Any]:
        """How many loans there were, and how many servers were on loan at most and on average over time."""
        return {
            "loans": self.num_loans,
            "lent_mean": self._mean(self.lent),
            "lent_max": max(self.lent, default=0),
            "borrowed_mean": self._mean(self.borrowed),
            "borrowed_max": max(self.borrowed, default=0),
        }

    def _mean(self, counts: Sequence[int]) -> float:
        spans_s = np.diff(np.append(np.array(self.time_s), max(self._end_s, *self.time_s[-1:], 0.0)))
        whole_s = float(spans_s.sum())
        return float(spans_s @ np.array(counts, dtype=float)) / whole_s if whole_s > 0.0 else 0.0


def percentile(values: Sequence[float], percent: float) -> float | None:
    """A percentile; None without values."""
    return float(np.percentile(values, percent)) if values else None
