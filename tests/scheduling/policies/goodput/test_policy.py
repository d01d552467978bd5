"""What goodput decides on snapshots that a reader can hold in mind, what it learns, and that it stands by it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kits.scheduling.goodput_jobs import BATCH, devices, snapshot, view
from springtide.control.controller import check_plan
from springtide.core.job_parts import GradientNoise, StepTime
from springtide.core.workload import JobState
from springtide.perf.goodput import gain, split_batch, step_total_s
from springtide.perf.throughput import ThroughputModel
from springtide.scheduling.families.candidates import size_grid
from springtide.scheduling.families.family import (
    FamilySpeed,
    JobFamily,
    family_key,
    read_family,
    stretch_of,
    write_family,
)
from springtide.scheduling.policies.goodput.policy import Goodput
from springtide.scheduling.registry import make_policy

TRUTH = ThroughputModel(alpha_c=0.02, beta_c=0.001, alpha_n=0.03, beta_n=0.001, alpha_r=0.01, beta_r=0.001, gamma=1.5)
NOISE = GradientNoise(grad_sqr=1.0, grad_var=20.0)


def step_of(*placement, local=32):
    step_s, sync_s = TRUTH.step_s(len(placement), sum(placement), local)
    return StepTime(placement=placement, local_batch_size=local, step_s=float(step_s), sync_s=float(sync_s))


KNOWN = tuple(step_of(*placement, local=local) for placement in ((1,), (2,), (4,), (4, 4)) for local in (8, 32, 128))


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


@pytest.mark.parametrize("batch", [BATCH, None])
def test_seconds_to_the_end_are_those_of_the_truth(batch):
    job = view("a", batch=batch).job
    family = JobFamily(steps=KNOWN, noise={stretch_of(1.0): (1.0, 20.0), stretch_of(12_000.0): (1.0, 20.0)})
    pace = FamilySpeed(family, [1, 4, 8], 4, job)
    found = pace.seconds(np.array([0.0, 9000.0]), np.array([10_000.0, 10_000.0]))
    for column, (num_nodes, workers) in enumerate(((1, 1), (1, 4), (2, 8))):
        size, _ = pace.batch_for(num_nodes, workers, NOISE)
        local, passes = split_batch(size, workers, batch, 32)
        step_s, sync_s = TRUTH.step_s(num_nodes, workers, local)
        rate = float(gain(NOISE, size / 32) / step_total_s(step_s, sync_s, passes)) if batch else 1.0 / float(step_s)
        assert found[0, column] == pytest.approx(10_000.0 / rate, rel=0.15)
        assert found[1, column] == pytest.approx(found[0, column] / 10, rel=0.05)


def test_where_nobody_has_been_noise_grows_with_progress():
    job = view("a").job
    seen = FamilySpeed(JobFamily(steps=KNOWN, noise={stretch_of(1000.0): (1.0, 5.0)}), [1, 16], 4, job)
    far = FamilySpeed(JobFamily(steps=KNOWN, noise={stretch_of(16_000.0): (1.0, 80.0)}), [1, 16], 4, job)
    (near_s,), (later_s,), (known_s,) = (
        pace.seconds(np.array([begin]), np.array([begin + 100.0]))
        for pace, begin in ((seen, 900.0), (seen, 15_900.0), (far, 15_900.0))
    )
    assert later_s[1] == pytest.approx(known_s[1], rel=0.05)
    assert later_s[1] < near_s[1]


def test_families_survive_the_journal_and_change_only_with_news():
    family = JobFamily().with_view(view("a", steps=KNOWN, noise=NOISE, progress=100.0), 5.0)
    assert read_family(msgspec.json.decode(msgspec.json.encode(write_family(family)))) == family
    assert family.with_view(view("b", steps=KNOWN, noise=NOISE, progress=101.0), 9.0) is family
    assert family.noise_at(1e6) == NOISE
    assert family_key(view("a").job) == family_key(view("b").job)
    assert family_key(view("a").job, alone=True) != family_key(view("b").job, alone=True)


def test_sizes_are_few_within_a_node_and_finer_above():
    assert size_grid(5) == [1, 2, 3, 4]
    assert size_grid(64) == [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64]
