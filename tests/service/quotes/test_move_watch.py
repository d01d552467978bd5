"""The platform moves a job by itself: only if machines miss its deadline and functions make it, and once."""

from __future__ import annotations

from dataclasses import replace as changed

import pytest

from kits.service.function_fixtures import function_job, profile
from springtide.core.decision import PlannedRun, TimeClaim
from springtide.core.events import CheckpointCommitted, MoveFailed, MoveRequested, ProgressReported
from springtide.service.quotes.move_watch import AGAIN_S, SETTLED_S, MoveWatch, lost_on_machines
from springtide.service.quotes.moves import JobMoves
from springtide.service.quotes.quote import LiveQuotes


@pytest.fixture
def watch(connected):
    return MoveWatch(connected, JobMoves(connected, LiveQuotes(connected)))


def begun(asking, connected, *, deadline_s=500.0, **options):
    """A job that was left to the platform and runs on machines, fast enough as it was thought."""
    speeds = {"options__profile_steps_per_s": {"1": 9.0}, "options__max_workers": 1, "options__is_soft": True}
    speeds["options__deadline_s"] = deadline_s
    given = {"options__on": "auto", "options__layer_profile": profile(2), **speeds, **options}
    answer = asking.post("/v1/jobs", json=function_job(**given))
    assert answer.status_code == 201, answer.text
    job_id = answer.json()["job_id"]
    connected.run_job(job_id)
    generation = connected.view().jobs[job_id].group.generation
    report = ProgressReported(
        job_id=job_id, generation=generation, step=30, total_steps=72, world_size=1, samples_per_s=2.0
    )
    connected.play(report)
    return job_id


def plan_end(connected, job_id, after_s):
    """The policy plans the job on machines to end so many seconds after its deadline."""
    deadline_s = connected.view().jobs[job_id].job.goal.deadline_s
    run = PlannedRun(start_s=connected.clock_s, end_s=deadline_s + after_s, num_devices=1)
    connected.current = changed(connected.current, future={job_id: (run,)})


def look(connected, watch):
    """Look until what is found has settled."""
    watch.look()
    connected.clock_s += SETTLED_S
    watch.look()


def moves_of(connected):
    return [event for _, step in connected.journal.read() for event in step.events if isinstance(event, MoveRequested)]


def test_a_job_whose_deadline_is_lost_is_moved_with_the_reason(asking, connected, watch):
    job_id = begun(asking, connected)
    plan_end(connected, job_id, 90.0)
    look(connected, watch)
    (event,) = moves_of(connected)
    assert event.is_automatic
    assert event.reason.startswith("machines would miss its deadline by 1m30; on functions what is left takes ")
    record = connected.view().jobs[job_id]
    connected.play(CheckpointCommitted(job_id=job_id, generation=record.group.generation, step=31, path="/c"))
    connected.stop_replicas(job_id)
    why = asking.get(f"/v1/workloads/{job_id}/why").json()
    assert why["evidence"][0].startswith("moved to functions after step 31: machines would miss its deadline")
    assert any(line["text"].startswith("the platform moves it to functions") for line in why["history"])


def test_a_promise_that_is_given_up_is_a_lost_deadline(asking, connected):
    job_id = begun(asking, connected)
    record = connected.view().jobs[job_id]
    view = changed(connected.view(), claims={job_id: TimeClaim(code="given_up")})
    assert lost_on_machines(record, view, connected.clock_s) == "its deadline is lost on machines"
    view = changed(connected.view(), claims={job_id: TimeClaim(code="kept_in_time")})
    assert lost_on_machines(record, view, connected.clock_s) == ""


@pytest.mark.parametrize("after_s", [-1.0, 0.0])
def test_a_job_in_time_stays(asking, connected, watch, after_s):
    job_id = begun(asking, connected)
    plan_end(connected, job_id, after_s)
    look(connected, watch)
    assert not moves_of(connected)


def test_where_functions_miss_it_too_it_stays_and_is_looked_at_again_later(asking, connected, watch):
    job_id = begun(asking, connected)
    connected.clock_s += 495.0
    plan_end(connected, job_id, 90.0)
    look(connected, watch)
    assert not moves_of(connected)
    asked = []
    watch._moves.rest_of = lambda record: asked.append(record)
    watch.look()
    assert not asked
    connected.clock_s += AGAIN_S
    with pytest.raises(AttributeError):
        watch.look()
    assert asked


def test_a_budget_that_is_too_small_keeps_it(asking, connected, watch):
    job_id = begun(asking, connected, options__budget_usd=0.003)
    plan_end(connected, job_id, 90.0)
    look(connected, watch)
    assert not moves_of(connected)


def test_one_whose_owner_chose_machines_stays(asking, connected, watch):
    job_id = begun(asking, connected, options__on="cluster", options__layer_profile=None)
    plan_end(connected, job_id, 90.0)
    look(connected, watch)
    assert not moves_of(connected)


def test_it_is_moved_once_also_if_that_failed(asking, connected, watch):
    job_id = begun(asking, connected)
    plan_end(connected, job_id, 90.0)
    look(connected, watch)
    connected.stop_replicas(job_id)
    generation = connected.view().jobs[job_id].group.generation
    connected.play(MoveFailed(job_id=job_id, generation=generation, error="it is odd"))
    connected.stop_replicas(job_id)
    assert not connected.view().jobs[job_id].job.is_on_functions
    plan_end(connected, job_id, 90.0)
    look(connected, watch)
    assert len(moves_of(connected)) == 1


def test_a_slow_moment_alone_moves_nothing(asking, connected, watch):
    job_id = begun(asking, connected)
    plan_end(connected, job_id, 90.0)
    watch.look()
    connected.clock_s += SETTLED_S - 1.0
    plan_end(connected, job_id, -1.0)
    watch.look()
    connected.clock_s += 2.0
    plan_end(connected, job_id, 90.0)
    watch.look()
    assert not moves_of(connected)


def test_without_a_plan_its_mean_speed_says_whether_it_is_late(asking, connected):
    # 42 steps of 64 samples at 2 samples/s are 1344 s.
    job_id = begun(asking, connected)
    record, view = connected.view().jobs[job_id], connected.view()
    assert record.learnt.throughput_samples_per_s == {1: 2.0}
    deadline_s = record.job.goal.deadline_s
    assert lost_on_machines(record, view, deadline_s - 1344.5) == ""
    assert lost_on_machines(record, view, deadline_s - 1342.0) == "machines would miss its deadline by 2.0 s"
