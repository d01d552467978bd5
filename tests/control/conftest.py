"""A small stage for the Controller: a policy that wants what the test says, and events by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from springtide.control.controller import Controller
from springtide.core import events
from springtide.core.decision import Plan, PoolAllocation, Refusal, Snapshot, TimeClaim
from springtide.core.events import Event
from springtide.core.resources import DeviceId, make_node
from springtide.core.workload import Entrypoint, InferenceService, JobState, TrainingJob, WorkloadId

SOURCE = Entrypoint(source_path="job.py", object_name="fit")


class Wanted:
    """A policy that plays back the wish of the test: how many devices, or which, for whom."""

    def __init__(self) -> None:
        self.wish: dict[str, list[str]] = {}
        self.refuse: dict[str, str] = {}
        self.batch: dict[str, int] = {}
        self.why: dict[str, str] = {}
        self.claims: dict[str, TimeClaim] = {}

    def decide(self, snapshot: Snapshot) -> Plan:
        present = {view.job.job_id for view in snapshot.jobs} | {view.service.service_id for view in snapshot.services}
        return Plan(
            allocations={
                WorkloadId(name): PoolAllocation(
                    device_ids=tuple(DeviceId(device) for device in devices), global_batch_size=self.batch.get(name)
                )
                for name, devices in self.wish.items()
                if name in present
            },
            rejected={WorkloadId(name): Refusal(reason=why) for name, why in self.refuse.items() if name in present},
            reasons={WorkloadId(name): why for name, why in self.why.items() if name in present},
            claims={WorkloadId(name): claim for name, claim in self.claims.items() if name in present},
        )


class Stage:
    """Drives one Controller, prints actions as short words, and lets every replica obey at once when asked."""

    def __init__(self) -> None:
        self.policy = Wanted()
        self.controller = Controller(self.policy)
        self.now_s = 0.0
        self.steps: list[object] = []

    def tell(self, *happened: Event, at_s: float | None = None) -> list[str]:
        self.now_s = self.now_s + 0.01 if at_s is None else at_s
        step = self.controller.step(self.now_s, happened)
        self.steps.append(step)
        return [_word(action) for action in step.actions]

    def want(self, **wish: str) -> None:
        self.policy.wish = {name: [f"n/{index}" for index in devices] for name, devices in wish.items()}

    def job(self, name: str):
        return self.controller.state.jobs[WorkloadId(name)]

    def state(self, name: str) -> JobState:
        return self.job(name).state

    def ready(self, name: str, *numbers: int) -> list[str]:
        return self.tell(*(events.ReplicaReady(workload_id=name, replica_id=f"{name}.{n}") for n in numbers))

    def resized(self, name: str, step: int = 0, direction: str = "grow") -> list[str]:
        record = self.job(name)
        return self.tell(
            events.JobResized(
                job_id=name,
                generation=record.group.generation,
                world_size=record.world_size,
                step=step,
                pause_s=0.01,
                direction=direction,
            )
        )

    def running(self, name: str, devices: str, **options) -> None:
        """Bring a job to RUNNING on the given devices."""
        self.want(**{**{k: "".join(d[2:] for d in v) for k, v in self.policy.wish.items()}, name: devices})
        self.tell(events.JobSubmitted(job=make_job(name, **options)))
        self.ready(name, *range(len(devices)))
        self.resized(name, direction="start")
        assert self.state(name) is JobState.RUNNING


def _word(action: object) -> str:
    kind = type(action).__name__
    if kind == "StartReplica":
        return f"start {action.replica_id} on {action.device_id} g{action.generation}"
    if kind == "StopReplica":
        return f"stop {action.replica_id}"
    if kind == "ResizeJob":
        forced = " forced" if action.forced else ""
        return f"resize {action.job_id} g{action.generation} to {','.join(action.replica_ids)}{forced}"
    if kind == "PreemptJob":
        return f"preempt {action.job_id} g{action.generation}"
    return f"end {action.job_id} {action.state}"


def make_job(name: str, **options) -> TrainingJob:
    return TrainingJob(**{"job_id": name, "name": name, "entrypoint": SOURCE, "max_workers": 4, **options})


def make_service(name: str, **options) -> InferenceService:
    return InferenceService(**{"service_id": name, "name": name, "entrypoint": SOURCE, "max_replicas": 4, **options})


@pytest.fixture
def stage() -> Stage:
    fresh = Stage()
    fresh.tell(events.NodeJoined(node=make_node("n", 4)))
    return fresh


@pytest.fixture
def job() -> Callable[..., TrainingJob]:
    return make_job


@pytest.fixture
def service() -> Callable[..., InferenceService]:
    return make_service
