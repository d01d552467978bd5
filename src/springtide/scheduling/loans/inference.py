"""How many replicas every service gets on the nodes that serve, and on which devices: FaPES, section 3.3 and Figure 5.

Guaranteed minimums come first, in order of deployment; then services grow, and shrink where a minimum is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from springtide.core.decision import EMPTY, PoolAllocation
from springtide.core.resources import DeviceId, NodeId, Pool
from springtide.core.workload import WorkloadId
from springtide.scheduling.loans.pools import Growth, LabelVerdict, Need, NodeView, PoolState
from springtide.scheduling.placement.allocation_ledger import NUM_NAMED

# The kinds of slots, the best first: nothing has to happen before a replica can start; a replica has to leave the
# device; jobs have to leave its server; a job has to give it up on a shared server that inference owns, or on another.
FREE, LEAVING, COMING, LENT, TAKEN = range(5)


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A device that a replica may hold under a verdict. `cost` is the loss of the job that has to give it up."""

    device_id: DeviceId
    node_id: NodeId
    kind: int
    is_shared: bool = False
    cost: float = 0.0


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What services hold, and why."""

    allocations: Mapping[WorkloadId, PoolAllocation] = EMPTY
    reasons: Mapping[WorkloadId, str] = EMPTY
    devices: frozenset[DeviceId] = frozenset()


class Holding(msgspec.Struct, kw_only=True):
    """The replicas of a service while a plan is made; `count` is how many it is to have.

    `stays` are the devices of live replicas that may stay, `leaves` those of live replicas that have to leave their
    node, both in the order of the replicas. On `starts` new replicas are to start.
    """

    need: Need
    stays: list[DeviceId]
    leaves: list[DeviceId]
    count: int = 0
    starts: list[DeviceId] = msgspec.field(default_factory=list)

    @property
    def num_live(self) -> int:
        """How many replicas run or start."""
        return len(self.stays) + len(self.leaves)


def wanted_label(node: NodeView, verdict: LabelVerdict) -> Pool:
    """The label that a node is to have."""
    relabel = verdict.pools.get(node.node_id)
    return relabel.pool if relabel is not None else node.pool


def serve(pools: PoolState, verdict: LabelVerdict) -> Served:
    """Give every service its replicas: live ones stay where they can, new ones fill one server after the other."""
    if not pools.needs:
        return Served()
    slots = _slots(pools, verdict)
    kind_of = {slot.device_id: slot for slot in slots}
    holdings = [_holding(pools, need, kind_of) for need in pools.needs]
    _count(holdings, slots, verdict)
    _shrink(holdings, pools, kind_of)
    _start(holdings, slots, pools)
    allocations: dict[WorkloadId, PoolAllocation] = {}
    devices: set[DeviceId] = set()
    for holding in holdings:
        chosen = (*holding.stays, *holding.starts, *holding.leaves)
        devices.update(chosen)
        if chosen:
            held = pools.snapshot.allocations.get(holding.need.service_id)
            is_same = held is not None and held.device_ids == chosen
            allocations[holding.need.service_id] = held if is_same and held else PoolAllocation(device_ids=chosen)
    return Served(
        allocations=allocations, reasons=_reasons(holdings, pools, verdict.growth, kind_of), devices=frozenset(devices)
    )


# --- slots ----------------------------------------------------------------------------------------------------------


def _slots(pools: PoolState, verdict: LabelVerdict) -> list[Slot]:
    """Every device that a replica may hold, the best first; among equals, those of the fullest server."""
    cluster = pools.snapshot.cluster
    job_at = {
        device_id: (view.job.job_id, rank)
        for view in pools.snapshot.jobs
        if view.job.job_id in pools.snapshot.allocations
        for rank, device_id in enumerate(pools.snapshot.allocations[view.job.job_id].device_ids)
    }
    live = {device_id for need in pools.needs for device_id in _live(pools, need)}
    held = {device_id for allocation in pools.snapshot.allocations.values() for device_id in allocation.device_ids}
    ranked: list[tuple[tuple[float, ...], int, Slot]] = []
    for place, node in enumerate(pools.nodes):
        label = wanted_label(node, verdict)
        if label == "training":
            continue
        is_moving = node.pool != label and label == "inference"
        is_reclaimed = node.node_id in verdict.reclaimed
        mine: list[tuple[tuple[float, ...], Slot]] = []
        for device in cluster.by_id[node.node_id].devices:
            job = job_at.get(device.device_id)
            cost, rank = 0.0, 0
            if label == "shared" and job is not None:
                kind = LENT if node.owner == "inference" else TAKEN
                cost, rank = verdict.job_costs.get(job[0], 1.0), job[1]
            elif is_moving and node.jobs and not (node.pool == "shared" and job is None):
                # The label changes when the last job has left. Unless jobs have to leave, that is not waited for.
                if not is_reclaimed:
                    continue
                kind = COMING
            elif is_moving and job is not None and not is_reclaimed:
                continue
            elif device.device_id in held and device.device_id not in live:
                kind = LEAVING
            else:
                kind = COMING if job is not None else FREE
            slot = Slot(
                device_id=device.device_id,
                node_id=node.node_id,
                kind=kind,
                is_shared=label == "shared",
                cost=cost,
            )
            mine.append(((float(kind), float(slot.is_shared), cost, -float(rank)), slot))
        num_free = sum(slot.kind in (FREE, LEAVING) and slot.device_id not in live for _, slot in mine)
        for (kind_key, shared_key, cost_key, rank_key), slot in mine:
            fill = 0.0 if slot.kind in (LENT, TAKEN) else float(num_free)
            ranked.append(((kind_key, shared_key, cost_key, fill, float(place), rank_key), len(ranked), slot))
    ranked.sort(key=lambda item: item[:2])
    return [slot for _, _, slot in ranked]


def _live(pools: PoolState, need: Need) -> Sequence[DeviceId]:
    """The devices of the replicas that run or start; stopping replicas come last in an allocation."""
    held = pools.snapshot.allocations.get(need.service_id)
    return held.device_ids[: need.view.num_ready + need.view.num_starting] if held is not None else ()


def _holding(pools: PoolState, need: Need, kind_of: Mapping[DeviceId, Slot]) -> Holding:
    alive = pools.snapshot.cluster.device_set
    live = [device_id for device_id in _live(pools, need) if device_id in alive]
    return Holding(
        need=need,
        stays=[device_id for device_id in live if device_id in kind_of],
        leaves=[device_id for device_id in live if device_id not in kind_of],
    )


# --- how many -------------------------------------------------------------------------------------------------------


def _count(holdings: Sequence[Holding], slots: Sequence[Slot], verdict: LabelVerdict) -> None:
    """Set the counts: minimums first, on all slots; then growth, on fewer of them."""
    dedicated = sum(not slot.is_shared for slot in slots)
    unheld = dedicated + sum(slot.is_shared and slot.kind in (FREE, LEAVING) for slot in slots)
    lent = unheld + sum(slot.kind == LENT for slot in slots)
    used = _raise(holdings, [holding.need.minimum for holding in holdings], 0, len(slots))
    if verdict.growth == "maximum":
        # Up to the maximum only on nodes for services alone; by load also on idle devices of shared nodes.
        used = _raise(holdings, [holding.need.maximum for holding in holdings], used, dedicated)
        _raise(holdings, [holding.need.wanted for holding in holdings], used, unheld)
    else:
        # Surplus replicas of a service whose load went down make room for others before a server is reclaimed.
        asked = [min(holding.need.maximum, holding.need.view.needed_replicas) for holding in holdings]
        used = _raise(holdings, asked, used, lent)
        _raise(holdings, [holding.need.wanted for holding in holdings], used, lent)
    for holding in holdings:
        # A replica whose server is to train stays there until there is another place.
        needed = min(holding.need.wanted, holding.num_live) - holding.count
        if needed > 0 and holding.leaves:
            holding.count += min(needed, len(holding.leaves))


def _raise(holdings: Iterable[Holding], targets: Iterable[int], used: int, supply: int) -> int:
    for holding, target in zip(holdings, targets, strict=True):
        more = max(0, min(target - holding.count, supply - used))
        holding.count += more
        used += more
    return used


# --- where ----------------------------------------------------------------------------------------------------------


def _shrink(holdings: Sequence[Holding], pools: PoolState, kind_of: Mapping[DeviceId, Slot]) -> None:
    """Give up surplus replicas: on shared servers first, then where that empties a server soonest, for a loan."""
    place = {node.node_id: number for number, node in enumerate(pools.nodes)}
    left: dict[NodeId, int] = defaultdict(int)
    for holding in holdings:
        for device_id in holding.stays:
            left[kind_of[device_id].node_id] += 1

    def rank(device_id: DeviceId) -> tuple[bool, int, int]:
        slot = kind_of[device_id]
        return (not slot.is_shared, left[slot.node_id], -place[slot.node_id])

    for holding in holdings:
        while len(holding.stays) > holding.count:
            # On one server, the last one goes first: it is the newest.
            given_up = min(reversed(holding.stays), key=rank)
            holding.stays.remove(given_up)
            left[kind_of[given_up].node_id] -= 1


def _start(holdings: Sequence[Holding], slots: Sequence[Slot], pools: PoolState) -> None:
    """Choose devices for missing replicas, minimums first. A replica that has to leave its server stays until its
    successor runs elsewhere."""
    taken = {device_id for holding in holdings for device_id in holding.stays}
    dropped = {device_id for need in pools.needs for device_id in _live(pools, need)} - taken
    open_slots = [slot for slot in slots if slot.device_id not in taken]
    # A device that a service gives up in this plan is not free yet.
    open_slots.sort(key=lambda slot: max(slot.kind, LEAVING) if slot.device_id in dropped else slot.kind)
    waiting = iter(open_slots)
    room = len(open_slots)
    given: dict[WorkloadId, list[Slot]] = {holding.need.service_id: [] for holding in holdings}
    for only_minimum in (True, False):
        for holding in holdings:
            mine = given[holding.need.service_id]
            target = min(holding.count, holding.need.minimum) if only_minimum else holding.count
            for _ in range(min(room, target - len(holding.stays) - len(mine))):
                mine.append(next(waiting))
                room -= 1
    for holding in holdings:
        mine = given[holding.need.service_id]
        starting, most = holding.need.view.num_starting, holding.need.maximum
        if holding.leaves:
            num_kept = min(len(holding.leaves), max(0, holding.count - len(holding.stays) + starting))
            spare = max(0, most - len(holding.stays) - num_kept)
            if not spare and not starting and mine and mine[0].kind == FREE and mine[0].device_id not in dropped:
                # The maximum allows no replica more than now: one has to stop before its successor starts.
                spare = 1
            mine = mine[:spare]
        holding.starts = [slot.device_id for slot in mine]
        num_kept = min(holding.count - len(holding.stays) + starting, most - len(holding.stays) - len(holding.starts))
        holding.leaves = holding.leaves[: max(0, num_kept)]


# --- why ------------------------------------------------------------------------------------------------------------


def _reasons(
    holdings: Sequence[Holding], pools: PoolState, growth: Growth, kind_of: Mapping[DeviceId, Slot]
) -> dict[WorkloadId, str]:
    """One sentence for each service that changes or holds less than it should."""
    needy = [holding for holding in holdings if _before(holding) < min(holding.count, holding.need.minimum)]
    needy = needy or [holding for holding in holdings if _before(holding) < holding.count]
    reasons: dict[WorkloadId, str] = {}
    for holding in holdings:
        before = _before(holding)
        is_short = holding.count < holding.need.wanted
        if before != holding.count or is_short or holding.starts or holding.leaves:
            others = [f"'{other.need.view.service.name}'" for other in needy if other is not holding]
            reasons[holding.need.service_id] = _reason(holding, growth, others, pools, kind_of)
    return reasons


def _before(holding: Holding) -> int:
    return holding.need.view.num_ready + holding.need.view.num_starting


def _reason(
    holding: Holding, growth: Growth, others: Sequence[str], pools: PoolState, kind_of: Mapping[DeviceId, Slot]
) -> str:
    need, before, count = holding.need, _before(holding), holding.count
    coming = list(dict.fromkeys(kind_of[at].node_id for at in holding.starts if kind_of[at].kind >= COMING))
    waits = f"; waits for {names_text(coming)} to be given back by training" if coming else ""
    if count < need.minimum:
        return f"only {count} of its guaranteed {replicas_text(need.minimum)} fit on what may serve{waits}"
    if holding.leaves and count <= before:
        nodes = dict.fromkeys(pools.snapshot.cluster.node_of[device_id] for device_id in holding.leaves)
        return f"moves off {names_text(list(nodes))}, which is to train"
    if count < before:
        if count == need.maximum:
            return f"its owner allows {count}"
        if others and (count < need.wanted or growth == "maximum"):
            return f"gives way to {names_text(others)}"
        return _load(need) if count == need.wanted and growth == "load" else "fewer devices serve"
    if count <= need.minimum:
        return f"its guaranteed minimum of {replicas_text(need.minimum)}{waits}"
    if count <= need.wanted:
        return f"{_load(need)}{waits}"
    return f"idle serving devices: it has {count} of at most {need.maximum}{waits}"


def _load(need: Need) -> str:
    view = need.view
    if view.in_flight + view.queued == 0:
        return f"nobody has asked for {view.idle_s:.0f} s"
    return f"its load asks for {need.wanted} ({view.in_flight} in flight, {view.queued} queued)"


def replicas_text(count: int) -> str:
    """A number of replicas with its noun."""
    return "1 replica" if count == 1 else f"{count} replicas"


def names_text(names: Sequence[str]) -> str:
    """The first few names and how many more there are."""
    num_more = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {num_more} more" if num_more > 0 else "")
