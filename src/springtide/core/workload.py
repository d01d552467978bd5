"""What people hand over: training jobs and inference services, and the goals they come with."""

from __future__ import annotations

import enum
from typing import Literal, NewType

import msgspec

WorkloadId = NewType("WorkloadId", str)
ReplicaId = NewType("ReplicaId", str)

MAX_VIRTUAL_SHARDS = 256
DEFAULT_GRACE_S = 15.0


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner wants. `deadline_s` is absolute, on the platform's clock; None means as fast as is sensible.

    A soft deadline is no condition: the job runs, late if it must. `waits` says that a job that cannot be promised
    its deadline now stays in line while the deadline still stands; otherwise it is refused at once.
    """

    deadline_s: float | None = None
    budget_usd: float | None = None
    is_soft: bool = False
    waits: bool = False

    @property
    def is_hard(self) -> bool:
        """Whether there is a deadline that has to be promised before the job may run."""
        return self.deadline_s is not None and not self.is_soft


class Entrypoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where the user's code is: a snapshot of the source file, so that later edits never reach a running job.

    kind `function`: `object_name` is called with a TrainContext. `class`: it is a served class.
    `script`: the whole file runs as `__main__` under torchrun's variables with `args`.
    """

    source_path: str
    object_name: str = ""
    kind: Literal["function", "class", "script"] = "function"
    args: tuple[str, ...] = ()
    import_root: str = ""


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True, tag_field="workload", tag="job"):
    """A training function with its length, its bounds and its goal. Never changes after submission.

    `num_virtual_shards` (a power of two, at least `max_workers`) fixes the order in which gradients are reduced
    and owns the random-number streams, so that the number of workers never shows in the result.

    `total_steps` is the job's length where it is known before it runs. `profile_steps_per_s` maps a number of
    workers to optimizer steps a second measured before it ran (compact placement, `global_batch_size` held); empty:
    nothing is known. `requested_workers` is what its owner would have asked for on a platform that does not choose.
    """

    job_id: WorkloadId
    name: str
    entrypoint: Entrypoint
    global_batch_size: int = 32
    num_epochs: int = 1
    min_workers: int = 1
    max_workers: int = 1
    num_virtual_shards: int = 4
    elastic: bool = True
    goal: Goal = Goal()
    seed: int = 0
    max_restarts: int = 3
    grace_s: float = DEFAULT_GRACE_S
    checkpoint_interval_s: float = 30.0
    submit_key: str = ""
    params: dict[str, str] = {}
    owner: str = ""
    total_steps: int | None = None
    profile_steps_per_s: dict[int, float] = {}
    requested_workers: int | None = None


class InferenceService(msgspec.Struct, frozen=True, kw_only=True, tag_field="workload", tag="service"):
    """An inference function with its objective and its bounds. A changed service is a new `revision`."""

    service_id: WorkloadId
    name: str
    entrypoint: Entrypoint
    slo_s: float | None = None
    min_replicas: int = 0
    max_replicas: int = 1
    max_batch_size: int = 8
    batch_wait_s: float = 0.005
    max_queue: int = 256
    target_in_flight: int = 8
    idle_s: float = 30.0
    grace_s: float = DEFAULT_GRACE_S
    revision: int = 1
    params: dict[str, str] = {}


class JobState(enum.StrEnum):
    """Where a job is. The last four are terminal: a job enters exactly one of them, once."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PREEMPTING = "PREEMPTING"
    PAUSED = "PAUSED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    REJECTED = "REJECTED"

    @property
    def is_terminal(self) -> bool:
        """Whether a job in this state has ended for good."""
        return self in _TERMINAL


_TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.REJECTED})


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A committed, durable state of a job: `step` optimizer steps are in it."""

    generation: int
    step: int
    path: str
    num_bytes: int = 0
