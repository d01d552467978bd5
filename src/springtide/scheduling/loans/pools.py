"""The contract of a strategy of loans: the two pools as it sees them, and the verdict that it returns.

A strategy decides which nodes serve and which train; how many replicas there are and which jobs run is decided
elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal, Protocol

import msgspec
from msgspec.structs import replace

from springtide.core.decision import EMPTY, Capacity, Drain, JobView, Relabel, ServiceView, Snapshot
from springtide.core.resources import NodeId, Pool
from springtide.core.workload import WorkloadId
from springtide.perf.tide import Forecasters
from springtide.scheduling.replicas import SHRINK_BELOW_FRACTION, wanted_replicas

# How services grow beyond what they need: up to their maximum on idle devices, or not.
Growth = Literal["load", "maximum"]


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node: its present label, the pool that owns it, the drain under way, and how many devices workloads hold on it.

    `jobs` and `replicas` count the devices of each job and each service there, including those being given back.
    """

    node_id: NodeId
    pool: Pool
    owner: Pool
    num_devices: int
    isolates_devices: bool = False
    drain: Drain | None = None
    jobs: Mapping[WorkloadId, int] = EMPTY
    replicas: Mapping[WorkloadId, int] = EMPTY

    @property
    def heading(self) -> Pool:
        """The label that it will have: that of its drain, or the present one."""
        return self.drain.pool if self.drain is not None else self.pool

    @property
    def is_reclaimed(self) -> bool:
        """Whether jobs have to leave it."""
        return self.drain is not None and self.drain.reclaim_since_s is not None

    @property
    def num_training(self) -> int:
        """How many devices jobs hold on it."""
        return sum(self.jobs.values())

    @property
    def num_serving(self) -> int:
        """How many devices replicas hold on it."""
        return sum(self.replicas.values())

    @property
    def is_idle(self) -> bool:
        """Whether no workload holds a device on it."""
        return not self.jobs and not self.replicas


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas (devices) a service is guaranteed, wants for its load (at least as many), and takes at most."""

    view: ServiceView
    minimum: int
    wanted: int
    maximum: int

    @property
    def service_id(self) -> WorkloadId:
        """The service's id."""
        return self.view.service.service_id


class PoolState(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The nodes in the order in which they joined, and the services in order of priority (the earlier the higher).

    `snapshot` has everything else: the tide, the clock, jobs with their checkpoints and deadlines. `forecasters` only
    save time; their forecasts do not depend on earlier calls.
    """

    snapshot: Snapshot
    nodes: tuple[NodeView, ...]
    needs: tuple[Need, ...]
    forecasters: Forecasters = msgspec.field(default_factory=Forecasters)

    @property
    def now_s(self) -> float:
        """The present moment."""
        return self.snapshot.now_s

    @cached_property
    def by_id(self) -> dict[NodeId, NodeView]:
        """Every node by its id."""
        return {node.node_id: node for node in self.nodes}

    @cached_property
    def job_of(self) -> dict[WorkloadId, JobView]:
        """Every unfinished job by its id."""
        return {view.job.job_id: view for view in self.snapshot.jobs}

    @cached_property
    def required(self) -> int:
        """The devices that the guaranteed minimums need."""
        return sum(need.minimum for need in self.needs)

    @cached_property
    def wanted(self) -> int:
        """The devices that the minimums and the load need."""
        return sum(need.wanted for need in self.needs)

    @cached_property
    def maximum(self) -> int:
        """The devices that the services could use."""
        return sum(need.maximum for need in self.needs)

    def heading(self, *pools: Pool) -> tuple[NodeView, ...]:
        """The nodes that will have one of these labels: by their drain, or because they have it and keep it."""
        return tuple(node for node in self.nodes if node.heading in pools)


class LabelVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Which nodes are to change their label, and how.

    `pools` has every node whose label is to change, also those under way; a node that is left out keeps its label, and
    its drain is called off. Jobs have to leave the nodes in `reclaimed` now; on other nodes that are to serve they stay
    until they end, and no job starts there. Replicas leave a node that is to train by themselves. A node with
    `isolates_devices` that becomes "shared" is loaned in part: services take the devices that they need, jobs the rest.

    `job_costs` is what each job loses by giving up a device, for the choice between the jobs on a shared node; a job
    that is not in it counts as 1. `revisit_at_s` is when the verdict may change even if nothing happens until then.
    """

    pools: Mapping[NodeId, Relabel] = EMPTY
    reclaimed: frozenset[NodeId] = frozenset()
    growth: Growth = "load"
    job_costs: Mapping[WorkloadId, float] = EMPTY
    revisit_at_s: float | None = None


class Strategy(Protocol):
    """Decides which nodes serve and which train. Pure: its only memory is the snapshot (drains, tide)."""

    def choose(self, pools: PoolState) -> LabelVerdict:
        """Return the labels that nodes are to change to.

        While a verdict is being carried out (drains begin, nodes are labelled, devices are given back), the labels must
        stay the same: a node under way stays chosen as long as it is needed.
        """
        ...

    def capacity(self, pools: PoolState, verdict: LabelVerdict) -> tuple[Capacity, ...]:
        """How many devices training can count on over time; empty: what it has now, for good."""
        ...


def pool_state(snapshot: Snapshot, forecasters: Forecasters | None = None) -> PoolState:
    """Look at a snapshot by nodes."""
    cluster = snapshot.cluster
    job_ids = {view.job.job_id for view in snapshot.jobs}
    service_ids = {view.service.service_id for view in snapshot.services}
    jobs: dict[NodeId, dict[WorkloadId, int]] = {}
    replicas: dict[NodeId, dict[WorkloadId, int]] = {}
    for workload_id, held in snapshot.allocations.items():
        for device_id in held.device_ids:
            node_id = cluster.node_of.get(device_id)
            if node_id is None:
                continue
            is_replica = workload_id in service_ids
            if not is_replica and workload_id not in job_ids:
                # A workload that ended, was paused or removed gives its devices back; its place tells what kind it was.
                is_replica = cluster.by_id[node_id].pool == "inference"
            mine = (replicas if is_replica else jobs).setdefault(node_id, {})
            mine[workload_id] = mine.get(workload_id, 0) + 1
    nodes = tuple(
        NodeView(
            node_id=node.node_id,
            pool=node.pool,
            owner=node.owner,
            num_devices=len(node.devices),
            isolates_devices=node.isolates_devices,
            drain=snapshot.drains.get(node.node_id),
            jobs=jobs.get(node.node_id, EMPTY),
            replicas=replicas.get(node.node_id, EMPTY),
        )
        for node in cluster.nodes
    )
    return PoolState(
        snapshot=snapshot,
        nodes=nodes,
        needs=tuple(_need(view, nodes) for view in snapshot.services),
        forecasters=forecasters or Forecasters(),
    )


def _need(view: ServiceView, nodes: Sequence[NodeView]) -> Need:
    minimum, load = min(view.min_replicas, view.max_replicas), view
    if view.num_starting:
        # A replica that moves runs twice until its successor is ready: that is not what the load was found to need.
        who = view.service.service_id
        leaving = sum(node.replicas.get(who, 0) for node in nodes if node.drain and node.heading == "training")
        load = replace(view, num_ready=view.num_ready - min(leaving, view.num_starting, view.num_ready))
    return Need(
        view=view,
        minimum=minimum,
        wanted=max(minimum, min(view.max_replicas, _wanted(load))),
        maximum=view.max_replicas,
    )


def _wanted(view: ServiceView) -> int:
    """What the load asks for, the same while replicas start and stop on their way to it.

    A replica that moves runs twice for a while, so that more run than are wanted for good.
    """
    wanted = wanted_replicas(view)
    demand = view.in_flight + view.queued
    service = view.service
    if demand == 0:
        # While no replica is ready, starting ones are wanted; beside a ready one without requests they are not.
        return 0 if view.num_ready and view.idle_s >= service.idle_s else wanted
    running = view.num_ready + view.num_starting
    slack = math.ceil(demand / (service.target_in_flight * SHRINK_BELOW_FRACTION))
    wanted = max(wanted, min(running, slack))
    is_slow = service.slo_s is not None and (view.latency_p99_s or 0.0) > service.slo_s
    return max(wanted, view.num_ready + 1) if is_slow and view.num_starting and demand > view.num_ready else wanted
