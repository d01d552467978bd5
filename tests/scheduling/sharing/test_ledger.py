"""The ledger of shared devices: exact sums, bounds that hold, all or nothing, and who is beside whom."""

from __future__ import annotations

import random

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.resources import DeviceId, Topology, make_node
from springtide.core.shares import Load, Share, has_room, load_of
from springtide.core.workload import WorkloadId
from springtide.scheduling.sharing.demand import UNITS, demand_of
from springtide.scheduling.sharing.ledger import LedgerBounds, ShareLedger, parts_of

CLUSTER = Topology(nodes=tuple(make_node(f"n{at}", 4, kind="gpu", memory_mb=40_000) for at in range(3)))
A, B, C = (DeviceId(f"n0/{at}") for at in range(3))


def share(request: float, limit: float | None = None, memory_mb: int = 1000) -> Share:
    return Share(request=request, limit=limit if limit is not None else request, memory_mb=memory_mb)


def put(
    ledger: ShareLedger, name: str, held: Share, *devices: DeviceId, family: str = "f", is_given: bool = False
) -> None:
    ledger.hold(WorkloadId(name), family, parts_of(devices, held), is_given=is_given)


def test_tenths_and_thirds_fill_a_device_and_leave_nothing_behind() -> None:
    ledger = ShareLedger(CLUSTER)
    for name, request in (("a", 0.1), ("b", 0.2), ("c", 0.7)):
        put(ledger, name, share(request), A)
    assert not ledger.room_for(demand_of(share(0.01)))[0]
    assert ledger.load(A) == Load(num_holders=3, request=1.0, limit=1.0, memory_mb=3000)
    for name in ("b", "a", "c"):
        ledger.release(WorkloadId(name))
    assert ledger.load(A) == Load()
    assert ledger.num_open == 0
    for at in range(3):
        put(ledger, f"third-{at}", share(1 / 3), A)


def test_bounds_hold_for_requests_limits_and_memory() -> None:
    ledger = ShareLedger(CLUSTER, LedgerBounds(max_request=1.0, max_limit=1.5))
    put(ledger, "first", share(0.5, 0.9, 30_000), A)
    for name, wanted in (("r", share(0.6)), ("l", share(0.2, 0.7)), ("m", share(0.1, 0.1, 10_001))):
        with pytest.raises(InvalidRequest, match="has no room"):
            put(ledger, name, wanted, A)
    put(ledger, "fits", share(0.5, 0.6, 10_000), A)


def test_all_devices_or_none() -> None:
    ledger = ShareLedger(CLUSTER)
    put(ledger, "first", share(0.8), B)
    with pytest.raises(InvalidRequest, match="has no room for group"):
        put(ledger, "group", share(0.5), A, B, C)
    assert ledger.devices_of(WorkloadId("group")) == ()
    assert (ledger.load(A).num_holders, ledger.num_open) == (0, 1)
    put(ledger, "group", share(0.2), A, B, C)
    assert ledger.devices_of(WorkloadId("group")) == (A, B, C)
    with pytest.raises(InvalidRequest, match="takes each of its devices once"):
        put(ledger, "group", share(0.1), A)
    with pytest.raises(InvalidRequest, match="takes each of its devices once"):
        put(ledger, "twice", share(0.1), A, A)
    with pytest.raises(InvalidRequest, match="no device 'elsewhere'"):
        put(ledger, "lost", share(0.1), DeviceId("elsewhere"))
    with pytest.raises(InvalidRequest, match="nothing to give back"):
        ledger.release(WorkloadId("nobody"))


def test_who_is_there_already_stands_beyond_the_bounds_and_nobody_joins() -> None:
    ledger = ShareLedger(CLUSTER)
    put(ledger, "old", share(0.9, 1.0), A, is_given=True)
    put(ledger, "older", share(0.9, 1.0), A, is_given=True)
    assert ledger.load(A).request == pytest.approx(1.8)
    assert not ledger.room_for(demand_of(share(0.0001, memory_mb=0)))[0]
    ledger.release(WorkloadId("old"))
    ledger.release(WorkloadId("older"))
    assert ledger.room_for(demand_of(share(1.0, 1.0)))[0]


def test_whole_holders_and_forbidden_devices_take_no_newcomer() -> None:
    ledger = ShareLedger(CLUSTER, allowed=[A, B])
    ledger.block(A)
    ledger.block(A)
    assert ledger.room_for(demand_of(share(0.1))).tolist() == [False, True] + [False] * 10
    assert ledger.num_idle.tolist() == [1, 0, 0]
    # Somebody may be there from before; a newcomer may not.
    put(ledger, "old", share(0.5), C, is_given=True)
    with pytest.raises(InvalidRequest, match="has no room"):
        put(ledger, "new", share(0.1), C)
    assert ledger.num_idle.tolist() == [1, 0, 0]
    put(ledger, "next", share(0.5), B)
    assert ledger.num_idle.tolist() == [0, 0, 0]
    ledger.release(WorkloadId("next"))
    assert ledger.num_idle.tolist() == [1, 0, 0]


def test_where_there_is_room_is_found_once_until_something_changes() -> None:
    ledger, demand = ShareLedger(CLUSTER, allowed=[A, B]), demand_of(share(0.6))
    first = ledger.room_among(demand)
    assert ledger.room_among(demand) is first
    assert not ledger.room_among(demand, may_open=False).is_any
    put(ledger, "one", share(0.3), B)
    assert ledger.room_among(demand, may_open=False).on.tolist() == [False, True] + [False] * 10
    assert ledger.num_open_on_nodes().tolist() == [1, 0, 0]
    ledger.block(B)
    assert not ledger.room_among(demand, may_open=False).is_any
    ledger.unblock(B)
    assert ledger.room_among(demand, may_open=False).is_any
    ledger.block_all([A])
    assert ledger.room_among(demand).on.tolist() == [False, True] + [False] * 10
    ledger.release(WorkloadId("one"))
    assert not ledger.room_among(demand, beside_shared=True).is_any
    assert ledger.num_open_on_nodes().tolist() == [0, 0, 0]


def test_an_outlook_is_of_the_demands_at_its_time_whenever_it_is_read() -> None:
    ledger, newcomer = ShareLedger(CLUSTER), demand_of(share(0.1))
    put(ledger, "large", share(0.95), A)
    outlook = ledger.outlook(newcomer)
    put(ledger, "small", share(0.2), B)
    # Beside the newcomer no other large one fits any more, and only that one counts.
    assert outlook.losses(newcomer, ledger.left_on(np.array([2]))).tolist() == [1.0]


def test_devices_whose_memory_nobody_counts() -> None:
    ledger = ShareLedger(Topology(nodes=(make_node("cpu", 1),)))
    put(ledger, "large", share(0.5, memory_mb=10**9), DeviceId("cpu/0"))
    put(ledger, "other", share(0.5, memory_mb=10**9), DeviceId("cpu/0"))


def test_beside_names_the_devices_of_known_partners() -> None:
    ledger = ShareLedger(CLUSTER)
    put(ledger, "job", share(0.3), A, B, C, family="training")
    put(ledger, "stranger", share(0.3), C, DeviceId("n1/0"), family="other")
    assert ledger.beside("serving") == []
    put(ledger, "replica-1", share(0.2), A, family="serving")
    assert ledger.beside("serving") == [1, 2]
    put(ledger, "replica-2", share(0.2), B, family="serving")
    assert ledger.beside("serving") == [2]
    ledger.release(WorkloadId("job"))
    assert ledger.beside("serving") == []


@pytest.mark.parametrize("seed", range(5))
def test_sums_never_drift_and_agree_with_the_vocabulary(seed: int) -> None:
    """A thousand changes: the ledger accepts what `has_room` accepts, and ends where it began."""
    rng = random.Random(seed)
    ledger = ShareLedger(CLUSTER)
    held: dict[str, tuple[DeviceId, Share]] = {}
    for number in range(1000):
        if held and rng.random() < 0.45:
            name = rng.choice(sorted(held))
            ledger.release(WorkloadId(name))
            del held[name]
            continue
        request = rng.choice((0.1, 0.2, 0.3, 1 / 3, 0.25, 0.7, rng.uniform(0.05, 0.9)))
        wanted = share(request, min(1.0, request * rng.uniform(1.0, 2.0)), rng.randint(0, 20_000))
        device = DeviceId(f"n{rng.randint(0, 2)}/{rng.randint(0, 3)}")
        load = load_of(each for at, each in held.values() if at == device)
        fits = has_room(load, wanted, 40_000, max_limit=1.5)
        assert bool(ledger.room_for(demand_of(wanted))[ledger.at[device]]) == fits
        if fits:
            put(ledger, str(number), wanted, device)
            held[str(number)] = (device, wanted)
        assert ledger.load(device).request == pytest.approx(
            sum(each.request for at, each in held.values() if at == device), abs=1e-9
        )
    for name in sorted(held):
        ledger.release(WorkloadId(name))
    fresh = ShareLedger(CLUSTER)
    for column in ("free_request", "free_limit", "free_memory_mb", "is_open", "num_idle"):
        assert getattr(ledger, column).tolist() == getattr(fresh, column).tolist()
    assert ledger.mix == {}


def test_demands_are_whole_numbers_to_the_nearest_unit() -> None:
    assert demand_of(share(0.39, 0.5900000000000001, 7)) == (39 * UNITS // 100, 59 * UNITS // 100, 7)
