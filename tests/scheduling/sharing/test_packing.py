"""Which devices a newcomer shares: Algorithm 1 as printed, foresight, affinity, groups, and what limits the choice."""

from __future__ import annotations

import random

import pytest

from springtide.core.resources import DeviceId, Topology, make_node
from springtide.core.shares import Share
from springtide.core.workload import WorkloadId
from springtide.scheduling.sharing.ledger import ShareLedger, parts_of
from springtide.scheduling.sharing.packing import DiluPacker, PlacementRequest

PRINTED = DiluPacker(foresight=False)
PACKERS = (PRINTED, DiluPacker())


def cluster(num_nodes: int = 3, num_devices: int = 4) -> Topology:
    return Topology(nodes=tuple(make_node(f"n{at}", num_devices, memory_mb=40_000) for at in range(num_nodes)))


def share(request: float, limit: float, memory_gb: int) -> Share:
    return Share(request=request, limit=limit, memory_mb=1000 * memory_gb)


def ask(name: str, wanted: Share, num_devices: int = 1, *, family: str = "", **more: object) -> PlacementRequest:
    return PlacementRequest(
        workload_id=WorkloadId(name), family=family or name, share=wanted, num_devices=num_devices, **more
    )


def put(ledger: ShareLedger, name: str, wanted: Share, *devices: str, family: str = "") -> None:
    ledger.hold(WorkloadId(name), family or name, parts_of((DeviceId(each) for each in devices), wanted))


def test_the_least_left_over_is_best_by_rate_and_memory() -> None:
    ledger = ShareLedger(cluster())
    put(ledger, "low-rate", share(0.3, 0.3, 20), "n0/0")
    put(ledger, "high-rate", share(0.5, 0.5, 20), "n0/1")
    put(ledger, "high-memory", share(0.3, 0.3, 28), "n0/2")
    assert PRINTED.choose(ledger, ask("new", share(0.2, 0.3, 1))) == ("n0/1",)
    # With the weights the other way round memory decides.
    assert DiluPacker(foresight=False, alpha=0.1, beta=0.9).choose(ledger, ask("new", share(0.2, 0.3, 1))) == ("n0/2",)


@pytest.mark.parametrize("packer", PACKERS)
def test_a_new_device_only_where_no_shared_one_has_room(packer: DiluPacker) -> None:
    ledger = ShareLedger(cluster())
    put(ledger, "first", share(0.6, 0.9, 10), "n1/2")
    # The request would fit, the limit does not.
    chosen = packer.choose(ledger, ask("new", share(0.4, 0.7, 10)))
    assert chosen is not None
    assert not ledger.load(chosen[0]).num_holders
    assert packer.choose(ledger, ask("new", share(0.4, 0.7, 10), may_open=False)) is None
    assert packer.choose(ledger, ask("new", share(0.4, 0.6, 10), may_open=False)) == ("n1/2",)
    assert packer.choose(ledger, ask("new", share(0.4, 0.6, 10), avoid=frozenset({DeviceId("n1/2")}))) != ("n1/2",)


def test_foresight_keeps_room_for_what_is_large() -> None:
    """A second small one would take the last place where a job's worker fits; a new device spoils less."""
    ledger = ShareLedger(cluster())
    for at in range(2):
        put(ledger, f"job-{at}", share(0.7, 0.9, 30), f"n0/{2 * at}", f"n0/{2 * at + 1}")
    put(ledger, "full-0", share(0.2, 0.5, 10), "n0/0")
    put(ledger, "full-1", share(0.2, 0.5, 10), "n0/1")
    put(ledger, "full-2", share(0.2, 0.5, 10), "n0/2")
    put(ledger, "full-3", share(0.2, 0.5, 10), "n0/3")
    put(ledger, "small", share(0.3, 0.5, 8), "n1/0")
    newcomer = ask("new", share(0.3, 0.5, 8))
    assert PRINTED.choose(ledger, newcomer) == ("n1/0",)
    chosen = DiluPacker().choose(ledger, newcomer)
    assert chosen is not None
    assert chosen != ("n1/0",)
    assert not ledger.load(chosen[0]).num_holders


@pytest.mark.parametrize("count", [1, 2])
def test_all_alike_fill_a_device_before_a_new_one(count: int) -> None:
    """Three shares of 0.3 fit: foresight opens nothing for the sake of people no larger than the newcomer."""
    ledger = ShareLedger(cluster())
    for at in range(6):
        wanted = share(0.3, 0.4, 2)
        chosen = DiluPacker().choose(ledger, ask(f"w{at}", wanted, count))
        assert chosen is not None
        ledger.hold(WorkloadId(f"w{at}"), f"w{at}", parts_of(chosen, wanted))
    assert ledger.num_open == 2 * count


@pytest.mark.parametrize("packer", PACKERS)
def test_instances_go_beside_the_same_partners(packer: DiluPacker) -> None:
    ledger = ShareLedger(cluster())
    put(ledger, "job", share(0.3, 0.4, 10), "n0/0", "n0/1", family="training")
    # Fuller, hence better by what is left over; but a stranger.
    put(ledger, "stranger", share(0.5, 0.6, 30), "n1/0", family="other")
    put(ledger, "replica-1", share(0.2, 0.3, 5), "n0/0", family="serving")
    newcomer = ask("replica-2", share(0.2, 0.3, 5), family="serving")
    assert packer.choose(ledger, newcomer) == ("n0/1",)
    alone = ask("replica-2", share(0.2, 0.3, 5), family="unknown")
    assert packer.choose(ledger, alone) != ("n0/1",)
    # Where the partners have no room left, the others are looked at.
    put(ledger, "guest", share(0.6, 0.8, 5), "n0/1", family="guest")
    elsewhere = packer.choose(ledger, newcomer)
    assert elsewhere in {("n0/0",), ("n1/0",)}


@pytest.mark.parametrize("packer", PACKERS)
def test_groups_lie_on_one_node_or_anywhere(packer: DiluPacker) -> None:
    ledger = ShareLedger(cluster(num_nodes=2, num_devices=2))
    put(ledger, "full", share(1.0, 1.0, 40), "n0/0")
    group = share(0.6, 0.8, 25)
    assert packer.choose(ledger, ask("group", group, 2)) == ("n1/0", "n1/1")
    assert packer.choose(ledger, ask("group", group, 3)) is None
    spread = packer.choose(ledger, ask("group", group, 3, same_node=False))
    assert spread is not None
    assert sorted(spread) == ["n0/1", "n1/0", "n1/1"]
    assert packer.choose(ledger, ask("group", group, 4, same_node=False)) is None
    # It joins those who share already where it fits there.
    put(ledger, "small", share(0.2, 0.4, 5), "n1/1")
    assert packer.choose(ledger, ask("one", group, 1)) == ("n1/1",)


def test_whole_nodes_are_spared_by_what_nothing_joins() -> None:
    ledger = ShareLedger(cluster())
    put(ledger, "first", share(0.9, 1.0, 40), "n1/0")
    assert PRINTED.choose(ledger, ask("new", share(0.9, 1.0, 40))) == ("n1/1",)
    assert DiluPacker().choose(ledger, ask("new", share(0.9, 1.0, 40))) == ("n1/1",)


@pytest.mark.parametrize("packer", PACKERS)
def test_nodes_of_different_sizes_and_memory(packer: DiluPacker) -> None:
    nodes = (make_node("small", 1, memory_mb=16_000), make_node("big", 3, memory_mb=80_000), make_node("cpu", 2))
    ledger = ShareLedger(Topology(nodes=nodes))
    chosen = packer.choose(ledger, ask("large", share(0.5, 0.8, 40), 3))
    assert chosen == ("big/0", "big/1", "big/2")
    assert packer.choose(ledger, ask("larger", share(0.5, 0.8, 40), 4)) is None
    assert packer.choose(ShareLedger(Topology(nodes=())), ask("nowhere", share(0.5, 0.8, 40))) is None
    assert packer.choose(ShareLedger(Topology(nodes=())), ask("nowhere", share(0.5, 0.8, 40), 2)) is None


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_chosen_has_room_and_nothing_is_refused_that_fits(packer: DiluPacker, seed: int) -> None:
    rng = random.Random(seed)
    ledger = ShareLedger(cluster(6))
    live: list[str] = []
    for number in range(300):
        if live and rng.random() < 0.4:
            ledger.release(WorkloadId(live.pop(rng.randrange(len(live)))))
            continue
        request = rng.randint(10, 80) / 100
        wanted = share(request, min(1.0, request + rng.randint(0, 50) / 100), rng.randint(1, 40))
        count = rng.choice((1, 1, 1, 2, 4))
        newcomer = ask(f"w{number}", wanted, count, family=f"f{number % 7}", same_node=rng.random() < 0.7)
        chosen = packer.choose(ledger, newcomer)
        assert chosen == packer.choose(ledger, newcomer)
        if chosen is None:
            # By hand: no device, or no node with enough of them, would take it.
            free = [
                device
                for device in ledger.device_ids
                if ledger.load(device).request + wanted.request <= 1 + 1e-9
                and ledger.load(device).limit + wanted.limit <= 1.5 + 1e-9
                and ledger.load(device).memory_mb + wanted.memory_mb <= 40_000
            ]
            by_node = [sum(device.startswith(f"n{at}/") for device in free) for at in range(6)]
            assert (max(by_node) if newcomer.same_node else len(free)) < count
            continue
        assert len(set(chosen)) == count
        assert not newcomer.same_node or len({device.split("/")[0] for device in chosen}) == 1
        ledger.hold(newcomer.workload_id, newcomer.family, parts_of(chosen, wanted))
        live.append(f"w{number}")
