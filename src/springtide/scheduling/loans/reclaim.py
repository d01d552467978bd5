"""FaPES-Manager and the two baselines it is compared with, and the choice of the servers whose jobs lose least.

FaPES (SoCC'24), section 3.4 and Figures 5 and 6; the baselines are those of section 7.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec

from springtide.core.decision import Capacity, JobView, Relabel
from springtide.core.resources import NodeId
from springtide.core.workload import WorkloadId
from springtide.scheduling.loans.pools import LabelVerdict, Need, NodeView, PoolState
from springtide.solvers.reclaim import Server, Victim, reclaim_by_cost, reclaim_by_gain


class Dedicated(msgspec.Struct, frozen=True, kw_only=True):
    """Labels never change: every server stays in the pool that it is labelled for (FaPES, section 7.1)."""

    summary: ClassVar[str] = "Two pools of fixed size, without loans (FaPES, 7.1)."

    def choose(self, pools: PoolState) -> LabelVerdict:
        """No node changes its label."""
        del pools
        return LabelVerdict(growth="maximum")

    def capacity(self, pools: PoolState, verdict: LabelVerdict) -> tuple[Capacity, ...]:
        """Empty: the present capacity, for good."""
        del pools, verdict
        return ()


class OneWay(msgspec.Struct, frozen=True, kw_only=True):
    """Idle inference servers are loaned, and only those are taken back, in the order in which they joined."""

    summary: ClassVar[str] = "Loans of which only what was loaned is taken back (FaPES, 7.1)."

    def choose(self, pools: PoolState) -> LabelVerdict:
        """Loan what is idle, take back what minimums need."""
        return _choose_labels(pools, [node for node in pools.nodes if node.owner == "inference"], _enough)

    def capacity(self, pools: PoolState, verdict: LabelVerdict) -> tuple[Capacity, ...]:
        """Empty: the present capacity, for good."""
        del pools, verdict
        return ()


class TwoWay(msgspec.Struct, frozen=True, kw_only=True):
    """FaPES-Manager: minimums may take any training server, those with the best reclaim gain and cost (section 3.4)."""

    summary: ClassVar[str] = "Loans with any server taken back by gain and cost (FaPES-Manager)."

    def choose(self, pools: PoolState) -> LabelVerdict:
        """Loan what is idle, take back what minimums need."""
        return _choose_labels(pools, pools.nodes, _by_gain)

    def capacity(self, pools: PoolState, verdict: LabelVerdict) -> tuple[Capacity, ...]:
        """Empty: the present capacity, for good."""
        del pools, verdict
        return ()


def _choose_labels(
    pools: PoolState,
    reclaimable: Sequence[NodeView],
    pick: Callable[[Sequence[NodeView], int], list[NodeView]],
) -> LabelVerdict:
    """Figure 5: a loan when every service has its maximum, a reclaim when a minimum finds no device."""
    may_serve = sum(node.num_devices for node in pools.nodes if node.pool != "training")
    missing = pools.required - may_serve
    if missing <= 0:
        return LabelVerdict(pools=_loans(pools), growth="maximum")
    chosen = _under_way(pools, missing)
    short = missing - sum(node.num_devices for node in chosen)
    if short > 0:
        taken = {node.node_id for node in chosen}
        open_ = [node for node in reclaimable if node.pool == "training" and node.node_id not in taken]
        # What is free is labelled at once: if that is enough, no workload has to leave another node.
        chosen = _enough(sorted([*chosen, *pick(open_, short)], key=lambda node: node.num_training > 0), missing)
    chosen = _needed(chosen, missing)
    reason = f"taken back for {needy_services_text(pools)}"
    labels = {node.node_id: Relabel(pool="inference", reason=reason, cost_s=float(len(node.jobs))) for node in chosen}
    if not any(node.jobs for node in chosen):
        # They serve from now on; a smaller server may be one too many then.
        labels |= _loans(pools, sum(node.num_devices for node in chosen))
    return LabelVerdict(pools=labels, reclaimed=frozenset(node.node_id for node in chosen), growth="maximum")


def _under_way(pools: PoolState, num_devices: int) -> list[NodeView]:
    """The nodes that are already leaving training and are still needed, those with the fewest jobs' devices first."""
    coming = [node for node in pools.heading("inference") if node.pool == "training"]
    return _enough(sorted(coming, key=lambda node: node.num_training), num_devices)


def _enough(nodes: Sequence[NodeView], num_devices: int) -> list[NodeView]:
    """The first nodes that have so many devices together; all of them if they do not suffice."""
    chosen: list[NodeView] = []
    for node in nodes:
        if num_devices <= 0:
            break
        chosen.append(node)
        num_devices -= node.num_devices
    return chosen


def _needed(nodes: Sequence[NodeView], num_devices: int) -> list[NodeView]:
    """The nodes without surplus ones: where nodes differ in size, fewer of the chosen ones may be enough."""
    surplus = sum(node.num_devices for node in nodes) - num_devices
    spared: set[NodeId] = set()
    for node in sorted(nodes, key=lambda node: (-node.num_training, node.num_devices)):
        if node.num_devices <= surplus:
            surplus -= node.num_devices
            spared.add(node.node_id)
    return [node for node in nodes if node.node_id not in spared]


def _loans(pools: PoolState, num_coming: int = 0) -> dict[NodeId, Relabel]:
    """Loans of servers that services do not need even at their maximum; the replicas there move to other servers first.

    Loans under way go on; then the emptiest servers are chosen, of these the ones that training owns, then the last
    ones, since services fill servers from the first on. `num_coming` more devices serve from now on.
    """
    mine = [(place, node) for place, node in enumerate(pools.nodes) if node.pool == "inference" and not node.jobs]
    surplus = sum(node.num_devices for node in pools.nodes if node.pool == "inference") + num_coming - pools.maximum
    mine.sort(key=lambda at: (at[1].heading != "training", at[1].num_serving, at[1].owner != "training", -at[0]))
    loans: dict[NodeId, Relabel] = {}
    for _, node in mine:
        if node.num_devices <= surplus:
            surplus -= node.num_devices
            loans[node.node_id] = Relabel(pool="training", reason="every service has its maximum without it")
    return loans


def _by_gain(nodes: Sequence[NodeView], num_devices: int) -> list[NodeView]:
    servers, _ = servers_of(nodes)
    return [nodes[number] for number in reclaim_by_gain(servers, num_devices)]


def needy_services_text(pools: PoolState) -> str:
    """Which services have less than their minimum, in order of priority, as text."""
    short = [need for need in pools.needs if need.view.num_ready + need.view.num_starting < need.minimum]
    if not short:
        return "guaranteed minimums"
    first = _shortfall_text(short[0])
    num_more = len(short) - 1
    return first + (f" and {num_more} more service{'s' if num_more > 1 else ''}" if num_more else "")


def _shortfall_text(need: Need) -> str:
    have = need.view.num_ready + need.view.num_starting
    return f"'{need.view.service.name}', which has {have} of its guaranteed {need.minimum} replicas"


# --- victims by their losses ----------------------------------------------------------------------------------------


def servers_of(nodes: Sequence[NodeView]) -> tuple[list[Server], list[WorkloadId]]:
    """The nodes as plain numbers for the solver, and the job of each number."""
    jobs = list(dict.fromkeys(job_id for node in nodes for job_id in node.jobs))
    number_of = {job_id: number for number, job_id in enumerate(jobs)}
    servers = [
        Server(num_devices=node.num_devices, jobs={number_of[job_id]: count for job_id, count in node.jobs.items()})
        for node in nodes
    ]
    return servers, jobs


def choose_victims(
    pools: PoolState, candidates: Sequence[NodeView], num_devices: int, victim_of: Callable[[JobView], Victim]
) -> tuple[list[NodeView], float]:
    """The candidates with `num_devices` devices whose jobs lose least (in the unit of `victim_of`), and that loss.

    A job that has ended loses nothing. All candidates if they are not enough.
    """
    servers, jobs = servers_of(candidates)
    known = pools.job_of
    victims = [victim_of(known[job_id]) if job_id in known else Victim(stop_cost=0.0) for job_id in jobs]
    choice = reclaim_by_cost(servers, victims, num_devices)
    return [candidates[number] for number in choice.servers], choice.cost
