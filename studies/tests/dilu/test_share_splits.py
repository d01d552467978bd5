"""A large model over the rests of several devices: only where that costs less than one more, and never free."""

from __future__ import annotations

import pytest

from springtide.core.resources import DeviceId, Topology, make_node
from springtide.core.shares import Share
from springtide.core.workload import WorkloadId
from springtide.scheduling.sharing.ledger import ShareLedger, parts_of
from springtide.scheduling.sharing.packing import DiluPacker, PlacementRequest
from springtide_studies.dilu.share_splits import SplitPrice, place
from springtide_studies.rivals.policies.share_rivals import InflessRequest

MODEL = Share(request=0.4, limit=0.6, memory_mb=24_000)


def ledger_with(*memory_gb: int, request: float = 0.5, limit: float = 0.8) -> ShareLedger:
    """One node of four devices of 40 GB, and another, idle one; the first devices hold so much each."""
    ledger = ShareLedger(Topology(nodes=tuple(make_node(name, 4, memory_mb=40_000) for name in ("a", "b"))))
    for at, held_gb in enumerate(memory_gb):
        held = Share(request=request, limit=limit, memory_mb=1000 * held_gb)
        ledger.hold(WorkloadId(f"job-{at}"), f"job-{at}", parts_of([DeviceId(f"a/{at}")], held))
    return ledger


def asked(*, is_large: bool = True, share: Share = MODEL) -> PlacementRequest:
    return PlacementRequest(workload_id=WorkloadId("llm"), family="llm", share=share, is_large=is_large)


def test_two_rests_instead_of_one_more_device() -> None:
    ledger = ledger_with(30, 25, 35)
    parts = place(DiluPacker(), ledger, asked(), SplitPrice())
    assert parts is not None
    # Most memory first: 15 GB, then 9 of the 10 GB; each piece holds request and limit in full.
    assert [(part.device_id, part.share.memory_mb) for part in parts] == [("a/1", 15_000), ("a/0", 9_000)]
    assert all((part.share.request, part.share.limit) == (0.4, 0.6) for part in parts)
    ledger.hold(WorkloadId("llm"), "llm", parts)
    assert (ledger.load(DeviceId("a/1")).memory_mb, ledger.load(DeviceId("a/0")).memory_mb) == (40_000, 39_000)
    ledger.release(WorkloadId("llm"))
    assert ledger.load(DeviceId("a/0")).limit == 0.8


@pytest.mark.parametrize(
    ("ledger", "request_", "price"),
    [
        (ledger_with(30, 25, 35), asked(), None),
        (ledger_with(30, 25, 35), asked(is_large=False), SplitPrice()),
        # A stage too dear, a device too cheap.
        (ledger_with(30, 25, 35), asked(), SplitPrice(stage=0.6)),
        (ledger_with(30, 25, 35), asked(), SplitPrice(device=0.5)),
        # Three pieces repeat the request twice: 2 (0.4 + 0.1) is no less than a device.
        (ledger_with(31, 31, 31, 31), asked(), SplitPrice()),
        # Limits of 1.0 leave no room for a piece within gamma, nor do full requests.
        (ledger_with(30, 25, 35, limit=1.0), asked(), SplitPrice()),
        (ledger_with(30, 25, 35, request=0.7, limit=0.8), asked(), SplitPrice()),
        (ledger_with(), asked(), SplitPrice()),
    ],
)
def test_whole_where_a_split_costs_more_or_has_no_room(
    ledger: ShareLedger, request_: PlacementRequest, price: SplitPrice | None
) -> None:
    parts = place(DiluPacker(), ledger, request_, price)
    assert parts is not None
    assert [part.share for part in parts] == [MODEL]
    assert not ledger.load(parts[0].device_id).num_holders


def test_three_pieces_where_a_request_is_small() -> None:
    light = Share(request=0.2, limit=0.4, memory_mb=24_000)
    parts = place(DiluPacker(), ledger_with(31, 31, 31, 31), asked(share=light), SplitPrice())
    assert parts is not None
    assert [part.share.memory_mb for part in parts] == [9_000, 9_000, 6_000]


def test_one_shared_device_with_room_is_never_split() -> None:
    parts = place(DiluPacker(), ledger_with(10, 30, 25), asked(), SplitPrice())
    assert parts is not None
    assert [(part.device_id, part.share) for part in parts] == [("a/0", MODEL)]


def test_a_rival_places_what_it_books() -> None:
    parts = place(InflessRequest(), ledger_with(10), asked())
    assert parts is not None
    assert parts[0].share == Share(request=0.4, limit=0.4, memory_mb=24_000)
    assert place(DiluPacker(), ShareLedger(Topology(nodes=())), asked()) is None
