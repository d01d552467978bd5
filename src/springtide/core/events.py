"""What happened, in the past tense. The Controller learns about the world through events only.

Every event that a worker causes carries its job's `generation` (the fencing token) or the id of the replica that it is
about, so that late or repeated messages can be told from fresh ones.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from springtide.core.function_search import FunctionMeasurement, StreamView
from springtide.core.functions import Bill, FunctionMenu, Usage
from springtide.core.resources import Node, NodeId
from springtide.core.workload import Goal, InferenceService, ReleaseTerms, ReplicaId, TrainingJob, WorkloadId


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True, omit_defaults=True):
    pass


class JobSubmitted(_Event, frozen=True, kw_only=True):
    """A user submitted a training job. A second one with a known `job_id` changes nothing."""

    job: TrainingJob


class CancelRequested(_Event, frozen=True, kw_only=True):
    """A user asked to end the job, or to remove the service."""

    workload_id: WorkloadId


class PauseRequested(_Event, frozen=True, kw_only=True):
    """The job is to checkpoint and hold no device until resumed: by its owner's request or its budget (`reason`)."""

    job_id: WorkloadId
    reason: str = ""


class ResumeRequested(_Event, frozen=True, kw_only=True):
    """A user resumed a paused job, with a new budget if one is given."""

    job_id: WorkloadId
    budget_usd: float | None = None


class JobEdited(_Event, frozen=True, kw_only=True):
    """A user changed a job that has not ended; fields that are left out stay as they were.

    `promised_finish_s` is the job's planned finish if the policy promises the deadline of the new goal. `accepted` are
    the digests of all parts of its Kubernetes object that are in force after the change.
    """

    job_id: WorkloadId
    goal: Goal | None = None
    max_restarts: int | None = None
    promised_finish_s: float | None = None
    accepted: dict[str, str] = {}


class MoveRequested(_Event, frozen=True, kw_only=True):
    """A job on machines is to go on on functions, by this menu, from its checkpoint; `reason` says why.

    `usd_per_device_hour` is the price of a device of the machines: what the job has cost there counts in its bill. The
    platform, and not the job's owner, has decided on it if it `is_automatic`.
    """

    job_id: WorkloadId
    menu: FunctionMenu
    reason: str
    usd_per_device_hour: float
    is_automatic: bool = False


class ScaleRequested(_Event, frozen=True, kw_only=True):
    """A user set new bounds on the number of workers (job) or replicas (service).

    `reason` says why, if the platform did; with `is_limit` it allows a job fewer workers than its owner does.
    """

    workload_id: WorkloadId
    minimum: int
    maximum: int
    reason: str = ""
    is_limit: bool = False


class ServiceDeployed(_Event, frozen=True, kw_only=True):
    """A user deployed a new or changed inference service.

    `first_replica` is the number of its first replica, if one of that name was removed before: so no id comes twice.
    `terms` is how it gets the requests of a revision that answers. With `is_rollback` it is an earlier revision, which
    keeps its number.
    """

    service: InferenceService
    first_replica: int = 0
    terms: ReleaseTerms = ReleaseTerms()
    is_rollback: bool = False


class RevisionJudged(_Event, frozen=True, kw_only=True):
    """It is decided whether the revision that is being released gets all requests of its service, or none any more."""

    service_id: WorkloadId
    revision: int
    is_good: bool
    reason: str


class NodeJoined(_Event, frozen=True, kw_only=True):
    """A node offers its devices."""

    node: Node


class NodeLost(_Event, frozen=True, kw_only=True):
    """A node is gone, or has been silent past its lease. Its workers are fenced."""

    node_id: NodeId


class PlatformStopping(_Event, frozen=True, kw_only=True):
    """The platform shuts down in order: jobs commit checkpoints, replicas drain, nothing new starts."""


class PlatformStarted(_Event, frozen=True, kw_only=True):
    """The platform is up (again): workloads that PlatformStopping has stopped may run."""


class ClockAnchored(_Event, frozen=True, kw_only=True):
    """One moment on the machine's clocks: `boot_s` seconds after the boot `boot_id`, `unix_s`, and `at_s` here.

    For the last `skipped_s` seconds of platform time the machine was off, so that nothing ran. `is_in_doubt` says that
    it is not known how long it was off, and that no time was counted for it.
    """

    boot_id: str
    boot_s: float
    unix_s: float
    at_s: float
    skipped_s: float = 0.0
    is_in_doubt: bool = False


class FenceFound(_Event, frozen=True, kw_only=True):
    """The storage of a job was written by `generation`, of which the journal knows nothing: it lost steps."""

    job_id: WorkloadId
    generation: int


class JobsArchived(_Event, frozen=True, kw_only=True):
    """Jobs that ended long ago left the platform's state; the journal keeps their records apart."""

    job_ids: tuple[WorkloadId, ...]


class ServicesArchived(_Event, frozen=True, kw_only=True):
    """Services that were removed long ago left the platform's state; the journal keeps their records apart."""

    service_ids: tuple[WorkloadId, ...]


class DecisionsResumed(_Event, frozen=True, kw_only=True):
    """The control plane decides again after a time in which it was down, suspended, or unable to write its journal.

    It saw nothing meanwhile, so that time counts against no workload.
    """


class ReplicaReady(_Event, frozen=True, kw_only=True):
    """A replica is warm: a training worker has imported and built its model, a serving replica can answer.

    `phases_s` is the duration of each phase of the start, in order (`schedule`, `spawn`, `import`, `load`).
    `device_seen` is the name of the GPU that it found there; empty if it has none or knows of none.
    """

    workload_id: WorkloadId
    replica_id: ReplicaId
    address: str = ""
    phases_s: dict[str, float] = {}
    device_seen: str = ""


class StartHeldUp(_Event, frozen=True, kw_only=True):
    """The platform on which a replica is to run does not let it begin yet: `reason` says what that waits for.

    An empty reason says that it has begun. The time before counts against no limit of the workload's, unless it
    `is_stuck`: only a person can mend what it waits for.
    """

    workload_id: WorkloadId
    replica_id: ReplicaId
    reason: str = ""
    is_stuck: bool = False


class StartTimedOut(_Event, frozen=True, kw_only=True):
    """A replica of a service, or a worker that was to join a group, was not ready within `timeout_s` of its start.

    Of a job that was starting: its first step has not come. The controller notes it.
    """

    workload_id: WorkloadId
    replica_id: ReplicaId
    timeout_s: float


class ReplicaStopped(_Event, frozen=True, kw_only=True):
    """A replica that was asked to stop is gone; its device is free."""

    workload_id: WorkloadId
    replica_id: ReplicaId


class ReplicaLost(_Event, frozen=True, kw_only=True):
    """A replica is gone without a request to stop; its device is free. `reason` is a sentence for people.

    `is_fault` is false if the replica itself did not fail, but its machine or its container was taken away. With
    `is_refused` its machine turned it away before it ran: it is to be tried elsewhere, or there again later.
    """

    workload_id: WorkloadId
    replica_id: ReplicaId
    reason: str = ""
    exit_code: int | None = None
    is_fault: bool = True
    is_refused: bool = False


class ProgressReported(_Event, frozen=True, kw_only=True):
    """The members of `generation` have committed `step` of `total_steps` (0: not known) optimizer steps.

    `progress` of `total_progress` is the same in steps of the job's initial batch size; None if the batch is fixed.
    `step_s` is the time of a step with `local_batch_size` samples per worker and pass, exchange included, `sync_s` the
    part of it in which no worker computes. `grad_sqr` and `grad_var` are estimates of the squared norm of the true
    gradient and of the variance of a gradient at the initial batch size. `is_diverged`: the newest loss is NaN or
    infinite, and `diverged_at_step` is the first step at which one was, as far as its reporter knows. `exact_obstacle`
    is why the parts of an exact job's batch have a pass each, a code of EXACT_OBSTACLES.
    """

    job_id: WorkloadId
    generation: int
    step: int
    total_steps: int
    world_size: int
    epoch: int = 0
    loss: float | None = None
    is_diverged: bool = False
    diverged_at_step: int | None = None
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
    exact_obstacle: str = ""


class JobStalled(_Event, frozen=True, kw_only=True):
    """No step of the job has been reported since `since_s`, for longer than `timeout_s`. The controller notes it."""

    job_id: WorkloadId
    generation: int
    since_s: float
    timeout_s: float


class JobResized(_Event, frozen=True, kw_only=True):
    """Every member of `generation` has joined, and this generation trains from `step` on.

    `pause_s` runs from the end of the last step before to the start of the first step after.
    """

    job_id: WorkloadId
    generation: int
    world_size: int
    step: int
    pause_s: float
    direction: Literal["start", "grow", "shrink", "recover", "resume", "replace"]


class GroupBroken(_Event, frozen=True, kw_only=True):
    """A collective of `generation` failed although every member is alive; the group must be re-formed."""

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
    """The training function returned on every member. `diverged_at_step` is as in ProgressReported."""

    job_id: WorkloadId
    generation: int
    step: int
    artifact_path: str = ""
    diverged_at_step: int | None = None


class JobFailed(_Event, frozen=True, kw_only=True):
    """The user's code raised. `error` is one sentence, the traceback is in the logs.

    With `is_fixed_size` it cannot be resized in place, as written or as its library is installed where its worker is,
    for the reason `error`. A job that has not trained for long then starts again as a plain script with one worker.
    """

    job_id: WorkloadId
    generation: int
    error: str
    is_fixed_size: bool = False


class MoveFailed(_Event, frozen=True, kw_only=True):
    """A job that was moved to functions cannot start there from its checkpoint: it goes back to machines."""

    job_id: WorkloadId
    generation: int
    error: str


class UsageReported(_Event, frozen=True, kw_only=True):
    """Usage and bill of a job on functions since its submission, over all generations."""

    job_id: WorkloadId
    usage: Usage
    bill: Bill


class FunctionsMeasured(_Event, frozen=True, kw_only=True):
    """A new measurement of the time and cost of a step, for a job on functions with its present plan."""

    job_id: WorkloadId
    generation: int
    measurement: FunctionMeasurement


class StreamObserved(_Event, frozen=True, kw_only=True):
    """How far the growing dataset of a job has grown."""

    job_id: WorkloadId
    stream: StreamView


class LoadObserved(_Event, frozen=True, kw_only=True):
    """The load of one service that the gateway observed over its last window.

    `wanted_replicas` is the co-scaler's advice; None if the service has no profiled capacity.
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
    | MoveRequested
    | ScaleRequested
    | ServiceDeployed
    | RevisionJudged
    | NodeJoined
    | NodeLost
    | PlatformStopping
    | PlatformStarted
    | ClockAnchored
    | FenceFound
    | DecisionsResumed
    | JobsArchived
    | ServicesArchived
    | ReplicaReady
    | StartHeldUp
    | StartTimedOut
    | ReplicaStopped
    | ReplicaLost
    | ProgressReported
    | JobStalled
    | JobResized
    | GroupBroken
    | CheckpointCommitted
    | JobFinished
    | JobFailed
    | MoveFailed
    | UsageReported
    | FunctionsMeasured
    | StreamObserved
    | LoadObserved
)
