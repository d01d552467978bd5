"""Another goal for a job on functions over the API: taken where it can be had, refused with what could."""

from __future__ import annotations

from kits.service.function_fixtures import function_job
from springtide.core.events import JobEdited, PauseRequested, UsageReported
from springtide.core.functions import Bill, Usage


def begun(asking, connected, **options):
    answer = asking.post("/v1/jobs", json=function_job(**options))
    assert answer.status_code == 201, answer.text
    job_id = answer.json()["job_id"]
    connected.run_job(job_id)
    connected.submit(UsageReported(job_id=job_id, usage=Usage(), bill=Bill(function_usd=0.0001)))
    return job_id


def goal_of(connected, job_id):
    return connected.view().jobs[job_id].job.goal


def refusal(answer):
    assert answer.status_code == 422, answer.text
    return answer.json()["error"]["message"]


def test_a_budget_is_taken_while_it_runs(asking, connected):
    job_id = begun(asking, connected, options__budget_usd=1.0)
    for budget_usd in (5.0, 0.5, None):
        answer = asking.patch(f"/v1/jobs/{job_id}", json={"budget_usd": budget_usd})
        assert answer.status_code == 200, answer.text
        assert goal_of(connected, job_id).budget_usd == budget_usd
    assert connected.view().jobs[job_id].bounds.num_edits == 3


def test_a_budget_that_no_way_keeps_is_refused_with_one_that_would_do(asking, connected):
    job_id = begun(asking, connected, options__budget_usd=1.0)
    told = refusal(asking.patch(f"/v1/jobs/{job_id}", json={"budget_usd": 0.0002}))
    assert "its cheapest way on functions costs up to $" in told
    assert told.endswith("; until then it goes on as it was")
    would = float(told.partition("a budget of $")[2].partition(";")[0].partition(" ")[0])
    assert goal_of(connected, job_id).budget_usd == 1.0
    assert asking.patch(f"/v1/jobs/{job_id}", json={"budget_usd": would}).status_code == 200
    spent = refusal(asking.patch(f"/v1/jobs/{job_id}", json={"budget_usd": 0.00005}))
    assert "has cost" in spent


def test_a_deadline_is_promised_while_it_runs_or_refused(asking, connected):
    job_id = begun(asking, connected)
    answer = asking.patch(f"/v1/jobs/{job_id}", json={"deadline_s": 7200.0})
    assert answer.status_code == 200, answer.text
    record = connected.view().jobs[job_id]
    assert record.promise.admitted_at_s is not None
    assert record.promise.promised_finish_s <= record.job.goal.deadline_s
    told = refusal(asking.patch(f"/v1/jobs/{job_id}", json={"deadline_s": 0.5}))
    assert "the fastest way takes up to" in told
    assert "what would do: a deadline at 1970-01-12T" in told
    assert "spec.soft: true" in told
    assert connected.view().jobs[job_id].promise.promised_finish_s == record.promise.promised_finish_s
    aim = asking.patch(f"/v1/jobs/{job_id}", json={"deadline_s": 0.5, "is_soft": True})
    assert aim.status_code == 200, aim.text
    assert connected.view().jobs[job_id].promise.promised_finish_s is None


def test_one_that_rests_is_promised_nothing_and_keeps_its_budget(asking, connected):
    job_id = begun(asking, connected, options__budget_usd=1.0)
    connected.submit(PauseRequested(job_id=job_id))
    connected.stop_replicas(job_id)
    assert "is paused" in refusal(asking.patch(f"/v1/jobs/{job_id}", json={"deadline_s": 7200.0}))
    assert asking.patch(f"/v1/jobs/{job_id}", json={"budget_usd": 2.0}).status_code == 200
    assert goal_of(connected, job_id).budget_usd == 2.0


def test_the_journal_has_it_before_anybody_acts_on_it(asking, connected):
    job_id = begun(asking, connected, options__budget_usd=1.0)
    asking.patch(f"/v1/jobs/{job_id}", json={"budget_usd": 2.0})
    edits = [event for _, step in connected.journal.read() for event in step.events if isinstance(event, JobEdited)]
    assert [edit.goal.budget_usd for edit in edits] == [2.0]
