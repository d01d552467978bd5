"""Invariants of nodes that change pools: one label each, only replicas that it admits, drains that end.

And services with guaranteed replicas have them, where there are servers for it. Checked over the state and the
machines, in fault runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from springtide.control.records import JobRecord, PlatformState, ServiceRecord
from springtide.core.actions import DrainNode, LabelNode, StartReplica
from springtide.core.events import NodeLost
from springtide.core.ports import Step
from springtide.core.resources import Node, NodeId, Pool, admits
from springtide.core.workload import TrainingJob, WorkloadId
from springtide_studies.fault_seeds.machine import Machine

# A worker is gone this long after its grace: signals, silence and the loss of its messages take no longer.
DRAIN_SLACK_S = 20.0
# Without faults a replica serves this long after its device is free, and a worker is gone this long after its grace.
START_SLACK_S = 2.0
# With them a service may wait out a back-off, time after time; this is more than the longest.
SHORT_FOR_EVER_S = 90.0
# Load is told every few seconds, bounds change now and then: a node that is given another direction more often than
# this is driven by nothing but its own changes.
FLAPS, FLAPS_WITHIN_S = 20, 10.0


class LoanInvariants:
    """Watches the labels of one run. `complain` is called with the name of the broken invariant and the details.

    `reaches` says which nodes the policy takes for a guaranteed minimum if it must. With `is_quiet` nothing goes wrong
    in the run, so that a minimum has to be there within grace and start.
    """

    def __init__(
        self,
        machine: Machine,
        complain: Callable[[str, str], None],
        *,
        reaches: Callable[[Node], bool],
        is_quiet: bool,
    ) -> None:
        self.machine = machine
        self._complain = complain
        self._reaches = reaches
        self._is_quiet = is_quiet
        self._drains: dict[NodeId, Pool] = {}
        self._reclaimed_since_s: dict[NodeId, float] = {}
        self._short: dict[WorkloadId, tuple[float, object]] = {}
        self._turned_at_s: dict[NodeId, deque[float]] = {}
        self._troubled_until_s = 0.0
        self.num_labels = 0
        self.num_reclaims = 0

    def note_outage(self, until_s: float) -> None:
        """Until that moment the control plane was disturbed: no time limit is counted from before it."""
        self._troubled_until_s = max(self._troubled_until_s, until_s)

    def note_journaled(self, step: Step, state: PlatformState) -> None:
        """A step is in the journal: nothing starts on a node that drains to a pool which does not admit it."""
        for event in step.events:
            if isinstance(event, NodeLost):
                self._drains.pop(event.node_id, None)
        node_of = state.topology().node_of
        for action in step.actions:
            match action:
                case DrainNode():
                    self.num_reclaims += action.is_reclaim
                    self._drains[action.node_id] = action.pool
                    self._note_turn(action.node_id, step.now_s)
                case LabelNode():
                    self.num_labels += 1
                    self._drains.pop(action.node_id, None)
                    self._note_turn(action.node_id, step.now_s)
                case StartReplica():
                    node_id = node_of[action.device_id]
                    pool = self._drains.get(node_id)
                    is_job, is_part = isinstance(action.workload, TrainingJob), action.share is not None
                    if pool is not None and not admits(pool, is_job=is_job, is_part=is_part):
                        self._complain("drain-closes", f"{action.replica_id} starts on {node_id}, on its way to {pool}")

    def _note_turn(self, node_id: NodeId, now_s: float) -> None:
        turns = self._turned_at_s.setdefault(node_id, deque(maxlen=FLAPS))
        turns.append(now_s)
        if len(turns) == FLAPS and now_s - turns[0] < FLAPS_WITHIN_S:
            self._complain("labels-settle", f"{node_id} turned {FLAPS} times within {now_s - turns[0]:.1f} s")

    def check(self, state: PlatformState, now_s: float, settled_at_s: float) -> None:
        """Every invariant of pools over the present state, once all its effects have begun.

        `settled_at_s` is when the last fault is over.
        """
        self._check_labels(state)
        self._check_holders(state)
        self._check_drains(state, now_s)
        self._check_minimums(state, now_s, settled_at_s)

    def check_end(self, state: PlatformState) -> None:
        """When everything is over: every node that is up is known, in the pool that its label says."""
        up, known = set(self.machine.nodes), set(state.nodes)
        if up != known:
            self._complain("one-label", f"up are {sorted(up)}, in a pool are {sorted(known)}")
        self._check_labels(state)
        self._check_holders(state)

    def _check_labels(self, state: PlatformState) -> None:
        for node_id, node in state.nodes.items():
            known = self.machine.known_nodes[node_id]
            if known.pool != node.pool:
                self._complain("one-label", f"{node_id} is labelled for {known.pool}, the records say {node.pool}")
            if known.owner != node.owner:
                self._complain("one-label", f"{node_id} belongs to {known.owner}, the records say {node.owner}")

    def _check_holders(self, state: PlatformState) -> None:
        """In the records and at the machines: what is on a node is admitted by its label."""
        topology = state.topology()
        for record in state.live_records():
            is_job = isinstance(record, JobRecord)
            for replica in record.replicas:
                node_id, is_part = topology.node_of.get(replica.device_id), replica.share is not None
                if node_id is not None and not admits(topology.by_id[node_id].pool, is_job=is_job, is_part=is_part):
                    self._complain(
                        "label-admits", f"{replica.replica_id} holds {replica.device_id} of {topology.by_id[node_id]}"
                    )
        for process in self.machine.alive.values():
            pool = self.machine.known_nodes[process.node_id].pool
            is_job, is_part = isinstance(process.action.workload, TrainingJob), process.action.share is not None
            if not process.is_fenced and not admits(pool, is_job=is_job, is_part=is_part):
                self._complain("label-admits", f"{process.replica_id} lives on {process.device_id}, label {pool}")

    def _check_drains(self, state: PlatformState, now_s: float) -> None:
        for node_id, drain in state.drains.items():
            node = state.nodes.get(node_id)
            if node is None or node.pool == drain.pool:
                self._complain("drain-ends", f"{node_id} drains for {drain.pool} and is {node}")
            if drain.reclaim_since_s is not None and node_id not in self._reclaimed_since_s:
                self._reclaimed_since_s[node_id] = now_s
        for node_id, since_s in list(self._reclaimed_since_s.items()):
            known = state.drains.get(node_id)
            if known is None or known.reclaim_since_s is None:
                del self._reclaimed_since_s[node_id]
                continue
            slack_s = START_SLACK_S if self._is_quiet else DRAIN_SLACK_S
            if now_s - max(since_s, self._troubled_until_s) > _longest_grace_s(state) + slack_s:
                devices = {device.device_id for device in state.nodes[node_id].devices}
                who = [r.replica_id for held in state.live_records() for r in held.replicas if r.device_id in devices]
                self._complain("drain-ends", f"{node_id} is reclaimed since {since_s:.1f} s, held by {who}: {known}")

    def _check_minimums(self, state: PlatformState, now_s: float, settled_at_s: float) -> None:
        """No service lacks guaranteed replicas for too long while there are servers enough for all guarantees."""
        served = {name: record for name, record in state.services.live.items() if record.is_served}
        num_devices = sum(len(node.devices) for node in state.nodes.values() if self._reaches(node))
        guaranteed = {name: record.min_replicas for name, record in served.items()}
        is_feasible = sum(guaranteed.values()) <= num_devices
        key = (tuple(guaranteed.items()), tuple(node.node_id for node in state.nodes.values()))
        slack_s = _longest_grace_s(state) + START_SLACK_S if self._is_quiet else SHORT_FOR_EVER_S
        for name, record in served.items():
            is_short = _num_ready(record) < record.min_replicas
            if not is_feasible or not is_short or now_s < record.starts_at_s:
                self._short.pop(name, None)
                continue
            since_s, known = self._short.get(name, (now_s, key))
            since_s = since_s if known == key else now_s
            self._short[name] = (since_s, key)
            if now_s - max(since_s, settled_at_s, self._troubled_until_s) > slack_s:
                self._complain(
                    "minimum-kept",
                    f"{name} has {_num_ready(record)} of {record.min_replicas} guaranteed since {since_s:.1f} s, "
                    f"{num_devices} devices for {sum(guaranteed.values())}",
                )
        for name in [name for name in self._short if name not in served]:
            del self._short[name]


def _num_ready(record: ServiceRecord) -> int:
    return sum(replica.state == "READY" for replica in record.replicas)


def _longest_grace_s(state: PlatformState) -> float:
    jobs = [record.job.grace_s for record in state.jobs.values()]
    services = [record.service.grace_s for record in state.services.values()]
    return max((*jobs, *services), default=0.0)
