"""What happened, in the past tense. Events are the only way in which the Controller learns anything.

Every event that a worker causes carries its job's `generation` (the fencing token) or the id of the one replica
it speaks for, so that a late or repeated message can be distinguished from a fresh one.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from springtide.core.function_search import FunctionMeasurement, StreamView
from springtide.core.functions import Bill, Usage
from springtide.core.resources import Node, NodeId
from springtide.core.workload import Goal, InferenceService, ReplicaId, TrainingJob, WorkloadId


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True, omit_defaults=True):
    pass


class JobSubmitted(_Event, frozen=True, kw_only=True):
    """A user handed over a training job. A second one with a known `job_id` changes nothing."""

    job: TrainingJob


class CancelRequested(_Event, frozen=True, kw_only=True):
    """A user wants the job ended, or the service removed."""

    workload_id: WorkloadId


class PauseRequested(_Event, frozen=True, kw_only=True):
    """The job is to checkpoint and hold no device until resumed: its owner wants that, or its budget (`reason`)."""

    job_id: WorkloadId
    reason: str = ""


class ResumeRequested(_Event, frozen=True, kw_only=True):
    """A user wants a paused job to go on, with a new budget where one is named."""

    job_id: WorkloadId
    budget_usd: float | None = None


class JobEdited(_Event, frozen=True, kw_only=True):
    """A user wants something else of a job that has not ended; what is left out stays as it was.

    `promised_finish_s` is when the job is planned to end, where the deadline of the new goal was found to hold: it is a
    promise then. `accepted` are the digests of all parts of its object as they are in force then.
    """

    job_id: WorkloadId
    goal: Goal | None = None
    max_restarts: int | None = None
    promised_finish_s: float | None = None
    accepted: dict[str, str] = {}


class ScaleRequested(_Event, frozen=True, kw_only=True):
    """A user set new bounds on the number of workers (job) or replicas (service)."""

    workload_id: WorkloadId
    minimum: int
    maximum: int


class ServiceDeployed(_Event, frozen=True, kw_only=True):
    """A user handed over an inference service, new or changed."""

    service: InferenceService


class NodeJoined(_Event, frozen=True, kw_only=True):
    """A node offers its devices."""

    node: Node


class NodeLost(_Event, frozen=True, kw_only=True):
    """A node is gone, or has been silent past its lease. Whatever ran there is fenced."""

    node_id: NodeId


class PlatformStopping(_Event, frozen=True, kw_only=True):
    """The platform goes down in order: jobs checkpoint, replicas drain, nothing new starts."""


class PlatformStarted(_Event, frozen=True, kw_only=True):
    """The platform is up (again): what was put to rest by PlatformStopping may run."""


class ReplicaReady(_Event, frozen=True, kw_only=True):
    """A replica is warm: a training worker has imported and built its model, a serving replica can answer.

    `phases_s` says what the start was made of: seconds by phase, in order (`schedule`, `spawn`, `import`, `load`).
    """

    workload_id: WorkloadId
    replica_id: ReplicaId
    address: str = ""
    phases_s: dict[str, float] = {}


class ReplicaStopped(_Event, frozen=True, kw_only=True):
    """A replica that was asked to stop is gone; its device is free."""

    workload_id: WorkloadId
    replica_id: ReplicaId


class ReplicaLost(_Event, frozen=True, kw_only=True):
    """A replica is gone without being asked; its device is free. `reason` is a sentence for people.

    `is_fault` is false where it did not fail: its machine or its container was taken away.
    """

    workload_id: WorkloadId
    replica_id: ReplicaId
    reason: str = ""
    exit_code: int | None = None
    is_fault: bool = True


class ProgressReported(_Event, frozen=True, kw_only=True):
    """`step` of `total_steps` (0: not known) optimizer steps are committed by the members of `generation`.

    `progress` of `total_progress` is done, in steps of the job's initial batch size; left out where the batch is fixed:
    then it is `step` of `total_steps`. `step_s` is what a step on `local_batch_size` samples a worker and pass takes,
    its exchange included, `sync_s` the part of it in which no worker computes. `grad_sqr` and `grad_var` are the
    squared norm of the true gradient and the variance of a gradient at the initial batch size, estimated while it
    trains.
    """

    job_id: WorkloadId
    generation: int
    step: int
    total_steps: int
    world_size: int
    epoch: int = 0
    loss: float | None = None
    samples_per_s: float | None = None
    metrics: dict[str, float] = {}
    progress: float | None = None
    total_progress: float | None = None
    global_batch_size: int | None = None
    local_batch_size: int | None = None
    step_s: float | None = None
    sync_s: float | None = None
    grad_sqr: float | None = None
    grad_var: float | None = None


class JobResized(_Event, frozen=True, kw_only=True):
    """Every member of `generation` has joined; it is the one that trains from `step` on.

    `pause_s` runs from the end of the last step before to the start of the first step after.
    """

    job_id: WorkloadId
    generation: int
    world_size: int
    step: int
    pause_s: float
    direction: Literal["start", "grow", "shrink", "recover", "resume", "replace"]


class GroupBroken(_Event, frozen=True, kw_only=True):
    """A collective of `generation` failed although every member lives; the group must form anew."""

    job_id: WorkloadId
    generation: int
    detail: str = ""


class CheckpointCommitted(_Event, frozen=True, kw_only=True):
    """A checkpoint is durable and complete (its manifest is in place)."""

    job_id: WorkloadId
    generation: int
    step: int
    path: str
    num_bytes: int = 0


class JobFinished(_Event, frozen=True, kw_only=True):
    """The training function returned on every member."""

    job_id: WorkloadId
    generation: int
    step: int
    artifact_path: str = ""


class JobFailed(_Event, frozen=True, kw_only=True):
    """The user's code raised. `error` is one sentence, the traceback is in the logs."""

    job_id: WorkloadId
    generation: int
    error: str


class UsageReported(_Event, frozen=True, kw_only=True):
    """What a job on functions has used and what that costs, from its submission to now, all generations together."""

    job_id: WorkloadId
    usage: Usage
    bill: Bill


class FunctionsMeasured(_Event, frozen=True, kw_only=True):
    """What steps of a job on functions take and cost as its present plan, measured anew."""

    job_id: WorkloadId
    generation: int
    measurement: FunctionMeasurement


class StreamObserved(_Event, frozen=True, kw_only=True):
    """How far the growing dataset of a job has come."""

    job_id: WorkloadId
    stream: StreamView


class LoadObserved(_Event, frozen=True, kw_only=True):
    """What the gateway saw of one service over its last window.

    `wanted_replicas` is how many the co-scaler wants, where the service has a capacity to go by.
    """

    service_id: WorkloadId
    arrivals_per_s: float
    in_flight: int
    queued: int
    idle_s: float
    latency_p50_s: float | None = None
    latency_p99_s: float | None = None
    wanted_replicas: int | None = None


Event = (
    JobSubmitted
    | CancelRequested
    | PauseRequested
    | ResumeRequested
    | JobEdited
    | ScaleRequested
    | ServiceDeployed
    | NodeJoined
    | NodeLost
    | PlatformStopping
    | PlatformStarted
    | ReplicaReady
    | ReplicaStopped
    | ReplicaLost
    | ProgressReported
    | JobResized
    | GroupBroken
    | CheckpointCommitted
    | JobFinished
    | JobFailed
    | UsageReported
    | FunctionsMeasured
    | StreamObserved
    | LoadObserved
)
