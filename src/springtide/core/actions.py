"""What to do, in the imperative. Actions are the only way in which the Controller changes anything.

Every action is idempotent under its ids and generation, and may be repeated after a restart: an executor that
already did it, or is already past it, does nothing. `cause` names the event or plan that led to it, `reason` is the
sentence people read, and `change`, where there is one, what that sentence is made of.
"""

from __future__ import annotations

import msgspec

from springtide.core.functions import FunctionPlan
from springtide.core.reasons import GroupChange
from springtide.core.resources import DeviceId, NodeId, Pool
from springtide.core.shares import Share
from springtide.core.workload import (
    DEFAULT_GRACE_S,
    Checkpoint,
    InferenceService,
    JobState,
    ReplicaId,
    TrainingJob,
    WorkloadId,
)


class _Action(msgspec.Struct, frozen=True, kw_only=True, tag_field="action", tag=True, omit_defaults=True):
    cause: str = ""
    reason: str = ""


class StartReplica(_Action, frozen=True, kw_only=True):
    """Start one replica on one device and warm it. It joins a job's group only when a ResizeJob names it.

    `generation` is the job's generation at this moment; when it is higher than any seen before for this job, no
    older writer may write any more (the executor raises the storage fence first). `restore` is the checkpoint that
    the first group starts from. `share` is what it holds of the device (None: the whole); the executor holds it to
    that, or reports that it cannot.
    """

    workload: TrainingJob | InferenceService
    replica_id: ReplicaId
    device_id: DeviceId
    generation: int
    restore: Checkpoint | None = None
    share: Share | None = None
    change: GroupChange | None = None

    @property
    def workload_id(self) -> WorkloadId:
        """The id of the job or service."""
        workload = self.workload
        return workload.job_id if isinstance(workload, TrainingJob) else workload.service_id


class StopReplica(_Action, frozen=True, kw_only=True):
    """Ask one replica to end (a serving replica drains first), and make sure of it after `grace_s`."""

    workload_id: WorkloadId
    replica_id: ReplicaId
    grace_s: float = DEFAULT_GRACE_S


class ResizeJob(_Action, frozen=True, kw_only=True):
    """From the next step boundary on, exactly these replicas train, in this rank order, as `generation`.

    The first ResizeJob of a job forms its first group. A step is made of `global_batch_size` samples from then on; with
    the members as they were it changes the batch alone. `forced` says that a member of the generation before is
    lost: the survivors must leave whatever collective they hang in, and the storage fence rises at once. A job on
    functions has one replica, its coordinator, and runs as `functions` from then on.
    """

    job_id: WorkloadId
    generation: int
    replica_ids: tuple[ReplicaId, ...]
    global_batch_size: int
    forced: bool = False
    functions: FunctionPlan | None = None
    change: GroupChange | None = None


class PreemptJob(_Action, frozen=True, kw_only=True):
    """Within `grace_s`, commit a checkpoint and end every replica of the job."""

    job_id: WorkloadId
    generation: int
    replica_ids: tuple[ReplicaId, ...]
    grace_s: float = DEFAULT_GRACE_S


class SetShare(_Action, frozen=True, kw_only=True):
    """From now on the replica holds this share of its device. It goes on without a pause."""

    workload_id: WorkloadId
    replica_id: ReplicaId
    share: Share


class EndJob(_Action, frozen=True, kw_only=True):
    """The job has reached its one terminal state."""

    job_id: WorkloadId
    state: JobState
    alternatives: tuple[str, ...] = ()


class AdmitJob(_Action, frozen=True, kw_only=True):
    """The job's deadline is promised from now on, its finish planned for `finish_s`. Executors have no part in it."""

    job_id: WorkloadId
    finish_s: float


class DrainNode(_Action, frozen=True, kw_only=True):
    """Nothing that `pool` does not admit starts on the node any more: it is to be labelled for `pool` when it is free.

    With `is_reclaim` the workloads there have to go, by force when their grace is over; without it they may stay as
    long as the plan lets them. `cost_s` is what leaving costs, in device-seconds, as the policy reckons.
    """

    node_id: NodeId
    pool: Pool
    is_reclaim: bool = False
    cost_s: float = 0.0


class LabelNode(_Action, frozen=True, kw_only=True):
    """The node is labelled for `pool` from now on; with the label that it has, a drain of it is called off."""

    node_id: NodeId
    pool: Pool


Action = StartReplica | StopReplica | ResizeJob | PreemptJob | SetShare | EndJob | AdmitJob | DrainNode | LabelNode
