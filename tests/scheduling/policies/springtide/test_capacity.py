"""What springtide counts on: capacity that is told, servers that go, and jobs on servers that are being emptied."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.rival_platform import make_view
from kits.solvers.reservations import verify
from springtide.core.decision import Capacity, Drain, Overheads, PoolAllocation, Snapshot
from springtide.core.resources import Topology, make_node
from springtide.core.workload import JobState
from springtide.scheduling.decisions.fingerprint import nodes_fingerprint
from springtide.scheduling.policies.springtide.capacity import (
    NO_WORKLOAD,
    StayingJobs,
    announced_falls,
    has_more_devices,
    promisable_capacity,
)
from springtide.scheduling.policies.springtide.memory import State, costs_of
from springtide.scheduling.policies.springtide.moves import delays, jobs_to_stop_first, without_waits
from springtide.scheduling.policies.springtide.policy import DerivedPromises, Springtide
from springtide.solvers.reservations.reservation_table import ReservationTable

NODES = tuple(make_node(f"n{index}", 4) for index in range(3))
WHOLE = Topology(nodes=NODES)
COSTS = Overheads(change_s=2.0)


def _capacity(*steps: tuple[float, int]) -> tuple[Capacity, ...]:
    return tuple(Capacity(from_s=from_s, num_devices=count) for from_s, count in steps)


def _given(*devices: str) -> PoolAllocation:
    return PoolAllocation(device_ids=devices)


def _running(view, now_s=0.0):
    return with_fields(
        view, state=JobState.RUNNING, num_replicas=4, admitted_at_s=0.0, started_at_s=0.0, progress_at_s=now_s
    )


def _all(node: str) -> tuple[str, ...]:
    return tuple(f"{node}/{index}" for index in range(4))


def test_what_is_told_is_counted_on_but_never_more_than_is_there_now() -> None:
    snapshot = Snapshot(now_s=10.0, cluster=WHOLE, capacity=_capacity((0.0, 20), (20.0, 16), (30.0, 8)))
    assert promisable_capacity(snapshot, 0.0, 0, StayingJobs()) == ((0.0, 12), (20.0, 16), (30.0, 8))
    assert promisable_capacity(snapshot, 0.25, 2, StayingJobs()) == ((0.0, 7), (20.0, 10), (30.0, 4))
    assert announced_falls(snapshot) == (30.0, 30.0)
    assert promisable_capacity(Snapshot(now_s=0.0, cluster=WHOLE), 0.0, 0, StayingJobs()) == ((0.0, 12),)
    assert announced_falls(Snapshot(now_s=0.0, cluster=WHOLE)) == ()


def test_servers_that_are_not_counted_on_may_go_at_any_moment() -> None:
    snapshot = Snapshot(now_s=10.0, cluster=WHOLE, capacity=_capacity((0.0, 4), (30.0, 8), (40.0, 4)))
    assert [round(at_s) for at_s in announced_falls(snapshot)] == [10, 10, 40]
    # 30 s of work on four devices and 2 s to start; two servers may go at once and one at 40 s, and each time it may
    # have to move.
    tight, loose = (make_view(name, steps=120, deadline_s=10.0 + s, most=4) for name, s in (("a", 37.0), ("b", 39.0)))
    answers = [Springtide().decide(replace(snapshot, jobs=(view,), overheads=COSTS)) for view in (tight, loose)]
    assert [bool(plan.admitted) for plan in answers] == [False, True]


def test_more_is_more_only_from_now_on() -> None:
    assert has_more_devices(((0.0, 4),), ((0.0, 4), (50.0, 8)), 10.0)
    assert not has_more_devices(((0.0, 4),), ((0.0, 8), (20.0, 4)), 30.0)


def test_a_promise_counts_on_what_will_be_there() -> None:
    # 12 devices for a minute, then four: half an hour of work for one cannot be done in time.
    snapshot = Snapshot(now_s=0.0, cluster=WHOLE, overheads=COSTS, capacity=_capacity((0.0, 12), (60.0, 4)))
    view = make_view("a", steps=1800, deadline_s=300.0)
    assert Springtide().decide(replace(snapshot, jobs=(view,))).rejected
    assert Springtide().decide(replace(snapshot, jobs=(view,), capacity=())).admitted


def test_a_capacity_that_moves_on_changes_nothing_and_one_that_falls_does() -> None:
    policy = Springtide()
    view = make_view("a", steps=3000, deadline_s=4000.0)
    told = _capacity((0.0, 12), (2000.0, 8))
    first = policy.decide(Snapshot(now_s=0.0, cluster=WHOLE, jobs=(view,), overheads=COSTS, capacity=told))
    running = with_fields(view, state=JobState.RUNNING, admitted_at_s=0.0, num_replicas=8)
    later = Snapshot(
        now_s=50.0,
        cluster=WHOLE,
        jobs=(running,),
        overheads=COSTS,
        allocations=first.allocations,
        memory=first.memory,
        capacity=_capacity((50.0, 12), (100.0, 12), (2000.0, 8), (9000.0, 12)),
    )
    second = policy.decide(later)
    assert second.memory is first.memory
    # Eight are in use to 377 s. Where only four are left from 100 s on it is planned anew, in time.
    third = policy.decide(replace(later, capacity=_capacity((50.0, 12), (100.0, 4)), memory=second.memory))
    assert third.memory is not second.memory
    assert third.future["a"][-1].num_devices <= 4
    assert third.future["a"][-1].end_s <= 4000.0
    again = Springtide().decide(
        replace(
            later,
            capacity=_capacity((50.0, 12), (100.0, 4)),
            memory=msgspec.json.decode(msgspec.json.encode(second.memory)),
        )
    )
    assert again.memory == third.memory
    assert again.allocations == third.allocations


def test_who_waits_is_tried_again_when_more_is_told() -> None:
    policy = Springtide()
    blocker = make_view("blocker", steps=350, deadline_s=100.0, most=4)
    waits = make_view("waits", steps=350, deadline_s=120.0, most=4)
    waits = replace(waits, job=replace(waits.job, goal=replace(waits.job.goal, waits=True)))
    scarce = Snapshot(now_s=0.0, cluster=WHOLE, jobs=(blocker, waits), capacity=_capacity((0.0, 4)))
    first = policy.decide(scarce)
    assert set(first.admitted) == {"blocker"}
    second = policy.decide(
        replace(scarce, now_s=1.0, memory=first.memory, capacity=_capacity((0.0, 8)), allocations=first.allocations)
    )
    assert second.admitted["waits"] <= 120.0


def test_what_is_not_counted_on_runs_best_effort() -> None:
    promised, effort = make_view("promised", steps=300, deadline_s=100.0, most=4), make_view("effort", steps=900)
    snapshot = Snapshot(now_s=0.0, cluster=WHOLE, jobs=(promised, effort), capacity=_capacity((0.0, 4)))
    plan = Springtide().decide(snapshot)
    assert plan.allocations["promised"].num_devices == 4
    assert plan.allocations["effort"].num_devices >= 4


def test_a_promise_goes_on_where_it_is_although_less_is_told() -> None:
    policy = Springtide()
    view = make_view("a", steps=700, deadline_s=100.0)
    first = policy.decide(Snapshot(now_s=0.0, cluster=WHOLE, jobs=(view,)))
    assert first.allocations["a"].num_devices == 8
    running = with_fields(view, state=JobState.RUNNING, admitted_at_s=0.0, num_replicas=8)
    later = Snapshot(now_s=10.0, cluster=WHOLE, jobs=(running,), allocations=first.allocations, memory=first.memory)
    second = policy.decide(replace(later, capacity=_capacity((0.0, 0))))
    assert second.allocations == first.allocations
    assert "told" in second.memory
    other = make_view("other", steps=100, deadline_s=100.0, most=4)
    third = policy.decide(replace(later, jobs=(running, other), capacity=_capacity((0.0, 0)), memory=second.memory))
    assert "other" in third.rejected


def test_a_job_whose_server_is_taken_goes_on_from_where_it_is() -> None:
    policy = Springtide()
    view = make_view("a", steps=2000, deadline_s=900.0, most=4)
    first = policy.decide(Snapshot(now_s=0.0, cluster=WHOLE, jobs=(view,), overheads=COSTS))
    devices = first.allocations["a"].device_ids
    node = WHOLE.node_of[devices[0]]
    left = Topology(nodes=tuple(at for at in NODES if at.node_id != node))
    # Nothing was reported since it started, and its server is no longer shown.
    taken = Snapshot(now_s=302.0, cluster=left, jobs=(_running(view),), overheads=COSTS, memory=first.memory)
    plan = policy.decide(taken)
    assert plan.allocations["a"].num_devices == 4
    # 300 s were done of 500; a change and a reserve on top.
    assert 502.0 < plan.future["a"][-1].end_s < 510.0
    # A lost server is another matter: its workers are gone, and it begins where it was last seen.
    lost = replace(_running(view), num_replicas=0, state=JobState.PENDING)
    plan = Springtide().decide(replace(taken, jobs=(lost,)))
    assert plan.future["a"][-1].end_s > 800.0


@pytest.mark.parametrize("is_promised", [True, False])
def test_on_a_server_that_is_emptied_jobs_stay_and_nobody_comes(is_promised: bool) -> None:
    policy = Springtide()
    two = Topology(nodes=NODES[:2])
    views = [make_view(name, steps=1000, deadline_s=2000.0 if is_promised else None, most=4) for name in ("a", "b")]
    first = policy.decide(Snapshot(now_s=0.0, cluster=two, jobs=tuple(views), overheads=COSTS))
    assert {given.num_devices for given in first.allocations.values()} == {4}
    on_second = next(who for who, given in first.allocations.items() if given.device_ids[0].startswith("n1"))
    emptied = replace(NODES[1], node_id="n1[0,1,2,3]")
    shown = Topology(nodes=(NODES[0], emptied))
    later = Snapshot(
        now_s=10.0,
        cluster=shown,
        jobs=tuple(_running(view) for view in views),
        overheads=COSTS,
        allocations=first.allocations,
        memory=first.memory,
        drains={"n1[0,1,2,3]": Drain(pool="inference", since_s=10.0)},
    )
    second = policy.decide(later)
    assert second.allocations == first.allocations
    # Once the other one has ended its devices are free; those of the one that stays are nobody's.
    new = make_view("new", at_s=11.0, steps=1000, deadline_s=500.0 if is_promised else None, most=8)
    third = policy.decide(
        replace(
            later,
            now_s=11.0,
            jobs=(*[view for view in later.jobs if view.job.job_id == on_second], new),
            allocations={on_second: first.allocations[on_second]},
            memory=second.memory,
        )
    )
    assert third.allocations[on_second] == first.allocations[on_second]
    assert set(third.allocations["new"].device_ids) == set(_all("n0"))


def test_who_leaves_such_a_server_leaves_its_devices_to_nobody() -> None:
    held = {"a": _given("n1/0", "n1/1", "n0/0"), "b": _given("n0/1")}
    staying = StayingJobs(draining=frozenset(_all("n1")))
    shown = staying.for_placement(Snapshot(now_s=0.0, cluster=WHOLE, allocations=held))
    assert shown.allocations == {"a": _given("n0/0"), "b": _given("n0/1"), NO_WORKLOAD: _given("n1/0", "n1/1")}
    stays = StayingJobs(draining=frozenset(_all("n1")), promised={"a": (2, 50.0)})
    assert stays.for_placement(Snapshot(now_s=0.0, cluster=WHOLE, allocations=held)).allocations == held
    snapshot = Snapshot(now_s=0.0, cluster=WHOLE, capacity=_capacity((0.0, 12), (90.0, 4), (95.0, 8)))
    # Two of the four are with the one that stays, until it ends.
    assert promisable_capacity(snapshot, 0.0, 0, stays) == ((0.0, 10), (50.0, 8), (90.0, 4), (95.0, 8))
    assert promisable_capacity(snapshot, 0.0, 0, stays.without_promised())[0] == (0.0, 8)


def test_jobs_that_cannot_change_their_workers_stay_while_others_come() -> None:
    policy = Springtide()
    rigid = make_view("rigid", steps=800, deadline_s=3000.0, most=2, elastic=False)
    first = policy.decide(Snapshot(now_s=0.0, cluster=WHOLE, jobs=(rigid,), overheads=COSTS))
    running = replace(_running(rigid), num_replicas=2)
    wide = make_view("wide", at_s=5.0, steps=600, deadline_s=85.0)
    plan = policy.decide(
        Snapshot(
            now_s=5.0,
            cluster=WHOLE,
            jobs=(running, wide),
            overheads=COSTS,
            allocations=first.allocations,
            memory=first.memory,
        )
    )
    assert plan.allocations["rigid"].device_ids == first.allocations["rigid"].device_ids


def test_who_gets_a_movers_devices_waits_until_it_is_warm() -> None:
    costs = costs_of(COSTS, 8)
    state = State(ReservationTable(12, 0.0, costs))
    held = {"mover": _given("n0/0", "n0/1"), "shrinks": _given("n1/0", "n1/1"), "warm": _given("n2/0", "n2/1", "n2/2")}
    state.devices = {"mover": held["mover"].device_ids, "warm": ("n2/1", "n2/2")}
    snapshot = Snapshot(now_s=0.0, cluster=WHOLE, allocations=held)
    placed = {
        "mover": _given("n0/2", "n0/3"),
        "shrinks": _given("n1/0"),
        "warm": _given("n2/1", "n2/2"),
        "x": _given("n0/0"),
        "y": _given("n1/1"),
        "z": _given("n2/0"),
    }
    waits_s = delays(state, snapshot, placed)
    assert waits_s["x"] == waits_s["z"] == costs.later[2]
    assert waits_s["y"] == 0.0
    # Two that would wait for each other: one lets go first, and the other waits for nobody.
    swap = {"mover": held["shrinks"], "shrinks": held["mover"]}
    (first,) = jobs_to_stop_first(snapshot, swap)
    assert delays(state, snapshot, swap)["mover" if first == "shrinks" else "shrinks"] == 0.0
    # Each of 1,500 takes the device of the next one.
    line = {f"job-{index}": _given(f"n0/{index}") for index in range(1500)}
    snapshot = Snapshot(now_s=0.0, cluster=WHOLE, allocations=line)
    waits_s = delays(state, snapshot, {f"job-{index}": _given(f"n0/{index + 1}") for index in range(1500)})
    assert waits_s["job-0"] == pytest.approx(1499 * costs.later[1])


def test_parts_of_a_node_are_told_apart() -> None:
    def cluster(*indices: int) -> Topology:
        node = replace(NODES[0], devices=tuple(NODES[0].devices[index] for index in indices))
        return Topology(nodes=(node,))

    fingerprints = {nodes_fingerprint(cluster(*indices)) for indices in ((0, 1), (0, 2), (1, 2), (0, 1, 2, 3))}
    assert len(fingerprints) == 4
    assert nodes_fingerprint(cluster(0, 1, 2, 3)) == nodes_fingerprint(Topology(nodes=(NODES[0],)))


def test_after_any_of_this_the_book_is_sound() -> None:
    policy, derived = Springtide(), DerivedPromises()
    views = tuple(make_view(f"j{index}", steps=400, deadline_s=600.0 + index, most=4) for index in range(6))
    memory = None
    for now_s, count in ((0.0, 12), (10.0, 8), (20.0, 0), (30.0, 12)):
        snapshot = Snapshot(now_s=now_s, cluster=WHOLE, jobs=views, overheads=COSTS, memory=memory)
        memory = policy.decide(replace(snapshot, capacity=_capacity((0.0, count), (50.0, 8))), derived).memory
        state = derived.state
        assert state is not None
        assert verify(state.reservations) == []


@pytest.mark.parametrize(
    ("grows", "replica", "grown"),
    [
        (("n0/3", "n0/4"), ("n0/4",), ("n0/3", "n0/0")),
        # It moves itself: others may wait for it.
        (("n0/4",), ("n0/0",), ("n0/4",)),
        # It keeps its size: the idle device is left.
        (("n0/3",), ("n0/4",), ("n0/3",)),
    ],
)
def test_a_replica_waits_for_no_job_that_moves_where_a_growing_one_can(grows, replica, grown) -> None:
    held = {"moves": _given("n0/0"), "grows": _given("n0/3"), "shrinks": _given("n0/1", "n0/2", "n0/5")}
    placed = {
        "echo": _given("n0/0"),
        "moves": _given("n0/5"),
        "grows": _given(*grows),
        "shrinks": _given("n0/1", "n0/2"),
    }
    cluster = Topology(nodes=(make_node("n0", 6),))
    result = without_waits(placed, Snapshot(now_s=0.0, cluster=cluster, allocations=held), ["echo"], ["moves", "grows"])
    assert (result["echo"].device_ids, result["grows"].device_ids) == (replica, grown)
    assert (result["moves"], result["shrinks"]) == (placed["moves"], placed["shrinks"])
