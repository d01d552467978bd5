"""How a job came out is kept when it ends, with the state, as far as it tells something of speeds."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from kits.control.quoting import training_job
from springtide.control.outcomes import MAX_OUTCOMES
from springtide.control.records import PlatformState
from springtide.control.state_data import data_of, state_of
from springtide.control.transitions import apply_event
from springtide.core.events import JobFinished, JobSubmitted
from springtide.core.job_parts import JobOutcome, JobRestarts, LearntSpeed
from springtide.core.shares import Share
from springtide.core.workload import SpeedBelief, TrainingJob

# 600 steps of 64 samples, one a second on one worker as planned, and a tenth faster as expected.
JOB = replace(training_job(minutes=10), family="f", belief=SpeedBelief(slower={0: 1.3, 1: 1.1}))


def ended(
    job: TrainingJob, *, took_s: float = 600.0, step: int = 600, losses: int = 0, rates: tuple[int, ...] = (1,)
) -> PlatformState:
    state = PlatformState()
    apply_event(JobSubmitted(job=job), state, 0.0)
    record = state.jobs[job.job_id]
    state.jobs[job.job_id] = replace(
        record,
        lifecycle=replace(record.lifecycle, started_at_s=10.0),
        progress=replace(record.progress, total_steps=600),
        learnt=LearntSpeed(throughput_samples_per_s={count: 64.0 * count for count in rates}),
        restarts=JobRestarts(num_restarts=losses),
    )
    apply_event(JobFinished(job_id=job.job_id, generation=0, step=step), state, 10.0 + took_s)
    return state


def test_a_whole_run_tells_its_average_against_what_was_expected() -> None:
    (found,) = ended(JOB, took_s=660.0).outcomes
    assert (found.family, found.basis, found.num_failures) == ("f", "measured", 0)
    assert found.error == pytest.approx(math.log(1.1 * 1.1))
    (interrupted,) = ended(JOB, took_s=660.0, losses=1).outcomes
    assert interrupted.error == pytest.approx(math.log(1.1))
    assert interrupted.num_failures == 1


def test_on_what_was_not_measured_before_it_tells_of_the_curve() -> None:
    (found,) = ended(JOB, rates=(1, 2)).outcomes
    assert found.basis == "fitted"
    assert found.error == pytest.approx(math.log(1.3 * JOB.profile_steps_per_s[2] / 2.0))
    (declared,) = ended(replace(JOB, belief=SpeedBelief(is_declared=True))).outcomes
    assert (declared.basis, declared.error) == ("declared", pytest.approx(0.0))


@pytest.mark.parametrize(
    "changes", [{"belief": None}, {"share": Share(request=0.5, limit=0.5)}, {"profile_steps_per_s": {}}]
)
def test_what_had_no_expected_speed_tells_nothing(changes: dict[str, object]) -> None:
    assert ended(replace(JOB, **changes)).outcomes == ()


def test_a_run_that_ended_early_tells_nothing() -> None:
    assert ended(JOB, step=300).outcomes == ()


def test_they_outlive_the_job_in_the_state_and_are_bounded() -> None:
    state = ended(JOB)
    assert state_of(data_of(state)).outcomes == state.outcomes
    state.outcomes = (JobOutcome(family="f", basis="measured", error=0.5),) * MAX_OUTCOMES
    apply_event(JobSubmitted(job=replace(JOB, job_id="next")), state, 700.0)
    record = state.jobs["next"]
    state.jobs["next"] = replace(record, learnt=LearntSpeed(throughput_samples_per_s={1: 64.0}))
    apply_event(JobFinished(job_id="next", generation=0, step=600), state, 800.0)
    assert len(state.outcomes) == MAX_OUTCOMES
    assert state.outcomes[-1].error != 0.5
