"""One large model over the rests of several devices of a node: taken only where it costs less than one more device."""

from __future__ import annotations

import msgspec
import numpy as np

from springtide.core.shares import Share
from springtide.scheduling.sharing.demand import ShareDemand, demand_of
from springtide.scheduling.sharing.ledger import Counts, Part, ShareLedger, parts_of
from springtide.scheduling.sharing.packing import Packer, PlacementRequest


class SplitPrice(msgspec.Struct, frozen=True, kw_only=True):
    """What a split costs, in devices: every piece more than one holds the request again, and is a stage more.

    `stage` is what one more stage of the pipeline is worth avoiding: each answer passes through it, so it is slower.
    A split into so many pieces is taken where (pieces - 1) (request + stage) is below `device`, what one more device is
    reckoned at, and it has at most `max_pieces` pieces.
    """

    stage: float = 0.1
    device: float = 1.0
    max_pieces: int = 4

    def of(self, num_pieces: int, request: float) -> float:
        """The price of so many pieces, in devices."""
        return (num_pieces - 1) * (request + self.stage)


def place(
    packer: Packer, ledger: ShareLedger, request: PlacementRequest, price: SplitPrice | None = None
) -> tuple[Part, ...] | None:
    """What the newcomer holds of which devices, or None where there is no room; the ledger stays as it is.

    With a `price` one that is large and would take a device that is not shared yet may be split instead.
    """
    share = packer.booked(request.share)
    asked = msgspec.structs.replace(request, share=share)
    chosen = packer.choose(ledger, asked)
    is_new = chosen is None or any(not ledger.load(device_id).num_holders for device_id in chosen)
    if price is not None and request.is_large and request.num_devices == 1 and is_new:
        pieces = split(ledger, asked, price)
        if pieces is not None:
            return pieces
    return None if chosen is None else parts_of(chosen, share)


def split(ledger: ShareLedger, request: PlacementRequest, price: SplitPrice) -> tuple[Part, ...] | None:
    """The cheapest split over shared devices of one node, or None where one more device costs less.

    On each node the devices with the most memory left are taken first, so that there are as few stages as possible
    (Dilu, section 3.3: worst fit by memory). Each piece holds request and limit in full. Of equal prices the node is
    best where the least memory is left over.
    """
    demand = demand_of(request.share)
    most = min(price.max_pieces, ledger.grid.shape[1])
    while most > 1 and price.of(most, request.share.request) >= price.device:
        most -= 1
    if most < 2 or not demand.memory_mb:
        return None
    room = ledger.room_for(ShareDemand(demand.request, demand.limit, 1)) & ledger.is_open
    if request.avoid:
        room[[at for device_id in request.avoid if (at := ledger.at.get(device_id)) is not None]] = False
    # The last place stands for the gaps in rows of nodes with fewer devices.
    free: Counts = np.append(np.where(room, ledger.free_memory_mb, 0), 0)
    rows = free[ledger.grid]
    order = np.argsort(-rows, axis=1, kind="stable")
    reached = np.cumsum(np.take_along_axis(rows, order, axis=1)[:, :most], axis=1)
    enough = reached >= demand.memory_mb
    num_pieces = np.where(enough.any(axis=1), enough.argmax(axis=1) + 1, most + 1)
    least = int(num_pieces.min(initial=most + 1))
    if least > most:
        return None
    left_over = np.where(num_pieces == least, reached[:, least - 1], np.iinfo(np.int64).max)
    node = int(left_over.argmin())
    devices = ledger.grid[node][order[node][:least]].tolist()
    pieces, rest_mb = [], demand.memory_mb
    for at in devices:
        memory_mb = min(rest_mb, int(ledger.free_memory_mb[at]))
        rest_mb -= memory_mb
        share = Share(request=request.share.request, limit=request.share.limit, memory_mb=memory_mb)
        pieces.append(Part(ledger.device_ids[at], share))
    return tuple(pieces)
