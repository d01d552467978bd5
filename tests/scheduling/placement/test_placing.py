"""Placement: every count gets its devices, compact, without moving anybody who need not move, and it settles."""

from collections.abc import Mapping

import pytest

from springtide.core.decision import JobView, PoolAllocation, ServiceView, Snapshot
from springtide.core.job_parts import JobBounds
from springtide.core.resources import DeviceId, Topology, make_node
from springtide.core.workload import Entrypoint, Goal, InferenceService, JobState, TrainingJob, WorkloadId
from springtide.scheduling.placement.layout import layout_of
from springtide.scheduling.placement.placing import place, try_place
from springtide.scheduling.placement.relocation import SearchBudget

SOURCE = Entrypoint(source_path="main.py", object_name="main")
Counts = Mapping[WorkloadId, int]
Held = dict[WorkloadId, tuple[DeviceId, ...]]


def cluster_of(*sizes: int) -> Topology:
    return Topology(nodes=tuple(make_node(f"n{index}", size) for index, size in enumerate(sizes)))


def job_view(job_id: str, *, elastic: bool = True) -> JobView:
    job = TrainingJob(
        job_id=WorkloadId(job_id),
        name=job_id,
        entrypoint=SOURCE,
        global_batch_size=64,
        min_workers=1,
        max_workers=64,
        num_virtual_shards=64,
        elastic=elastic,
        goal=Goal(),
    )
    return JobView(job=job, state=JobState.RUNNING, submitted_at_s=0.0, bounds=JobBounds(min_workers=1, max_workers=64))


def service_view(service_id: str) -> ServiceView:
    service = InferenceService(
        service_id=WorkloadId(service_id), name=service_id, entrypoint=SOURCE, min_replicas=0, max_replicas=64
    )
    return ServiceView(service=service, min_replicas=0, max_replicas=64)


def snapshot_of(cluster: Topology, held: Mapping[WorkloadId, tuple[DeviceId, ...]], *others: str) -> Snapshot:
    """Names that begin with "s" are services."""
    names = dict.fromkeys([*held, *others])
    return Snapshot(
        now_s=0.0,
        cluster=cluster,
        jobs=tuple(job_view(name) for name in names if not name.startswith("s")),
        services=tuple(service_view(name) for name in names if name.startswith("s")),
        allocations={
            name: PoolAllocation(device_ids=devices, global_batch_size=None if name.startswith("s") else 64)
            for name, devices in held.items()
            if devices
        },
    )


def named(text: str) -> tuple[DeviceId, ...]:
    """`"0:012 1:3"` is devices 0, 1 and 2 of the first node and device 3 of the second."""
    return tuple(
        DeviceId(f"n{node}/{index}") for node, digits in (part.split(":") for part in text.split()) for index in digits
    )


def placed(cluster: Topology, held: Mapping[str, str], counts: Mapping[str, int], **kwargs: object) -> dict[str, str]:
    allocations = {WorkloadId(name): named(text) for name, text in held.items()}
    plan = place(counts, snapshot_of(cluster, allocations, *counts), **kwargs)  # type: ignore[arg-type]
    return {name: " ".join(device.removeprefix("n") for device in plan[name].device_ids) for name in plan}


# --- one rule at a time -----------------------------------------------------------------------------------------------


def test_who_keeps_its_size_keeps_its_devices_however_scattered() -> None:
    cluster = cluster_of(4, 4)
    assert placed(cluster, {"a": "1:3 0:1", "b": "0:0"}, {"a": 2, "b": 1, "c": 2}) == {
        "a": "1/3 0/1",
        "b": "0/0",
        "c": "0/2 0/3",
    }


def test_a_start_is_cut_from_the_smallest_block_that_is_large_enough() -> None:
    assert placed(cluster_of(8, 8), {"a": "0:012345"}, {"a": 6, "b": 2, "c": 4}) == {
        "a": "0/0 0/1 0/2 0/3 0/4 0/5",
        "b": "0/6 0/7",
        "c": "1/0 1/1 1/2 1/3",
    }


def test_among_equal_blocks_the_fuller_surroundings_win() -> None:
    cluster = cluster_of(8, 8)
    assert placed(cluster, {"a": "0:0", "b": "1:0123 1:4"}, {"a": 1, "b": 5, "c": 1})["c"] == "1/5"


def test_large_jobs_are_placed_before_small_ones() -> None:
    assert placed(cluster_of(4, 4), {}, {"a": 1, "b": 4, "c": 2}) == {
        "a": "1/2",
        "b": "0/0 0/1 0/2 0/3",
        "c": "1/0 1/1",
    }


@pytest.mark.parametrize(
    ("count", "devices"),
    [
        (3, "0/0 0/1 0/2"),
        (5, "0/0 0/1 0/2 0/3 0/4"),
        (6, "0/0 0/1 0/2 0/3 0/4 0/5"),
        (12, "0/0 0/1 0/2 0/3 0/4 0/5 0/6 0/7 1/0 1/1 1/2 1/3"),
    ],
)
def test_other_sizes_take_the_fewest_nodes(count: int, devices: str) -> None:
    assert placed(cluster_of(8, 8), {}, {"a": count}) == {"a": devices}


def test_three_go_where_they_fit_best() -> None:
    cluster = cluster_of(8, 8)
    assert placed(cluster, {"a": "0:01234"}, {"a": 5, "b": 3})["b"] == "0/5 0/6 0/7"


def test_who_grows_takes_the_buddy_of_its_own() -> None:
    cluster = cluster_of(8)
    assert placed(cluster, {"a": "0:32", "b": "0:4"}, {"a": 4, "b": 1}) == {"a": "0/3 0/2 0/0 0/1", "b": "0/4"}


def test_the_buddy_may_be_what_another_gives_back_in_the_same_plan() -> None:
    cluster = cluster_of(4, 4)
    plan = placed(cluster, {"a": "0:01", "b": "0:23"}, {"a": 4})
    assert plan == {"a": "0/0 0/1 0/2 0/3"}


def test_who_would_lie_on_more_nodes_than_it_needs_goes_to_a_compact_place() -> None:
    cluster = cluster_of(4, 4, 4)
    held = {"a": "0:01", "b": "0:23", "c": "1:0"}
    assert placed(cluster, held, {"a": 4, "b": 2, "c": 1})["a"] == "2/0 2/1 2/2 2/3"
    assert placed(cluster_of(4, 4), held, {"a": 4, "b": 2, "c": 1})["a"] == "0/0 0/1 1/2 1/3"


def test_who_has_room_on_its_own_node_stays_there() -> None:
    cluster = cluster_of(8, 8)
    held = {"a": "0:01", "b": "0:2"}
    assert placed(cluster, held, {"a": 4, "b": 1})["a"] == "0/0 0/1 0/3 0/4"
    # One that may be moved takes a block of its own, on its own node: it changes anyway.
    assert placed(cluster, held, {"a": 4, "b": 1}, movable={"a"})["a"] == "0/4 0/5 0/6 0/7"


def test_who_shrinks_leaves_the_largest_hole() -> None:
    cluster = cluster_of(8)
    assert placed(cluster, {"a": "0:4567", "b": "0:01"}, {"a": 2, "b": 2})["a"] == "0/4 0/5"
    assert placed(cluster, {"a": "0:2345"}, {"a": 2})["a"] == "0/2 0/3"
    assert placed(cluster, {"a": "0:2345", "b": "0:67"}, {"a": 2, "b": 2})["a"] == "0/4 0/5"


def test_who_shrinks_to_another_size_stays_compact() -> None:
    assert placed(cluster_of(8), {"a": "0:76543210"}, {"a": 6})["a"] == "0/5 0/4 0/3 0/2 0/1 0/0"
    assert placed(cluster_of(4, 4), {"a": "0:3 1:0123"}, {"a": 3})["a"] == "1/0 1/1 1/2"


def test_replicas_fill_the_holes() -> None:
    cluster = cluster_of(8, 8)
    plan = placed(cluster, {"a": "0:012", "b": "1:0123456"}, {"s": 2, "a": 3, "b": 7, "c": 4})
    assert plan["s"] == "0/3 1/7"
    assert plan["c"] == "0/4 0/5 0/6 0/7"


def test_a_service_keeps_its_first_replicas() -> None:
    assert placed(cluster_of(8), {"s": "0:5731"}, {"s": 2}) == {"s": "0/5 0/7"}


def test_dead_devices_are_replaced_and_nothing_else_moves() -> None:
    cluster = cluster_of(4, 4)
    held = {"a": "0:01 7:01", "b": "1:0 9:9"}
    assert placed(cluster, held, {"a": 4, "b": 1}) == {"a": "0/0 0/1 0/2 0/3", "b": "1/0"}
    # What else is held, and given up now, hides none of them.
    more = {**held, "gone": "0:23 1:23"}
    assert placed(cluster, more, {"a": 4, "b": 2}) == {"a": "0/0 0/1 0/2 0/3", "b": "1/0 1/1"}


def test_devices_that_nobody_holds_come_before_those_that_are_given_back() -> None:
    cluster = cluster_of(2, 2)
    assert placed(cluster, {"gone": "0:0", "a": "1:0"}, {"a": 1, "b": 1})["b"] == "1/1"
    assert placed(cluster, {"gone": "0:01"}, {"b": 2})["b"] == "1/0 1/1"
    # Compact comes first all the same.
    assert placed(cluster, {"gone": "0:0", "a": "1:0"}, {"a": 1, "b": 2})["b"] == "0/0 0/1"


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(AssertionError, match="do not fit"):
        placed(cluster_of(2), {}, {"a": 3})


# --- making room ------------------------------------------------------------------------------------------------------


def test_a_job_moves_aside_for_one_that_finds_no_block() -> None:
    cluster = cluster_of(4, 4)
    held = {"a": "0:0", "b": "0:2", "c": "1:01"}
    counts = {"a": 1, "b": 1, "c": 2, "d": 4}
    assert placed(cluster, held, counts)["d"] == "0/1 0/3 1/2 1/3"
    plan = placed(cluster, held, counts, movable={"a", "b", "c"})
    assert plan["d"] == "0/0 0/1 0/2 0/3" or plan["d"] == "1/0 1/1 1/2 1/3"
    assert sum(plan[name].replace("/", ":") != held[name] for name in "abc") >= 1


def test_only_those_move_that_may() -> None:
    cluster = cluster_of(4, 4)
    held = {"a": "0:0", "c": "1:01"}
    counts = {"a": 1, "c": 2, "d": 4}
    assert placed(cluster, held, counts, movable={"c"}) == {"a": "0/0", "c": "0/2 0/3", "d": "1/0 1/1 1/2 1/3"}
    assert placed(cluster, held, counts, movable={"a"}) == {"a": "1/2", "c": "1/0 1/1", "d": "0/0 0/1 0/2 0/3"}
    assert placed(cluster, held, counts, movable={"a", "c"})["c"] == "1/0 1/1"
    assert placed(cluster, held, counts, movable=frozenset())["d"] == "0/1 0/2 0/3 1/2"


def test_who_lies_scattered_and_may_move_comes_together() -> None:
    cluster = cluster_of(4, 4, 4)
    held = {"a": "0:0 1:3", "b": "2:012"}
    assert placed(cluster, held, {"a": 2, "b": 3})["a"] == "0/0 1/3"
    assert placed(cluster, held, {"a": 2, "b": 3}, movable={"a"})["a"] == "0/0 0/1"
    # Where nothing is free for it, others make room; it leaves before somebody who starts is placed.
    tight = {"a": "0:23 1:23", "b": "0:01"}
    plan = placed(cluster_of(4, 4), tight, {"a": 4, "b": 2}, movable={"a", "b"})
    assert plan == {"a": "1/2 1/3 1/0 1/1", "b": "0/0 0/1"}
    full = {"a": "0:23 1:23", "b": "0:0", "c": "1:0"}
    plan = placed(cluster_of(4, 4), full, {"a": 4, "b": 1, "c": 1}, movable={"a", "b", "c"})
    assert plan == {"a": "0/2 0/3 0/0 0/1", "b": "1/1", "c": "1/0"}


def test_who_shrinks_and_comes_together_leaves_what_was_promised() -> None:
    held = {"a": "1:01 0:0", "b": "0:1"}
    wanted = {WorkloadId("b"): named("1:0")}
    plan = placed(cluster_of(2, 2, 1), held, {"a": 2, "b": 1}, movable={"a"}, wanted=wanted)
    # Nor can it go where b is: b waits for it.
    assert plan == {"a": "1/1 0/0", "b": "1/0"}


def test_processes_that_cannot_change_are_never_moved() -> None:
    cluster = cluster_of(4, 4)
    allocations = {WorkloadId("a"): named("0:0"), WorkloadId("c"): named("1:01")}
    snapshot = snapshot_of(cluster, allocations, "d")
    views = tuple(job_view(name, elastic=name == "d") for name in ("a", "c", "d"))
    rigid = Snapshot(now_s=0.0, cluster=cluster, jobs=views, allocations=snapshot.allocations)
    counts = {WorkloadId("a"): 1, WorkloadId("c"): 2, WorkloadId("d"): 4}
    plan = place(counts, rigid, movable=frozenset(counts))
    assert {name: plan[name].device_ids for name in ("a", "c")} == allocations


def test_a_chain_of_moves_goes_through_devices_that_are_free() -> None:
    # Room for eight: the four must leave the second node, and for them the two must leave the third.
    cluster = cluster_of(8, 8, 8)
    held = {"x": "0:012345", "four": "1:0123", "two": "2:01", "y": "2:4567"}
    counts = {"x": 6, "four": 4, "two": 2, "y": 4, "new": 8}
    plan = placed(cluster, held, counts, movable={"four", "two"})
    assert plan["new"] == " ".join(f"1/{index}" for index in range(8))
    assert plan["four"] == "2/0 2/1 2/2 2/3"
    assert plan["two"] == "0/6 0/7"


# --- what was decided before ------------------------------------------------------------------------------------------


def test_what_was_decided_stands_while_it_is_carried_out() -> None:
    cluster = cluster_of(4, 4)
    wanted = {WorkloadId("a"): named("1:0123"), WorkloadId("b"): list(named("0:0"))}
    for held in ({"a": "0:23"}, {"a": "0:23 1:01"}, {"a": "1:0123 0:23"}, {"a": "1:0123"}, {}):
        plan = placed(cluster, held, {"a": 4, "b": 1}, wanted=wanted)
        assert sorted(plan["a"].split()) == ["1/0", "1/1", "1/2", "1/3"]
        assert plan["b"] == "0/0"


def test_what_was_decided_falls_when_it_does_not_fit_any_more() -> None:
    cluster = cluster_of(4, 4)
    wanted = {WorkloadId("a"): named("1:01")}
    assert placed(cluster, {"a": "0:01"}, {"a": 1}, wanted=wanted) == {"a": "0/0"}
    assert placed(cluster, {"b": "1:01"}, {"b": 2, "a": 2}, wanted=wanted) == {"b": "1/0 1/1", "a": "1/2 1/3"}
    assert placed(cluster_of(4), {}, {"a": 2}, wanted=wanted) == {"a": "0/0 0/1"}
    # Who shrinks keeps what was not promised to others.
    assert placed(cluster, {"b": "1:0123"}, {"b": 2, "a": 2}, wanted=wanted) == {"b": "1/2 1/3", "a": "1/0 1/1"}
    assert placed(cluster, {"b": "1:0123"}, {"b": 3, "a": 2}, wanted=wanted) == {"b": "1/0 1/1 1/2", "a": "0/0 0/1"}


def test_a_try_ends_once_a_rejected_place_is_certain_and_no_search_is_left() -> None:
    cluster = cluster_of(4, 4, 4)
    layout = layout_of(cluster)
    held = {WorkloadId(name): layout.device_at[at : at + 3] for name, at in (("b", 0), ("c", 4), ("d", 8))}
    snapshot = snapshot_of(cluster, held, "a", "z")  # type: ignore[arg-type]
    # One device of each node is left: "a" cannot be on one node, and "z" comes after it.
    counts = {WorkloadId("b"): 3, WorkloadId("c"): 3, WorkloadId("d"): 3, WorkloadId("a"): 2, WorkloadId("z"): 1}

    def tried(movable: frozenset[str], clearings: int, most_nodes: int = 1) -> object:
        def rejects(who: WorkloadId, bits: int) -> bool:
            return who == "a" and len(layout.nodes_of(bits)) > most_nodes

        movable_ids = frozenset(map(WorkloadId, movable))
        budget = SearchBudget(clearings=clearings)
        return try_place(counts, snapshot, movable=movable_ids, wanted={}, budget=budget, rejects=rejects)

    assert tried(frozenset(), 9) is None
    assert tried(frozenset({"c"}), 0) is None
    # A search could still use up what is left, and other callers have no objection.
    assert tried(frozenset({"c"}), 9) == place(counts, snapshot, movable={WorkloadId("c")})
    assert tried(frozenset(), 9, most_nodes=2) == place(counts, snapshot)
