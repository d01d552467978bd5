"""Pollux: exploration by doubling, fair speedups, batches by goodput, and a search that remembers."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kits.job_parts import with_fields
from kits.scheduling.rival_platform import make_view
from springtide.control.controller import check_plan
from springtide.core.decision import PoolAllocation, Snapshot
from springtide.core.job_parts import GradientNoise, StepTime
from springtide.core.resources import Topology, make_node
from springtide.core.workload import AdaptiveBatch, JobState
from springtide_studies.rivals.policies import pollux
from springtide_studies.rivals.policies.pollux import Pollux

QUICK = Pollux(population=30, generations=20)
BOUNDS = AdaptiveBatch(min_size=128, max_size=4096, min_local_size=32, max_local_size=1024)


def measured(name, *counts, at_s=0.0, exchange_s=0.02, noise=4.0, **more):
    """A job whose steps were measured on `counts` workers of one node: 10 ms and 1 ms a sample."""
    view = make_view(name, at_s=at_s, most=64, **more)
    job = msgspec.structs.replace(view.job, global_batch_size=128, batch=BOUNDS, length_unit="progress", max_workers=64)
    steps = tuple(
        StepTime(
            placement=(count,),
            local_batch_size=local,
            step_s=0.01 + 0.001 * local + (exchange_s if count > 1 else 0.0),
            sync_s=exchange_s if count > 1 else 0.0,
        )
        for count in counts
        for local in (128 // count, 256 // count)
    )
    known = GradientNoise(grad_sqr=1.0, grad_var=noise)
    return with_fields(
        view, job=job, state=JobState.RUNNING if counts else JobState.PENDING, step_times=steps, noise=known
    )


def snapshot(*views, now_s=0.0, memory=None, nodes=4, held=None):
    return Snapshot(
        now_s=now_s,
        cluster=Topology(nodes=tuple(make_node(f"n{index}", 4) for index in range(nodes))),
        jobs=views,
        allocations=held or {},
        memory=msgspec.json.decode(msgspec.json.encode(memory)),
    )


def look(snap, policy=QUICK):
    plan = policy.decide(snap)
    check_plan(snap, plan)
    return plan


def counts(plan):
    return {name: given.num_devices for name, given in plan.allocations.items()}


def test_a_job_starts_on_one_worker_and_explores_by_doubling():
    fresh = measured("a", at_s=-100.0)
    first = look(snapshot(fresh))
    assert counts(first) == {"a": 1}
    view, memory, seen = fresh, first.memory, []
    for number, runs in enumerate([(1,), (1, 2), (1, 2, 4)], start=1):
        view = measured("a", *runs, at_s=-1000.0)
        plan = look(
            snapshot(view, now_s=60.0 * number, memory=memory, held={"a": PoolAllocation(device_ids=("n0/0",))})
        )
        memory = plan.memory
        seen.append(counts(plan)["a"])
    assert seen == [2, 4, 8]


def test_what_it_ran_on_is_remembered_beyond_its_measurements():
    wide = measured("a", 1, 2, 4, at_s=-1000.0)
    first = look(snapshot(wide))
    plan = look(snapshot(measured("a", 1, at_s=-1000.0), now_s=60.0, memory={**first.memory, "wanted": {}}))
    assert counts(plan)["a"] == 8


@pytest.mark.slow
def test_everybody_gets_something_before_anybody_gets_more():
    views = [measured(f"j{index}", 1, 2, 4, at_s=-500.0) for index in range(16)]
    plan = look(snapshot(*views), Pollux())
    for number in range(1, 4):
        # From an empty cluster the search takes more than one round, each from the last one's front.
        held = dict(plan.allocations)
        plan = look(snapshot(*views, now_s=60.0 * number, memory=plan.memory, held=held), Pollux())
    assert len(counts(plan)) >= 15


def test_the_batch_is_that_of_the_highest_goodput_within_the_bounds():
    noisy = look(snapshot(measured("a", 1, 2, 4, at_s=-500.0, noise=1000.0))).allocations["a"]
    quiet = look(snapshot(measured("a", 1, 2, 4, at_s=-500.0, noise=0.1))).allocations["a"]
    assert quiet.global_batch_size < noisy.global_batch_size <= BOUNDS.max_size
    assert quiet.global_batch_size >= BOUNDS.min_size
    assert look(snapshot(make_view("b", at_s=-500.0))).allocations["b"].global_batch_size in (None, 32)


def test_a_round_that_brings_nothing_new_moves_nobody():
    views = [measured(f"j{index}", 1, 2, 4, 8, at_s=-900.0) for index in range(3)]
    plan = look(snapshot(*views))
    for number in range(1, 4):
        again = look(snapshot(*views, now_s=60.0 * number, memory=plan.memory, held=dict(plan.allocations)))
        moved = {
            name for name, given in again.allocations.items() if given.device_ids != plan.allocations[name].device_ids
        }
        # It may find something better; what it does not change stays on the very same devices.
        assert moved.isdisjoint(
            name for name in counts(again) if name not in again.reasons or "batch" in again.reasons[name]
        )
        plan = again


def test_a_fresh_object_with_the_memory_decides_the_same_and_a_seed_another():
    views = [measured(f"j{index}", 1, 2, 4, at_s=-100.0 * index) for index in range(6)]
    first = look(snapshot(*views))
    after = snapshot(*views, now_s=60.0, memory=first.memory, held=dict(first.allocations))
    assert look(after) == look(after, Pollux(population=30, generations=20))
    state = first.memory["state"]
    assert state["population"]["shape"][1:] == [6, 8]
    others = {str(look(snapshot(*views), Pollux(population=30, generations=2, seed=seed))) for seed in range(4)}
    assert len(others) > 1


def test_restarts_are_counted_and_charged_by_age():
    young, old = measured("young", 1, 2, 4, at_s=-60.0), measured("old", 1, 2, 4, at_s=-1e6)
    plan = look(snapshot(young, old))
    assert plan.memory["state"]["restarts"] == dict.fromkeys(counts(plan), 0)
    moved = look(snapshot(old, now_s=60.0, memory=plan.memory, held={"old": plan.allocations["old"]}))
    assert moved.memory["state"]["restarts"]["old"] == (moved.allocations["old"] != plan.allocations["old"])


def test_jobs_that_cannot_change_their_number_come_first_and_stay():
    script = make_view("script", ask=6, most=6, least=6, elastic=False)
    plan = look(snapshot(measured("a", 1, 2, 4, 8, at_s=-500.0), script))
    assert counts(plan)["script"] == 6
    assert counts(plan)["a"] >= 1
    later = look(snapshot(script, now_s=60.0, memory=plan.memory, held=dict(plan.allocations)))
    assert later.allocations["script"].device_ids == plan.allocations["script"].device_ids


def test_the_front_goes_by_rank_as_published_or_by_name():
    front = np.zeros((1, 3, 8), dtype=np.int8)
    front[0, :, 0] = [1, 2, 3]
    state = {"jobs": ["a", "b", "c"], "nodes": ["n0"], "population": pollux._pack(front)}
    by_rank = pollux._adapt(state, ["c", "d", "a"], ["n0"], by_name=False)
    by_name = pollux._adapt(state, ["c", "d", "a"], ["n0"], by_name=True)
    assert by_rank[0, :, 0].tolist() == [1, 0, 3]
    assert by_name[0, :, 0].tolist() == [3, 0, 1]


@pytest.mark.parametrize("lost", [1, 3])
def test_nodes_that_vanish_take_nothing_else_along(lost):
    views = [measured(f"j{index}", 1, 2, 4, at_s=-500.0) for index in range(4)]
    first = look(snapshot(*views))
    plan = look(snapshot(*views, now_s=60.0, memory=first.memory, nodes=4 - lost))
    assert plan.allocations
