"""Pools in a quote: which devices jobs may use, which loans exist, and which of them a promise counts on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from springtide.core.decision import Plan, Schedule, Snapshot
from springtide.core.resources import NodeId, Topology, admits
from springtide.core.status.quote import CountedOn
from springtide.core.workload import WorkloadId


class PoolContext:
    """The devices that jobs may hold under a plan's labels; in a cluster without pools, all of them.

    `num_devices` counts them, `num_own` the devices of nodes that are not inference's own; `servers` holds the number
    of devices of each inference server on loan to training.
    """

    def __init__(self, snapshot: Snapshot, plan: Plan) -> None:
        self.snapshot = snapshot
        cluster = snapshot.cluster
        labels = {node.node_id: node.pool for node in cluster.nodes}
        labels |= {node_id: wish.pool for node_id, wish in plan.pools.items() if node_id in labels}
        self.nodes = {node.node_id for node in cluster.nodes if admits(labels[node.node_id], is_job=True)}
        self.num_devices = sum(len(node.devices) for node in cluster.nodes if node.node_id in self.nodes)
        loaned = [node for node in cluster.nodes if node.node_id in self.nodes and node.owner == "inference"]
        self.servers = [len(node.devices) for node in loaned]
        self.num_own = sum(len(node.devices) for node in cluster.nodes if node.owner != "inference")

    @property
    def has_pools(self) -> bool:
        """Whether any node is labelled for one kind of workload."""
        return self.snapshot.cluster.has_pools

    def num_workers(self, devices_each: int) -> int:
        """How many workers of so many devices of one node there is room for."""
        nodes = [node for node in self.snapshot.cluster.nodes if node.node_id in self.nodes]
        return sum(len(node.devices) // devices_each for node in nodes)

    def num_free(self) -> int:
        """How many of the devices are held by no workload."""
        held = dict.fromkeys(at for given in self.snapshot.allocations.values() for at in given.device_ids)
        return self.num_devices - sum(node_id in self.nodes for node_id in _nodes_of(self.snapshot.cluster, held))

    def holders(self) -> list[str]:
        """Which workloads hold jobs' devices, as text: "2 loaned to 'sentiment'" (services on training's own nodes),
        "1 held by 'fit'", or "2 x 0.3 held by 'fit'" for shares.
        """
        snapshot, cluster = self.snapshot, self.snapshot.cluster
        names = {view.job.job_id: view.job.name for view in snapshot.jobs}
        services = {view.service.service_id: view.service.name for view in snapshot.services}
        loaned_to, held = dict[WorkloadId, int](), dict[WorkloadId, int]()
        for who, given in snapshot.allocations.items():
            for node_id in _nodes_of(cluster, given.device_ids):
                if who in services and cluster.by_id[node_id].owner == "training":
                    loaned_to[who] = loaned_to.get(who, 0) + 1
                elif node_id in self.nodes:
                    held[who] = held.get(who, 0) + 1
        texts = [f"{self._amount(who, count)} loaned to '{services[who]}'" for who, count in _largest(loaned_to)]
        names |= services
        return texts + [f"{self._amount(who, count)} held by '{names.get(who, who)}'" for who, count in _largest(held)]

    def _amount(self, who: WorkloadId, count: int) -> str:
        share = self.snapshot.allocations[who].share
        if share is None:
            return str(count)
        return f"{share.request:g}" if count == 1 else f"{count} x {share.request:g}"


def counted_on(pools: PoolContext, plan: Plan, until_s: float) -> tuple[CountedOn, ...]:
    """The capacity that promises count on until `until_s`, interval by interval, in seconds from the snapshot's now."""
    now_s = pools.snapshot.now_s
    found: list[CountedOn] = []
    for index, step in enumerate(plan.capacity):
        ends_s = plan.capacity[index + 1].from_s if index + 1 < len(plan.capacity) else math.inf
        if ends_s <= now_s or step.from_s >= until_s:
            continue
        count = CountedOn(
            num_devices=step.num_devices,
            num_loaned=max(0, step.num_devices - pools.num_own),
            until_s=None if ends_s == math.inf else ends_s - now_s,
        )
        if found and (found[-1].num_devices, found[-1].num_loaned) == (count.num_devices, count.num_loaned):
            found.pop()
        found.append(count)
    return tuple(found)


def is_counting_on_loans(pools: PoolContext, plan: Plan, schedule: Schedule) -> bool:
    """Whether the promises of a plan ever need more than the jobs' own devices during the schedule."""
    promised: list[Schedule] = [runs for runs in (plan.future[job_id] for job_id in plan.future) if runs]
    moments = {run.start_s for runs in (*promised, schedule) for run in runs}
    begin_s, end_s = schedule[0].start_s, schedule[-1].end_s
    return any(_used(promised, moment_s) > pools.num_own for moment_s in sorted(moments) if begin_s <= moment_s < end_s)


class CountedLoans(NamedTuple):
    """The loans that a promise counts on. `until` is the forecast time of day at which they end (empty: never)."""

    what: str
    until: str = ""

    def text(self) -> str:
        """For people: '2 loaned servers until 07:10 (forecast)'."""
        return f"{self.what} until {self.until} (forecast)" if self.until else self.what


def loans_counted(pools: PoolContext, counts_on: tuple[CountedOn, ...]) -> CountedLoans | None:
    """The first loans that promises count on, and until when; None if they count on none."""
    peak = next((count for count in counts_on if count.num_loaned), None)
    if peak is None:
        return None
    what = _loaned(pools, peak.num_loaned)
    until_s = peak.until_s
    for count in counts_on[counts_on.index(peak) + 1 :]:
        if count.num_loaned < peak.num_loaned:
            break
        until_s = count.until_s
    if until_s is None:
        return CountedLoans(what)
    snapshot = pools.snapshot
    return CountedLoans(what, snapshot.tide.clock(snapshot.now_s + until_s))


def _loaned(pools: PoolContext, num_devices: int) -> str:
    size = max((len(node.devices) for node in pools.snapshot.cluster.nodes if node.owner == "inference"), default=1)
    if num_devices % size:
        return "1 loaned device" if num_devices == 1 else f"{num_devices} loaned devices"
    count = num_devices // size
    return "1 loaned server" if count == 1 else f"{count} loaned servers"


def _used(schedules: Iterable[Schedule], moment_s: float) -> int:
    return sum(run.num_devices for runs in schedules for run in runs if run.start_s <= moment_s < run.end_s)


def _nodes_of(cluster: Topology, device_ids: Iterable[str]) -> list[NodeId]:
    return [cluster.node_of[at] for at in device_ids if at in cluster.node_of]  # type: ignore[index]


def _largest(counts: dict[WorkloadId, int]) -> list[tuple[WorkloadId, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])
