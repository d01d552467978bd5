"""What people are told about places on shared devices: what a waiting workload lacks, and beside whom one is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from springtide.core.resources import DeviceId
from springtide.core.shares import MAX_LIMIT, TOLERANCE, Share
from springtide.scheduling.sharing.demand import demand_of
from springtide.scheduling.sharing.ledger import ShareLedger

_NUM_NAMED = 4


def lacks_text(
    ledger: ShareLedger,
    share: Share,
    who: str,
    *,
    beside: Sequence[DeviceId] = (),
    closed: Sequence[DeviceId] = (),
    pool: str = "",
) -> str:
    """What a waiting workload lacks: request, memory, or what the limits on a device may add up to. `who` is it with
    its verb, `beside` are the devices that it is on already, `closed` idle ones that belong to `pool`."""
    is_open_to_it = ledger.is_usable.copy()
    is_open_to_it[[ledger.at[device_id] for device_id in (*beside, *closed)]] = False
    usable = np.flatnonzero(is_open_to_it)
    memory = f" and {share.memory_mb} MB" if share.memory_mb else ""
    asks = f"{who} {share.request:g}{memory} of a device"
    if not len(usable):
        causes = [] if ledger.is_usable.all() else ["others hold them as a whole"]
        causes += ["it is on them already"] if beside else []
        causes += [f"they belong to {pool}"] if closed else []
        return f"{asks}, and none of the {len(ledger.at)} is open to it: {', or '.join(causes)}"
    requests, limits = ledger.sums_on(usable)
    fits = (requests + share.request <= 1.0 + TOLERANCE) & (limits + share.request <= MAX_LIMIT + TOLERANCE)
    fits &= ledger.free_memory_mb[usable] >= share.memory_mb
    if fits.any():
        best = int(np.where(fits, limits, np.inf).argmin())
        left, name = MAX_LIMIT - float(limits[best]), ledger.device_ids[usable[best]]
        return f"{asks} and up to {share.limit:g}, and on {name} there is a limit of {left:.2g} left: a lower one fits"
    most = max(0.0, 1.0 - float(requests.min()))
    if most + TOLERANCE >= share.request:
        return f"{asks}, and what is left of the devices has too little memory"
    return f"{asks}, and the most that is left of one is {most:.2g}"


def lacks_together_text(
    ledger: ShareLedger, share: Share, who: str, each: int, *, beside: Sequence[DeviceId] = ()
) -> str:
    """What a workload lacks whose replicas hold their share of `each` devices of one node; as in `lacks_text`."""
    memory = f" and {share.memory_mb} MB" if share.memory_mb else ""
    asks = f"{who} {share.request:g}{memory} of each of {each} devices of one node"
    widest = max((len(node) for node in ledger.nodes), default=0)
    if widest < each:
        return f"{asks}, and the largest node has {widest}"
    rooms = ledger.room_for(demand_of(share))
    rooms[[ledger.at[device_id] for device_id in beside]] = False
    most = max(int(rooms[node].sum()) for node in ledger.nodes)
    return f"{asks}, and the most on one that have room for it is {most}"


def places_text(share: Share, num_devices: int, others: Iterable[str]) -> str:
    """The share of a workload's devices, and the names of some workloads that are beside it."""
    part = f"{share.request:g}..{share.limit:g} of {num_devices} device{'s' if num_devices > 1 else ''}"
    named = ", ".join(f"'{name}'" for name in list(others)[:_NUM_NAMED])
    return f"{part}, beside {named}" if named else f"{part}, which nobody else shares"
