"""What becomes of a job on functions in the control plane: one coordinator, plans that change, bills, budgets."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from springtide.control.controller import Controller, check_plan, keep_plan
from springtide.control.quotes.forecast import roll_forward
from springtide.core import events
from springtide.core.decision import FunctionAllocation, Plan, PoolAllocation, Snapshot
from springtide.core.errors import PolicyError
from springtide.core.functions import (
    Bill,
    FunctionMenu,
    FunctionOption,
    FunctionPlan,
    FunctionPrices,
    FunctionService,
    FunctionStage,
    MemorySize,
    Usage,
)
from springtide.core.resources import Device, DeviceId, Node, NodeId, make_node
from springtide.core.workload import Entrypoint, Goal, JobState, TrainingJob, WorkloadId
from springtide.scheduling.functions.policy import WithFunctions
from springtide.scheduling.registry import make_policy

PLACE = DeviceId("f/0")
NODE = Node(
    node_id=NodeId("f"),
    devices=(Device(device_id=PLACE, node_id=NodeId("f"), index=0, kind="function"),),
    functions=FunctionService(
        name="f",
        sizes=(MemorySize(memory_mb=512, vcpus=0.3, bytes_per_s=1e7),),
        prices=FunctionPrices(usd_per_gb_s=1e-5),
    ),
)


def plan_of(num_stages: int) -> FunctionPlan:
    return FunctionPlan(
        stages=tuple(FunctionStage(first_layer=n, end_layer=n + 1, memory_mb=512) for n in range(num_stages))
    )


def job_on_functions(name: str = "a", budget_usd: float | None = None) -> TrainingJob:
    options = tuple(FunctionOption(plan=plan_of(n), step_s=1.0 / n, step_usd=0.01 * n) for n in (1, 2))
    return TrainingJob(
        job_id=WorkloadId(name),
        name=name,
        entrypoint=Entrypoint(source_path="job.py"),
        goal=Goal(budget_usd=budget_usd),
        menu=FunctionMenu(service="f", options=options),
    )


class AsTold:
    """A policy that gives job `a` the place and so many stages; 0: nothing."""

    def __init__(self) -> None:
        self.num_stages = 1

    def decide(self, snapshot: Snapshot) -> Plan:
        given = FunctionAllocation(device_ids=(PLACE,), plan=plan_of(max(1, self.num_stages)))
        present = {view.job.job_id for view in snapshot.jobs}
        return Plan(allocations={who: given for who in present if self.num_stages})


class Scene:
    def __init__(self, budget_usd: float | None = None) -> None:
        self.policy = AsTold()
        self.controller = Controller(self.policy)
        self.now_s = 0.0
        self.steps = []
        self.tell(events.NodeJoined(node=make_node("n", 1)), events.NodeJoined(node=NODE))
        self.started = self.tell(events.JobSubmitted(job=job_on_functions(budget_usd=budget_usd)))

    def tell(self, *happened):
        self.now_s += 1.0
        step = self.controller.step(self.now_s, happened)
        self.steps.append(step)
        return list(step.actions)

    @property
    def record(self):
        return self.controller.state.jobs[WorkloadId("a")]

    def ready(self, replica: str = "a.0"):
        return self.tell(events.ReplicaReady(workload_id="a", replica_id=replica))

    def resized(self, direction: str = "start"):
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


def test_the_coordinator_starts_and_is_told_what_to_run_as():
    scene = Scene()
    (start,) = scene.started
    assert (start.replica_id, start.device_id) == ("a.0", PLACE)
    (resize,) = scene.ready()
    assert resize.functions == plan_of(1)
    assert resize.replica_ids == ("a.0",)
    assert scene.resized() == []
    assert scene.record.state is JobState.RUNNING
    held = scene.controller.snapshot(9.0).allocations["a"]
    assert isinstance(held, FunctionAllocation)
    assert held.plan == plan_of(1)


def test_another_plan_for_a_running_job_is_one_change_of_its_group():
    scene = Scene()
    scene.ready()
    scene.resized()
    scene.policy.num_stages = 2
    (resize,) = scene.tell()
    assert resize.functions == plan_of(2)
    assert resize.generation == 2
    assert resize.replica_ids == ("a.0",)
    assert scene.tell() == [], "the change is under way"
    assert scene.resized("replace") == []
    assert scene.record.runs_as.plan == plan_of(2)
    assert scene.record.changes.num_resizes == 1


def test_what_is_repeated_after_a_crash_names_the_plan():
    scene = Scene()
    scene.ready()
    (again,) = [action for action in scene.controller.standing().actions if hasattr(action, "replica_ids")]
    assert again.functions == plan_of(1)


def test_a_lost_coordinator_starts_again_from_the_checkpoint_and_is_told_the_plan_anew():
    scene = Scene()
    scene.ready()
    scene.resized()
    scene.tell(events.CheckpointCommitted(job_id="a", generation=1, step=7, path="memory://x/state"))
    scene.tell(events.ReplicaLost(workload_id="a", replica_id="a.0", reason="the platform's process was killed"))
    assert scene.record.runs_as.plan is None or not scene.record.replicas
    scene.now_s = scene.record.restarts.starts_at_s
    (start,) = scene.tell()
    assert start.restore.step == 7
    (resize,) = scene.ready("a.1")
    assert resize.functions == plan_of(1)


def test_a_spent_budget_pauses_the_job_with_its_reason_and_a_new_one_lets_it_go_on():
    scene = Scene(budget_usd=0.5)
    scene.ready()
    scene.resized()
    reason = "its budget of $0.50 is nearly spent ($0.49); a checkpoint of step 9 is kept"
    (preempt,) = scene.tell(events.PauseRequested(job_id="a", reason=reason))
    assert preempt.reason == reason
    scene.tell(events.ReplicaStopped(workload_id="a", replica_id="a.0"))
    assert scene.record.state is JobState.PAUSED
    assert scene.record.reason == reason
    (start,) = scene.tell(events.ResumeRequested(job_id="a", budget_usd=2.0))
    assert start.workload.goal.budget_usd == 2.0
    assert scene.record.runs_as.plan is None


def test_the_bill_only_grows_and_policies_see_what_is_spent():
    scene = Scene()
    scene.tell(events.UsageReported(job_id="a", usage=Usage(function_gb_s=10), bill=Bill(function_usd=0.2)))
    scene.tell(events.UsageReported(job_id="a", usage=Usage(function_gb_s=5), bill=Bill(function_usd=0.1)))
    assert scene.record.spent.bill.total_usd == 0.2
    assert scene.controller.snapshot(9.0).jobs[0].spent_usd == 0.2


def test_a_replay_of_the_journal_ends_in_the_same_state():
    scene = Scene(budget_usd=0.5)
    scene.ready()
    scene.resized()
    scene.policy.num_stages = 2
    scene.tell()
    scene.resized("replace")
    scene.tell(events.UsageReported(job_id="a", usage=Usage(num_puts=3), bill=Bill(request_usd=0.01)))
    fresh = Controller(AsTold())
    for step in scene.steps:
        fresh.restore(step)
    assert fresh.state.jobs[WorkloadId("a")] == scene.record


def test_a_plan_that_mixes_up_places_is_refused():
    job = job_on_functions()
    scene = Scene()
    snapshot = scene.controller.snapshot(1.0)
    machine = FunctionAllocation(device_ids=(DeviceId("n/0"),), plan=plan_of(1))
    with pytest.raises(PolicyError, match="runs on functions"):
        check_plan(snapshot, Plan(allocations={job.job_id: machine}))
    with pytest.raises(PolicyError, match="no functions"):
        check_plan(snapshot, Plan(allocations={job.job_id: PoolAllocation(device_ids=(PLACE,))}))
    plain = replace(snapshot.jobs[0], job=replace(job, menu=None))
    with pytest.raises(PolicyError, match="runs on machines"):
        check_plan(
            replace(snapshot, jobs=(plain,)), Plan(allocations={job.job_id: PoolAllocation(device_ids=(PLACE,))})
        )


def test_the_plan_of_last_resort_keeps_functions_running():
    scene = Scene()
    scene.ready()
    scene.resized()
    kept = keep_plan(scene.controller.snapshot(9.0)).allocations["a"]
    assert isinstance(kept, FunctionAllocation)
    assert kept.plan == plan_of(1)


def test_a_forecast_plays_jobs_on_functions_as_their_plans_say():
    scene = Scene()
    scene.ready()
    scene.resized()
    snapshot = scene.controller.snapshot(10.0)
    (running,) = snapshot.jobs
    running = with_fields(running, step=20, total_steps=100, progress_at_s=10.0)
    waiting = with_fields(
        running, job=job_on_functions("b"), state=JobState.PENDING, step=0, num_replicas=0, throughput_samples_per_s={}
    )
    snapshot = replace(snapshot, jobs=(running, waiting))
    forecast = roll_forward(snapshot, WithFunctions(make_policy("fifo")))
    # One place: the first runs its 80 steps of 1 s, then the second 100 of its recommended plan.
    assert forecast.finishes_s["a"] == pytest.approx(90.0)
    assert forecast.finishes_s["b"] == pytest.approx(190.0)
