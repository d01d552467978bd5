"""Worlds of tight deadlines: what is drawn for them, and what is held against what policies promise."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from springtide.control.records import PlatformState
from springtide.control.runs import apply_events
from springtide.core.actions import AdmitJob
from springtide.core.decision import PlannedRun
from springtide.core.events import JobSubmitted, NodeJoined
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.core.workload import Goal, JobState
from springtide.scheduling.registry import make_policy
from springtide.simulator.fluid.invariants import InvariantViolation
from springtide_studies.fault_seeds.invariants import complain
from springtide_studies.fault_seeds.promises import PromiseInvariants
from springtide_studies.fault_seeds.seeds import FaultRun, run_seed
from springtide_studies.fault_seeds.workload import make_job


@pytest.fixture
def state():
    found = PlatformState()
    job = make_job("a", num_samples=320, samples_per_s=32.0, workers=(1, 2))
    job = replace(job, goal=Goal(deadline_s=100.0), total_steps=20, profile_steps_per_s={1: 1.0, 2: 2.0})
    apply_events([NodeJoined(node=make_node("n", 2)), JobSubmitted(job=job)], found, 1.0)
    return found


def note(watch, state, now_s=2.0, actions=(), **future):
    runs = {
        who: tuple(PlannedRun(start_s=b, end_s=e, num_devices=n) for b, e, n in runs) for who, runs in future.items()
    }
    watch.note_journaled(Step(now_s=now_s, events=(), actions=actions), state, runs)


ADMITTED = AdmitJob(job_id="a", finish_s=50.0, cause="plan", reason="")


@pytest.mark.parametrize(
    ("broken", "given"),
    [
        ("promise-planned", {"actions": (replace(ADMITTED, finish_s=101.0),)}),
        ("promise-released", {"gone": [(2.0, 9.0, 1)]}),
        ("plan-fits", {"a": [(2.0, 9.0, 2), (8.0, 12.0, 1)]}),
        ("promise-kept", {"a": [(2.0, 101.0, 2)], "actions": (ADMITTED,)}),
        ("promise-kept", {"actions": (ADMITTED,)}),
    ],
)
def test_what_breaks_a_promise_is_told(state, broken, given):
    with pytest.raises(InvariantViolation, match=broken):
        note(PromiseInvariants(complain, 2, is_kept=True), state, **given)


def test_a_plan_that_keeps_the_promise_is_none(state):
    watch = PromiseInvariants(complain, 2, is_kept=True)
    note(watch, state, actions=(ADMITTED,), a=[(2.0, 9.0, 2), (9.0, 50.0, 1)])
    note(watch, state, 50.5, a=[])
    assert watch.num_promised == 1


def test_jobs_have_profiles_that_are_true_and_deadlines_and_nothing_else_changes():
    plain, tight = (
        FaultRun(5, lambda: make_policy("springtide"), has_promises=has_promises) for has_promises in (False, True)
    )
    assert tight.nodes == plain.nodes
    before, after = {job.job_id: job for _, job in plain.workload.jobs()}, tight.workload.jobs()
    assert len(after) == len(before)
    assert any(job.goal.is_hard for _, job in after)
    for _, job in after:
        assert sorted(job.profile_steps_per_s) == list(range(1, job.max_workers + 1))
        assert job.num_epochs == before[job.job_id].num_epochs
    assert not tight.workload.loads, "no service takes devices from promises"


@pytest.mark.slow
@pytest.mark.parametrize("num_faults", [0.0, None])
def test_promises_are_given_and_refused(num_faults):
    results = [run_seed(seed, "springtide", num_faults=num_faults, has_promises=True) for seed in range(6)]
    assert not [result.detail for result in results if result.violation]
    assert sum(result.num_promises for result in results) > 10
    assert {state for result in results for state in result.ends.values()} >= {str(JobState.SUCCEEDED)}
    assert results[0].command.endswith(" --promises")


def test_a_checkpoint_between_two_reports_breaks_no_promise():
    # A job's step ran ahead of the time at which it was reported, so that it was planned to end too early.
    assert not run_seed(34, "springtide", num_faults=0.0, has_promises=True).violation
