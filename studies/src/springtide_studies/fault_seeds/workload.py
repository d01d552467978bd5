"""Seeded jobs and services, the load on them, and owners who repeat requests until they are answered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from springtide.core.events import (
    CancelRequested,
    Event,
    JobSubmitted,
    LoadObserved,
    PauseRequested,
    ResumeRequested,
    ScaleRequested,
    ServiceDeployed,
)
from springtide.core.resources import Node, Pool, make_node
from springtide.core.shares import Share, make_share
from springtide.core.workload import AdaptiveBatch, Entrypoint, Goal, InferenceService, TrainingJob, WorkloadId
from springtide_studies.fault_seeds.executor import SimExecutor
from springtide_studies.fault_seeds.machine import Machine
from springtide_studies.fault_seeds.models import describe

ASK_AGAIN_S = 1.0
# So many requests a replica with a device of its own answers at the same time.
_AT_ONCE = 4.0
_ROUNDING = 1e-9
_SOURCE = Entrypoint(source_path="source/train.py", object_name="train")


class OwnerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Something an owner asks for at `at_s`."""

    at_s: float
    event: Event


class LoadProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The arrivals at one service: a base rate with a wave on it, silent outside [`start_s`, `end_s`)."""

    service_id: WorkloadId
    start_s: float
    end_s: float
    base_per_s: float
    wave_per_s: float
    period_s: float
    service_time_s: float

    def rate_per_s(self, at_s: float) -> float:
        """Requests a second at one instant."""
        if not self.start_s <= at_s < self.end_s:
            return 0.0
        return max(0.0, self.base_per_s + self.wave_per_s * math.sin(2 * math.pi * at_s / self.period_s))


def make_submission(job: TrainingJob) -> JobSubmitted:
    """The event by which a job arrives."""
    return JobSubmitted(job=job)


class Owners:
    """All users of the platform: each repeats a request until it is acknowledged.

    `acknowledged` holds the events whose answer came: the platform may never forget them again.
    """

    def __init__(self, machine: Machine, requests: Sequence[OwnerRequest]) -> None:
        self.machine = machine
        self.num_open = len(requests)
        self.acknowledged: list[Event] = []
        self.executor: SimExecutor | None = None
        self.asks_twice: Callable[[], bool] = lambda: False
        before: dict[str, list[bool]] = {}
        for request in requests:
            subject, answered = _subject(request.event), [False]
            previous = before.get(subject, [True])
            before[subject] = answered
            machine.agenda.at(
                request.at_s,
                lambda event=request.event, a=answered, p=previous: self._ask(event, a, p),  # type: ignore[misc]
            )

    def _ask(self, event: Event, answered: list[bool], previous: list[bool]) -> None:
        if answered[0]:
            return
        # An owner waits for one answer before the next request about the same workload.
        if self.executor is not None and previous[0]:
            self.executor.post(event, lambda: self._hear(event, answered))
            if self.asks_twice():
                self.executor.post(msgspec.structs.replace(event), lambda: self._hear(event, answered))
        self.machine.agenda.after(ASK_AGAIN_S, lambda: self._ask(event, answered, previous))

    def _hear(self, event: Event, answered: list[bool]) -> None:
        if not answered[0]:
            answered[0] = True
            self.num_open -= 1
            self.acknowledged.append(event)
            self.machine.say("acknowledged: {}", type(event).__name__)


def _subject(event: Event) -> str:
    match event:
        case JobSubmitted():
            return event.job.job_id
        case ServiceDeployed():
            return event.service.service_id
        case PauseRequested() | ResumeRequested():
            return event.job_id
        case CancelRequested() | ScaleRequested():
            return event.workload_id
    raise AssertionError(f"owners never ask {type(event).__name__}")


class ModelledGateway:
    """Reports what it sees of each service, every `interval_s`."""

    def __init__(self, machine: Machine, loads: Sequence[LoadProfile], interval_s: float) -> None:
        self.machine = machine
        self.interval_s = interval_s
        self.executor: SimExecutor | None = None
        self.removed: set[WorkloadId] = set()
        self._last_s = {load.service_id: 0.0 for load in loads}
        for load in loads:
            machine.agenda.at(load.start_s, lambda load=load: self._observe(load))  # type: ignore[misc]

    def _observe(self, load: LoadProfile) -> None:
        if load.service_id in self.removed:
            return
        now_s = self.machine.clock.now_s()
        rate = load.rate_per_s(now_s)
        if rate > 0:
            self._last_s[load.service_id] = now_s
        ready = [p.replica_id for p in self.machine.of_workload(load.service_id) if p.is_ready]
        wanted, sharing = rate * load.service_time_s, self.machine.sharing
        # Each answers so many at once on a whole device, and as much of that as it gets of one that it shares.
        sharing.set_demand(ready, min(1.0, wanted / (_AT_ONCE * len(ready))) if ready else 0.0)
        most = _AT_ONCE * sum(sharing.rate(replica_id) for replica_id in ready)
        if self.executor is not None:
            self.executor.post(
                LoadObserved(
                    service_id=load.service_id,
                    arrivals_per_s=rate,
                    in_flight=math.ceil(min(wanted, most)),
                    queued=math.ceil(max(0.0, wanted - most) - _ROUNDING),
                    idle_s=now_s - self._last_s[load.service_id],
                )
            )
        self.machine.agenda.after(self.interval_s, lambda: self._observe(load))


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A whole scenario of requests and load; `day_s` is the season of its load, None where it has none."""

    requests: tuple[OwnerRequest, ...] = ()
    loads: tuple[LoadProfile, ...] = ()
    day_s: float | None = None

    def jobs(self) -> list[tuple[float, TrainingJob]]:
        """Every job with the moment of its submission."""
        return [(r.at_s, r.event.job) for r in self.requests if isinstance(r.event, JobSubmitted)]


def make_job(
    job_id: str,
    *,
    num_samples: int,
    samples_per_s: float,
    parallel_fraction: float = 0.9,
    batch_size: int = 32,
    num_epochs: int = 1,
    workers: tuple[int, int] = (1, 1),
    deadline_s: float | None = None,
    poison: str = "",
    **changes: object,
) -> TrainingJob:
    """Build a job whose model is in its params."""
    job = TrainingJob(
        job_id=WorkloadId(job_id),
        name=job_id,
        entrypoint=_SOURCE,
        global_batch_size=batch_size,
        num_epochs=num_epochs,
        min_workers=workers[0],
        max_workers=workers[1],
        num_virtual_shards=max(4, 1 << (workers[1] - 1).bit_length()),
        goal=Goal(deadline_s=deadline_s),
        params=describe(num_samples, samples_per_s, parallel_fraction, poison),
    )
    return msgspec.structs.replace(job, **changes)


def with_adaptive_batch(job: TrainingJob) -> TrainingJob:
    """The job with a batch that may grow eightfold, whose gradient noise makes twice the initial one worth it."""
    size = job.global_batch_size
    return msgspec.structs.replace(
        job,
        batch=AdaptiveBatch(min_size=size, max_size=8 * size),
        family="growing",
        params={**job.params, "noise_scale": repr(2.0 * size)},
    )


def make_service(service_id: str, **changes: object) -> InferenceService:
    """Build a service."""
    service = InferenceService(
        service_id=WorkloadId(service_id),
        name=service_id,
        entrypoint=Entrypoint(source_path="source/serve.py", object_name="Model", kind="class"),
        idle_s=10.0,
        grace_s=5.0,
        target_in_flight=4,
    )
    return msgspec.structs.replace(service, **changes)


def draw_workload(rng: np.random.Generator, num_devices: int, horizon_s: float) -> Workload:
    """Draw a small scenario: 3 to 10 jobs of all kinds, up to 2 services, owners who change their minds."""
    requests: list[OwnerRequest] = []
    num_jobs = int(rng.integers(3, 11))
    for index in range(num_jobs):
        requests += _draw_job(rng, index, num_devices, horizon_s)
    loads = []
    for index in range(int(rng.integers(0, 3))):
        service_requests, load = _draw_service(rng, index, horizon_s)
        requests += service_requests
        loads.append(load)
    requests.sort(key=lambda request: request.at_s)
    return Workload(requests=tuple(requests), loads=tuple(loads))


def with_shares(workload: Workload, rng: np.random.Generator) -> Workload:
    """The scenario with shares for about two thirds of its jobs and services, drawn from a stream of their own.

    Nothing else of it changes. A service that is deployed anew keeps its share, or is given another one then.
    """
    shares: dict[WorkloadId, Share | None] = {}
    requests = []
    for request in workload.requests:
        event = request.event
        if isinstance(event, JobSubmitted):
            event = JobSubmitted(job=msgspec.structs.replace(event.job, share=_draw_share(rng)))
        elif isinstance(event, ServiceDeployed):
            service_id = event.service.service_id
            if service_id not in shares or rng.random() < 0.5:
                shares[service_id] = _draw_share(rng)
            event = ServiceDeployed(service=msgspec.structs.replace(event.service, share=shares[service_id]))
        requests.append(OwnerRequest(at_s=request.at_s, event=event))
    return msgspec.structs.replace(workload, requests=tuple(requests))


def with_devices(workload: Workload, rng: np.random.Generator, nodes: Sequence[Node]) -> Workload:
    """The scenario with two or four devices for each worker of about half of its jobs, from a stream of their own.

    They have so many fewer workers, and a batch that does not change. A few find no node that is large enough.
    """
    # Where nodes have pools, a job fits into those of training, so that it ends even if nothing is ever loaned.
    widths = [len(node.devices) for node in nodes if node.owner != "inference"]
    if any(node.owner == "training" for node in nodes):
        widths = [len(node.devices) for node in nodes if node.owner == "training"]
    widest = max(widths)
    requests = []
    most_of: dict[WorkloadId, int] = {}
    for request in workload.requests:
        event = request.event
        if isinstance(event, ScaleRequested) and event.workload_id in most_of:
            most = most_of[event.workload_id]
            low, high = min(event.minimum, most), min(event.maximum, most)
            event = msgspec.structs.replace(event, minimum=low, maximum=high)
        if isinstance(event, JobSubmitted):
            job, each, has_several = event.job, int(rng.choice([2, 2, 4])), bool(rng.random() < 0.5)
            if has_several and (each <= widest or rng.random() < 0.1):
                most = most_of[job.job_id] = max(1, min(job.max_workers, sum(width // each for width in widths)))
                job = msgspec.structs.replace(
                    job,
                    devices_each=each,
                    min_workers=min(job.min_workers, most),
                    max_workers=most,
                    batch=None,
                    family="",
                    share=None,
                    profile_steps_per_s={n: rate for n, rate in job.profile_steps_per_s.items() if n <= most},
                )
            event = JobSubmitted(job=job)
            if each > widest and job.devices_each > 1:
                # It never starts, and so does not end unless its owner gives it up.
                gone = CancelRequested(workload_id=job.job_id)
                requests.append(OwnerRequest(at_s=request.at_s + 60.0, event=gone))
        requests.append(OwnerRequest(at_s=request.at_s, event=event))
    requests.sort(key=lambda request: request.at_s)
    return msgspec.structs.replace(workload, requests=tuple(requests))


def _draw_share(rng: np.random.Generator) -> Share | None:
    request, stretch = round(float(rng.uniform(0.1, 0.7)), 2), float(rng.uniform(1.0, 2.5))
    memory_mb, has_share = int(rng.choice([0, 200, 500])), bool(rng.random() < 0.67)
    if not has_share:
        return None
    return make_share(request, min(1.0, round(request * stretch, 2)), memory_mb)


def _draw_job(rng: np.random.Generator, index: int, num_devices: int, horizon_s: float) -> list[OwnerRequest]:
    at_s = float(rng.uniform(0.0, horizon_s * 0.6))
    most = int(rng.integers(1, min(num_devices, 6) + 1))
    least = int(rng.integers(1, most + 1)) if rng.random() < 0.4 else 1
    rate = float(rng.uniform(20.0, 80.0))
    length_s = float(np.exp(rng.uniform(np.log(2.0), np.log(30.0))))
    batch_size = int(rng.choice([8, 16, 32]))
    poison = str(rng.choice(["crash", "hang", "raise", "segfault"])) if rng.random() < 0.08 else ""
    job = make_job(
        f"job-{index}",
        num_samples=max(batch_size, int(rate * length_s / 2)),
        num_epochs=2,
        samples_per_s=rate,
        parallel_fraction=float(rng.uniform(0.6, 0.98)),
        batch_size=batch_size,
        workers=(least, most),
        deadline_s=at_s + length_s * float(rng.uniform(1.0, 6.0)) if rng.random() < 0.5 else None,
        poison=poison,
        elastic=bool(rng.random() < 0.85),
        checkpoint_interval_s=float(rng.uniform(1.0, 8.0)),
        grace_s=float(rng.uniform(0.5, 6.0)),
        max_restarts=int(rng.integers(2, 6)),
    )
    if batch_size == 8 and not poison:
        # A third of the jobs, chosen without drawing anew: what else is drawn stays what it was.
        job = with_adaptive_batch(job)
    requests = [OwnerRequest(at_s=at_s, event=JobSubmitted(job=job))]
    if rng.random() < 0.1:
        requests.append(
            OwnerRequest(at_s=at_s + float(rng.exponential(8.0)), event=CancelRequested(workload_id=job.job_id))
        )
    if rng.random() < 0.15:
        pause_s = at_s + float(rng.exponential(6.0))
        requests.append(OwnerRequest(at_s=pause_s, event=PauseRequested(job_id=job.job_id)))
        resume_s = pause_s + 3.0 + float(rng.exponential(6.0))
        requests.append(OwnerRequest(at_s=resume_s, event=ResumeRequested(job_id=job.job_id)))
    if rng.random() < 0.15:
        requests.append(
            OwnerRequest(
                at_s=at_s + float(rng.exponential(6.0)),
                event=ScaleRequested(workload_id=job.job_id, minimum=1, maximum=int(rng.integers(1, most + 1))),
            )
        )
    return requests


def _draw_service(rng: np.random.Generator, index: int, horizon_s: float) -> tuple[list[OwnerRequest], LoadProfile]:
    start_s = float(rng.uniform(0.0, horizon_s * 0.4))
    end_s = start_s + float(rng.uniform(0.2, 0.8)) * horizon_s
    service = make_service(
        f"service-{index}", min_replicas=int(rng.integers(0, 2)), max_replicas=int(rng.integers(1, 4))
    )
    requests = [OwnerRequest(at_s=start_s, event=ServiceDeployed(service=service))]
    if rng.random() < 0.3:
        changed = msgspec.structs.replace(service, max_queue=512)
        requests.append(
            OwnerRequest(at_s=float(rng.uniform(start_s + 2.0, end_s + 2.0)), event=ServiceDeployed(service=changed))
        )
    load = LoadProfile(
        service_id=service.service_id,
        start_s=start_s,
        end_s=end_s,
        base_per_s=float(rng.uniform(0.0, 40.0)),
        wave_per_s=float(rng.uniform(0.0, 40.0)),
        period_s=float(rng.uniform(10.0, 60.0)),
        service_time_s=float(rng.uniform(0.05, 0.2)),
    )
    # At the end every service is removed, so that nothing may be left running.
    requests.append(OwnerRequest(at_s=end_s + 20.0, event=CancelRequested(workload_id=service.service_id)))
    return requests, load


# --- a compressed day ---------------------------------------------------------------------------------------------

_OWNERS: tuple[Pool, ...] = ("inference", "training", "inference", "training", "shared")


def draw_pooled_nodes(rng: np.random.Generator) -> tuple[Node, ...]:
    """Draw 3 to 6 nodes: at least one of each pool, some shared, some whose devices are loaned one by one."""
    more = rng.integers(0, len(_OWNERS), int(rng.integers(1, 5)))
    pools: list[Pool] = ["inference", "training", *(_OWNERS[int(index)] for index in more)]
    num_devices = int(rng.integers(1, 5))
    return tuple(
        make_node(f"node-{index}", num_devices, pool=pool, isolates_devices=pool != "shared" and rng.random() < 0.2)
        for index, pool in enumerate(pools)
    )


def draw_tidal_workload(rng: np.random.Generator, nodes: Sequence[Node], horizon_s: float) -> Workload:
    """Draw services whose guaranteed minimum and load rise and fall over a compressed day, and jobs in between.

    All minimums together fit into the nodes that do not belong to training, half of the times into all of them. The
    services outlive the faults by a few minutes, so that it shows whether they ever get what they are guaranteed.
    """
    num_devices = sum(len(node.devices) for node in nodes)
    num_home = sum(len(node.devices) for node in nodes if node.owner != "training")
    num_training = sum(len(node.devices) for node in nodes if node.owner == "training")
    day_s = float(rng.uniform(25.0, 60.0))
    left = num_home if rng.random() < 0.5 else num_devices
    requests: list[OwnerRequest] = []
    loads: list[LoadProfile] = []
    for index in range(int(rng.integers(1, 4))):
        by_day = int(rng.integers(0, left + 1))
        left -= by_day
        service_requests, load = _draw_tidal_service(rng, index, by_day, num_devices, day_s, horizon_s)
        requests += service_requests
        loads.append(load)
    for index in range(int(rng.integers(3, 11))):
        requests += _draw_tidal_job(rng, index, num_training, horizon_s)
    requests.sort(key=lambda request: request.at_s)
    return Workload(requests=tuple(requests), loads=tuple(loads), day_s=day_s)


def _draw_tidal_service(
    rng: np.random.Generator, index: int, by_day: int, num_devices: int, day_s: float, horizon_s: float
) -> tuple[list[OwnerRequest], LoadProfile]:
    by_night = int(rng.integers(0, by_day + 1))
    most = min(num_devices, by_day + int(rng.integers(0, 4))) or 1
    most_by_night = min(most, max(1, by_night + int(rng.integers(0, 2))))
    service = make_service(
        f"service-{index}",
        min_replicas=by_night,
        max_replicas=most_by_night,
        idle_s=float(rng.uniform(3.0, 15.0)),
        grace_s=float(rng.uniform(0.5, 5.0)),
    )
    start_s = float(rng.uniform(0.0, day_s / 4))
    end_s = horizon_s + 200.0
    service_id = service.service_id
    requests = [OwnerRequest(at_s=start_s, event=ServiceDeployed(service=service))]
    morning_s, evening_s = float(rng.uniform(0.1, 0.4)) * day_s, float(rng.uniform(0.6, 0.9)) * day_s
    for day in range(math.ceil(horizon_s / day_s)):
        for at_s, minimum, maximum in ((morning_s, by_day, most), (evening_s, by_night, most_by_night)):
            event = ScaleRequested(workload_id=service_id, minimum=minimum, maximum=maximum)
            requests.append(OwnerRequest(at_s=start_s + day * day_s + at_s, event=event))
    # In the end every service is removed, so that nothing may be left running.
    requests.append(OwnerRequest(at_s=end_s, event=CancelRequested(workload_id=service_id)))
    in_flight = float(rng.uniform(0.0, 4.0 * most))
    load = LoadProfile(
        service_id=service_id,
        start_s=start_s,
        end_s=end_s - 60.0,
        base_per_s=in_flight * 5.0,
        wave_per_s=in_flight * 5.0,
        period_s=day_s,
        service_time_s=0.1,
    )
    return requests, load


def _draw_tidal_job(rng: np.random.Generator, index: int, num_training: int, horizon_s: float) -> list[OwnerRequest]:
    """A job that fits into the nodes of training, so that it ends even if nothing is ever loaned."""
    at_s = float(rng.uniform(0.0, horizon_s * 0.7))
    most = int(rng.integers(1, min(num_training, 8) + 1))
    least = int(rng.integers(1, most + 1)) if rng.random() < 0.4 else 1
    rate = float(rng.uniform(20.0, 80.0))
    length_s = float(np.exp(rng.uniform(np.log(4.0), np.log(60.0))))
    batch_size = int(rng.choice([8, 16, 32]))
    job = make_job(
        f"job-{index}",
        num_samples=max(batch_size, int(rate * length_s / 2)),
        num_epochs=2,
        samples_per_s=rate,
        parallel_fraction=float(rng.uniform(0.6, 0.98)),
        batch_size=batch_size,
        workers=(least, most),
        deadline_s=at_s + length_s * float(rng.uniform(1.0, 6.0)) if rng.random() < 0.4 else None,
        elastic=bool(rng.random() < 0.6),
        checkpoint_interval_s=float(rng.uniform(1.0, 8.0)),
        grace_s=float(rng.uniform(0.5, 6.0)),
        max_restarts=int(rng.integers(4, 8)),
    )
    requests = [OwnerRequest(at_s=at_s, event=JobSubmitted(job=job))]
    if rng.random() < 0.1:
        requests.append(
            OwnerRequest(at_s=at_s + float(rng.exponential(8.0)), event=CancelRequested(workload_id=job.job_id))
        )
    if rng.random() < 0.15:
        pause_s = at_s + float(rng.exponential(6.0))
        requests.append(OwnerRequest(at_s=pause_s, event=PauseRequested(job_id=job.job_id)))
        resume_s = pause_s + 3.0 + float(rng.exponential(6.0))
        requests.append(OwnerRequest(at_s=resume_s, event=ResumeRequested(job_id=job.job_id)))
    return requests
