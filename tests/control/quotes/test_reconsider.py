"""A policy's answer to another deadline of an accepted job: as for a new job, at no other job's cost."""

from __future__ import annotations

import pytest

from springtide.control.controller import Controller
from springtide.control.quotes.reconsider import reconsider, soonest_s
from springtide.core import events
from springtide.core.decision import Overheads
from springtide.core.resources import make_node
from springtide.core.workload import Entrypoint, Goal, TrainingJob
from springtide.scheduling.registry import make_live_policy

# So long a start takes; a job of 1,000 steps takes 100 s on one device and 56 s on two.
CHANGE_S = 2.0


class World:
    """A live platform's policy on a few devices, with jobs that run from the moment of their submission on."""

    def __init__(self, policy: str = "springtide", num_devices: int = 2) -> None:
        self.policy = policy
        self.controller = Controller(make_live_policy(policy), overheads=Overheads(change_s=CHANGE_S))
        self.tell(0.0, events.NodeJoined(node=make_node("n", num_devices)))

    def tell(self, at_s: float, *happened) -> None:
        self.controller.step(at_s, happened)

    def job(self, name: str):
        return self.controller.state.jobs[name]

    def run(self, name: str, deadline_s: float | None = None, *, at_s: float = 1.0, **options) -> None:
        job = TrainingJob(
            job_id=name,
            name=name,
            entrypoint=Entrypoint(source_path="a.py", object_name="fit"),
            goal=Goal(deadline_s=deadline_s),
            **{"total_steps": 1000, "profile_steps_per_s": {1: 10.0, 2: 18.0}, "max_workers": 2} | options,
        )
        self.tell(at_s, events.JobSubmitted(job=job))
        replicas = self.job(name).replicas
        self.tell(at_s, *(events.ReplicaReady(workload_id=name, replica_id=r.replica_id) for r in replicas))
        record = self.job(name)
        if not record.group.members:
            return
        resized = events.JobResized(
            job_id=name,
            generation=record.group.generation,
            world_size=len(record.group.members),
            step=0,
            pause_s=0.0,
            direction="start",
        )
        self.tell(at_s, resized)

    def ask(self, name: str, deadline_s: float, now_s: float = 2.0, **options):
        goal = Goal(deadline_s=deadline_s, **options)
        return reconsider(self.controller.snapshot(now_s), make_live_policy(self.policy), name, goal)


def test_what_fits_is_promised_and_what_does_not_is_refused_in_the_policys_words():
    world = World()
    world.run("a", 500.0)
    found = world.ask("a", 80.0)
    assert found.refusal == ""
    assert found.finish_s <= 80.0
    refused = world.ask("a", 30.0)
    assert refused.finish_s is None
    assert "impossible even alone" in refused.refusal


def test_what_it_has_done_counts():
    world = World()
    world.run("a", 500.0)
    done = events.ProgressReported(
        job_id="a", generation=world.job("a").group.generation, step=900, total_steps=1000, world_size=2
    )
    world.tell(50.0, done)
    found_s = world.ask("a", 80.0, now_s=50.0).finish_s
    # A start, and 100 steps on one device or two.
    assert 50.0 + CHANGE_S + 100 / 18.0 <= found_s <= 50.0 + CHANGE_S + 100 / 10.0 + 0.1


def test_the_promises_of_others_stand():
    world = World(num_devices=1)
    world.run("a", 500.0, max_workers=1)
    world.run("b", 220.0, max_workers=1)
    assert world.job("b").promise.admitted_at_s is not None
    # Each takes 102 s: first or second, but before 220 s only one of the two.
    assert world.ask("a", 330.0).finish_s is not None
    assert world.ask("a", 105.0).finish_s is not None
    tight = World(num_devices=1)
    tight.run("a", 500.0, max_workers=1)
    tight.run("b", 107.0, max_workers=1)
    assert tight.job("b").promise.admitted_at_s is not None
    assert "b" in tight.ask("a", 110.0).refusal


def test_asking_changes_nothing():
    world = World()
    world.run("a", 500.0)
    before = world.controller.snapshot(2.0)
    world.ask("a", 30.0)
    world.ask("a", 90.0)
    after = world.controller.snapshot(2.0)
    assert (after.jobs, after.allocations, after.memory) == (before.jobs, before.allocations, before.memory)


def test_a_later_one_is_found_that_would_be_promised():
    world = World()
    world.run("a", 500.0)
    snapshot, policy = world.controller.snapshot(2.0), make_live_policy("springtide")
    found_s = soonest_s(snapshot, policy, "a", Goal(deadline_s=20.0))
    assert world.ask("a", found_s).finish_s is not None
    assert world.ask("a", 2.0 + (found_s - 2.0) / 1.25).finish_s is None
    assert soonest_s(snapshot, make_live_policy("fifo"), "a", Goal(deadline_s=20.0)) is None


def test_a_job_that_would_wait_in_line_is_answered_at_once():
    world = World(num_devices=1)
    world.run("a", 110.0, max_workers=1)
    world.run("b", 1000.0, max_workers=1)
    waits = world.ask("b", 150.0, waits=True)
    assert waits.finish_s is None
    assert waits.refusal == world.ask("b", 150.0).refusal != ""


@pytest.mark.parametrize("policy", ["fifo", "elastic", "edf", "springtide", "elasticflow", "tiresias", "pollux"])
def test_every_policy_can_be_asked(policy):
    world = World(policy, num_devices=4)
    world.run("a", 500.0)
    world.run("b")
    found = world.ask("a", 300.0)
    assert found.refusal == ""
    assert found.finish_s is None or found.finish_s <= 300.0
    assert world.ask("b", 300.0, is_soft=True).refusal == ""


@pytest.mark.parametrize("policy", ["springtide", "elastic", "elasticflow", "edf"])
def test_an_edited_goal_is_decided_by_and_no_promise_is_broken(policy):
    world = World(policy, num_devices=2)
    world.run("a", 2000.0, total_steps=10_000)
    world.run("b", None)
    for at_s, goal in ((10.0, Goal(deadline_s=700.0)), (20.0, Goal()), (30.0, Goal(deadline_s=3000.0, is_soft=True))):
        promised_s = 600.0 if goal.is_hard else None
        edit = events.JobEdited(job_id="a", goal=goal, promised_finish_s=promised_s)
        world.tell(at_s, edit)
        record = world.job("a")
        assert record.job.goal == goal
        assert not record.state.is_terminal
        assert (record.promise.admitted_at_s is not None) == (promised_s is not None)
        assert world.controller.snapshot(at_s).jobs[0].bounds.num_edits == record.bounds.num_edits
    assert world.job("a").bounds.num_edits == 3


def test_a_hurried_job_is_planned_anew_and_one_that_gave_up_makes_room():
    world = World(num_devices=2)
    world.run("a", 2000.0, total_steps=1000)
    world.tell(2.0, events.JobEdited(job_id="a", goal=Goal(deadline_s=90.0), promised_finish_s=80.0))
    assert world.controller.future["a"][-1].end_s <= 90.0
    world.tell(3.0, events.JobEdited(job_id="a", goal=Goal()))
    memory = world.controller.state.memory
    assert "a" not in memory["jobs"]
