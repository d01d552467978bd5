"""Workloads that hang: when they count as hung, what happens then, and that a replay finds the same."""

from __future__ import annotations

import pytest

from springtide.control.controller import Controller
from springtide.control.journal.memory import MemoryJournal
from springtide.control.loop import recover, run, verify
from springtide.control.watches import LEAST_STALL_S, stall_timeout_s
from springtide.core import events
from springtide.core.job_parts import StepTime
from springtide.core.workload import Entrypoint, JobState


def progress(name: str, step: int, generation: int = 1, **told) -> events.ProgressReported:
    return events.ProgressReported(
        job_id=name, generation=generation, step=step, total_steps=1000, world_size=1, loss=0.5, **told
    )


def stalls(stage) -> list[events.JobStalled]:
    return [event for step in stage.steps for event in step.events if isinstance(event, events.JobStalled)]


def test_a_job_without_a_step_is_noted_once_and_runs_on_until_its_next_step(stage):
    stage.running("a", "0", stall_timeout_s=60.0)
    stage.tell(progress("a", 480), at_s=10.0)
    assert stage.controller.wakeup_at_s == 70.0, "the loop is woken when the time is over"
    assert stage.tell(at_s=69.9) == []
    assert stalls(stage) == []
    assert stage.tell(at_s=70.0) == []
    assert stage.tell(at_s=500.0) == [], "it is said once"
    assert [(event.since_s, event.timeout_s) for event in stalls(stage)] == [(10.0, 60.0)]
    assert stage.state("a") is JobState.RUNNING
    assert stage.job("a").reason == "no step for more than 1m00, the last was 480 of 1000"
    assert stage.job("a").progress.stalled_since_s == 10.0
    stage.tell(progress("a", 480), at_s=501.0)
    assert stage.job("a").progress.stalled_since_s == 10.0, "the same step again is no progress"
    stage.tell(progress("a", 481), at_s=502.0)
    assert stage.job("a").progress.stalled_since_s is None
    assert stage.job("a").reason == "steps again, after 8m12 without one"
    assert stage.controller.wakeup_at_s == 562.0


def test_a_stalled_job_restarts_from_its_checkpoint_and_fails_when_it_gets_no_further(stage):
    stage.running("a", "0", stall_timeout_s=1200.0, on_stall="restart", max_restarts=2)
    stage.tell(events.CheckpointCommitted(job_id="a", generation=1, step=5, path="c"), progress("a", 7), at_s=10.0)
    now_s = 10.0
    for number, wait_s in ((0, 1.0), (1, 2.0)):
        now_s += 1200.0
        assert stage.tell(at_s=now_s) == [f"stop a.{number}"], "no checkpoint is waited for: the workers hang"
        assert f"restarting in {wait_s:.0f} s after a crash ({number + 1} of 2): no step for" in stage.job("a").reason
        stage.tell(events.ReplicaStopped(workload_id="a", replica_id=f"a.{number}"), at_s=now_s)
        assert stage.state("a") is JobState.PENDING
        now_s += wait_s
        assert stage.tell(at_s=now_s) == [f"start a.{number + 1} on n/0 g{number + 2}"]
        assert stage.job("a").replicas[0].restore.step == 5
        stage.ready("a", number + 1)
        stage.resized("a", step=5, direction="resume")
        now_s = stage.now_s
    assert stage.tell(at_s=now_s + 1200.0) == ["end a FAILED", "stop a.2"]
    assert stage.job("a").reason.startswith("crashed 3 times without a further step: no step for more than 20m00")


def test_stalls_of_a_job_that_gets_further_each_time_do_not_add_up(stage):
    stage.running("a", "0", stall_timeout_s=1200.0, on_stall="restart", max_restarts=1)
    for number in range(3):
        stage.tell(progress("a", 100 * (number + 1), generation=number + 1))
        stage.tell(at_s=stage.now_s + 1200.0)
        assert "(1 of 1)" in stage.job("a").reason
        stage.tell(events.ReplicaStopped(workload_id="a", replica_id=f"a.{number}"))
        stage.tell(at_s=stage.controller.wakeup_at_s)
        stage.ready("a", number + 1)
        stage.resized("a", direction="resume")
    assert stage.job("a").restarts.num_restarts == 3


def test_a_stalled_job_may_fail_at_once(stage):
    stage.running("a", "01", stall_timeout_s=60.0, on_stall="fail")
    assert stage.tell(at_s=100.0) == ["end a FAILED", "stop a.0", "stop a.1"]
    assert stage.job("a").reason == "no step for more than 1m00, the last was 0"


def test_only_a_job_that_runs_is_watched(stage, job):
    stage.want(a="0", b="1", c="2")
    options = {"stall_timeout_s": 5.0, "on_stall": "fail"}
    script = Entrypoint(source_path="job.py", kind="script")
    stage.tell(
        events.JobSubmitted(job=job("waits", **options)),
        events.JobSubmitted(job=job("a", **options)),
        events.JobSubmitted(job=job("b", entrypoint=script, **options)),
        events.JobSubmitted(job=job("c", stream="clicks", **options)),
        events.JobSubmitted(job=job("d", stall_timeout_s=0.0, on_stall="fail")),
    )
    stage.tell(at_s=100.0)
    assert [stage.state(name) for name in ("waits", "a")] == [JobState.PENDING, JobState.STARTING]
    for name in "abc":
        stage.ready(name, 0)
        stage.resized(name, direction="start")
    stage.tell(events.PauseRequested(job_id="a"), at_s=104.0)
    assert stage.tell(at_s=200.0) == []
    assert stalls(stage) == []
    assert stage.state("a") is JobState.PREEMPTING
    stage.tell(events.ReplicaStopped(workload_id="a", replica_id="a.0"))
    stage.tell(at_s=1000.0)
    assert stage.state("a") is JobState.PAUSED
    assert stalls(stage) == []


def test_a_script_that_reports_steps_is_watched_and_starts_over_where_it_says(stage):
    script = Entrypoint(source_path="job.py", kind="script")
    stage.running("a", "01", stall_timeout_s=60.0, on_stall="fail", entrypoint=script)
    assert stage.tell(at_s=1000.0) == []
    progress = events.ProgressReported(job_id="a", generation=1, step=5, total_steps=9, world_size=2, loss=0.5)
    stage.tell(progress, at_s=1000.0)
    assert stage.job("a").progress.total_steps == 9
    stage.tell(events.JobResized(job_id="a", generation=1, world_size=2, pause_s=0.0, direction="start", step=0))
    assert stage.job("a").progress.step == 5
    stage.tell(at_s=1061.0)
    assert stage.state("a") is JobState.FAILED
    assert "the last was 5" in stage.job("a").reason


def test_a_change_of_the_group_that_is_never_confirmed_is_a_stall_as_well(stage):
    stage.running("a", "0", stall_timeout_s=60.0)
    stage.want(a="01")
    stage.tell(at_s=50.0)
    stage.ready("a", 1)
    assert not stage.job("a").group.is_confirmed
    stage.tell(at_s=100.0)
    assert stalls(stage) == [], "the time begins anew with the order"
    stage.tell(at_s=111.0)
    assert len(stalls(stage)) == 1


def test_the_time_that_a_job_sets_itself_follows_its_steps_and_its_longest_pause(stage):
    stage.running("a", "0", stall_timeout_s=None)
    assert stall_timeout_s(stage.job("a")) == LEAST_STALL_S
    stage.tell(progress("a", 1, step_s=30.0, local_batch_size=32), at_s=30.0)
    assert stage.job("a").learnt.step_times == (StepTime(placement=(1,), local_batch_size=32, step_s=30.0),)
    assert stall_timeout_s(stage.job("a")) == 1500.0
    stage.tell(progress("a", 2), at_s=1230.0)
    assert stall_timeout_s(stage.job("a")) == 2400.0, "it was evaluated for 20 minutes, and that is not a hang"
    stage.tell(progress("a", 1000), at_s=1240.0)
    stage.tell(at_s=1e6)
    assert stalls(stage) == [], "what follows the last step may take any time"


class Clock:
    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


class Quiet:
    """An executor of workers that say nothing: `wait` returns what the test prepared, at the time it names."""

    def __init__(self, clock: Clock, turns) -> None:
        self.clock, self.turns = clock, list(turns)

    def recover(self, standing) -> None:
        pass

    def start(self, action) -> None:
        pass

    def acknowledge(self, told) -> None:
        assert not any(isinstance(event, events.DecisionsResumed | events.JobStalled) for event in told)

    def wait(self, deadline_s):
        self.clock.at_s, told = self.turns.pop(0)
        return told


def play(clock: Clock, journal: MemoryJournal, controller: Controller, *turns) -> None:
    executor = Quiet(clock, turns)
    recover(controller, executor, journal)
    run(controller, executor, clock, journal, until=lambda: not executor.turns)


@pytest.mark.parametrize("away_s", [3600.0, 12.0])
def test_the_time_without_a_control_plane_does_not_count(stage, job, away_s):
    stage.running("a", "0", stall_timeout_s=60.0, on_stall="fail")
    journal, clock = MemoryJournal(), Clock()
    for step in stage.steps:
        journal.append(step)
    play(clock, journal, Controller(stage.policy), (1.0, []), (55.0, []))
    play(clock, journal, Controller(stage.policy), (55.0 + away_s, []), (60.0 + away_s, []))
    assert not any(isinstance(event, events.JobStalled) for _, step in journal.read() for event in step.events)
    play(clock, journal, Controller(stage.policy), (80.0 + away_s, []), (140.0 + away_s, []))
    last = list(journal.read())[-1][1]
    assert [type(event).__name__ for event in last.events] == ["JobStalled"]
    assert last.events[0].since_s == 80.0 + away_s
    for is_cold in (False, True):
        verify(Controller(stage.policy), journal, is_cold=is_cold)


def test_a_suspended_machine_stalls_nobody(stage):
    stage.running("a", "0", stall_timeout_s=60.0)
    journal, clock = MemoryJournal(), Clock()
    for step in stage.steps:
        journal.append(step)
    play(clock, journal, Controller(stage.policy), (1.0, []), (4000.0, []), (4010.0, []))
    kinds = [type(event).__name__ for _, step in journal.read(len(stage.steps)) for event in step.events]
    assert kinds == ["DecisionsResumed", "DecisionsResumed"]
