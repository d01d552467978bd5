"""A job that moves from machines to functions, in the control plane: never lost, and never in both places."""

from __future__ import annotations

import pytest

from kits.scheduling.menu_jobs import MENU, cluster
from springtide.control.controller import Controller
from springtide.control.journal.memory import MemoryJournal
from springtide.control.loop import verify
from springtide.core import events
from springtide.core.actions import PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.functions import Bill, Usage
from springtide.core.workload import Entrypoint, Goal, JobState, TrainingJob, WorkloadId
from springtide.scheduling.functions.policy import WithFunctions
from springtide.scheduling.registry import make_policy


def make_controller() -> Controller:
    return Controller(WithFunctions(make_policy("fifo")))


class Scene:
    """A controller with a job on two machines, told by hand what happens; every step is journaled."""

    def __init__(self, goal: Goal = Goal()) -> None:  # noqa: B008 - a frozen value.
        self.controller = make_controller()
        self.journal = MemoryJournal()
        self.now_s = 0.0
        self.tell(*(events.NodeJoined(node=node) for node in cluster().nodes))
        job = TrainingJob(
            job_id=WorkloadId("a"),
            name="a",
            entrypoint=Entrypoint(source_path="job.py"),
            goal=goal,
            global_batch_size=32,
            min_workers=2,
            max_workers=2,
            exact=False,
            profile_steps_per_s={2: 0.01},
        )
        self.tell(events.JobSubmitted(job=job))

    def tell(self, *happened):
        self.now_s += 1.0
        step = self.controller.step(self.now_s, happened)
        if step.events or step.actions:
            self.journal.append(step)
        return list(step.actions)

    def restart(self):
        """The control plane dies, and another one folds the journal; what it finds standing."""
        self.controller = make_controller()
        for _, step in self.journal.read(0):
            self.controller.restore(step)
        return self.controller.standing()

    @property
    def record(self):
        return self.controller.state.jobs[WorkloadId("a")]

    def train(self, step: int = 40):
        self.tell(*(events.ReplicaReady(workload_id="a", replica_id=each) for each in ("a.0", "a.1")))
        self.confirm("start")
        self.tell(
            events.ProgressReported(
                job_id="a",
                generation=1,
                step=step,
                total_steps=100,
                world_size=2,
                samples_per_s=8.0,
                loss=0.5,
                progress=float(step),
                total_progress=100.0,
            )
        )

    def confirm(self, direction: str):
        return self.tell(
            events.JobResized(
                job_id="a",
                generation=self.record.group.generation,
                world_size=1,
                step=self.record.progress.step,
                pause_s=0.1,
                direction=direction,
            )
        )

    def move(self, **fields):
        asked = {"reason": "its owner asked for it", "usd_per_device_hour": 36.0, **fields}
        return self.tell(events.MoveRequested(job_id="a", menu=MENU, **asked))

    def save(self, step: int):
        generation = self.record.group.generation
        return self.tell(events.CheckpointCommitted(job_id="a", generation=generation, step=step, path="/c"))

    def leave(self, *replicas: str):
        return self.tell(*(events.ReplicaStopped(workload_id="a", replica_id=each) for each in replicas))


def of(kind, actions):
    return [action for action in actions if isinstance(action, kind)]


@pytest.fixture
def scene():
    made = Scene()
    made.train()
    return made


def test_it_is_preempted_and_starts_on_functions_from_its_checkpoint(scene):
    (preempt,) = scene.move()
    assert isinstance(preempt, PreemptJob)
    assert preempt.reason == "it moves to functions: its owner asked for it"
    assert scene.save(42) == []
    assert scene.leave("a.0") == [], "a worker is left"
    assert not scene.record.job.is_on_functions
    (start,) = scene.leave("a.1")
    assert isinstance(start, StartReplica)
    assert start.workload.menu == MENU
    assert start.device_id.startswith("lambda")
    assert start.restore.step == 42
    assert start.generation == preempt.generation + 1
    assert start.workload.machine_run.step == 42
    (resize,) = scene.tell(events.ReplicaReady(workload_id="a", replica_id="a.2"))
    assert isinstance(resize, ResizeJob)
    assert resize.functions in [option.plan for option in MENU.options]
    scene.confirm("start")
    assert (scene.record.state, scene.record.progress.step) == (JobState.RUNNING, 42)


def test_what_was_learnt_by_number_of_workers_is_dropped_and_bounds_are_one(scene):
    assert scene.record.learnt.throughput_samples_per_s
    scene.move()
    scene.save(42)
    scene.leave("a.0", "a.1")
    record = scene.record
    assert not record.learnt.throughput_samples_per_s
    assert (record.bounds.min_workers, record.bounds.max_workers) == (1, 1)
    assert record.job.profile_steps_per_s == {}
    assert record.job.place_reason == "moved to functions after step 42: its owner asked for it"
    assert record.progress.total_steps == 100
    (view,) = scene.controller.snapshot(scene.now_s).jobs
    assert (view.equivalent_steps, view.total_equivalent_steps) == (42.0, 100.0)


def test_the_bill_goes_on_from_what_machines_have_cost(scene):
    scene.move()
    scene.save(42)
    scene.leave("a.0", "a.1")
    record = scene.record
    machines_usd = record.spent.finished_service_s / 3600.0 * 36.0
    assert machines_usd > 0.05
    assert record.spent.bill == Bill(machines_usd=machines_usd)
    assert record.job.machine_run.cost_usd == machines_usd
    (view,) = scene.controller.snapshot(scene.now_s).jobs
    assert view.spent_usd == machines_usd
    # A coordinator that does not know of it would be taken for an older report.
    scene.tell(events.UsageReported(job_id="a", usage=Usage(), bill=Bill(function_usd=machines_usd / 2)))
    assert scene.record.spent.bill.total_usd == machines_usd
    bill = Bill(function_usd=0.01, machines_usd=machines_usd)
    scene.tell(events.UsageReported(job_id="a", usage=Usage(machines_usd=machines_usd), bill=bill))
    assert scene.record.spent.bill == bill


@pytest.mark.parametrize("died_after", range(6))
def test_a_control_plane_that_dies_in_between_keeps_the_job_in_one_place(scene, died_after):
    steps = [
        lambda: scene.move(),
        lambda: scene.save(42),
        lambda: scene.leave("a.0"),
        lambda: scene.leave("a.1"),
        lambda: scene.tell(events.ReplicaReady(workload_id="a", replica_id="a.2")),
        lambda: scene.confirm("start"),
    ]
    for number, step in enumerate(steps):
        step()
        if number == died_after:
            before = scene.record
            standing = scene.restart()
            assert scene.record == before
            places = {start.workload.is_on_functions for start in standing.replicas}
            assert len(places) == 1, "it is here or there"
    assert scene.record.state is JobState.RUNNING
    assert scene.record.job.is_on_functions
    assert [replica.replica_id for replica in scene.record.replicas] == ["a.2"]
    assert verify(make_controller(), scene.journal) > 6


def test_the_loss_of_every_worker_on_the_way_moves_it_with_its_last_checkpoint(scene):
    scene.save(30)
    scene.move()
    lost = [events.ReplicaLost(workload_id="a", replica_id=each, reason="gone") for each in ("a.0", "a.1")]
    scene.tell(*lost)
    starts = of(StartReplica, scene.tell())
    record = scene.record
    assert record.job.is_on_functions
    assert record.job.machine_run.step == 30
    assert len(record.replicas) == 1
    assert all(start.restore.step == 30 for start in starts)


def test_one_that_has_not_begun_moves_at_once():
    scene = Scene()
    stops = scene.move()
    assert [type(action) for action in stops] == [StopReplica, StopReplica]
    (start,) = scene.leave("a.0", "a.1")
    assert start.restore is None
    assert start.workload.machine_run.step == 0


def test_a_paused_one_moves_and_stays_paused(scene):
    scene.tell(events.PauseRequested(job_id="a"))
    scene.save(41)
    scene.leave("a.0", "a.1")
    assert scene.move() == []
    assert scene.record.job.is_on_functions
    assert scene.record.state is JobState.PAUSED
    (start,) = scene.tell(events.ResumeRequested(job_id="a"))
    assert start.workload.machine_run.step == 41


def test_where_functions_cannot_start_it_goes_back_to_machines_as_it_was(scene):
    before, bounds = scene.record.job, scene.record.bounds
    scene.move()
    scene.save(42)
    scene.leave("a.0", "a.1")
    (stop,) = scene.tell(events.MoveFailed(job_id="a", generation=scene.record.group.generation, error="it is odd"))
    assert isinstance(stop, StopReplica)
    starts = scene.leave("a.2")
    record = scene.record
    told = "it stays on machines, for it could not move to functions: it is odd"
    assert record.job.place_reason == told
    assert record.job.machine_run is None
    assert (record.job.menu, record.job.profile_steps_per_s) == (None, before.profile_steps_per_s)
    assert record.bounds == bounds
    assert record.move.state == "failed"
    assert record.restarts.num_restarts == 0
    assert [start.device_id for start in starts] == ["n/0", "n/1"]
    assert {start.restore.step for start in starts} == {42}
    assert verify(make_controller(), scene.journal) > 6


def test_one_that_goes_back_while_the_control_plane_dies_is_on_machines_and_is_charged_no_restart(scene):
    scene.move()
    scene.save(42)
    scene.leave("a.0", "a.1")
    scene.tell(events.MoveFailed(job_id="a", generation=scene.record.group.generation, error="it is odd"))
    (start,) = scene.restart().replicas
    assert not start.workload.is_on_functions, "no executor of functions begins again with it"
    # That of machines knows of no such process.
    scene.tell(events.ReplicaLost(workload_id="a", replica_id="a.2", reason="it is gone"))
    starts = of(StartReplica, scene.tell())
    record = scene.record
    assert [each.device_id for each in starts or record.replicas] == ["n/0", "n/1"]
    assert record.restarts.num_restarts == 0


def test_a_late_word_of_a_failure_changes_nothing(scene):
    scene.move()
    scene.save(42)
    scene.leave("a.0", "a.1")
    stale = scene.record.group.generation - 1
    assert scene.tell(events.MoveFailed(job_id="a", generation=stale, error="odd")) == []
    assert scene.record.job.is_on_functions


def test_a_second_request_and_one_for_a_job_on_functions_change_nothing(scene):
    scene.move()
    first = scene.record.move
    scene.move(reason="again")
    assert scene.record.move == first
    scene.save(42)
    scene.leave("a.0", "a.1")
    moved = scene.record.job
    scene.move(reason="again")
    assert scene.record.job == moved


def test_one_that_is_cancelled_on_the_way_ends(scene):
    scene.move()
    scene.tell(events.CancelRequested(workload_id="a"))
    scene.leave("a.0", "a.1")
    assert scene.record.state is JobState.CANCELLED
    assert not scene.record.job.is_on_functions
