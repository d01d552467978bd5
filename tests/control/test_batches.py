"""A job whose batch a policy may choose: how a new batch takes effect, and what is learnt of steps and noise."""

from __future__ import annotations

import pytest

from springtide.core import events
from springtide.core.errors import PolicyError
from springtide.core.job_parts import MAX_STEP_TIMES, GradientNoise, StepTime
from springtide.core.resources import make_node
from springtide.core.workload import AdaptiveBatch

BOUNDS = AdaptiveBatch(min_size=16, max_size=128)


def batches(stage):
    return [action.global_batch_size for step in stage.steps for action in step.actions if hasattr(action, "forced")]


def test_a_new_batch_alone_is_a_switch_of_the_same_members(stage):
    stage.running("a", "01", batch=BOUNDS)
    stage.policy.batch["a"] = 64
    assert stage.tell() == ["resize a g2 to a.0,a.1"]
    assert stage.tell() == [], "nothing changes while the switch is under way"
    stage.resized("a")
    assert stage.tell() == []
    assert batches(stage) == [32, 64]
    assert stage.job("a").batch_size == 64
    assert stage.controller.snapshot(1.0).jobs[0].global_batch_size == 64
    assert stage.controller.snapshot(1.0).allocations["a"].global_batch_size == 64


def test_a_new_batch_waits_for_the_joiners_it_was_chosen_for(stage):
    stage.running("a", "0", batch=BOUNDS)
    stage.want(a="01")
    stage.policy.batch["a"] = 64
    assert stage.tell() == ["start a.1 on n/1 g1"]
    assert stage.tell() == []
    assert stage.ready("a", 1) == ["resize a g2 to a.0,a.1"]
    assert batches(stage) == [32, 64]


def test_survivors_of_a_loss_keep_the_batch(stage):
    stage.running("a", "01", batch=BOUNDS)
    stage.policy.batch["a"] = 64
    stage.tell()
    stage.resized("a")
    assert stage.tell(events.ReplicaLost(workload_id="a", replica_id="a.1")) == ["resize a g3 to a.0 forced"]
    assert batches(stage)[-1] == 64


def test_a_plan_without_a_batch_leaves_it_and_a_fixed_job_never_changes(stage):
    stage.running("a", "01", batch=BOUNDS)
    stage.policy.batch["a"] = 64
    stage.tell()
    stage.resized("a")
    del stage.policy.batch["a"]
    assert stage.tell() == []
    assert stage.job("a").batch_size == 64
    stage.running("b", "23")
    stage.policy.batch["b"] = 64
    assert stage.tell() == []
    assert stage.job("b").batch_size == 32


def test_a_batch_out_of_bounds_is_a_broken_plan(stage):
    stage.running("a", "0", batch=BOUNDS)
    stage.policy.batch["a"] = 256
    with pytest.raises(PolicyError, match="a batch of 256, which takes 16 to 128"):
        stage.tell()


def report(step, **more):
    return events.ProgressReported(job_id="a", generation=1, step=step, total_steps=100, world_size=3, **more)


def test_progress_steps_and_noise_reach_the_policy(stage):
    stage.tell(events.NodeJoined(node=make_node("m", 2)))
    stage.running("a", "01", batch=BOUNDS)
    view = stage.controller.snapshot(1.0).jobs[0]
    assert (view.equivalent_steps, view.learnt.step_times, view.learnt.noise) == (0.0, (), None)
    stage.policy.wish["a"].append("m/0")
    stage.tell()
    stage.ready("a", 2)
    stage.resized("a")
    told = events.ProgressReported(
        job_id="a",
        generation=2,
        step=10,
        total_steps=100,
        world_size=3,
        progress=7.5,
        total_progress=80.0,
        local_batch_size=16,
        step_s=0.2,
        sync_s=0.05,
        grad_sqr=2.0,
        grad_var=3.0,
    )
    stage.tell(told)
    view = stage.controller.snapshot(1.0).jobs[0]
    assert (view.equivalent_steps, view.total_equivalent_steps) == (7.5, 80.0)
    assert view.learnt.noise == GradientNoise(grad_sqr=2.0, grad_var=3.0)
    assert view.learnt.step_times == (StepTime(placement=(2, 1), local_batch_size=16, step_s=0.2, sync_s=0.05),)


def test_of_each_placement_and_local_batch_the_newest_measurement_is_kept_and_not_too_many(stage):
    stage.running("a", "012", batch=BOUNDS)
    stage.tell(report(1, local_batch_size=8, step_s=0.5), report(2, local_batch_size=8, step_s=0.4))
    assert [known.step_s for known in stage.job("a").learnt.step_times] == [0.4]
    stage.tell(*(report(3 + n, local_batch_size=9 + n, step_s=0.1) for n in range(MAX_STEP_TIMES)))
    sizes = [known.local_batch_size for known in stage.job("a").learnt.step_times]
    assert len(sizes) == MAX_STEP_TIMES
    assert 8 not in sizes


def test_a_measurement_of_another_group_is_not_mistaken_for_this_one(stage):
    stage.running("a", "01", batch=BOUNDS)
    stage.tell(report(1, local_batch_size=8, step_s=0.5))
    assert stage.job("a").learnt.step_times == ()


def test_an_unknown_length_stays_unknown(stage):
    stage.running("a", "012", batch=BOUNDS)
    stage.tell(events.ProgressReported(job_id="a", generation=1, step=5, total_steps=0, world_size=3))
    view = stage.controller.snapshot(1.0).jobs[0]
    assert (view.progress.step, view.total_steps, view.total_equivalent_steps) == (5, None, None)
