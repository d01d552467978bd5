"""What a change costs is learned from what changes took, and a journal that is read again has learned the same."""

from __future__ import annotations

import pytest

from springtide.control.controller import Controller
from springtide.control.journal.memory import MemoryJournal
from springtide.control.learnt import MAX_CHANGES, PRIOR_CHANGES, learnt_overheads
from springtide.control.loop import verify
from springtide.core import events
from springtide.core.decision import Overheads
from springtide.core.resources import make_node
from springtide.core.workload import Entrypoint, Goal, TrainingJob
from springtide.scheduling.registry import make_live_policy

PRIOR = Overheads(change_s=6.0)


def cost(*times_s: float) -> float:
    return learnt_overheads(PRIOR, times_s).change_s


def test_before_anything_was_seen_the_prior_is_believed():
    assert learnt_overheads(PRIOR, ()) is PRIOR
    assert cost(2.0) == 6.0


def test_what_most_changes_took_counts_and_a_cold_image_does_not():
    assert cost(*[2.0] * 16) == 2.0
    assert cost(*[2.0] * 14, 300.0, 300.0) == 6.0
    assert cost(*[2.0] * 28, 300.0, 300.0, 300.0) == 2.0
    assert cost(*[14.2] * 8) == 14.5


def test_three_of_four_are_done_in_time():
    times_s = [float(number) for number in range(1, 33)]
    within = [time_s for time_s in [*times_s, *[6.0] * PRIOR_CHANGES] if time_s <= cost(*times_s)]
    assert len(within) == 27


def test_neither_nothing_nor_for_ever_is_believed():
    assert cost(*[0.0] * MAX_CHANGES) == 0.5
    assert cost(*[1e6] * MAX_CHANGES) == 120.0


def test_other_costs_stay_as_they_are():
    prior = Overheads(change_s=6.0, fresh_s=1.0, fresh_per_doubling_s=2.0)
    assert learnt_overheads(prior, (9.0,) * 20) == Overheads(change_s=9.0, fresh_s=1.0, fresh_per_doubling_s=2.0)


def test_speeds_are_kept_by_the_model_of_the_devices(stage):
    nodes = [make_node("v", 2, accelerator="V100"), make_node("t", 2, accelerator="T4")]
    stage.tell(*[events.NodeJoined(node=node) for node in nodes], events.JobSubmitted(job=a_job("a")))
    for at_s, node, speed in ((10.0, "v", 90.0), (20.0, "t", 30.0)):
        stage.policy.wish = {"a": [f"{node}/0"]}
        stage.tell(at_s=at_s)
        replica_id = next(each.replica_id for each in stage.job("a").replicas if each.device_id == f"{node}/0")
        stage.tell(events.ReplicaReady(workload_id="a", replica_id=replica_id), at_s=at_s + 1.0)
        stage.tell(resized(stage, "a", "replace"), at_s=at_s + 2.0)
        generation = stage.job("a").group.generation
        report = {"job_id": "a", "generation": generation, "step": 1, "total_steps": 9, "world_size": 1}
        report |= {"samples_per_s": speed, "step_s": 0.5, "local_batch_size": 1}
        stage.tell(events.ProgressReported(**report), at_s=at_s + 8.0)
    learnt = stage.job("a").learnt
    assert learnt.by_accelerator == {"V100": {1: 90.0}, "T4": {1: 30.0}}
    assert learnt.throughput_samples_per_s == learnt.by_accelerator["T4"]
    assert [step.accelerator for step in learnt.step_times] == ["V100", "T4"]


# --- in the controller -----------------------------------------------------------------------------------------------


def test_from_the_order_of_the_last_new_worker_to_the_first_step(stage):
    seen = stage.controller.state
    stage.want(a="0")
    stage.tell(events.JobSubmitted(job=a_job("a")), at_s=10.0)
    stage.ready("a", 0)
    stage.tell(resized(stage, "a", "start"), at_s=13.0)
    assert seen.change_times_s == (3.0,)
    # One joins, and the order is what counts, not the ordering of the group.
    stage.want(a="01")
    stage.tell(at_s=20.0)
    stage.tell(events.ReplicaReady(workload_id="a", replica_id="a.1"), at_s=24.0)
    stage.tell(resized(stage, "a", "grow"), at_s=25.0)
    assert seen.change_times_s == (3.0, 5.0)
    # Who leaves shows nothing of what a start takes.
    stage.want(a="0")
    stage.tell(at_s=30.0)
    stage.tell(resized(stage, "a", "shrink"), at_s=31.0)
    assert seen.change_times_s == (3.0, 5.0)
    # Said once more it is no other change.
    stage.tell(resized(stage, "a", "shrink"), at_s=40.0)
    assert seen.change_times_s == (3.0, 5.0)


def test_of_many_changes_the_last_ones_are_remembered(stage):
    stage.controller.state.change_times_s = tuple(float(number) for number in range(MAX_CHANGES))
    stage.running("a", "0")
    assert len(stage.controller.state.change_times_s) == MAX_CHANGES
    assert stage.controller.state.change_times_s[0] == 1.0


@pytest.mark.parametrize("learns", [True, False])
def test_the_policy_is_told_what_was_learned_where_the_platform_learns(learns):
    world = World(learns=learns)
    for number in range(20):
        world.run(f"j{number}", took_s=14.0)
    assert world.controller.snapshot(world.now_s).overheads == Overheads(change_s=14.0 if learns else 6.0)


def test_a_journal_that_is_read_again_has_learned_and_decides_the_same():
    world = World(learns=True)
    for number in range(24):
        world.run(f"j{number}", took_s=3.0 + number, deadline_s=500.0)
    live = world.controller
    assert live.snapshot(world.now_s).overheads.change_s > 6.0
    again = world.fresh()
    for _, step in world.journal.read():
        again.restore(step)
    assert again.state.change_times_s == live.state.change_times_s
    assert again.snapshot(world.now_s).overheads == live.snapshot(world.now_s).overheads
    assert verify(world.fresh(), world.journal) > 48


def test_what_was_learned_decides_what_is_promised():
    """A job that fits its deadline where changes are quick does not where they are slow."""
    verdicts = []
    for took_s in (2.0, 40.0):
        world = World(learns=True)
        for number in range(20):
            world.run(f"j{number}", took_s=took_s)
        record = world.submit("urgent", deadline_s=120.0)
        verdicts.append((record.state, record.promise.admitted_at_s is not None))
    assert verdicts[0][1]
    assert verdicts[1] == ("REJECTED", False)


def a_job(name: str, **options) -> TrainingJob:
    return TrainingJob(
        job_id=name, name=name, entrypoint=Entrypoint(source_path="a.py", object_name="fit"), max_workers=4, **options
    )


def resized(stage, name: str, direction: str) -> events.JobResized:
    record = stage.job(name)
    return events.JobResized(
        job_id=name,
        generation=record.group.generation,
        world_size=record.world_size,
        step=1,
        pause_s=0.1,
        direction=direction,
    )


class World:
    """The policy of a live platform on four devices, whose workers take as long as they are told."""

    def __init__(self, *, learns: bool) -> None:
        self._learns = learns
        self.journal = MemoryJournal()
        self.controller = self.fresh()
        self.now_s = 0.0
        self.tell(events.NodeJoined(node=make_node("n", 4)))

    def fresh(self) -> Controller:
        return Controller(make_live_policy("springtide"), overheads=PRIOR, learns_overheads=self._learns)

    def tell(self, *happened) -> None:
        self.journal.append(self.controller.step(self.now_s, happened))

    def submit(self, name: str, deadline_s: float | None = None):
        """A job of 100 s on one worker."""
        goal = Goal() if deadline_s is None else Goal(deadline_s=self.now_s + deadline_s)
        job = TrainingJob(
            job_id=name,
            name=name,
            entrypoint=Entrypoint(source_path="a.py", object_name="fit"),
            total_steps=1000,
            profile_steps_per_s={1: 10.0},
            goal=goal,
        )
        self.tell(events.JobSubmitted(job=job))
        return self.controller.state.jobs[name]

    def run(self, name: str, *, took_s: float, deadline_s: float | None = None) -> None:
        """Bring a job from its submission to its end, its first step so long after the order."""
        record = self.submit(name, deadline_s)
        self.now_s += took_s
        ready = [events.ReplicaReady(workload_id=name, replica_id=r.replica_id) for r in record.replicas]
        self.tell(*ready)
        record = self.controller.state.jobs[name]
        self.tell(
            events.JobResized(
                job_id=name,
                generation=record.group.generation,
                world_size=record.world_size,
                step=1,
                pause_s=0.1,
                direction="start",
            )
        )
        self.tell(events.JobFinished(job_id=name, generation=record.group.generation, step=1000))
        gone = self.controller.state.jobs[name].replicas
        self.tell(*(events.ReplicaStopped(workload_id=name, replica_id=r.replica_id) for r in gone))
