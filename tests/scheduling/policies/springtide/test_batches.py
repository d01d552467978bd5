"""Jobs that may change their batch under the default policy: sizes, batches, and promises on one batch."""

from __future__ import annotations

import math

import msgspec
import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.goodput_jobs import BATCH, KNOWN, NOISE, snapshot, view
from springtide.control.controller import check_plan
from springtide.core.decision import PoolAllocation
from springtide.core.job_parts import JobProgress
from springtide.core.workload import Goal, JobState
from springtide.scheduling.families.family import FamilySpeed, read_family
from springtide.scheduling.policies.springtide.policy import Springtide
from springtide.scheduling.policies.springtide.rows import SURE_FRACTION

OLD = view("old", steps=KNOWN, noise=NOISE, progress=9_000.0)


def decide(shown, derived=None):
    plan = Springtide().decide(shown, derived)
    check_plan(shown, plan)
    assert msgspec.json.decode(msgspec.json.encode(plan.memory)) == plan.memory
    return plan


def due(at_s, **fields):
    shown = view("due", **fields)
    return replace(shown, job=replace(shown.job, goal=Goal(deadline_s=at_s)))


def known():
    """The memory of a policy that has measured the family."""
    return decide(snapshot(OLD)).memory


def test_of_an_unknown_job_one_worker_finds_out():
    plan = decide(snapshot(view("a", family="")))
    assert {name: given.num_devices for name, given in plan.allocations.items()} == {"a": 1}


def test_a_known_family_starts_wide_and_with_a_batch_that_suits_it():
    given = decide(snapshot(view("new"), memory=known(), now_s=600.0)).allocations["new"]
    assert given.num_devices > 4
    assert given.global_batch_size > 32


def test_a_batch_that_changes_alone_says_why():
    first = decide(snapshot(view("new"), memory=known(), now_s=600.0))
    given = first.allocations["new"]
    held = snapshot(view("new", state=JobState.RUNNING), memory=first.memory, now_s=700.0)
    held = replace(held, jobs=(replace(held.jobs[0], num_replicas=given.num_devices, global_batch_size=32),))
    small = PoolAllocation(device_ids=given.device_ids, global_batch_size=32)
    plan = decide(replace(held, allocations={"new": small}))
    assert plan.allocations["new"].device_ids == given.device_ids
    assert plan.allocations["new"].global_batch_size > 32
    assert plan.reasons["new"] == "this batch suits it better now"


def test_the_first_noise_of_a_family_is_a_reason_to_decide():
    """Not only the next time that sizes and batches are chosen anew anyhow."""
    first = decide(snapshot(view("new", steps=KNOWN)))
    given = first.allocations["new"]
    assert given.global_batch_size == 32
    later = snapshot(view("new", steps=KNOWN, noise=NOISE, state=JobState.RUNNING), memory=first.memory, now_s=1.0)
    later = replace(later, jobs=(replace(later.jobs[0], num_replicas=given.num_devices, global_batch_size=32),))
    assert decide(replace(later, allocations={"new": given})).allocations["new"].global_batch_size > 32


def test_a_promise_rests_on_one_batch_for_all_that_is_left():
    memory = known()
    (kept,) = memory["families"]["families"].values()
    speed = FamilySpeed(read_family(kept), [1, 2, 4, 8], 4, view("a").job)

    def fastest_s(rates):
        return 30.0 + 10_000.0 / max(rates)

    by_plan_s = fastest_s(speed.rates_of_one_batch(0.0, 10_000.0) * SURE_FRACTION)
    assert by_plan_s < 0.5 * fastest_s(speed.rates_at(None))
    soon = due(600.0 + 1.05 * by_plan_s)
    assert decide(snapshot(soon, memory=memory, now_s=600.0)).admitted["due"] <= soon.job.goal.deadline_s
    refused = decide(snapshot(due(600.0 + 0.95 * by_plan_s), memory=memory, now_s=600.0))
    assert "impossible even alone" in refused.rejected["due"].reason


def test_without_a_measured_family_nothing_is_promised_and_the_job_runs():
    plan = decide(snapshot(due(1e6)))
    assert (plan.admitted, plan.rejected) == ({}, {})
    assert plan.allocations["due"].num_devices == 1


def test_a_job_that_runs_is_promised_only_once_it_was_measured_for_long_enough():
    first = decide(snapshot(due(1e6)))
    running = due(1e6, state=JobState.RUNNING, steps=KNOWN, noise=NOISE, progress=50.0)
    running = with_fields(running, started_at_s=5.0, throughput_samples_per_s={1: 30.0}, num_replicas=1)
    held = {"due": first.allocations["due"].device_ids}
    plan = decide(snapshot(running, held=held, memory=first.memory, now_s=60.0))
    assert (plan.admitted, plan.rejected) == ({}, {})
    assert plan.allocations["due"].num_devices > 1
    settled = with_fields(running, resized_at_s=30.0, progress_at_s=59.0)
    plan = decide(snapshot(settled, held=held, memory=first.memory, now_s=60.0))
    assert plan.admitted["due"] <= 1e6
    # Nine tenths of what its family was measured at, on one batch.
    (kept,) = plan.memory["families"]["families"].values()
    speed = FamilySpeed(read_family(kept), [1, 2, 4], 4, view("a").job)
    known = dict(plan.memory["sure"]["due"])
    assert known[1] == pytest.approx(0.9 * speed.rates_of_one_batch(50.0, 10_000.0)[0])


@pytest.mark.parametrize("has_due", [False, True])
def test_derived_values_change_no_plan(has_due):
    """The same plans with what was derived before as from the memory alone, as measurements come in."""
    warm = Springtide()
    derived = warm.make_derived()
    memory, held, allocations = None, {}, {}
    for turn in range(8):
        now_s = 60.0 * turn
        steps = KNOWN[: 3 * turn]
        jobs = [view(f"j{index}", steps=steps, noise=NOISE if turn else None, progress=40.0 * turn) for index in (0, 1)]
        if has_due and turn >= 2:
            jobs.append(due(5_000.0, progress=30.0 * (turn - 2)))
        jobs = [
            with_fields(
                replace(job, state=JobState.RUNNING if job.job.job_id in allocations else JobState.PENDING),
                progress=JobProgress(progress_at_s=now_s - 1.0, equivalent_steps=job.equivalent_steps),
            )
            for job in jobs
        ]
        shown = replace(snapshot(*jobs, held=held, memory=memory, now_s=now_s), allocations=allocations)
        plan, cold = warm.decide(shown, derived), Springtide().decide(shown)
        assert plan.allocations == cold.allocations
        assert plan.memory == cold.memory
        assert dict(plan.reasons) == dict(cold.reasons)
        assert plan.revisit_at_s == cold.revisit_at_s
        assert plan.revisit_at_s <= now_s + 60.0
        memory, allocations = plan.memory, dict(plan.allocations)
        held = {name: given.device_ids for name, given in allocations.items()}
    assert max(given.global_batch_size for given in allocations.values()) > BATCH.min_size
    assert math.isfinite(plan.admitted.get("due", 0.0))
