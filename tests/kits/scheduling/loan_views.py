"""Jobs and services in pools, as a policy sees them."""

from __future__ import annotations

from springtide.core.decision import JobView, ServiceView
from springtide.core.job_parts import JobBounds
from springtide.core.workload import Entrypoint, InferenceService, JobState, TrainingJob

SOURCE = Entrypoint(source_path="a.py")


def service(name, *, low=0, high=4, ready=None, starting=0, load=0, idle_s=0.0, held=()):
    view = ServiceView(
        service=InferenceService(service_id=name, name=name, entrypoint=SOURCE, min_replicas=low, max_replicas=high),
        min_replicas=low,
        max_replicas=high,
        num_ready=len(held) - starting if ready is None else ready,
        num_starting=starting,
        in_flight=load,
        idle_s=idle_s,
    )
    return view, tuple(held)


def job(name, *held, elastic=True):
    plain = TrainingJob(job_id=name, name=name, entrypoint=SOURCE, max_workers=8, num_virtual_shards=8, elastic=elastic)
    view = JobView(
        job=plain,
        state=JobState.RUNNING,
        submitted_at_s=0.0,
        num_replicas=len(held),
        bounds=JobBounds(min_workers=1, max_workers=8),
    )
    return view, tuple(held)
