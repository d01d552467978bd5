"""What a turn looks at: unchanged jobs keep their views, ended ones cost nothing, promises are written down once."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from springtide.control.controller import Controller
from springtide.core import events
from springtide.core.actions import AdmitJob
from springtide.core.decision import Overheads, Plan
from springtide.core.workload import JobState


def test_an_unchanged_job_keeps_its_view_and_its_allocation(stage, job):
    stage.running("a", "01")
    before = stage.controller.snapshot(1.0)
    stage.tell(events.JobSubmitted(job=job("b")))
    after = stage.controller.snapshot(2.0)
    assert after.jobs[0] is before.jobs[0]
    assert after.allocations["a"] is before.allocations["a"]
    assert stage.controller.snapshot(3.0).jobs is after.jobs


def test_jobs_stay_in_order_of_arrival_after_a_pause(stage, job):
    for name in "abc":
        stage.tell(events.JobSubmitted(job=job(name)))
    stage.tell(events.PauseRequested(job_id="a"))
    assert [view.job.job_id for view in stage.controller.snapshot(1.0).jobs] == ["b", "c"]
    stage.tell(events.ResumeRequested(job_id="a"))
    assert [view.job.job_id for view in stage.controller.snapshot(1.0).jobs] == ["a", "b", "c"]


def test_ended_jobs_are_out_of_every_turn(stage, job):
    stage.running("a", "01")
    stage.tell(events.CancelRequested(workload_id="a"))
    stage.tell(*(events.ReplicaStopped(workload_id="a", replica_id=f"a.{n}") for n in (0, 1)))
    assert stage.state("a") is JobState.CANCELLED
    assert not stage.controller.state.jobs.live
    assert not stage.controller.state.jobs.held
    assert stage.controller.is_idle


def test_a_device_held_twice_is_refused_by_the_table_itself(stage):
    stage.running("a", "01")
    stage.running("b", "23")
    record = stage.job("b")
    stolen = tuple(replace(r, device_id="n/0") if r.device_id == "n/2" else r for r in record.replicas)
    with pytest.raises(AssertionError, match="n/0"):
        stage.controller.state.jobs["b"] = replace(record, replicas=stolen)


def test_attained_service_grows_with_the_devices_held(stage):
    stage.running("a", "01")
    (view,) = stage.controller.snapshot(10.0).jobs
    record = stage.job("a")
    assert view.attained_service_s(10.0) == pytest.approx(record.attained_service_s(10.0))
    assert view.attained_service_s(20.0) - view.attained_service_s(10.0) == pytest.approx(20.0)


def test_an_admission_is_one_action_and_a_lasting_promise(job):
    class Promises:
        def decide(self, snapshot):
            return Plan(admitted={view.job.job_id: snapshot.now_s + 50.0 for view in snapshot.jobs})

    controller = Controller(Promises(), overheads=Overheads(change_s=2.0))
    steps = [controller.step(1.0, [events.JobSubmitted(job=job("a"))]), controller.step(2.0, [])]
    assert [[type(action) for action in step.actions] for step in steps] == [[AdmitJob], []]
    snapshot = controller.snapshot(3.0)
    assert snapshot.jobs[0].promise.promised_finish_s == 51.0
    assert snapshot.jobs[0].promise.admitted_at_s == 1.0
    assert snapshot.overheads.change_s == 2.0
    restored = Controller(Promises())
    for step in steps:
        restored.restore(step)
    assert restored.state == controller.state


def test_a_checkpoint_moves_no_step_away_from_the_time_at_which_it_was_reported(stage):
    stage.running("a", "0")
    reported = events.ProgressReported(job_id="a", generation=1, step=5, total_steps=100, world_size=1)
    stage.tell(reported, at_s=10.0)
    stage.tell(events.CheckpointCommitted(job_id="a", generation=1, step=9, path="c"), at_s=12.0)
    (view,) = stage.controller.snapshot(12.0).jobs
    # Plans reckon from this pair how far the job has come since.
    assert (view.progress.step, view.progress.progress_at_s) == (5, 10.0)
    assert view.checkpoint.step == 9
    stage.tell(events.PauseRequested(job_id="a"))
    stage.tell(events.CheckpointCommitted(job_id="a", generation=2, step=12, path="d"))
    assert stage.job("a").progress.step == 12, "it will go on from there"


def test_a_move_to_other_devices_takes_the_state_along(stage):
    stage.running("a", "01")
    stage.want(a="23")
    assert stage.tell() == ["start a.2 on n/2 g1", "start a.3 on n/3 g1"]
    assert stage.ready("a", 2) == []
    assert stage.ready("a", 3) == ["resize a g2 to a.0,a.2,a.3"]
    assert stage.resized("a") == ["stop a.1", "resize a g3 to a.2,a.3"]


def test_a_move_does_not_wait_for_workers_beyond_those_it_had(stage):
    stage.running("a", "0", max_workers=4)
    stage.want(a="123")
    assert stage.tell() == ["start a.1 on n/1 g1", "start a.2 on n/2 g1", "start a.3 on n/3 g1"]
    assert stage.ready("a", 2) == ["resize a g2 to a.0,a.2"]
    assert stage.resized("a") == ["resize a g3 to a.2"]
    assert stage.resized("a") == ["stop a.0"]
    assert stage.ready("a", 1) == []
    assert stage.ready("a", 3) == ["resize a g4 to a.2,a.1,a.3"]


def test_a_move_within_its_bound_leaves_one_joiner_for_later(stage, job):
    stage.running("a", "01", max_workers=2)
    stage.want(a="23")
    stage.tell()
    assert stage.ready("a", 2, 3) == ["resize a g2 to a.0,a.2"]
    assert stage.resized("a") == ["stop a.1", "resize a g3 to a.2,a.3"]


def test_a_single_worker_that_may_not_have_a_second_moves_by_its_checkpoint(stage):
    stage.running("a", "0", max_workers=1, num_virtual_shards=1)
    stage.want(a="1")
    assert stage.tell() == ["preempt a g2"]


def test_a_move_that_loses_the_member_with_the_state_takes_another_one_along(stage):
    stage.running("a", "01")
    stage.want(a="23")
    stage.tell()
    assert stage.ready("a", 2, 3) == ["resize a g2 to a.0,a.2,a.3"]
    assert stage.tell(events.ReplicaLost(workload_id="a", replica_id="a.0", reason="killed")) == [
        "resize a g3 to a.1,a.2,a.3 forced"
    ]
