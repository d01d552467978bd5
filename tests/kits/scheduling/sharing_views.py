"""Views of jobs and services on parts of devices, and decisions about them that are checked to be possible."""

from __future__ import annotations

from springtide.control.controller import check_plan
from springtide.core.decision import JobView, PoolAllocation, ServiceView, Snapshot
from springtide.core.job_parts import JobBounds
from springtide.core.resources import Topology, make_node
from springtide.core.shares import Share
from springtide.core.workload import Entrypoint, Goal, InferenceService, JobState, TrainingJob

SOURCE = Entrypoint(source_path="job.py", object_name="fit")


def service(name, share=None, *, wanted=1, ready=0, **options):
    return ServiceView(
        service=InferenceService(
            service_id=name,
            name=name,
            entrypoint=SOURCE,
            max_replicas=4,
            share=share,
            devices_each=options.get("devices_each", 1),
        ),
        min_replicas=options.get("min_replicas", 0),
        max_replicas=4,
        num_ready=ready,
        wanted_replicas=wanted,
    )


def job(name, share=None, *, workers=(1, 1), submitted_at_s=0.0, **options):
    goal = options.pop("goal", Goal())
    described = TrainingJob(
        job_id=name,
        name=name,
        entrypoint=SOURCE,
        min_workers=workers[0],
        max_workers=workers[1],
        share=share,
        goal=goal,
        **options,
    )
    return JobView(
        job=described,
        state=JobState.PENDING,
        submitted_at_s=submitted_at_s,
        total_steps=described.total_steps,
        total_equivalent_steps=described.total_steps,
        global_batch_size=described.global_batch_size,
        bounds=JobBounds(min_workers=workers[0], max_workers=workers[1]),
    )


def decide(policy, jobs=(), services=(), held=None, nodes=None, memory=None, now_s=10.0):
    allocations = {
        name: PoolAllocation(device_ids=tuple(devices), share=share) for name, (devices, share) in (held or {}).items()
    }
    snapshot = Snapshot(
        now_s=now_s,
        cluster=Topology(nodes=tuple(nodes or (make_node("n", 4),))),
        jobs=tuple(jobs),
        services=tuple(services),
        allocations=allocations,
        memory=memory,
    )
    plan = policy.decide(snapshot)
    check_plan(snapshot, plan)
    return plan


def places(plan):
    return {name: list(given.device_ids) for name, given in plan.allocations.items()}


SMALL = Share(request=0.3, limit=0.5)
HALF = Share(request=0.5, limit=0.7)
