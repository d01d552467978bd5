"""The rivals: what each books for a share, whom it joins, and rectangles that never overlap."""

from __future__ import annotations

import random

import pytest

from springtide.core.resources import DeviceId, Topology, make_node
from springtide.core.shares import Share
from springtide.core.workload import WorkloadId
from springtide.scheduling.sharing.demand import UNITS
from springtide.scheduling.sharing.ledger import LedgerBounds, ShareLedger, parts_of
from springtide.scheduling.sharing.packing import Packer, PlacementRequest
from springtide_studies.rivals.policies.share_rivals import (
    ExclusivePacker,
    FastGsPacker,
    InflessLimit,
    InflessRequest,
    free_rectangles,
)

ASKED = Share(request=0.3, limit=0.6, memory_mb=5000)
RIVALS: tuple[Packer, ...] = (ExclusivePacker(), InflessLimit(), InflessRequest(), FastGsPacker())


def empty(bounds: LedgerBounds | None = None) -> ShareLedger:
    return ShareLedger(Topology(nodes=tuple(make_node(f"n{at}", 4, memory_mb=40_000) for at in range(3))), bounds)


def fill(packer: Packer, ledger: ShareLedger, asked: Share, count: int) -> list[str]:
    """Where so many alike go, one after another."""
    places = []
    for at in range(count):
        request = PlacementRequest(workload_id=WorkloadId(f"w{at}"), family=f"w{at}", share=packer.booked(asked))
        chosen = packer.choose(ledger, request)
        assert chosen is not None
        ledger.hold(request.workload_id, request.family, parts_of(chosen, request.share))
        places.append(chosen[0])
    return places


@pytest.mark.parametrize(
    ("packer", "booked", "per_device"),
    [
        (ExclusivePacker(), (1.0, 1.0), 1),
        (InflessLimit(), (0.6, 0.6), 1),
        (InflessRequest(), (0.3, 0.3), 3),
        # A rectangle 0.6 wide and 0.5 high: two lie above each other.
        (FastGsPacker(), (0.3, 0.6), 2),
    ],
)
def test_how_many_share_a_device(packer: Packer, booked: tuple[float, float], per_device: int) -> None:
    share = packer.booked(ASKED)
    assert (share.request, share.limit, share.memory_mb) == (*booked, 5000)
    places = fill(packer, empty(), ASKED, 6)
    assert max(places.count(place) for place in places) == per_device
    assert len(set(places)) == -(-6 // per_device)


@pytest.mark.parametrize("packer", RIVALS)
def test_groups_lie_on_one_node(packer: Packer) -> None:
    ledger = empty()
    ledger.hold(WorkloadId("old"), "old", parts_of([DeviceId("n0/1")], packer.booked(Share(request=0.9, limit=1.0))))

    def choose(count: int, **more: object) -> tuple[DeviceId, ...] | None:
        share = packer.booked(ASKED)
        request = PlacementRequest(workload_id=WorkloadId("g"), family="g", share=share, num_devices=count, **more)
        return packer.choose(ledger, request)

    assert choose(3) == ("n0/0", "n0/2", "n0/3")
    assert choose(4) == ("n1/0", "n1/1", "n1/2", "n1/3")
    assert choose(5) is None
    assert len(choose(5, same_node=False) or ()) == 5
    assert choose(1, may_open=False) is None
    assert choose(3, avoid=frozenset({DeviceId("n0/0")})) == ("n1/0", "n1/1", "n1/2")


def test_infless_joins_the_device_with_the_least_rate_left() -> None:
    ledger = empty()
    for device, request in (("n0/0", 0.2), ("n0/1", 0.6), ("n0/2", 0.9)):
        ledger.hold(WorkloadId(device), device, parts_of([DeviceId(device)], Share(request=request, limit=request)))
    request = PlacementRequest(workload_id=WorkloadId("g"), family="g", share=InflessRequest().booked(ASKED))
    assert InflessRequest().choose(ledger, request) == ("n0/1",)


def test_the_whole_plane_is_free_and_one_rectangle_leaves_two() -> None:
    assert free_rectangles([]) == [(0, 0, UNITS, UNITS)]
    half, third = UNITS // 2, UNITS // 4
    assert sorted(free_rectangles([(half, third)])) == [
        (0, third, UNITS, UNITS - third),
        (half, 0, UNITS - half, UNITS),
    ]
    assert free_rectangles([(UNITS, half), (UNITS, half)]) == []
    assert free_rectangles([(UNITS, UNITS), (1, 1)]) == []


@pytest.mark.parametrize("seed", range(5))
def test_free_rectangles_lie_within_what_is_left(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [(rng.randint(1, 6) * UNITS // 10, rng.randint(1, 6) * UNITS // 10) for _ in range(4)]
    for num in range(len(sizes) + 1):
        free = free_rectangles(sizes[:num])
        area = sum(width * height for width, height in sizes[:num])
        for left, low, width, height in free:
            assert min(left, low) >= 0
            assert max(left + width, low + height) <= UNITS
            assert width * height <= UNITS * UNITS - area
