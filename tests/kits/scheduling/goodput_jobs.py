"""Jobs with measured speeds and noise, in snapshots for the goodput policy."""

from __future__ import annotations

import msgspec

from kits.job_parts import with_fields
from springtide.core.decision import JobView, Overheads, PoolAllocation, Snapshot
from springtide.core.job_parts import GradientNoise, JobBounds, LearntSpeed, StepTime
from springtide.core.resources import Topology, make_node
from springtide.core.workload import AdaptiveBatch, Entrypoint, JobState, TrainingJob
from springtide.perf.throughput import ThroughputModel

TRUTH = ThroughputModel(alpha_c=0.02, beta_c=0.001, alpha_n=0.03, beta_n=0.001, alpha_r=0.01, beta_r=0.001, gamma=1.5)
NOISE = GradientNoise(grad_sqr=1.0, grad_var=20.0)
BATCH = AdaptiveBatch(min_size=32, max_size=2048, min_local_size=8, max_local_size=256)


def step_of(*placement, local=32):
    step_s, sync_s = TRUTH.step_s(len(placement), sum(placement), local)
    return StepTime(placement=placement, local_batch_size=local, step_s=float(step_s), sync_s=float(sync_s))


KNOWN = tuple(step_of(*placement, local=local) for placement in ((1,), (2,), (4,), (4, 4)) for local in (8, 32, 128))


def view(name, *, family="net", progress=0.0, total=10_000.0, steps=(), noise=None, batch=BATCH, high=16, **fields):
    job = TrainingJob(
        job_id=name,
        name=name,
        entrypoint=Entrypoint(source_path="a.py"),
        global_batch_size=32,
        max_workers=high,
        num_virtual_shards=16,
        batch=batch,
        length_unit="progress",
        family=family,
    )
    plain = JobView(
        job=job,
        state=JobState.PENDING,
        submitted_at_s=0.0,
        bounds=JobBounds(min_workers=1, max_workers=high),
        equivalent_steps=progress,
        total_equivalent_steps=total,
        learnt=LearntSpeed(step_times=tuple(steps), noise=noise),
    )
    return with_fields(plain, **fields)


def snapshot(*views, held=None, memory=None, now_s=0.0, nodes=4, overheads=30.0):
    held = held or {}
    return Snapshot(
        now_s=now_s,
        cluster=Topology(nodes=tuple(make_node(f"n{index}", 4) for index in range(nodes))),
        jobs=tuple(msgspec.structs.replace(each, num_replicas=len(held.get(each.job.job_id, ()))) for each in views),
        allocations={name: PoolAllocation(device_ids=devices, global_batch_size=32) for name, devices in held.items()},
        memory=memory,
        overheads=Overheads(change_s=overheads),
    )


def devices(*names):
    return tuple(names)
