"""The kit for policies: random snapshots, and what every plan must be. `python -m springtide.testing.policy NAME`."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from springtide.control.controller import check_plan
from springtide.core.decision import Allocation, JobView, Plan, Policy, PoolAllocation, ServiceView, Snapshot
from springtide.core.resources import DeviceId, Topology, make_node
from springtide.core.workload import (
    Entrypoint,
    Goal,
    InferenceService,
    JobState,
    TrainingJob,
    WorkloadId,
)
from springtide.policies.registry import make_policy

_SOURCE = Entrypoint(source_path="source/main.py", object_name="main")


def draw_snapshot(rng: np.random.Generator) -> Snapshot:
    """Draw a platform in some state: nodes, jobs and services, some of which hold devices."""
    nodes = tuple(make_node(f"node-{index}", int(rng.integers(1, 9))) for index in range(int(rng.integers(1, 5))))
    cluster = Topology(nodes=nodes)
    now_s = float(rng.uniform(0.0, 10_000.0))
    free = list(cluster.device_ids())
    rng.shuffle(free)
    allocations: dict[WorkloadId, Allocation] = {}
    jobs = tuple(draw_job(rng, index, now_s, free, allocations) for index in range(int(rng.integers(0, 13))))
    services = tuple(draw_service(rng, index, free, allocations) for index in range(int(rng.integers(0, 4))))
    return Snapshot(now_s=now_s, cluster=cluster, jobs=jobs, services=services, allocations=allocations)


def draw_job(
    rng: np.random.Generator,
    index: int,
    now_s: float,
    free: list[DeviceId],
    allocations: dict[WorkloadId, Allocation],
) -> JobView:
    """Draw a job in some state, which may hold some of the `free` devices."""
    most = int(rng.integers(1, 9))
    least = int(rng.integers(1, most + 1))
    total_steps = int(rng.integers(10, 10_000))
    submitted_at_s = float(rng.uniform(0.0, now_s))
    has_deadline = rng.random() < 0.5
    job = TrainingJob(
        job_id=WorkloadId(f"job-{index}"),
        name=f"job-{index}",
        entrypoint=_SOURCE,
        global_batch_size=int(2 ** rng.integers(3, 9)),
        min_workers=least,
        max_workers=most,
        num_virtual_shards=8,
        elastic=bool(rng.random() < 0.8),
        goal=Goal(deadline_s=submitted_at_s + float(rng.uniform(1.0, 20_000.0)) if has_deadline else None),
    )
    count = min(int(rng.integers(least, most + 1)), len(free)) if rng.random() < 0.5 else 0
    if count >= least:
        allocations[job.job_id] = PoolAllocation(device_ids=tuple(free.pop() for _ in range(count)))
    rate = float(np.exp(rng.uniform(0.0, 8.0)))
    measured = {n: rate * n**0.8 for n in range(1, most + 1) if rng.random() < 0.3}
    return JobView(
        job=job,
        state=JobState.RUNNING if job.job_id in allocations else JobState.PENDING,
        submitted_at_s=submitted_at_s,
        min_workers=least,
        max_workers=most,
        step=int(rng.integers(0, total_steps)),
        total_steps=total_steps if rng.random() < 0.7 else None,
        throughput_samples_per_s=measured,
        progress_at_s=float(rng.uniform(submitted_at_s, max(submitted_at_s, now_s))),
        service_offset_s=float(rng.uniform(0.0, 5_000.0)),
        runnable_at_s=now_s + float(rng.uniform(0.0, 60.0)) if rng.random() < 0.1 else 0.0,
    )


def draw_service(
    rng: np.random.Generator, index: int, free: list[DeviceId], allocations: dict[WorkloadId, Allocation]
) -> ServiceView:
    """Draw a service in some state, which may hold some of the `free` devices."""
    most = int(rng.integers(1, 5))
    service = InferenceService(
        service_id=WorkloadId(f"service-{index}"),
        name=f"service-{index}",
        entrypoint=_SOURCE,
        slo_s=0.2 if rng.random() < 0.5 else None,
        min_replicas=int(rng.integers(0, most + 1)),
        max_replicas=most,
    )
    count = min(int(rng.integers(0, most + 1)), len(free))
    if count:
        allocations[service.service_id] = PoolAllocation(device_ids=tuple(free.pop() for _ in range(count)))
    num_ready = int(rng.integers(0, count + 1))
    return ServiceView(
        service=service,
        min_replicas=service.min_replicas,
        max_replicas=most,
        num_ready=num_ready,
        num_starting=count - num_ready,
        arrivals_per_s=float(rng.uniform(0.0, 100.0)),
        in_flight=int(rng.integers(0, 40)),
        queued=int(rng.integers(0, 40)),
        idle_s=float(rng.uniform(0.0, 100.0)),
    )


def check_policy(make: Callable[[], Policy], *, num_snapshots: int = 200, seed: int = 0) -> None:
    """Check a policy against random snapshots. Raises PolicyError or AssertionError with the number of the snapshot.

    Every plan must be possible; deciding must leave the snapshot alone and give the same plan again, also from a
    policy that was built anew; the memory must survive the journal; a revisit must not lie in the past.
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    policy = make()
    for number in range(num_snapshots):
        snapshot = draw_snapshot(rng)
        before = encode_plan(snapshot)
        plan = policy.decide(snapshot)
        check_plan(snapshot, plan)
        assert encode_plan(snapshot) == before, f"snapshot {number} was changed by deciding"
        assert encode_plan(policy.decide(snapshot)) == encode_plan(plan), f"snapshot {number}: the second plan differs"
        assert encode_plan(make().decide(snapshot)) == encode_plan(plan), (
            f"snapshot {number}: a new policy decides otherwise"
        )
        check_plan_details(number, snapshot, plan)


def check_plan_details(number: int, snapshot: Snapshot, plan: Plan) -> None:
    """Check that a plan can be journaled, looks ahead and gives nobody too little. Raises AssertionError."""
    memory = msgspec.json.decode(msgspec.json.encode(plan.memory))
    assert memory == plan.memory, f"snapshot {number}: the memory does not survive the journal"
    assert plan.revisit_at_s is None or plan.revisit_at_s > snapshot.now_s, f"snapshot {number}: revisit in the past"
    least = {view.job.job_id: view.min_workers for view in snapshot.jobs}
    for workload_id, allocation in plan.allocations.items():
        count = allocation.num_devices
        held = snapshot.allocations.get(workload_id)
        is_kept = held is not None and count <= held.num_devices
        assert count == 0 or count >= least.get(workload_id, 0) or is_kept, (
            f"snapshot {number}: {workload_id} gets {count}, below its minimum"
        )


def digest_plans(make: Callable[[], Policy], *, num_snapshots: int = 50, seed: int = 0) -> str:
    """A digest of the plans for a fixed series of snapshots; the same in every process, whatever its hash seed."""
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    policy = make()
    digest = hashlib.sha256()
    for _ in range(num_snapshots):
        digest.update(encode_plan(policy.decide(draw_snapshot(rng))))
    return digest.hexdigest()


def encode_plan(value: object) -> bytes:
    """A plan or a snapshot as bytes, for comparing."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} is not a plain value")


if __name__ == "__main__":
    sys.stdout.write(digest_plans(lambda: make_policy(sys.argv[1])) + "\n")
