"""A job whose workers and memory are searched for, in the control plane: what is measured decides what it runs as."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from springtide.control.controller import Controller
from springtide.control.quotes.forecast import roll_forward
from springtide.core import events
from springtide.core.actions import AdmitJob, ResizeJob
from springtide.core.function_search import (
    MAX_MEASUREMENTS,
    FunctionMeasurement,
    FunctionSearch,
    StreamView,
    WorkerModel,
)
from springtide.core.functions import Bill, Usage
from springtide.core.resources import Device, DeviceId, Node, NodeId, make_node
from springtide.core.workload import Entrypoint, Goal, JobState, TrainingJob, WorkloadId
from springtide.perf.functions.services import aws_lambda
from springtide.perf.functions.workers.model import space_of
from springtide.perf.functions.workers.surface import Surface, WorkSettings
from springtide.scheduling.functions.goal_search import search_menu
from springtide.scheduling.functions.policy import WithFunctions
from springtide.scheduling.functions.settled import settled
from springtide.scheduling.registry import make_policy

SERVICE = aws_lambda(concurrency=40)
NODE = Node(
    node_id=NodeId("aws"),
    devices=tuple(
        Device(device_id=DeviceId(f"aws/{n}"), node_id=NodeId("aws"), index=n, kind="function") for n in (0, 1)
    ),
    functions=SERVICE,
)
# A step of 64 samples takes some 13 s on one vCPU: worth several workers.
MODEL = WorkerModel(parameter_bytes=20_000_000, sample_s=0.2, fixed_s=0.01, sample_bytes=4_000_000)
SEARCH = FunctionSearch(model=MODEL, space=space_of(SERVICE, MODEL, max_workers=16), has_parameter_store=True)


def searched_job(goal: Goal, total_steps: int | None = 400) -> TrainingJob:
    return TrainingJob(
        job_id=WorkloadId("a"),
        name="a",
        entrypoint=Entrypoint(source_path="job.py"),
        goal=goal,
        global_batch_size=64,
        total_steps=total_steps,
        menu=search_menu(SEARCH, SERVICE, 64, total_steps=total_steps),
        search=SEARCH,
    )


class Scene:
    """A controller with one searched job, told by hand what happens."""

    def __init__(self, goal: Goal, **options) -> None:
        self.controller = Controller(WithFunctions(make_policy("fifo")))
        self.now_s = 0.0
        self.spent_usd = 0.0
        self.tell(events.NodeJoined(node=make_node("n", 1)), events.NodeJoined(node=NODE))
        self.first = self.tell(events.JobSubmitted(job=searched_job(goal, **options)))

    def tell(self, *happened, after_s: float = 1.0):
        self.now_s += after_s
        return list(self.controller.step(self.now_s, happened).actions)

    @property
    def record(self):
        return self.controller.state.jobs[WorkloadId("a")]

    def begin(self):
        """It runs as it was told to; the plan."""
        (resize,) = self.tell(events.ReplicaReady(workload_id="a", replica_id="a.0"))
        self.confirm("start")
        return resize.functions

    def confirm(self, direction: str = "replace"):
        record = self.record
        return self.tell(
            events.JobResized(
                job_id="a",
                generation=record.group.generation,
                world_size=1,
                step=record.progress.step,
                pause_s=0.1,
                direction=direction,
            )
        )

    def measured(self, step_s: float, num_steps: int = 6, *, generation: int | None = None, usd: float = 1e-3):
        """So many more steps as the present plan have taken so long each."""
        record = self.record
        self.spent_usd += num_steps * usd
        measurement = FunctionMeasurement(
            plan=record.runs_as.plan,
            global_batch_size=64,
            gradient_bytes=MODEL.parameter_bytes,
            num_steps=num_steps,
            step_s=step_s,
            deviation_s=0.02 * step_s,
            compute_s=0.8 * step_s,
            sync_s=0.2 * step_s,
            usd=usd,
        )
        given = record.group.generation if generation is None else generation
        progress = events.ProgressReported(
            job_id="a",
            generation=given,
            step=record.progress.step + num_steps,
            total_steps=record.job.total_steps or 0,
            world_size=record.runs_as.plan.num_functions,
            samples_per_s=64 / step_s,
            global_batch_size=64,
        )
        usage = events.UsageReported(job_id="a", usage=Usage(), bill=Bill(function_usd=self.spent_usd))
        told = events.FunctionsMeasured(job_id="a", generation=given, measurement=measurement)
        return self.tell(progress, usage, told, after_s=num_steps * step_s)


def test_a_job_that_is_far_slower_than_thought_moves_to_where_its_deadline_is_met():
    scene = Scene(Goal(deadline_s=6000.0, is_soft=True))
    plan = scene.begin()
    actions = scene.measured(6 * 6000.0 / 400)
    resized = [action for action in actions if isinstance(action, ResizeJob)]
    assert len(resized) == 1
    assert resized[0].functions != plan
    vcpus = {size.memory_mb: size.vcpus for size in SEARCH.space.sizes}

    def power(plan):
        return plan.num_replicas * vcpus[plan.stages[0].memory_mb]

    assert power(resized[0].functions) > power(plan)
    assert resized[0].reason, "it says why"
    assert scene.record.state is JobState.RUNNING


def test_nothing_is_decided_anew_while_a_change_is_under_way_or_has_shown_nothing():
    scene = Scene(Goal(deadline_s=6000.0, is_soft=True))
    scene.begin()
    (first,) = [a for a in scene.measured(90.0) if isinstance(a, ResizeJob)]
    assert scene.tell() == []
    assert scene.record.runs_as.plan == first.functions
    assert [a for a in scene.confirm() if isinstance(a, ResizeJob)] == [], "the new plan has not been measured yet"


@pytest.mark.slow
def test_a_measurement_replaces_the_one_of_the_same_and_stale_ones_count_for_nothing():
    scene = Scene(Goal(deadline_s=50_000.0, is_soft=True))
    plan = scene.begin()
    scene.measured(8.0, num_steps=3)
    known = scene.record.learnt.measurements
    assert [(one.plan, one.num_steps) for one in known] == [(plan, 3)]
    stale = scene.controller.state.num_stale_events
    scene.tell(events.FunctionsMeasured(job_id="a", generation=0, measurement=replace(known[0], num_steps=99)))
    assert scene.record.learnt.measurements == known
    assert scene.controller.state.num_stale_events == stale + 1
    generation = scene.record.group.generation
    scene.tell(events.FunctionsMeasured(job_id="a", generation=generation, measurement=replace(known[0], num_steps=6)))
    assert [one.num_steps for one in scene.record.learnt.measurements] == [6]
    for number in range(2 * MAX_MEASUREMENTS):
        other = replace(known[0], global_batch_size=1000 + number)
        scene.tell(events.FunctionsMeasured(job_id="a", generation=scene.record.group.generation, measurement=other))
    assert len(scene.record.learnt.measurements) == MAX_MEASUREMENTS
    assert scene.record.learnt.measurements[-1].global_batch_size == 1000 + 2 * MAX_MEASUREMENTS - 1


def test_functions_that_ran_out_of_memory_are_not_asked_for_again():
    scene = Scene(Goal(deadline_s=90_000.0, is_soft=True))
    plan = scene.begin()
    small_mb = plan.stages[0].memory_mb
    larger = replace(plan, stages=(replace(plan.stages[0], memory_mb=small_mb + 512),))
    seen = FunctionMeasurement(
        plan=larger, global_batch_size=64, gradient_bytes=MODEL.parameter_bytes, num_steps=3, step_s=8.0, usd=1e-3
    )
    actions = scene.tell(events.FunctionsMeasured(job_id="a", generation=1, measurement=seen))
    assert scene.record.learnt.too_small_mb == small_mb
    assert scene.controller.snapshot(scene.now_s).jobs[0].learnt.too_small_mb == small_mb
    asked = [action.functions for action in actions if isinstance(action, ResizeJob)]
    assert all(one.stages[0].memory_mb > small_mb for one in [scene.record.runs_as.plan, *asked])
    assert asked or scene.record.runs_as.plan == larger, "what runs is what is believed to run"


def test_a_goal_that_cannot_be_met_is_refused_with_what_would_do():
    scene = Scene(Goal(deadline_s=30.0))
    record = scene.record
    assert record.state is JobState.REJECTED
    assert "cannot finish in time on functions" in record.reason
    assert any(change.startswith("--deadline") for change in record.lifecycle.alternatives)
    scene = Scene(Goal(budget_usd=1e-4))
    assert scene.record.state is JobState.REJECTED
    assert any(change.startswith("--budget") for change in scene.record.lifecycle.alternatives)


def test_a_hard_deadline_is_promised_before_it_begins():
    scene = Scene(Goal(deadline_s=20_000.0))
    (admitted,) = [action for action in scene.first if isinstance(action, AdmitJob)]
    assert admitted.finish_s <= 20_000.0
    assert scene.record.promise.promised_finish_s == admitted.finish_s


def test_fastest_takes_no_longer_than_cheapest():
    fast, cheap = Scene(Goal(is_fastest=True)), Scene(Goal(deadline_s=90_000.0))
    assert fast.begin().num_functions >= cheap.begin().num_functions
    assert fast.record.runs_as.plan.memory_mb > cheap.record.runs_as.plan.memory_mb


def test_a_stream_that_grows_is_known_and_an_older_look_is_not_believed():
    scene = Scene(Goal(), total_steps=None)
    first = StreamView(name="clicks", num_samples=100, arrivals_per_s=2.0)
    scene.tell(events.StreamObserved(job_id="a", stream=first))
    assert scene.record.progress.stream == first
    later = StreamView(name="clicks", num_samples=200, arrivals_per_s=3.0)
    scene.tell(events.StreamObserved(job_id="a", stream=later))
    scene.tell(events.StreamObserved(job_id="a", stream=first))
    assert scene.record.progress.stream == later
    assert scene.controller.snapshot(scene.now_s).jobs[0].progress.stream == later


def test_a_forecast_takes_the_search_as_over_with_what_it_believes():
    scene = Scene(Goal(deadline_s=40_000.0, is_soft=True))
    plan = scene.begin()
    step_s = 2.0 * next(o.step_s for o in scene.record.job.menu.options if o.plan == plan)
    scene.measured(step_s)
    snapshot = scene.controller.snapshot(scene.now_s)
    (view,) = settled(snapshot).jobs
    assert view.job.search is None
    assert scene.record.runs_as.plan in [option.plan for option in view.job.menu.options]
    forecast = roll_forward(snapshot, WithFunctions(make_policy("fifo")))
    left = 400 - scene.record.progress.step
    running = next(o for o in view.job.menu.options if o.plan == scene.record.runs_as.plan)
    settings = WorkSettings(global_batch_size=64, num_layers=1, has_parameter_store=True)
    surface = Surface(SERVICE, SEARCH.space, MODEL, settings)
    place = surface.place(scene.record.runs_as.plan)
    assert running.step_s > 1.4 * surface.step_s[place], "what was measured is believed of its neighbours, too"
    assert forecast.finishes_s["a"] == pytest.approx(scene.now_s + left * running.step_s, rel=0.25)


def test_a_platform_without_searches_gives_its_snapshot_back_as_it_is():
    snapshot = Scene(Goal(deadline_s=40_000.0)).controller.snapshot(3.0)
    plain = replace(snapshot, jobs=tuple(replace(v, job=replace(v.job, search=None)) for v in snapshot.jobs))
    assert settled(plain) is plain


def test_replaying_the_events_leads_to_the_same_record():
    def play():
        scene = Scene(Goal(deadline_s=6000.0, is_soft=True))
        scene.begin()
        scene.measured(90.0)
        scene.confirm()
        scene.measured(20.0)
        return scene.record

    assert play() == play()
