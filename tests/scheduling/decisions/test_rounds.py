"""Between two boundaries what was decided stands: nobody moves, who comes waits, who ends drops out."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.rival_platform import make_view
from springtide.control.controller import check_plan
from springtide.core.decision import PoolAllocation, ServiceView, Snapshot
from springtide.core.resources import Topology, make_node
from springtide.core.workload import Entrypoint, InferenceService, JobState
from springtide.scheduling.decisions.rounds import RoundDecision, decide_in_rounds, stuck_moves

A, B, C = make_view("a"), make_view("b", at_s=1.0), make_view("c", at_s=2.0)


class Halving:
    """Gives each job half of what is left, and counts how often it is asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, round_):
        self.asked.append(round_)
        left, given = list(round_.devices), {}
        for view in round_.snapshot.jobs:
            count = (len(left) + 1) // 2
            given[view.job.job_id] = PoolAllocation(device_ids=tuple(left[:count]), global_batch_size=32)
            left = left[count:]
        return RoundDecision(allocations=given, state={"number": round_.number})


def service(*, demand=0, ready=0, low=0):
    return ServiceView(
        service=InferenceService(service_id="s", name="s", entrypoint=Entrypoint(source_path="a.py"), max_replicas=4),
        min_replicas=low,
        max_replicas=4,
        num_ready=ready,
        in_flight=demand,
        idle_s=0.0 if demand else 99.0,
    )


def snapshot(*views, now_s=0.0, memory=None, slots=8, held=None, services=()):
    return Snapshot(
        now_s=now_s,
        cluster=Topology(nodes=(make_node("n", slots),)),
        jobs=views,
        services=services,
        allocations=held or {},
        memory=msgspec.json.decode(msgspec.json.encode(memory)),
    )


def decide(snap, policy, **more):
    plan = decide_in_rounds("rule", 60.0, snap, policy, **more)
    check_plan(snap, plan)
    assert plan.revisit_at_s is None or plan.revisit_at_s > snap.now_s
    return plan


def counts(plan):
    return {who: given.num_devices for who, given in plan.allocations.items()}


def test_what_was_decided_stands_however_far_it_has_come():
    policy = Halving()
    first = decide(snapshot(A, B), policy)
    assert counts(first) == {"a": 4, "b": 2}
    for held in ({}, {"a": PoolAllocation(device_ids=("n/1", "n/7"))}, dict(first.allocations)):
        for now_s in (0.0, 59.9):
            later = decide(snapshot(with_fields(A, step=5), B, now_s=now_s, memory=first.memory, held=held), policy)
            assert later.allocations == first.allocations
            assert later.revisit_at_s == first.revisit_at_s == 60.0
            assert later.memory == first.memory
    assert len(policy.asked) == 1


def test_who_comes_waits_for_the_boundary_and_who_ends_leaves_nothing_to_others():
    policy = Halving()
    first = decide(snapshot(A, B), policy)
    later = decide(snapshot(B, C, now_s=30.0, memory=first.memory, held=dict(first.allocations)), policy)
    assert later.allocations == {"b": first.allocations["b"]}
    assert "next round" in later.reasons["c"]
    at_boundary = decide(snapshot(B, C, now_s=60.0, memory=later.memory, held=dict(later.allocations)), policy)
    assert counts(at_boundary) == {"b": 4, "c": 2}
    assert policy.asked[1].number == 1
    assert policy.asked[1].state == {"number": 0}
    assert policy.asked[1].held == {"b": ("n/4", "n/5"), "c": ()}
    assert at_boundary.reasons.keys() == {"b", "c"}


def test_a_job_that_comes_to_an_idle_platform_waits_too():
    policy = Halving()
    empty = decide(snapshot(now_s=10.0), policy)
    assert empty.revisit_at_s is None
    waiting = decide(snapshot(A, now_s=65.0, memory=empty.memory), policy)
    assert counts(waiting) == {}
    assert waiting.revisit_at_s == 120.0
    assert counts(decide(snapshot(A, now_s=120.0, memory=waiting.memory), policy)) == {"a": 4}
    assert counts(decide(snapshot(A, now_s=120.0, memory=empty.memory), policy)) == {"a": 4}


def test_a_boundary_that_was_slept_through_is_made_up_for_once():
    policy = Halving()
    first = decide(snapshot(A), policy)
    late = decide(snapshot(A, B, now_s=200.0, memory=first.memory), policy)
    assert counts(late) == {"a": 4, "b": 2}
    assert late.revisit_at_s == 240.0


def test_without_memory_everybody_keeps_what_it_holds():
    policy = Halving()
    held = {"a": PoolAllocation(device_ids=("n/3",), global_batch_size=32)}
    plan = decide(snapshot(A, B, now_s=7.0, held=held, memory={"rule": "another", "wanted": {"b": ["n/0"]}}), policy)
    assert plan.allocations == held
    assert not policy.asked


def test_lost_devices_are_missing_until_the_boundary():
    policy = Halving()
    first = decide(snapshot(A, B), policy)
    running = replace(A, state=JobState.RUNNING)
    small = decide(snapshot(running, B, now_s=9.0, memory=first.memory, slots=2), policy)
    assert counts(small) == {"a": 2}
    least = with_fields(A, min_workers=3)
    assert counts(decide(snapshot(least, B, now_s=9.0, memory=first.memory, slots=2), policy)) == {}
    script = with_fields(running, job=msgspec.structs.replace(A.job, elastic=False), min_workers=4, max_workers=4)
    assert counts(decide(snapshot(script, B, now_s=9.0, memory=first.memory, slots=3), policy)) == {}


def test_bounds_that_changed_hold_at_once():
    policy = Halving()
    first = decide(snapshot(A, B), policy)
    plan = decide(snapshot(with_fields(A, max_workers=1), B, now_s=9.0, memory=first.memory), policy)
    assert counts(plan) == {"a": 1, "b": 2}


def test_services_take_idle_devices_at_once_and_from_jobs_only_what_is_guaranteed():
    policy = Halving()
    first = decide(snapshot(A, B, slots=3), policy)
    assert counts(first) == {"a": 2, "b": 1}
    asked = service(demand=17)
    held = dict(first.allocations)
    squeezed = decide(snapshot(A, B, slots=3, now_s=5.0, memory=first.memory, held=held, services=(asked,)), policy)
    assert counts(squeezed) == {"a": 1, "b": 1, "s": 1}
    assert "'s' needs" in squeezed.reasons["a"]
    again = decide(snapshot(A, B, slots=3, now_s=5.0, memory=squeezed.memory, held=held, services=(asked,)), policy)
    assert again.allocations == squeezed.allocations
    roomy = decide(snapshot(A, slots=8, now_s=5.0, memory=first.memory, services=(asked,)), policy)
    assert counts(roomy) == {"a": 2, "s": 3}
    boundary = decide(snapshot(A, B, slots=3, now_s=60.0, memory=squeezed.memory, held=held, services=(asked,)), policy)
    assert counts(boundary) == {"s": 3}


@pytest.mark.parametrize(("elastic", "expected"), [(True, {"a": 1, "s": 1}), (False, {"s": 1})])
def test_of_a_job_that_cannot_be_resized_a_service_takes_all_devices(elastic, expected):
    running = with_fields(replace(A, job=replace(A.job, elastic=elastic)), state=JobState.RUNNING, num_replicas=2)
    held = {"a": PoolAllocation(device_ids=("n/0", "n/1"), global_batch_size=32)}
    memory = decide(snapshot(running, slots=2, held=held), Halving()).memory
    asked = service(demand=1)
    plan = decide(snapshot(running, slots=2, now_s=60.0, memory=memory, held=held, services=(asked,)), Halving())
    assert counts(plan) == expected


def test_a_batch_stands_like_the_devices_do():
    def wide(round_):
        return RoundDecision(
            allocations={"a": PoolAllocation(device_ids=round_.devices[:2], global_batch_size=64)}, state=None
        )

    first = decide(snapshot(A), wide)
    later = decide(snapshot(A, now_s=20.0, memory=first.memory), wide)
    assert first.allocations["a"].global_batch_size == later.allocations["a"].global_batch_size == 64
    held = {"a": PoolAllocation(device_ids=("n/0", "n/1"), global_batch_size=32)}
    assert "batch" in decide(snapshot(A, held=held), wide).reasons["a"]
    assert not decide(snapshot(A, held=dict(first.allocations)), wide).reasons


def test_a_policy_may_decide_between_boundaries_too():
    policy = Halving()

    def is_due(snap, state):
        return state is None or state["number"] < 0 or (len(snap.jobs) > 1 and len(policy.asked) < 2)

    first = decide(snapshot(A, now_s=7.0), policy, is_due=is_due)
    assert counts(first) == {"a": 4}
    assert first.revisit_at_s == 60.0
    assert counts(decide(snapshot(A, now_s=8.0, memory=first.memory), policy, is_due=is_due)) == {"a": 4}
    second = decide(snapshot(A, B, now_s=9.0, memory=first.memory), policy, is_due=is_due)
    assert counts(second) == {"a": 4, "b": 2}
    decide(snapshot(A, B, now_s=60.0, memory=second.memory), policy, is_due=is_due)
    assert [round_.is_boundary for round_ in policy.asked] == [False, False, True]


def test_what_is_foreseen_comes_from_what_is_remembered():
    plan = decide(snapshot(A), Halving(), foresee=lambda snap, state: {"a": (state["number"],)})
    assert plan.future == {"a": (0,)}


@pytest.mark.parametrize("held", [{}, {"a": PoolAllocation(device_ids=tuple(f"n/{i}" for i in range(8)))}])
def test_a_job_never_gets_more_than_its_bounds(held):
    plan = decide(snapshot(with_fields(A, max_workers=3), now_s=1.0, held=held), Halving())
    assert all(count <= 3 for count in counts(plan).values())


def test_who_wait_for_each_other_in_a_circle_let_one_go():
    circle = {"a": (("1", "2"), ("3", "4")), "b": (("3",), ("5",)), "c": (("5", "4"), ("1",))}
    assert stuck_moves(circle) == ["c"]
    assert stuck_moves({**circle, "c": (("5", "4"), ("4", "1"))}) == []
    assert stuck_moves({"a": (("1",), ("2",)), "b": (("2",), ("3",))}) == []
    two = {
        "a": (("1",), ("2",)),
        "b": (("2",), ("1",)),
        "c": (("3",), ("4",)),
        "d": (("4",), ("3",)),
        "e": (("5",), ("3",)),
    }
    assert stuck_moves(two) == ["c", "a"]
    assert stuck_moves({}) == []


def test_jobs_that_change_places_get_there():
    def swap(round_):
        first, second = round_.devices[:2], round_.devices[2:4]
        given = (second, first) if round_.number else (first, second)
        return RoundDecision(
            allocations={
                name: PoolAllocation(device_ids=devices, global_batch_size=32)
                for name, devices in zip("ab", given, strict=True)
            }
        )

    first = decide(snapshot(A, B), swap)
    at_boundary = decide(snapshot(A, B, now_s=60.0, memory=first.memory, held=dict(first.allocations)), swap)
    assert counts(at_boundary) == {"b": 2}
    assert "change places" in at_boundary.reasons["a"]
    held = {"b": first.allocations["b"]}
    after = decide(snapshot(A, B, now_s=60.0, memory=at_boundary.memory, held=held), swap)
    assert after.allocations["a"].device_ids == ("n/2", "n/3")
    assert after.allocations["b"].device_ids == ("n/0", "n/1")
    again = decide(snapshot(A, B, now_s=61.0, memory=after.memory, held=dict(after.allocations)), swap)
    assert again.allocations == after.allocations
