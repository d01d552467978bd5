"""The parts of springtide: packing into blocks, retiming, remembering, spare devices, words."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kits.scheduling.rival_platform import make_view
from springtide.core.decision import PoolAllocation, Snapshot
from springtide.core.resources import Topology, make_node
from springtide.scheduling.decisions.cache import RowTable
from springtide.scheduling.decisions.fingerprint import nodes_fingerprint
from springtide.scheduling.placement.relocation import SearchBudget
from springtide.scheduling.placement.topology import layout_of
from springtide.scheduling.policies.springtide.blocks import admit_on_used_block
from springtide.scheduling.policies.springtide.memory import (
    PAD_S,
    State,
    block_of,
    costs_of,
    decode,
    entry_of,
)
from springtide.scheduling.policies.springtide.moves import jobs_to_stop_first
from springtide.scheduling.policies.springtide.packing import Packing
from springtide.scheduling.policies.springtide.reasons import why_impossible, why_no_room
from springtide.scheduling.policies.springtide.rows import PromiseRow
from springtide.scheduling.policies.springtide.schedules import retime
from springtide.solvers.reservations.fit import Costs, PlannedStretch
from springtide.solvers.reservations.reservation_table import ReservationTable

FOUR_NODES = Topology(nodes=tuple(make_node(f"n{index}", 8) for index in range(4)))


def _devices(*addresses: int) -> tuple[str, ...]:
    layout = layout_of(FOUR_NODES)
    return tuple(str(layout.device_at[address]) for address in addresses)


def _state(now_s: float = 0.0) -> State:
    snapshot = Snapshot(now_s=now_s, cluster=FOUR_NODES)
    state = State(ReservationTable(32, now_s, costs_of(snapshot.overheads, 8)))
    state.reservations.begin(now_s, costs_of(snapshot.overheads, 8), 10_000)
    return state


def test_packing_moves_the_fewest_devices_out_of_a_block() -> None:
    layout = layout_of(FOUR_NODES)
    # One of eight lies on two nodes; the block with the single device is emptied at least cost.
    places = {"wide": 0xF0 | 0xF0 << 8, "one": 1 << 16, "four": 0xF << 24, "two": 0x3, "other": 0xF << 8 | 0x4}
    packing = Packing(layout, places, {"one", "four", "two"})
    assert packing.gather("wide")
    assert packing.places["wide"] == 0xFF << 16
    assert packing.moved == {"wide", "one"}
    taken = 0
    for bits in packing.places.values():
        assert not taken & bits
        taken |= bits


def test_packing_changes_nothing_where_nobody_may_move() -> None:
    layout = layout_of(FOUR_NODES)
    places = {"wide": 0xF0 | 0xF0 << 8, "a": 0x1, "b": 0x1 << 8, "c": 0x1 << 16, "d": 0x1 << 24}
    packing = Packing(layout, places, set())
    assert not packing.gather("wide")
    assert packing.places == places


def test_packing_ends_with_the_budget_of_the_decision() -> None:
    layout = layout_of(FOUR_NODES)
    places = {"wide": 0xF0 | 0xF0 << 8, "one": 1 << 16, "other": 0xF << 8, "four": 0xF << 24, "two": 0x3}
    budget = SearchBudget(moves=1)
    packing = Packing(layout, places, {"one", "four", "two"}, budget)
    assert not packing.gather("wide")
    assert packing.places == places
    assert budget.moves == 0
    budget.moves = 2
    assert packing.gather("wide")


@pytest.mark.parametrize("seed", range(20))
def test_aligned_jobs_that_may_all_move_can_always_be_packed(seed: int) -> None:
    layout = layout_of(FOUR_NODES)
    rng = np.random.default_rng(seed)
    places: dict[str, int] = {}
    free = set(range(32))
    while True:
        size = int(2 ** rng.integers(0, 3))
        starts = [at for at in range(0, 32, size) if free.issuperset(range(at, at + size))]
        if not starts or len(free) - size < 8:
            break
        start = int(rng.choice(starts))
        places[f"job-{len(places)}"] = sum(1 << at for at in range(start, start + size))
        free -= set(range(start, start + size))
    places["wide"] = sum(1 << at for at in sorted(free)[:8])
    packing = Packing(layout, places, set(places))
    assert packing.gather("wide")
    assert packing.places["wide"].bit_count() == 8
    assert len(layout.nodes_of(packing.places["wide"])) == 1
    taken = 0
    for bits in packing.places.values():
        assert not taken & bits
        taken |= bits


@pytest.mark.parametrize(("num_jobs", "fits"), [(64, True), (65, False), (1500, False)])
def test_a_chain_of_moves_ends(num_jobs: int, fits: bool) -> None:
    layout = layout_of(Topology(nodes=tuple(make_node(f"n{index}", 8) for index in range(num_jobs + 1))))
    # Each job of eight lies on the halves of two nodes: one that gets a node to itself moves its neighbour.
    jobs = {f"job-{index:04}": 0xFF << 8 * index + 4 for index in range(num_jobs)}
    places = {"stays": 0xF, **jobs}
    packing = Packing(layout, places, set(jobs))
    assert packing.gather("job-0000") is fits
    if fits:
        assert packing.moved == set(jobs)
        assert {len(layout.nodes_of(bits)) for bits in packing.places.values()} == {1}
    else:
        assert (packing.places, packing.moved) == (places, set())


def test_the_reserve_pays_for_a_move() -> None:
    rates = (0.0, 1.0, 2.0)
    costs = Costs(lambda _: 5.0, [0.0, 5.0, 5.0], [0.0, 5.0, 5.0])
    runs = (PlannedStretch(0.0, 60.0, 2, 5.0),)
    # 40 steps are left at 30 s: 20 s of work and 10 s in hand.
    assert retime(runs, 40.0, rates, 30.0, 5.0, costs) == (PlannedStretch(30.0, 60.0, 2, 5.0),)
    assert retime(runs, 40.0, rates, 30.0, 12.0, costs) == (PlannedStretch(30.0, 62.0, 2, 12.0),)
    assert retime(runs, 40.0, rates, 30.0, 0.0, costs) == (PlannedStretch(30.0, 55.0, 2, 0.0),)


def test_only_circles_take_a_detour() -> None:
    held = {"a": PoolAllocation(device_ids=_devices(0)), "b": PoolAllocation(device_ids=_devices(1))}
    snapshot = Snapshot(now_s=0.0, cluster=FOUR_NODES, allocations=held)
    swap = {"a": PoolAllocation(device_ids=_devices(1)), "b": PoolAllocation(device_ids=_devices(0))}
    assert jobs_to_stop_first(snapshot, swap) == {"a"}
    chain = {"a": PoolAllocation(device_ids=_devices(1)), "b": PoolAllocation(device_ids=_devices(2))}
    assert jobs_to_stop_first(snapshot, chain) == set()
    assert jobs_to_stop_first(snapshot, dict(held)) == set()


def test_a_block_counts_as_used_once_somebody_has_left_it() -> None:
    layout = layout_of(FOUR_NODES)
    state = _state()
    state.record_devices(0.0, {"a": PoolAllocation(device_ids=_devices(4, 5, 6, 7))})
    state.mark_used(layout, 0.0, {})
    assert not state.is_used(layout, _devices(4, 5, 6, 7))  # Only passed through within one instant.
    state.mark_used(layout, 5.0, {})
    assert state.is_used(layout, _devices(4, 5, 6, 7))
    assert not state.is_used(layout, _devices(4, 5))
    assert block_of(layout, _devices(5, 6)) is None
    assert block_of(layout, _devices(6, 7)) == (1, 3)


def test_a_hurried_job_is_let_in_on_a_block_that_was_used() -> None:
    layout = layout_of(FOUR_NODES)
    state = _state()
    state.change_s = 2.0
    snapshot = Snapshot(now_s=0.0, cluster=FOUR_NODES)
    entry = entry_of(PromiseRow(make_view("a", steps=80, deadline_s=12.1)), 80.0, since_s=0.0)
    assert not admit_on_used_block(state, layout, snapshot, entry)
    state.used = [0, 0, 0, 0b100]
    assert admit_on_used_block(state, layout, snapshot, entry)
    assert state.pinned["a"] == _devices(*range(16, 24))
    assert entry.runs == (PlannedStretch(0.0, 12.0 + PAD_S, 8, 2.0 + PAD_S),)


def test_the_memory_gives_the_state_back() -> None:
    view = make_view("a", steps=1000, deadline_s=500.0)
    rows = RowTable(lambda view, _: PromiseRow(view))
    snapshot = Snapshot(now_s=0.0, cluster=FOUR_NODES, jobs=(view,))
    (row,) = rows.read(snapshot)
    state = _state()
    entry = entry_of(row, 1000.0, since_s=0.0)
    assert state.reservations.admit(entry)
    state.reservations.commit()
    state.used, state.cluster = [0, 5], nodes_fingerprint(FOUR_NODES)
    state.record_devices(0.0, {"a": PoolAllocation(device_ids=_devices(2, 3))})
    index_of = {device_id: number for number, device_id in enumerate(FOUR_NODES.device_ids())}
    memory = msgspec.json.decode(msgspec.json.encode(state.encode(index_of, {})))
    again = decode(memory, rows.by_id, snapshot, state.cluster, FOUR_NODES.device_ids())
    assert again.encode(index_of, {}) == memory
    assert again.reservations.entries["a"].runs == entry.runs
    assert again.reservations.profile.free == state.reservations.profile.free
    empty = decode({"rule": "somebody else's"}, {}, snapshot, "", FOUR_NODES.device_ids())
    assert not empty.reservations.entries
    gone = decode(memory, {}, snapshot, state.cluster, FOUR_NODES.device_ids())
    assert gone.num_gone == 1


def test_a_job_on_its_way_to_other_devices_goes_on_to_them_when_the_nodes_change() -> None:
    view = make_view("a", steps=1000, deadline_s=500.0)
    rows = RowTable(lambda view, _: PromiseRow(view))
    held = {"a": PoolAllocation(device_ids=(*_devices(2, 3), *_devices(6, 7)))}
    snapshot = Snapshot(now_s=0.0, cluster=FOUR_NODES, jobs=(view,), allocations=held)
    rows.read(snapshot)
    state = _state()
    state.cluster = nodes_fingerprint(FOUR_NODES)
    state.record_devices(0.0, {"a": PoolAllocation(device_ids=_devices(6, 7))})
    index_of = {device_id: number for number, device_id in enumerate(FOUR_NODES.device_ids())}
    memory = msgspec.json.decode(msgspec.json.encode(state.encode(index_of, held)))
    fewer = Topology(nodes=FOUR_NODES.nodes[:2])
    again = decode(memory, rows.by_id, snapshot, nodes_fingerprint(fewer), fewer.device_ids())
    assert again.devices == {"a": _devices(6, 7)}
    # Without these it is where it was, which is not what was decided.
    first = Topology(nodes=FOUR_NODES.nodes[1:])
    assert not decode(memory, rows.by_id, snapshot, nodes_fingerprint(first), first.device_ids()).devices


def test_sizes_are_powers_of_two_and_both_ends() -> None:
    linear = {n: float(n) for n in (1, 2, 3, 4, 5, 6)}
    assert PromiseRow(make_view("a", most=6, profile=linear)).sizes == (1, 2, 4, 6)
    assert PromiseRow(make_view("b", most=6, least=3, profile=linear)).sizes == (3, 4, 6)
    assert PromiseRow(make_view("c", most=6, elastic=False, profile=linear)).sizes == (6,)
    flat = {1: 5.0, 2: 4.0, 4: 6.0, 8: 3.0}
    assert PromiseRow(make_view("d", profile=flat)).sizes == (1, 4)


def test_words_carry_their_evidence() -> None:
    state = _state()
    row = PromiseRow(make_view("a", steps=4000, deadline_s=100.0))
    entry = entry_of(row, 4000.0, since_s=0.0)
    assert "on 8 devices it takes 8 min" in why_impossible(entry, row, state.reservations)
    state.reservations.profile.take(0.0, 1000.0, 30)
    assert "of which 2 are free" in why_no_room(entry, state.reservations, {})
