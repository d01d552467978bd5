"""What an owner writes into the object of a running job is in force, or a condition says why not and what could be."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from kits.service.cluster_double import House
from kits.service.platform_double import PlatformDouble
from springtide.backends.kubernetes.resources.status_schema import Reason
from springtide.control.controller import Controller
from springtide.core.errors import BackendError, Conflict, InvalidRequest
from springtide.core.events import JobEdited, ProgressReported, ReplicaStopped
from springtide.core.workload import Goal
from springtide.scheduling.registry import make_live_policy
from springtide.service.history.history import HistoryIndex
from springtide.service.reconciler.jobs import REFUSAL_VALID_S
from springtide.service.submission.submission import SubmissionService

# 1,000 steps: 100 s on one device, 56 s on two.
KNOWN = {"samples": 32_000, "speeds": {"1": 10.0, "2": 18.0}, "workers": "1..2", "globalBatch": 32}
RUNS = {"samples": 32_000, "speeds": {"1": 10.0}, "workers": 1, "globalBatch": 32}


def springtide():
    return make_live_policy("springtide")


@pytest.fixture
def house(tmp_path):
    return House(PlatformDouble(tmp_path, policy=springtide))


def goal_of(house, obj):
    return house.job(obj).job.goal


def begin(house, name="digits", **spec):
    obj = house.cluster.put(name=name, **spec)
    record, told = house.jobs.submit(obj)
    assert told is None
    house.platform.run_job(record.workload_id)
    assert house.job(obj).state == "RUNNING"
    return obj


def restored(house):
    """The records that another control plane makes of the journal."""
    controller = Controller(springtide())
    for _, step in house.platform.journal.read():
        controller.restore(step)
    return controller.state.jobs


def test_a_later_deadline_of_a_promised_job_is_promised_all_the_more(house):
    obj = begin(house, **KNOWN, deadline="5m")
    assert house.job(obj).promise.admitted_at_s is not None
    house.cluster.change(obj, deadline="10m")
    assert house.compare(obj).is_true
    record = house.job(obj)
    assert record.job.goal.deadline_s == pytest.approx(record.lifecycle.submitted_at_s + 600.0, abs=1.0)
    assert record.promise.admitted_at_s is not None
    assert restored(house)[record.workload_id] == record
    assert house.compare(obj).is_true


def test_a_deadline_that_cannot_be_met_at_the_measured_speed_is_refused(house):
    obj = begin(house, samples=32_000, workers=1, globalBatch=32)
    record = house.job(obj)
    steps = {"step": 200, "total_steps": 1000, "world_size": 1, "epoch": 0, "loss": 0.5, "samples_per_s": 320.0}
    house.platform.play(ProgressReported(job_id=record.workload_id, generation=record.group.generation, **steps))
    house.cluster.change(obj, deadline="30s")
    refused = house.compare(obj)
    assert not refused.is_true
    assert "what is left takes 1m20 even on 1 device" in refused.message
    assert goal_of(house, obj).deadline_s is None
    house.cluster.change(obj, deadline="30s", soft=True)
    assert house.compare(obj).is_true
    house.cluster.change(obj, deadline="5m", soft=False)
    assert house.compare(obj).is_true
    assert house.job(obj).promise.admitted_at_s is None, "nothing is promised to who was never profiled"


def test_a_sooner_deadline_that_can_be_promised_is(house):
    obj = begin(house, **KNOWN, deadline="60m")
    house.platform.clock_s += 5.0
    house.cluster.change(obj, deadline="3m")
    assert house.compare(obj).is_true
    record = house.job(obj)
    assert record.job.goal.deadline_s == pytest.approx(record.lifecycle.submitted_at_s + 180.0, abs=1.0)
    assert record.promise.promised_finish_s <= record.job.goal.deadline_s
    planned = house.platform.view().future[record.workload_id]
    assert planned[-1].end_s <= record.job.goal.deadline_s


def test_a_deadline_that_cannot_be_promised_is_refused_with_one_that_could(house):
    obj = begin(house, **KNOWN, deadline="60m")
    before = house.job(obj)
    house.cluster.change(obj, deadline="20s")
    applied = house.compare(obj)
    assert (applied.is_true, applied.reason) == (False, Reason.CHANGE_REFUSED)
    assert "a deadline in 20.0 s cannot be promised" in applied.message
    assert goal_of(house, obj) == before.job.goal
    assert house.job(obj).promise.admitted_at_s == before.promise.admitted_at_s
    offered = re.search(r"(\S+Z) could be promised", applied.message).group(1)
    house.cluster.change(obj, deadline=offered)
    assert house.compare(obj).is_true
    moment_s = datetime.fromisoformat(offered).timestamp() - house.platform.wall_clock_offset_s
    assert goal_of(house, obj).deadline_s == pytest.approx(moment_s)


def test_nobody_elses_promise_is_broken_for_a_sooner_deadline(house):
    other = begin(house, "other", **RUNS, deadline="110s")
    obj = begin(house, **RUNS | {"epochs": 3}, deadline="60m")
    third = begin_waiting(house, "third", **RUNS, deadline="220s")
    house.cluster.change(obj, deadline="305s")
    house.compare(obj)
    for each in (other, third):
        record = house.job(each)
        planned = house.platform.view().future[record.workload_id]
        assert planned[-1].end_s <= record.job.goal.deadline_s


def begin_waiting(house, name, **spec):
    obj = house.cluster.put(name=name, **spec)
    record, told = house.jobs.submit(obj)
    assert told is None
    assert record.promise.admitted_at_s is not None
    return obj


def test_a_running_job_without_a_deadline_is_given_a_promised_one_or_none(house):
    obj = begin(house, **KNOWN)
    assert house.job(obj).promise.admitted_at_s is None
    house.cluster.change(obj, deadline="10s")
    assert not house.compare(obj).is_true
    assert house.job(obj).state == "RUNNING"
    house.cluster.change(obj, deadline="5m")
    assert house.compare(obj).is_true
    record = house.job(obj)
    assert record.promise.admitted_at_s is not None
    house.platform.play()
    assert house.job(obj).state == "RUNNING"
    assert restored(house)[record.workload_id] == house.job(obj)


@pytest.mark.parametrize("change", [{"deadline": None}, {"soft": True}])
def test_who_gives_his_deadline_up_makes_room(house, change):
    obj = begin(house, **RUNS | {"epochs": 20, "workers": "1..2"}, deadline="35m")
    house.cluster.change(obj, **change)
    for name in [name for name, value in change.items() if value is None]:
        del house.cluster.server["TrainingFunction", next(key for _, key in house.cluster.server)]["spec"][name]
    assert house.compare(obj).is_true
    record = house.job(obj)
    assert not record.job.goal.is_hard
    assert record.promise.admitted_at_s is None
    urgent = begin_waiting(house, "urgent", **RUNS, deadline="130s")
    assert house.job(urgent).promise.admitted_at_s is not None
    house.platform.play()
    assert house.job(obj).state in ("RUNNING", "PREEMPTING", "PENDING")


def test_a_deadline_that_has_passed_and_one_that_is_no_time_are_refused(house):
    obj = begin(house, **KNOWN)
    house.platform.clock_s += 600.0
    house.cluster.change(obj, deadline="5m")
    assert "has passed; name a later one" in house.compare(obj).message
    assert house.job(obj).state == "RUNNING"


def test_a_time_of_the_clock_is_the_next_one(house):
    obj = begin(house, **KNOWN)
    house.platform.clock_s += 86400.0 * 3
    house.cluster.change(obj, deadline="18:00", soft=True)
    assert house.compare(obj).is_true
    ahead_s = goal_of(house, obj).deadline_s - house.platform.now_s()
    assert 0.0 < ahead_s <= 86400.0
    moment = datetime.fromtimestamp(goal_of(house, obj).deadline_s + house.platform.wall_clock_offset_s, UTC)
    assert (moment.hour, moment.minute) == (18, 0)


def test_a_budget_changes_while_it_runs(house):
    obj = begin(house, **KNOWN, budget="$4")
    house.cluster.change(obj, budget="$9")
    assert house.compare(obj).is_true
    assert goal_of(house, obj).budget_usd == 9.0
    house.cluster.change(obj, budget="$0.05")
    assert house.compare(obj).is_true
    assert goal_of(house, obj).budget_usd == 0.05


def test_a_budget_that_is_spent_or_would_be_is_refused_with_one_that_would_do(house):
    obj = begin(house, **RUNS, budget="$4", deadline="10m")
    house.cluster.change(obj, budget="$0.001")
    message = house.compare(obj).message
    assert "its planned cost of $0.01 exceeds a budget" in message
    house.cluster.change(obj, budget=re.search(r"at least (\$[0-9.]+)", message).group(1))
    assert house.compare(obj).is_true
    house.platform.clock_s += 3600.0
    house.cluster.change(obj, budget="$0.10")
    message = house.compare(obj).message
    assert "has cost $0.36 already" in message
    assert "name more, like $0.72" in message


def test_retries_change_whatever_becomes_of_the_goal(house):
    obj = begin(house, **KNOWN, deadline="60m", retries=1)
    house.cluster.change(obj, retries=7, deadline="10s")
    applied = house.compare(obj)
    assert not applied.is_true
    assert house.job(obj).job.max_restarts == 7
    house.cluster.change(obj, deadline="60m")
    assert house.compare(obj).is_true
    house.cluster.server["TrainingFunction", next(key for _, key in house.cluster.server)]["spec"].pop("retries")
    assert house.compare(obj).is_true
    assert house.job(obj).job.max_restarts == 3


def test_what_is_fixed_says_why(house):
    obj = begin(house, **KNOWN)
    house.cluster.change(obj, epochs=9, container={"image": "other"}, grace="1m", functions={})
    message = house.compare(obj).message
    assert "spec.epochs cannot change any more: it says what is computed" in message
    assert "spec.container cannot change any more: its pods are made of it" in message
    assert "spec.grace cannot change any more: workers are started with it" in message
    assert "spec.functions cannot change any more: a job stays where it began" in message


def test_a_policy_is_asked_once_about_one_wish_and_again_after_a_while(house, monkeypatch):
    obj = begin(house, **KNOWN, deadline="60m")
    house.cluster.change(obj, deadline="20s")
    house.compare(obj)
    asked = []
    made = house.platform.make_policy
    monkeypatch.setattr(house.platform, "make_policy", lambda: asked.append(1) or made())
    first = house.compare(obj)
    assert not asked
    house.platform.clock_s += REFUSAL_VALID_S
    house.cluster.change(obj, deadline="60s")
    assert "cannot be promised" in house.compare(obj).message
    assert asked
    assert first.reason is Reason.CHANGE_REFUSED


def test_an_edit_of_the_past_is_not_brought_and_a_server_that_is_away_is_asked_again(house):
    obj = begin(house, **KNOWN, budget="$4")
    seen = house.cluster.change(obj, budget="$5")
    house.cluster.see(obj)
    house.cluster.change(obj, budget="$4")
    stale = house.cluster.cached["TrainingFunction", next(key for _, key in house.cluster.server)]
    house.jobs.compare(stale, house.job(obj))
    assert goal_of(house, obj).budget_usd == 4.0
    seen["spec"]["budget"] = "$6"
    house.cluster.is_away = True
    applied = house.compare(obj)
    assert applied.reason is Reason.PLATFORM_UNAVAILABLE
    house.cluster.is_away = False
    assert house.compare(obj).is_true
    assert goal_of(house, obj).budget_usd == 6.0


def test_a_job_that_has_ended_is_edited_no_more(house):
    obj = begin(house, **KNOWN)
    house.submissions.cancel_job(house.job(obj).workload_id)
    house.cluster.change(obj, budget="$5", retries=2, ttlSecondsAfterFinished=5)
    assert "spec.budget, spec.retries cannot change any more: it has ended (CANCELLED)" in house.compare(obj).message
    with pytest.raises(Conflict):
        house.submissions.edit_job(house.job(obj).workload_id, goal=Goal(budget_usd=5.0))


def test_an_edit_is_a_line_of_its_story(house):
    obj = begin(house, **KNOWN)
    house.cluster.change(obj, deadline="5m", budget="$3", retries=1)
    assert house.compare(obj).is_true
    history = HistoryIndex()
    for seq, step in house.platform.journal.read():
        history.add(seq, step)
    told = [entry.text for entry in history.entries(house.job(obj).workload_id) if entry.kind == "edited"]
    assert told == ["its owner wants now: retries 1", "its owner wants now: deadline in 5m00, budget $3.00"]


def test_over_the_desk_a_goal_that_is_the_same_is_no_event(house):
    obj = begin(house, **KNOWN, deadline="5m")
    seq = house.platform.view().seq
    SubmissionService(house.platform).edit_job(house.job(obj).workload_id, goal=goal_of(house, obj))
    assert house.platform.view().seq == seq
    goal = Goal(deadline_s=house.platform.now_s() + 3.0)
    with pytest.raises(InvalidRequest, match="cannot be promised"):
        SubmissionService(house.platform).edit_job(house.job(obj).workload_id, goal=goal)


def test_a_journal_that_does_not_answer_leaves_all_as_it_was(house):
    obj = begin(house, **KNOWN, budget="$4")
    house.cluster.change(obj, budget="$5")
    house.platform.is_broken = True
    assert house.compare(obj).reason is Reason.PLATFORM_UNAVAILABLE
    house.platform.is_broken = False
    assert house.compare(obj).is_true
    house.platform.is_broken = True
    with pytest.raises(BackendError):
        house.submissions.edit_job(house.job(obj).workload_id, max_restarts=9)


def test_an_edit_of_a_job_that_nobody_knows_changes_nothing(house):
    begin(house, **KNOWN)
    before = dict(house.platform.view().jobs)
    house.platform.play(JobEdited(job_id="nobody", goal=Goal()))
    assert house.platform.view().jobs == before
    assert house.platform.controller.state.num_stale_events == 1


def test_who_runs_is_not_put_in_line_and_who_waits_stays_there(house):
    runs = begin(house, "runs", **RUNS | {"epochs": 5, "workers": 2, "speeds": {"2": 10.0}}, deadline="60m")
    waits = house.cluster.put(name="waits", **RUNS | {"workers": 2, "speeds": {"2": 10.0}}, deadline="20m", wait=True)
    house.jobs.submit(waits)
    house.cluster.change(runs, deadline="20s", wait=True)
    assert "cannot be promised" in house.compare(runs).message
    assert house.job(runs).state == "RUNNING"
    house.cluster.change(waits, deadline="15m")
    house.compare(waits)
    assert not house.job(waits).state.is_terminal


def test_who_is_paused_is_promised_nothing_until_he_goes_on(house):
    obj = begin(house, **KNOWN, deadline="60m")
    job_id = house.job(obj).workload_id
    house.cluster.change(obj, suspend=True)
    house.compare(obj)
    replicas = house.job(obj).replicas
    house.platform.play(*(ReplicaStopped(workload_id=job_id, replica_id=r.replica_id) for r in replicas))
    assert house.job(obj).state == "PAUSED"
    house.cluster.change(obj, deadline="5m")
    message = house.compare(obj).message
    assert "is paused, and nothing is promised" in message
    assert "spec.suspend: false" in message
    house.cluster.change(obj, soft=True)
    assert house.compare(obj).is_true
    house.cluster.change(obj, suspend=False)
    assert house.compare(obj).is_true
    assert not house.job(obj).state.is_terminal


def test_let_go_with_a_new_deadline_it_goes_on_and_is_promised_that_then(house):
    obj = begin(house, **KNOWN, deadline="60m", suspend=False)
    job_id = house.job(obj).workload_id
    house.cluster.change(obj, suspend=True)
    house.compare(obj)
    replicas = house.job(obj).replicas
    house.platform.play(*(ReplicaStopped(workload_id=job_id, replica_id=r.replica_id) for r in replicas))
    house.cluster.change(obj, suspend=False, deadline="10m")
    house.compare(obj)
    assert house.compare(obj).is_true
    record = house.job(obj)
    assert record.job.goal.deadline_s == pytest.approx(record.lifecycle.submitted_at_s + 600.0, abs=1.0)
    assert record.promise.admitted_at_s is not None
