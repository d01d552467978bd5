"""Places beside workloads that do not move: what is promised there, and who is stopped where a promise cannot wait."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from springtide.control.quotes.inquiry import arriving
from springtide.core.decision import Overheads, Plan, PoolAllocation, ServiceView, Snapshot
from springtide.core.job_parts import DeadlinePromise, JobProgress, LearntSpeed
from springtide.core.resources import Topology, make_node
from springtide.core.workload import Entrypoint, Goal, InferenceService, JobState, TrainingJob, WorkloadId
from springtide.scheduling.placement.layout import layout_of
from springtide.scheduling.placement.relocation import SearchBudget
from springtide.scheduling.policies.springtide.capacity import StayingJobs
from springtide.scheduling.policies.springtide.memory import State, costs_of, entry_of
from springtide.scheduling.policies.springtide.moves import delays, hurry, jobs_to_stop_first
from springtide.scheduling.policies.springtide.packing import Packing
from springtide.scheduling.policies.springtide.places import assign_devices, movable_jobs
from springtide.scheduling.policies.springtide.policy import Springtide
from springtide.scheduling.policies.springtide.rows import PromiseRow
from springtide.scheduling.policies.springtide.schedules import price_changes
from springtide.solvers.reservations.reservation_table import ReservationTable

SOURCE = Entrypoint(source_path="a.py")
THREE_PAIRS = Topology(nodes=tuple([make_node(f"n{index}", 2) for index in range(3)]))
# On two nodes instead of one: 2.17 ** (-1 / 3).
LOWER = 0.772


def job(name: str, steps: int, deadline_s: float | None, *, least: int, most: int) -> TrainingJob:
    return TrainingJob(
        job_id=WorkloadId(name),
        name=name,
        entrypoint=SOURCE,
        min_workers=least,
        max_workers=most,
        total_steps=steps,
        num_virtual_shards=64,
        profile_steps_per_s={n: 10.0 * n for n in range(least, most + 1)},
        goal=Goal(deadline_s=deadline_s),
    )


def beside_services(*jobs, memory=None, held=None, now_s: float = 0.0) -> Snapshot:
    """Three nodes of two devices, and on the first device of each a service that keeps it."""
    names = [WorkloadId(f"s{index}") for index in range(3)]
    services = [
        InferenceService(service_id=name, name=name, entrypoint=SOURCE, min_replicas=1, max_replicas=1)
        for name in names
    ]
    views = [ServiceView(service=known, min_replicas=1, max_replicas=1, num_ready=1) for known in services]
    places = {name: PoolAllocation(device_ids=(f"n{index}/0",)) for index, name in enumerate(names)}
    return Snapshot(
        now_s=now_s,
        cluster=THREE_PAIRS,
        jobs=jobs,
        services=tuple(views),
        allocations={**places, **(held or {})},
        memory=memory,
    )


def asks(deadline_s: float) -> Plan:
    """A job of 60 s on two devices asks, and there are none on one node."""
    known = job("wide", 1_200, deadline_s, least=2, most=2)
    return Springtide().decide(beside_services(arriving(known, 0.0)))


def test_a_job_that_is_in_time_on_scattered_devices_is_promised_there() -> None:
    plan = asks(100.0)
    assert not plan.rejected
    assert plan.allocations["wide"].num_devices == 2
    assert plan.admitted["wide"] == pytest.approx(60.0 / LOWER, rel=0.05)


def test_one_that_would_be_late_there_is_refused() -> None:
    plan = asks(65.0)
    assert plan.rejected.keys() == {"wide"}
    assert "3 are free all that time, but not together" in plan.rejected["wide"].reason


@pytest.mark.parametrize(("deadline_s", "is_promised"), [(185.0, False), (200.0, True)])
def test_one_that_starts_later_counts_on_the_places_that_services_leave(deadline_s: float, is_promised: bool) -> None:
    first = job("first", 3_000, 120.0, least=3, most=3)
    policy = Springtide()
    begun = policy.decide(beside_services(arriving(first, 0.0)))
    running = replace(
        arriving(first, 0.0),
        state=JobState.RUNNING,
        promise=DeadlinePromise(admitted_at_s=0.0, promised_finish_s=begun.admitted["first"]),
        progress=JobProgress(step=0, progress_at_s=0.0),
        started_at_s=0.0,
        num_replicas=3,
    )
    wide = arriving(job("wide", 1_200, deadline_s, least=2, most=2), 1.0)
    held = {"first": begun.allocations["first"]}
    plan = policy.decide(beside_services(running, wide, memory=begun.memory, held=held, now_s=1.0))
    assert ("wide" in plan.admitted) == is_promised, plan.reasons
    assert ("wide" in plan.rejected) != is_promised
    if is_promised:
        assert plan.admitted["wide"] >= 115.0 + 60.0 / LOWER


# --- gathered on fewer nodes ------------------------------------------------------------------------------------------

FOUR_NODES = layout_of(Topology(nodes=tuple([make_node(f"n{index}", 4) for index in range(4)])))


def packed(places: dict[str, str], movable: set[str], moves: int = 100) -> Packing:
    """Addresses of each job, four on a node, as hexadecimal digits."""
    bits = {WorkloadId(name): sum(1 << int(digit, 16) for digit in digits) for name, digits in places.items()}
    return Packing(FOUR_NODES, bits, {WorkloadId(name) for name in movable}, SearchBudget(moves=moves))


def nodes_of(packing: Packing, name: str) -> list[int]:
    return FOUR_NODES.nodes_of(packing.places[WorkloadId(name)])


# On each node one device of a service; `wide` has four devices on four nodes, beside best effort.
CROWDED = {"s0": "0", "s1": "4", "s2": "8", "s3": "c", "wide": "159d", "a": "2", "b": "6a", "c": "e", "d": "3"}


@pytest.mark.parametrize("loose", [set(), {"a", "b", "c", "d"}])
@pytest.mark.parametrize("movable", [{"wide"}, {"wide", "a", "c", "d"}, {"wide", "a", "b", "c", "d"}])
def test_a_scattered_job_changes_places_with_others_on_the_fewest_nodes(movable, loose) -> None:
    packing = packed(CROWDED, movable)
    before = {name: bits.bit_count() for name, bits in packing.places.items()}
    assert packing.gather_on_nodes(WorkloadId("wide"), loose)
    assert len(nodes_of(packing, "wide")) == 2
    assert {name: bits.bit_count() for name, bits in packing.places.items()} == before
    taken = list(packing.places.values())
    assert sum(bits.bit_count() for bits in taken) == sum(taken).bit_count()
    assert set(packing.moved) <= {*movable, "wide"}
    stayed = packed(CROWDED, movable).places
    assert all(packing.places[name] == bits for name, bits in stayed.items() if name not in packing.moved)


def test_a_job_that_changes_places_in_part_keeps_its_number_of_devices() -> None:
    packing = packed({"s0": "0", "s1": "467", "s2": "89ab", "s3": "cde", "wide": "15", "b": "23"}, {"b"})
    assert packing.gather_on_nodes(WorkloadId("wide"), {"b"})
    assert nodes_of(packing, "wide") == [0]
    assert packing.places[WorkloadId("b")].bit_count() == 2


def test_none_changes_places_if_no_fewer_nodes_come_of_it_or_more_would_move_than_may() -> None:
    full = {**CROWDED, "e": "7b", "f": "f"}
    assert not packed(full, {"wide", "b", "e"}).gather_on_nodes(WorkloadId("wide"), set())
    assert not packed(full, set(full), moves=1).gather_on_nodes(WorkloadId("wide"), set(full))
    packing = packed(full, {"wide", "a", "c", "d", "f"})
    assert packing.gather_on_nodes(WorkloadId("wide"), set())
    assert len(nodes_of(packing, "wide")) == 2


# --- who is stopped first ---------------------------------------------------------------------------------------------


def on(*devices: str) -> PoolAllocation:
    return PoolAllocation(device_ids=devices)


def test_best_effort_that_a_promise_cannot_wait_for_is_stopped_before_it_moves() -> None:
    # `a` moves to where `b` is, `b` to an idle device; the promised job gets the device of `a`.
    held = {"a": on("n0/0"), "b": on("n1/0")}
    placed = {"a": on("n1/0"), "b": on("n2/0"), "sure": on("n0/0")}
    snapshot = Snapshot(now_s=0.0, cluster=THREE_PAIRS, allocations=held)
    costs = costs_of(snapshot.overheads, 2)
    state = State(ReservationTable(6, 0.0, costs))
    state.reservations.begin(0.0, costs, 10_000)
    view = arriving(job("sure", 100, 50.0, least=1, most=1), 0.0)
    assert state.reservations.admit(entry_of(PromiseRow(view), 100.0, since_s=0.0))
    change_s = costs.later[1]
    assert delays(state, snapshot, placed)["sure"] == pytest.approx(2 * change_s)
    assert not hurry(state, snapshot, placed, {"other"}, "sure")
    assert hurry(state, snapshot, placed, {"a", "b"}, "sure")
    assert jobs_to_stop_first(snapshot, placed, state.hurried) == {"a", "b"}
    assert delays(state, snapshot, placed)["sure"] == 0.0
    assert not hurry(state, snapshot, placed, {"a", "b"}, "sure")
    # Where its device goes to no other job, none is stopped.
    assert jobs_to_stop_first(snapshot, {"a": on("n2/1"), "b": held["b"]}, state.hurried) == set()


@pytest.mark.parametrize(
    ("due_s", "now_s", "moves_to", "hurried"),
    [
        *((50.0, 5.0, "n2/0", set()), (50.0, 20.0, "n2/0", set()), (50.0, 34.0, "n2/0", {"a"})),
        # The promise is not behind yet, but would be by a move that begins now.
        *((20.0, 2.0, "n1/0", set()), (20.0, 2.0, "n2/0", {"a"})),
    ],
)
def test_best_effort_that_moves_too_slowly_for_a_promise_is_stopped(
    due_s: float, now_s: float, moves_to: str, hurried: set[str]
) -> None:
    # `a` moves out of the way of a job of 10 s; later it is still there, and may move to another device.
    layout, sure = layout_of(THREE_PAIRS), {"sure": on("n0/0")}
    snapshot = Snapshot(
        now_s=0.0, cluster=THREE_PAIRS, allocations={"a": on("n0/0")}, overheads=Overheads(change_s=4.0)
    )
    costs = costs_of(snapshot.overheads, 2)
    state = State(ReservationTable(6, 0.0, costs))
    state.change_s = 4.0
    state.reservations.begin(0.0, costs, 10_000)
    view = arriving(job("sure", 100, due_s, least=1, most=1), 0.0)
    entry = entry_of(PromiseRow(view), 100.0, since_s=0.0)
    assert state.reservations.admit(entry)
    entry.is_promised = True
    placed = {"a": on("n1/0"), **sure}
    assert not price_changes(state, layout, snapshot, placed, {"a"})
    assert not state.hurried
    state.record_devices(0.0, placed)
    state.reservations.commit()
    state.reservations.begin(now_s, costs, 10_000, {"sure": 1})
    snapshot = replace(snapshot, now_s=now_s, allocations={"a": on("n0/0", "n1/0")})
    assert not price_changes(state, layout, snapshot, {"a": on(moves_to), **sure}, {"a"})
    assert state.hurried == hurried


# --- who is not moved for a start that cannot wait --------------------------------------------------------------------

CHANGE_S = 20.0
# On each node of four a promised pair, a promised single and one of best effort.
PAIRS = {name: size for n in range(4) for name, size in ((f"pair{n}", 2), (f"single{n}", 1), (f"spare{n}", 1))}


@pytest.mark.parametrize(
    ("due_s", "ends_s", "nodes", "is_late"),
    [
        # A pair moves to devices that a single leaves first: two changes, its own start, and 30 s on one node.
        (95.0, 90.0, 1, False),
        # On four nodes it is slower by 2.17 ** (2 / 3), and starts at once.
        (75.0, 20.0 + 30.0 / LOWER**2, 4, False),
        (65.0, None, 4, True),
    ],
)
def test_a_job_that_cannot_wait_until_others_move_one_after_the_other_starts_scattered(
    due_s: float, ends_s: float | None, nodes: int, is_late: bool
) -> None:
    topology = Topology(nodes=tuple([make_node(f"n{index}", 4) for index in range(4)]))
    places = {"pair": (0, 1), "single": (2,), "spare": (3,)}
    held = {
        WorkloadId(f"{kind}{n}"): on(*(f"n{n}/{number}" for number in numbers))
        for n in range(4)
        for kind, numbers in places.items()
    }
    jobs = [arriving(job(name, 20_000, 5_000.0, least=size, most=size), 0.0) for name, size in PAIRS.items()]
    wide = arriving(job("wide", 1_200, due_s, least=4, most=4), 0.0)
    overheads = Overheads(change_s=CHANGE_S)
    snapshot = Snapshot(now_s=0.0, cluster=topology, jobs=(*jobs, wide), allocations=held, overheads=overheads)
    costs = costs_of(overheads, 4)
    state = State(ReservationTable(16, 0.0, costs))
    state.change_s = CHANGE_S
    state.record_devices(0.0, held)
    state.reservations.begin(0.0, costs, 100_000)
    for view in (*jobs, wide):
        name = view.job.job_id
        if name.startswith("spare"):
            continue
        size = view.job.max_workers
        entry = entry_of(PromiseRow(view), view.job.total_steps, since_s=0.0, held=0 if name == "wide" else size)
        entry.is_promised = True
        state.reservations.put(entry)
    # Best effort gives its devices up.
    placed = assign_devices(state, StayingJobs(), snapshot, {}, {}, 100_000)
    entry = state.reservations.entries["wide"]
    assert len({device.partition("/")[0] for device in placed["wide"].device_ids}) == nodes
    assert entry.is_late == is_late
    if ends_s is not None:
        assert entry.end_s == pytest.approx(ends_s, abs=0.5)
    others = [who for who in held if who in placed]
    assert (nodes == 1) == any(placed[who].device_ids != held[who].device_ids for who in others)


# --- what a move costs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "changes"), [(1, 2), (2, 1)])
def test_the_only_worker_of_a_job_moves_by_two_changes_and_only_where_there_is_time_for_both(most, changes) -> None:
    overheads = Overheads(change_s=CHANGE_S)
    held = {WorkloadId("sure"): on("n0/0")}
    costs = costs_of(overheads, 2)
    for spare_changes in (0.9, 1.1, 1.9, 2.1):
        due_s = 10.0 + spare_changes * costs.later[1]
        view = arriving(job("sure", 100, due_s, least=1, most=most), 0.0)
        snapshot = Snapshot(now_s=0.0, cluster=THREE_PAIRS, jobs=(view,), allocations=held, overheads=overheads)
        state = State(ReservationTable(6, 0.0, costs))
        state.change_s = CHANGE_S
        row = PromiseRow(view)
        state.lone = {row.job_id} if row.is_lone else set()
        state.record_devices(0.0, held)
        state.reservations.begin(0.0, costs, 10_000)
        entry = entry_of(row, 100.0, since_s=0.0, held=1)
        assert state.reservations.admit(entry)
        has_time = spare_changes > changes
        assert movable_jobs(state) == (["sure"] if has_time else [])
        moved = {"sure": on("n1/0")}
        broken = price_changes(state, layout_of(THREE_PAIRS), snapshot, moved, set())
        assert broken == ([] if has_time else ["sure"])
        if has_time:
            assert entry.runs[0].overhead_s == pytest.approx(changes * costs.later[1])


# --- what was measured ------------------------------------------------------------------------------------------------


def test_a_size_that_was_slower_than_others_say_of_it_is_planned_no_faster() -> None:
    known = job("sure", 100, 50.0, least=1, most=4)
    rates = {n: 10.0 * n for n in range(1, 5)}

    def planned(**measured: float) -> dict[int, float]:
        samples = {int(size[1:]): rate * known.global_batch_size for size, rate in measured.items()}
        row = PromiseRow(replace(arriving(known, 0.0), learnt=LearntSpeed(throughput_samples_per_s=samples)))
        return {n: row.rates[n] * row.scale for n in rates}

    assert planned() == rates
    assert planned(n2=20.0, n4=40.0) == pytest.approx(rates)
    # Scattered on four, as it says on two: by the mean of both it would be 0.9 of its profile.
    found = planned(n2=20.0, n4=32.4)
    assert found[4] == pytest.approx(32.4)
    assert found[1] == pytest.approx(9.0)
    # However slow the larger size was, it is no slower than a smaller one.
    assert planned(n3=30.0, n4=10.0)[4] == planned(n3=30.0, n4=10.0)[3]
