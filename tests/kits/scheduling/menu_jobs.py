"""Jobs on functions with a menu of options, and the snapshot that a policy decides on."""

from __future__ import annotations

from kits.job_parts import with_fields
from springtide.control.controller import check_plan
from springtide.core.decision import FunctionAllocation, JobView, Snapshot
from springtide.core.functions import (
    FunctionMenu,
    FunctionOption,
    FunctionPlan,
    FunctionPrices,
    FunctionService,
    FunctionStage,
    MemorySize,
)
from springtide.core.job_parts import JobBounds
from springtide.core.resources import Device, DeviceId, Node, NodeId, Topology, make_node
from springtide.core.workload import Entrypoint, Goal, JobState, TrainingJob, WorkloadId
from springtide.scheduling.functions.policy import WithFunctions
from springtide.scheduling.registry import make_policy

SERVICE = FunctionService(
    name="lambda",
    sizes=(
        MemorySize(memory_mb=1024, vcpus=0.6, bytes_per_s=70e6),
        MemorySize(memory_mb=2048, vcpus=1.1, bytes_per_s=70e6),
    ),
    prices=FunctionPrices(usd_per_gb_s=1.7e-5),
    concurrency=10,
)


def option(num_stages: int, num_replicas: int, step_s: float, step_usd: float, memory_mb: int = 1024) -> FunctionOption:
    stages = tuple(FunctionStage(first_layer=n, end_layer=n + 1, memory_mb=memory_mb) for n in range(num_stages))
    return FunctionOption(
        plan=FunctionPlan(stages=stages, num_replicas=num_replicas), step_s=step_s, step_usd=step_usd, start_s=10.0
    )


CHEAP, MIDDLE, FAST = option(1, 1, 8.0, 0.01), option(2, 1, 4.0, 0.013), option(2, 4, 2.0, 0.03)
MENU = FunctionMenu(service="lambda", options=(CHEAP, MIDDLE, FAST), recommended=1, error_fraction=0.125)


def view(name: str, goal: Goal | None = None, **changes: object) -> JobView:
    job = TrainingJob(
        job_id=WorkloadId(name),
        name=name,
        entrypoint=Entrypoint(source_path="job.py"),
        goal=goal or Goal(),
        menu=MENU,
        global_batch_size=32,
    )
    made = JobView(
        job=job,
        state=JobState.PENDING,
        submitted_at_s=0.0,
        total_steps=100,
        global_batch_size=32,
        bounds=JobBounds(min_workers=1, max_workers=1),
    )
    return with_fields(made, **changes)


def cluster(num_places: int = 4) -> Topology:
    places = tuple(
        Device(device_id=DeviceId(f"lambda/{n}"), node_id=NodeId("lambda"), index=n, kind="function")
        for n in range(num_places)
    )
    return Topology(nodes=(make_node("n", 2), Node(node_id=NodeId("lambda"), devices=places, functions=SERVICE)))


def decide(*views: JobView, now_s: float = 0.0, held: dict[str, FunctionAllocation] | None = None, places: int = 4):
    snapshot = Snapshot(now_s=now_s, cluster=cluster(places), jobs=views, allocations=held or {})
    plan = WithFunctions(make_policy("fifo")).decide(snapshot)
    check_plan(snapshot, plan)
    return plan
