"""The kit for policies: random snapshots, and checks of every plan.

    def test_my_policy():
        check_policy(lambda: MyPolicy())

`python -m springtide.testing.policy NAME...` prints a digest of each registered policy's plans, which must be equal in
every process.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from springtide.control.controller import check_plan
from springtide.core.decision import Allocation, JobView, Plan, Policy, PoolAllocation, ServiceView, Snapshot
from springtide.core.job_parts import GradientNoise, JobBounds, JobProgress, JobRestarts, LearntSpeed, StepTime
from springtide.core.resources import DeviceId, Topology, make_node
from springtide.core.shares import Share, has_room, load_of, make_share
from springtide.core.workload import (
    AdaptiveBatch,
    Entrypoint,
    Goal,
    InferenceService,
    JobState,
    TrainingJob,
    WorkloadId,
)
from springtide.scheduling.registry import make_policy

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
    # Do not reorder these draws: a seed must always give the same snapshots.
    step, is_known = int(rng.integers(0, total_steps)), rng.random() < 0.7
    progress_at_s = float(rng.uniform(submitted_at_s, max(submitted_at_s, now_s)))
    service_offset_s = float(rng.uniform(0.0, 5_000.0))
    view = JobView(
        job=job,
        state=JobState.RUNNING if job.job_id in allocations else JobState.PENDING,
        submitted_at_s=submitted_at_s,
        total_steps=total_steps if is_known else None,
        service_offset_s=service_offset_s,
        bounds=JobBounds(min_workers=least, max_workers=most),
        progress=JobProgress(step=step, progress_at_s=progress_at_s),
        learnt=LearntSpeed(throughput_samples_per_s=measured),
        restarts=JobRestarts(starts_at_s=now_s + float(rng.uniform(0.0, 60.0)) if rng.random() < 0.1 else 0.0),
    )
    # From a stream of its own, for the same reason.
    return _with_adaptive_batch(rng.spawn(1)[0], view)


def _with_adaptive_batch(rng: np.random.Generator, view: JobView) -> JobView:
    """The job itself, or in one of four cases as one that may change its batch and has measured steps and noise."""
    if rng.random() < 0.75:
        return view
    initial = view.job.global_batch_size
    bounds = AdaptiveBatch(min_size=initial, max_size=16 * initial, min_local_size=1)
    job = replace(view.job, batch=bounds, length_unit="progress", family=f"family-{rng.integers(0, 2)}")
    sizes = [n for n in (1, 2, 4) if rng.random() < 0.6]
    steps = [
        StepTime(placement=(n,), local_batch_size=local, step_s=0.01 * (1 + local / 8) + 0.002 * n, sync_s=0.002 * n)
        for n in sizes
        for local in (initial, 4 * initial)
    ]
    noise = GradientNoise(grad_sqr=1.0, grad_var=float(rng.uniform(0.0, 40.0))) if sizes else None
    return replace(
        view,
        job=job,
        global_batch_size=initial,
        equivalent_steps=float(view.progress.step),
        total_equivalent_steps=None if view.total_steps is None else float(view.total_steps),
        learnt=replace(view.learnt, step_times=tuple(steps), noise=noise),
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


# The share that a policy gives for a requested one.
GivenShare = Callable[[Share], Share]


def _as_requested(share: Share) -> Share:
    return share


def draw_shared_snapshot(rng: np.random.Generator, given_share: GivenShare = _as_requested) -> Snapshot:
    """Draw a platform with whole and shared devices, none of them overcommitted.

    `given_share` maps a requested share to the one that the policy under test gives.
    """
    nodes = tuple(
        make_node(f"node-{index}", int(rng.integers(1, 6)), memory_mb=1000) for index in range(int(rng.integers(1, 4)))
    )
    cluster = Topology(nodes=nodes)
    now_s = float(rng.uniform(0.0, 10_000.0))
    held: dict[DeviceId, list[Share | None]] = {device_id: [] for device_id in cluster.device_ids()}
    allocations: dict[WorkloadId, Allocation] = {}

    def place(workload_id: WorkloadId, asked: Share | None, least: int, most: int) -> int:
        share = None if asked is None else given_share(asked)
        room = [device for device, shares in held.items() if has_room(load_of(shares), share, 1000)]
        rng.shuffle(room)
        count = min(int(rng.integers(least, most + 1)), len(room)) if rng.random() < 0.6 else 0
        if count < max(1, least):
            return 0
        for device in room[:count]:
            held[device].append(share)
        allocations[workload_id] = PoolAllocation(device_ids=tuple(room[:count]), share=share)
        return count

    jobs = []
    for index in range(int(rng.integers(0, 10))):
        view, share = draw_job(rng, index, now_s, [], {}), _draw_share(rng)
        job = msgspec.structs.replace(view.job, share=share)
        count = place(job.job_id, share, view.bounds.min_workers, view.bounds.max_workers)
        state = JobState.RUNNING if count else JobState.PENDING
        jobs.append(msgspec.structs.replace(view, job=job, state=state, num_replicas=count))
    services = []
    for index in range(int(rng.integers(0, 5))):
        served, share = draw_service(rng, index, [], {}), _draw_share(rng)
        service = msgspec.structs.replace(served.service, share=share)
        count = place(service.service_id, share, 0, served.max_replicas)
        wanted = int(rng.integers(0, served.max_replicas + 2)) if rng.random() < 0.4 else None
        services.append(
            msgspec.structs.replace(served, service=service, num_ready=count, num_starting=0, wanted_replicas=wanted)
        )
    return Snapshot(now_s=now_s, cluster=cluster, jobs=tuple(jobs), services=tuple(services), allocations=allocations)


def _draw_share(rng: np.random.Generator) -> Share | None:
    request, stretch = round(float(rng.uniform(0.05, 0.8)), 2), float(rng.uniform(1.0, 2.5))
    memory_mb = int(rng.choice([0, 200, 500]))
    return make_share(request, min(1.0, round(request * stretch, 2)), memory_mb) if rng.random() < 0.7 else None


def check_shared_policy(
    make: Callable[[], Policy], *, num_snapshots: int = 200, seed: int = 0, given_share: GivenShare = _as_requested
) -> None:
    """Check a policy against random snapshots with shared devices, as `check_policy` does with whole ones.

    Also checks that a workload that requests a share gets `given_share` of it (a job perhaps with a lower limit) and
    others get whole devices; that jobs keep the shares they hold unless they are suspended for a service; and that no
    job with a share waits while enough devices for it are free. Raises PolicyError or AssertionError with the number of
    the snapshot.
    """
    check_more = functools.partial(_check_parts, given_share)
    check_on_snapshots(make, lambda rng: draw_shared_snapshot(rng, given_share), num_snapshots, seed, check_more)


def _check_parts(given_share: GivenShare, number: int, snapshot: Snapshot, plan: Plan) -> None:
    check_plan_details(number, snapshot, plan)
    jobs: dict[WorkloadId, Share | None] = {view.job.job_id: view.job.share for view in snapshot.jobs}
    asked = jobs | {view.service.service_id: view.service.share for view in snapshot.services}
    given: dict[DeviceId, list[Share | None]] = {device_id: [] for device_id in snapshot.cluster.device_ids()}
    for workload_id, allocation in plan.allocations.items():
        share, wanted = allocation.share, asked[workload_id]
        due = None if wanted is None else given_share(wanted)
        is_due = share == due
        if share is not None and due is not None and workload_id in jobs:
            # A job's limit above its request may be reduced for others.
            is_due = share.request <= share.limit <= due.limit and replace(share, limit=due.limit) == due
        assert is_due, f"snapshot {number}: {workload_id} gets {share} for {wanted}"
        for device_id in allocation.device_ids:
            given[device_id].append(share)
    for view in snapshot.jobs:
        job_id, held = view.job.job_id, snapshot.allocations.get(view.job.job_id)
        if held is not None and held.share is not None:
            kept = set(plan.allocations.get(job_id, PoolAllocation(device_ids=())).device_ids)
            # It gets more workers, or gives some or all to a stronger claim, with a reason; none that stays moves.
            has_less = kept < set(held.device_ids) and bool(plan.reasons.get(job_id))
            assert kept >= set(held.device_ids) or has_less, (
                f"snapshot {number}: {job_id} leaves the parts that it holds"
            )
            least = min(view.bounds.min_workers, held.num_devices)
            assert not kept or len(kept) >= least, f"snapshot {number}: {job_id} has fewer workers than it needs"
        is_left_out = job_id not in plan.allocations and job_id not in plan.rejected
        if view.job.share is not None and is_left_out and not any(other.job.share is None for other in snapshot.jobs):
            # This holds only if no job waits for whole devices, for which empty ones may be reserved.
            held_now = {device for allocation in snapshot.allocations.values() for device in allocation.device_ids}
            free = [device for device, shares in given.items() if not shares and device not in held_now]
            assert len(free) < view.bounds.min_workers, f"snapshot {number}: {job_id} waits though {free} are free"


def check_policy(make: Callable[[], Policy], *, num_snapshots: int = 200, seed: int = 0) -> None:
    """Check a policy against random snapshots. Raises PolicyError or AssertionError with the number of the snapshot.

    Every plan must pass `check_plan`. Deciding must not change the snapshot, and must give the same plan again, also
    from a new instance that `make` returns. The plan's memory must survive JSON, and `revisit_at_s` must be in the
    future.
    """
    check_on_snapshots(make, draw_snapshot, num_snapshots, seed, check_plan_details)


def check_on_snapshots(
    make: Callable[[], Policy],
    draw: Callable[[np.random.Generator], Snapshot],
    num_snapshots: int,
    seed: int,
    check_more: Callable[[int, Snapshot, Plan], None],
) -> None:
    """Check plans for drawn snapshots as `check_policy` says, each with `check_more`."""
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    policy = make()
    for number in range(num_snapshots):
        snapshot = draw(rng)
        before = encode_plan(snapshot)
        plan = policy.decide(snapshot)
        check_plan(snapshot, plan)
        assert encode_plan(snapshot) == before, f"snapshot {number} was changed by deciding"
        assert encode_plan(policy.decide(snapshot)) == encode_plan(plan), f"snapshot {number}: the second plan differs"
        assert encode_plan(make().decide(snapshot)) == encode_plan(plan), (
            f"snapshot {number}: a new policy decides otherwise"
        )
        check_more(number, snapshot, plan)


def check_plan_details(number: int, snapshot: Snapshot, plan: Plan) -> None:
    """Check a plan's memory, `revisit_at_s` and the minimum of every job's devices. Raises AssertionError."""
    memory = msgspec.json.decode(msgspec.json.encode(plan.memory))
    assert memory == plan.memory, f"snapshot {number}: the memory does not survive the journal"
    assert plan.revisit_at_s is None or plan.revisit_at_s > snapshot.now_s, f"snapshot {number}: revisit in the past"
    least = {view.job.job_id: view.bounds.min_workers for view in snapshot.jobs}
    for workload_id, allocation in plan.allocations.items():
        count = allocation.num_devices
        held = snapshot.allocations.get(workload_id)
        is_kept = held is not None and count <= held.num_devices
        assert count == 0 or count >= least.get(workload_id, 0) or is_kept, (
            f"snapshot {number}: {workload_id} gets {count}, below its minimum"
        )


def digest_plans(make: Callable[[], Policy], *, num_snapshots: int = 50, seed: int = 0) -> str:
    """A digest of the plans for a fixed series of snapshots; it must be equal in every process, for any hash seed."""
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    policy = make()
    digest = hashlib.sha256()
    for _ in range(num_snapshots):
        digest.update(encode_plan(policy.decide(draw_snapshot(rng))))
    return digest.hexdigest()


def encode_plan(value: object) -> bytes:
    """A plan or snapshot as bytes, for comparisons."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} is not a plain value")


if __name__ == "__main__":
    for policy_name in sys.argv[1:]:
        sys.stdout.write(digest_plans(lambda name=policy_name: make_policy(name)) + "\n")  # type: ignore[misc]
