"""What goodput decides on snapshots that a reader can hold in mind, what it learns, and that it stands by it."""

from __future__ import annotations

import msgspec

from kits.scheduling.goodput_jobs import KNOWN, NOISE, devices, snapshot, view
from springtide.control.controller import check_plan
from springtide.core.workload import JobState
from springtide.scheduling.families.family import (
    JobFamily,
    read_family,
)
from springtide.scheduling.policies.goodput.policy import Goodput
from springtide.scheduling.registry import make_policy


def decide(shown, **parameters):
    plan = Goodput(**parameters).decide(shown)
    check_plan(shown, plan)
    assert msgspec.json.decode(msgspec.json.encode(plan.memory)) == plan.memory
    return plan


def counts(plan):
    return {name: given.num_devices for name, given in plan.allocations.items()}


def test_of_an_unknown_job_one_worker_finds_out():
    assert counts(decide(snapshot(view("a", family="")))) == {"a": 1}


def test_a_known_family_starts_wide_and_with_a_batch_that_suits_it():
    first = decide(snapshot(view("old", steps=KNOWN, noise=NOISE, progress=2000.0)))
    plan = decide(snapshot(view("new"), memory=first.memory, now_s=600.0))
    assert plan.allocations["new"].num_devices > 4
    assert plan.allocations["new"].global_batch_size > 32
    alone = decide(snapshot(view("new"), memory=decide(snapshot(), learns=False).memory), learns=False)
    assert counts(alone) == {"new": 1}


def test_who_has_little_left_goes_first():
    short = view("short", steps=KNOWN, noise=NOISE, progress=9900.0)
    long = view("long", steps=KNOWN, noise=NOISE, progress=0.0, total=1e6)
    given = counts(decide(snapshot(long, short, nodes=1, overheads=1.0), company=0.0))
    assert given["short"] > given.get("long", 0)


def test_a_change_that_does_not_pay_is_not_made():
    held = {"a": devices("n0/0", "n0/1")}
    nearly = view("a", steps=KNOWN, noise=NOISE, progress=9990.0, state=JobState.RUNNING)
    assert counts(decide(snapshot(nearly, held=held))) == {"a": 2}
    fresh = view("a", steps=KNOWN, noise=NOISE, state=JobState.RUNNING)
    plan = decide(snapshot(fresh, held=held))
    assert plan.allocations["a"].num_devices > 2
    assert "30 s for the change are paid back" in plan.reasons["a"]
    assert set(held["a"]) <= set(plan.allocations["a"].device_ids)


def test_a_plan_half_carried_out_stands_and_a_new_object_says_the_same():
    views = [view(f"job-{index}", steps=KNOWN, noise=NOISE, progress=1000.0 * index) for index in range(5)]
    policy = Goodput()
    plan = policy.decide(snapshot(*views))
    memory = msgspec.json.decode(msgspec.json.encode(plan.memory))
    for policy_again in (policy, Goodput()):
        again = policy_again.decide(snapshot(*views, memory=memory, now_s=1.0))
        assert again.allocations == plan.allocations
    partly = {name: given.device_ids for name, given in list(plan.allocations.items())[:2]}
    assert policy.decide(snapshot(*views, memory=plan.memory, held=partly, now_s=2.0)).memory is not None
    assert counts(policy.decide(snapshot(*views, memory=plan.memory, held=partly, now_s=2.0))) == counts(plan)


def test_rounds_wait_for_their_boundary_and_events_do_not():
    policy, rounds = Goodput(), make_policy("goodput:round_s=60")
    one = view("a", steps=KNOWN, noise=NOISE, total=1e7)
    for each, waits in ((policy, False), (rounds, True)):
        plan = each.decide(snapshot(one, now_s=60.0))
        later = snapshot(one, view("b", steps=KNOWN, noise=NOISE), memory=plan.memory, now_s=65.0)
        assert ("b" in each.decide(later).allocations) is not waits
        assert each.decide(later).revisit_at_s == 120.0


def test_the_plan_tells_that_the_end_of_a_back_off_changes_it():
    one, two = view("a", steps=KNOWN, noise=NOISE, total=1e7), view("b", steps=KNOWN, noise=NOISE, starts_at_s=70.0)
    plan = Goodput().decide(snapshot(one, two, now_s=61.0))
    assert plan.revisit_at_s == 70.0
    later = Goodput().decide(snapshot(one, two, memory=plan.memory, now_s=plan.revisit_at_s))
    assert "b" in later.allocations
    assert later.revisit_at_s == 120.0


def test_unknown_length_is_what_others_of_the_family_took():
    policy = Goodput()
    old = view("old", steps=KNOWN, noise=NOISE, progress=5000.0, total=None)
    plan = policy.decide(snapshot(old))
    plan = policy.decide(snapshot(view("new", total=None), memory=plan.memory, now_s=10.0))
    (kept,) = plan.memory["state"]["families"].values()
    assert kept["lengths"] == [5000.0]
    assert read_family(kept).left_of(4000.0) == 1000.0
    assert read_family(kept).left_of(5000.0) == 500.0
    assert JobFamily().left_of(1.0) is None


def test_the_plan_tells_what_is_to_come():
    plan = decide(snapshot(view("a", steps=KNOWN, noise=NOISE), now_s=60.0))
    (run,) = plan.future["a"]
    assert run.start_s == 60.0
    assert run.end_s > 60.0
    assert run.num_devices == plan.allocations["a"].num_devices


def test_bounds_and_fixed_numbers_are_kept():
    fixed = view("fixed", state=JobState.RUNNING)
    fixed = msgspec.structs.replace(fixed, job=msgspec.structs.replace(fixed.job, elastic=False))
    many = view("many", steps=KNOWN, noise=NOISE, min_workers=5)
    plan = decide(snapshot(fixed, many, held={"fixed": devices("n0/0", "n1/0", "n2/0")}))
    assert plan.allocations["fixed"].device_ids == devices("n0/0", "n1/0", "n2/0")
    assert plan.allocations["many"].num_devices >= 5
    assert counts(decide(snapshot(view("huge", min_workers=15, high=15), nodes=2))) == {}
