"""What an executor is to do, in the imperative. The Controller changes the world through actions only.

Every action is idempotent under its ids and generation and may be repeated after a restart: an executor that has
already carried it out, or a later one, does nothing. `cause` names the event or plan that led to the action, `reason`
is the sentence for people, and `change`, where there is one, holds that sentence as data.
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
    """Start one replica on its device and warm it up. It joins a job's group only when a ResizeJob names it.

    `generation` is the job's present generation; if it is higher than any before for this job, the executor raises the
    storage fence first, so that no older worker can write any more. `restore` is the checkpoint that the first group
    starts from. `more_devices` are those of the same node that it holds beside `device_id`. `share` is what the replica
    holds of the device (None: the whole); the executor enforces it, or reports that it cannot.
    """

    workload: TrainingJob | InferenceService
    replica_id: ReplicaId
    device_id: DeviceId
    generation: int
    restore: Checkpoint | None = None
    share: Share | None = None
    change: GroupChange | None = None
    more_devices: tuple[DeviceId, ...] = ()

    @property
    def device_ids(self) -> tuple[DeviceId, ...]:
        """Every device that it is to hold."""
        return (self.device_id, *self.more_devices)

    @property
    def workload_id(self) -> WorkloadId:
        """The id of the job or service."""
        workload = self.workload
        return workload.job_id if isinstance(workload, TrainingJob) else workload.service_id


class StopReplica(_Action, frozen=True, kw_only=True):
    """Ask one replica to exit (a serving replica drains first), and kill it after `grace_s`."""

    workload_id: WorkloadId
    replica_id: ReplicaId
    grace_s: float = DEFAULT_GRACE_S


class ResizeJob(_Action, frozen=True, kw_only=True):
    """From the next step boundary on, exactly these replicas train, in this rank order, as `generation`.

    The first ResizeJob of a job forms its first group. From then on a step has `global_batch_size` samples; with
    unchanged members the action changes only the batch. `forced` says that a member of the previous generation is lost:
    the survivors must abort any collective they are in, and the storage fence rises at once. A job on functions has one
    replica, its coordinator, and runs as `functions` from then on.
    """

    job_id: WorkloadId
    generation: int
    replica_ids: tuple[ReplicaId, ...]
    global_batch_size: int
    forced: bool = False
    functions: FunctionPlan | None = None
    change: GroupChange | None = None


class PreemptJob(_Action, frozen=True, kw_only=True):
    """Commit a checkpoint and end every replica of the job, within `grace_s`."""

    job_id: WorkloadId
    generation: int
    replica_ids: tuple[ReplicaId, ...]
    grace_s: float = DEFAULT_GRACE_S


class SetShare(_Action, frozen=True, kw_only=True):
    """Change the share that a running replica holds of its device, without a pause."""

    workload_id: WorkloadId
    replica_id: ReplicaId
    share: Share


class EndJob(_Action, frozen=True, kw_only=True):
    """End the job in its terminal state."""

    job_id: WorkloadId
    state: JobState
    alternatives: tuple[str, ...] = ()


class AdmitJob(_Action, frozen=True, kw_only=True):
    """Promise the job its deadline from now on, with its finish planned for `finish_s`. Executors ignore it."""

    job_id: WorkloadId
    finish_s: float


class DrainNode(_Action, frozen=True, kw_only=True):
    """Start no workload on the node that `pool` does not admit; it is labelled for `pool` once it is free of them.

    With `is_reclaim` such workloads have to leave the node, by force when their grace is over; without it they may stay
    as long as the plan lets them. `cost_s` is the policy's estimate of what leaving costs, in device-seconds.
    """

    node_id: NodeId
    pool: Pool
    is_reclaim: bool = False
    cost_s: float = 0.0


class LabelNode(_Action, frozen=True, kw_only=True):
    """Label the node for `pool`; with the label that it already has, this cancels its drain."""

    node_id: NodeId
    pool: Pool


Action = StartReplica | StopReplica | ResizeJob | PreemptJob | SetShare | EndJob | AdmitJob | DrainNode | LabelNode
