"""Claims under construction: what is idle, who waits for whom, and making room or leaving everything as it was."""

import numpy as np
import pytest

from springtide.core.decision import PoolAllocation
from springtide.core.resources import DeviceId, Topology, make_node
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.layout import addresses, layout_of
from springtide.scheduling.placement.relocation import Claims, SearchBudget

A, B, C, NEW = (WorkloadId(name) for name in ("a", "b", "c", "new"))


def claims_for(
    held: dict[WorkloadId, list[int]],
    counts: dict[WorkloadId, int],
    *,
    nodes: tuple[int, ...] = (4, 4),
    movable: frozenset[WorkloadId] = frozenset({A, B, C}),
    budget: SearchBudget | None = None,
) -> Claims:
    """Everybody who holds as many devices as it is to have stays; addresses are numbers here."""
    layout = layout_of(Topology(nodes=tuple(make_node(f"n{index}", size) for index, size in enumerate(nodes))))
    devices = {who: tuple(DeviceId(str(layout.device_at[address])) for address in at) for who, at in held.items()}
    unmoved = {who: given for who, given in devices.items() if len(given) == counts.get(who)}
    allocations = {who: PoolAllocation(device_ids=given) for who, given in devices.items()}
    return Claims(layout, counts, allocations, unmoved, movable, budget)


def bits(*chosen: int) -> int:
    return sum(1 << address for address in chosen)


def test_what_nobody_claims_is_idle_and_free_once_nobody_holds_it() -> None:
    claims = claims_for({A: [0, 1], B: [4]}, {A: 2, B: 2})
    assert addresses(claims.idle) == [2, 3, 4, 5, 6, 7]
    assert addresses(claims.free_now) == [2, 3, 5, 6, 7]
    claims.take(B, bits(4, 5))
    assert addresses(claims.free_now) == [2, 3, 6, 7]
    assert addresses(claims.of(A)) == [0, 1]
    assert dict(claims.changed) == {B: bits(4, 5)}
    with pytest.raises(AssertionError, match="what others have"):
        claims.take(B, bits(1))


def test_who_is_waited_for_must_not_wait_in_turn() -> None:
    claims = claims_for({A: [0], B: [1], C: [2]}, {A: 1, B: 1, C: 1})
    claims.take(C, bits(5))
    claims.take(B, bits(2))  # It waits for c.
    assert addresses(claims.out_of_reach(C)) == [1]
    claims.take(A, bits(1))  # It waits for b, which waits for c.
    assert addresses(claims.out_of_reach(C)) == [0, 1]
    assert addresses(claims.out_of_reach(B)) == [0]
    assert claims.out_of_reach(A) == 0


def test_who_only_gives_back_is_waited_for_without_harm() -> None:
    claims = claims_for({A: [0, 1], B: [4]}, {A: 1, B: 1})
    claims.take(A, bits(0))
    claims.take(B, bits(1))
    assert claims.out_of_reach(B) == 0
    # Only if it were to move as well, the one that waits for it would be out of its reach.
    assert addresses(claims.out_of_reach(A)) == [4]


def reach(claims: Claims, who: WorkloadId, workloads: list[WorkloadId]) -> int:
    """What must not be waited for, workload by workload until nothing more is found."""
    region = held = claims.held(who)
    while True:
        before = region
        for other in workloads:
            takes, gives = claims.of(other) & ~claims.held(other), claims.held(other) & ~claims.of(other)
            if other != who and takes & region and gives:
                region |= gives
        if region == before:
            return region & ~held


@pytest.mark.parametrize("seed", range(20))
def test_out_of_reach_is_what_is_found_one_by_one_while_claims_change(seed: int) -> None:
    rng = np.random.default_rng(seed)
    workloads = [WorkloadId(f"w{number}") for number in range(10)]
    at = np.array_split(rng.permutation(40)[:30], sorted(rng.choice(np.arange(1, 30), 9, replace=False)))
    held = {who: [int(address) for address in mine] for who, mine in zip(workloads, at, strict=True)}
    counts = {who: len(mine) for who, mine in held.items()}
    claims = claims_for(held, counts, nodes=(8,) * 5, movable=frozenset(workloads))
    for _ in range(30):
        who = workloads[int(rng.integers(10))]
        if rng.random() < 0.7:
            free = addresses(claims.idle | claims.of(who))
            claims.take(who, bits(*[free[at] for at in rng.choice(len(free), min(len(free), 3), replace=False)]))
        elif rng.random() < 0.5:
            # Whether or not there is room: what was tried in vain is taken back.
            claims.make_room(who)
        who = workloads[int(rng.integers(10))]
        assert claims.out_of_reach(who) == reach(claims, who, workloads)


def test_room_is_made_where_the_fewest_devices_move() -> None:
    claims = claims_for({A: [0], B: [4, 5]}, {A: 1, B: 2, NEW: 4})
    assert claims.make_room(NEW)
    assert addresses(claims.of(NEW)) == [0, 1, 2, 3]
    assert addresses(claims.of(B)) == [4, 5]
    assert addresses(claims.of(A)) == [6]


@pytest.mark.parametrize(
    ("held", "movable"),
    [
        ({A: [0], B: [4, 5]}, frozenset[WorkloadId]()),
        ({A: [0, 1, 2], B: [4, 5]}, frozenset({A, B})),
    ],
    ids=["nobody may move", "too few are idle"],
)
def test_in_vain_nothing_changes(held: dict[WorkloadId, list[int]], movable: frozenset[WorkloadId]) -> None:
    counts = {who: len(at) for who, at in held.items()} | {NEW: 4}
    claims = claims_for(held, counts, movable=movable)
    before, beyond = claims.idle, {who: claims.out_of_reach(who) for who in held}
    assert not claims.make_room(NEW)
    assert claims.idle == before
    assert {who: claims.out_of_reach(who) for who in held} == beyond
    assert all(claims.of(who) == bits(*at) for who, at in held.items())


def test_searches_of_one_decision_share_a_budget() -> None:
    budget = SearchBudget(clearings=3)
    for left in (2, 1, 0):
        assert claims_for({A: [0], B: [4, 5]}, {A: 1, B: 2, NEW: 4}, budget=budget).make_room(NEW)
        assert budget.clearings == left
    claims = claims_for({A: [0], B: [4, 5]}, {A: 1, B: 2, NEW: 4}, budget=budget)
    assert not claims.make_room(NEW)
    assert addresses(claims.of(A)) == [0]


def test_two_that_grow_do_not_take_each_others_devices() -> None:
    # a and b would both fit if they could swap: neither can start there before the other has gone.
    claims = claims_for({A: [0, 1], B: [4, 5], C: [2, 6]}, {A: 4, B: 4, C: 0}, movable=frozenset({A, B}))
    claims.take(A, bits(0, 1))
    claims.take(B, bits(4, 5))
    claims.take(A, bits(0, 1, 2, 3))
    assert claims.make_room(B)
    assert addresses(claims.of(B)) == [4, 5, 6, 7]
    assert addresses(claims.of(A)) == [0, 1, 2, 3]
