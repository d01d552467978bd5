"""What users submit: training jobs and inference services, with their goals."""

from __future__ import annotations

import enum
from typing import Literal, NewType

import msgspec

from springtide.core.containers import ContainerSettings
from springtide.core.function_search import BatchPhase, FunctionSearch
from springtide.core.functions import FunctionMenu
from springtide.core.shares import Share

WorkloadId = NewType("WorkloadId", str)
ReplicaId = NewType("ReplicaId", str)

MAX_VIRTUAL_SHARDS = 256
DEFAULT_GRACE_S = 15.0
# How many devices of one node a worker or replica may hold.
DEVICES_EACH = (1, 2, 4, 8)
# How many jobs and services of one owner may be unfinished, unless the platform's settings say otherwise.
MAX_UNFINISHED = 1000
# What the body of one call of a service may have at most; as base64 it still fits a frame of 16 MiB to a replica.
MAX_BODY_MIB = 8
# Calls that one replica may work on at a time.
MAX_CONCURRENCY = 1024
# How many services the code of one may call.
MAX_CALLED_SERVICES = 64


# How the learning rate follows the batch: in proportion, by the root, by AdaScale's gain, or not at all.
LearningRateRule = Literal["linear", "sqrt", "adascale", "none"]
# The unit of a job's length: samples seen, or progress, of which a sample in a larger batch brings less.
LengthUnit = Literal["samples", "progress"]
LEAST_SHARDS = 4
# What happens to a job that goes without a step for too long.
OnStall = Literal["report", "restart", "fail"]
# What happens to a job whose loss is NaN or infinite.
OnNan = Literal["report", "fail"]


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """The owner's goal. `deadline_s` is absolute, on the platform's clock; None means as fast as is sensible.

    A job with a soft deadline also runs if it will be late. `waits` says that a job whose deadline cannot be promised
    now stays queued as long as the deadline can still be met; otherwise it is refused at once. `is_fastest` asks for
    the shortest time, within the budget if there is one.
    """

    deadline_s: float | None = None
    budget_usd: float | None = None
    is_soft: bool = False
    waits: bool = False
    is_fastest: bool = False

    @property
    def is_hard(self) -> bool:
        """Whether there is a deadline that has to be promised before the job may run."""
        return self.deadline_s is not None and not self.is_soft


class JobFolder(msgspec.Struct, frozen=True, kw_only=True):
    """The folder that was submitted with a workload, which has copies of its own (storage/folders/).

    A job has one, or one in each pod; of a service each replica has one. `sha256` is the digest of its list of files,
    `path` the workload's file in it, `directory` the one in it where it works (empty: the folder itself). `origin` is
    the path that it had where it was submitted; only people read that.
    """

    sha256: str
    path: str
    directory: str = ""
    origin: str = ""
    num_files: int = 0
    num_bytes: int = 0


# Libraries whose loops are elastic without a change of the program: Lightning, the Trainer of transformers, and loops
# of a program's own by Accelerate. With "springtide" the script has a loop over what `springtide.adopt` returns.
Library = Literal["", "lightning", "transformers", "accelerate", "springtide"]


class Entrypoint(msgspec.Struct, frozen=True, kw_only=True):
    """The user's code: a snapshot of the source file, so that later edits do not affect a running job.

    kind `function`: the function `object_name` is called with a TrainContext. `class`: `object_name` is a served class.
    `script`: the whole file runs as `__main__`, with torchrun's environment variables and `args`. With a `library` that
    runs its loop, it is elastic like a function, and gets no such variables, or ("springtide") those of one worker
    alone; empty: its loop is its own.
    With a `folder` the file is in the workload's copy of it, where the code also works, though `source_path` is not
    that of a copy which replicas and pods make for themselves; without one, as in earlier releases, the file is alone
    and its neighbours are imported from `import_root`.
    """

    source_path: str
    object_name: str = ""
    kind: Literal["function", "class", "script"] = "function"
    args: tuple[str, ...] = ()
    import_root: str = ""
    folder: JobFolder | None = None
    library: Library = ""

    @property
    def is_plain_script(self) -> bool:
        """Whether its loop is its own: it has a fixed number of workers, and says what it likes of its steps."""
        return self.kind == "script" and not self.library

    @property
    def has_library_loop(self) -> bool:
        """Whether a library runs its loop, with samples, passes and updates of its own."""
        return self.library not in ("", "springtide")


class AdaptiveBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds within which a policy may choose a job's global batch size; a job without them keeps its batch size.

    `min_size` and `max_size` are samples per step, over all workers. `max_local_size` is the most samples of one pass
    (forward and backward) of a worker, `min_local_size` the fewest that are efficient; a worker with more than
    `max_local_size` samples accumulates gradients over several passes. `learning_rate` says how the rate follows the
    batch.
    """

    min_size: int
    max_size: int
    min_local_size: int = 1
    max_local_size: int | None = None
    learning_rate: LearningRateRule = "linear"


class GradientBucket(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the gradient that is exchanged as a unit: its size, and when it is ready, from the step's start."""

    ready_s: float
    num_bytes: int


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One step's computation as profiled on two workers with `local_batch_size` samples each (FaPES, section 4.1).

    The step consists of `forward_s`, `backward_s` and `update_s`; `buckets` are in the order in which they are ready.
    Computation is assumed to be proportional to the local batch.
    """

    local_batch_size: int
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    buckets: tuple[GradientBucket, ...] = ()


# What a speed rests on before the job runs: its request, runs on as many workers, or a curve through runs.
SpeedBasis = Literal["declared", "measured", "fitted"]


class SpeedBelief(msgspec.Struct, frozen=True, kw_only=True):
    """What the speeds of a job's profile rest on, and how much slower they are than what is expected.

    `slower` is that factor by number of workers: of those that were measured, and under 0 of all others.
    """

    is_declared: bool = False
    slower: dict[int, float] = {}

    def basis(self, num_workers: int) -> SpeedBasis:
        """What the speed on so many workers rests on."""
        if self.is_declared:
            return "declared"
        return "measured" if num_workers and num_workers in self.slower else "fitted"

    def factor(self, num_workers: int) -> float:
        """By which factor a run on so many workers is planned longer than it is expected to take."""
        return self.slower.get(num_workers, self.slower.get(0, 1.0))


class SecretSet(msgspec.Struct, frozen=True, kw_only=True):
    """Secret variables of a workload's environment. Their values are where `reference` says (storage/secrets.py)."""

    names: tuple[str, ...]
    reference: str


class Packages(msgspec.Struct, frozen=True, kw_only=True):
    """An environment of a workload's own, with `requirements` (lines as pip reads them) beside the platform's packages.

    `python` is its interpreter (empty: the platform's), whose packages it has, too.
    """

    requirements: tuple[str, ...] = ()
    python: str = ""


class MachineRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a job did on machines before it moved to functions: how many steps these go on from, and what it cost."""

    step: int
    cost_usd: float


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True, tag_field="workload", tag="job"):
    """A training function with its length, its bounds and its goal. Immutable after submission, except for its goal
    and its restart budget, which its owner may change, and for its place: a move to functions gives it a menu.

    `num_virtual_shards` is a power of two and the most workers that it can have. Of an `exact` job it fixes the order
    in which gradients are reduced and the random-number streams, so that the result does not depend on the number of
    workers; without the field, as in earlier releases, a job is exact. Any other job makes one pass over each worker's
    part of a batch: the same sequence of groups gives the same bits.

    `total_steps` is the job's length, if it is known before the job runs. `profile_steps_per_s` maps a number of
    workers to optimizer steps a second, measured before the job ran (compact placement, at `global_batch_size`); empty
    if nothing is known. `profiles` has the same by model of device (`Device.accelerator`), where it is known on which
    model it was measured. `batch` lets policies choose the global batch size while the job runs; `global_batch_size` is
    then the initial one, and length and progress are counted in steps of that size (`length_unit`: by samples seen, or
    by scale-invariant progress, where a step on a larger batch counts as its gain; Pollux, section 3.1).
    `belief` says what that profile rests on, if the job is to show how far off it was; its speeds are so slow that a
    plan with them keeps the deadline with the probability `confidence` (None: as slow as is usual).
    `family` names a group of jobs with the same model: what was measured of one is expected of the next. A platform
    names it by the first job of it and, after a dash, by the digest of what its jobs run.
    `step_profile` is the timeline of a step, if one was profiled.
    `requested_workers` is the number that the owner would have requested on a platform that does not choose it.
    `menu` is set for a job that runs on a function service: the ways to run it there. With `search` the number of
    workers and their memory are searched for while the job runs, starting from the menu.
    `batch_schedule` changes the global batch with the epoch (on functions); `num_samples` is the length of the dataset,
    if it is known. `place_reason` says why it was sent to machines or to functions, if its owner left that to the
    platform, or why it has moved; `machine_run` is set if it has.
    `stream` names the growing dataset that the job trains on, each sample once, until it is closed.
    `study` names the search over jobs that the job is a trial of. `share` is what each worker holds of a device
    (None: the whole). `container` holds the settings of its pods, on Kubernetes.
    `env` are variables of its workers' environment, `secrets` those whose values are kept elsewhere.
    With `packages` its workers run in an environment of its own. Each worker holds `devices_each` devices of one node
    (1, 2, 4 or 8), or `share` of each.
    The job counts as stalled after `stall_timeout_s` without a step (None: as the platform finds sensible for it; 0: it
    is not watched), and `on_stall` says what happens then. It is started again when its first step has not come within
    `start_timeout_s` of its start (0: it may take any time). `on_nan` says what happens when its loss is not a finite
    number.
    """

    job_id: WorkloadId
    name: str
    entrypoint: Entrypoint
    global_batch_size: int = 32
    num_epochs: int = 1
    min_workers: int = 1
    max_workers: int = 1
    num_virtual_shards: int = 4
    exact: bool = True
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
    profiles: dict[str, dict[int, float]] = {}
    requested_workers: int | None = None
    batch: AdaptiveBatch | None = None
    length_unit: LengthUnit = "samples"
    family: str = ""
    step_profile: StepProfile | None = None
    menu: FunctionMenu | None = None
    search: FunctionSearch | None = None
    batch_schedule: tuple[BatchPhase, ...] = ()
    num_samples: int | None = None
    stream: str = ""
    study: str = ""
    share: Share | None = None
    container: ContainerSettings | None = None
    stall_timeout_s: float | None = 0.0
    on_stall: OnStall = "report"
    start_timeout_s: float = 0.0
    on_nan: OnNan = "report"
    belief: SpeedBelief | None = None
    confidence: float | None = None
    place_reason: str = ""
    env: dict[str, str] = {}
    secrets: SecretSet | None = None
    packages: Packages | None = None
    devices_each: int = 1
    machine_run: MachineRun | None = None

    @property
    def is_on_functions(self) -> bool:
        """Whether it runs on a function service instead of machines."""
        return self.menu is not None

    @property
    def is_script(self) -> bool:
        """Whether it is a plain script, which has a fixed number of workers and reports its steps only if it wants."""
        return self.entrypoint.is_plain_script

    @property
    def code(self) -> str:
        """The digest of what it runs, the end of its family's name; empty without a family."""
        return self.family.rpartition("-")[2]

    @property
    def has_own_batch(self) -> bool:
        """Whether how many samples a step has is the program's own matter, as in every script."""
        return self.entrypoint.kind == "script"


class InferenceService(msgspec.Struct, frozen=True, kw_only=True, tag_field="workload", tag="service"):
    """An inference function with its objective and its bounds. A changed service gets a new `revision`.

    `share` is what each replica holds of a device (None: the whole). `capacity_per_s` is how many requests a second one
    replica answers within the objective at the limit of its share, as profiled (None: not known). With it the number of
    replicas follows the co-scaler (serving/co_scaler.py) instead of the number of concurrent requests.
    `container` holds the settings of its pods, on Kubernetes. A replica that is not ready within `start_timeout_s` of
    its start is ended (0: it may take any time). `env`, `secrets` and `packages` are as in TrainingJob. Each replica
    holds `share` of `devices_each` devices of one node (1, 2, 4 or 8; without a share always 1). The body of one call
    has at most `max_body_mib` MiB. `concurrency` is how many calls a replica works on at a time (None: 1, and 64 where
    `predict` is async). Its code may call the services `calls`.
    """

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
    share: Share | None = None
    capacity_per_s: float | None = None
    container: ContainerSettings | None = None
    start_timeout_s: float = 0.0
    env: dict[str, str] = {}
    secrets: SecretSet | None = None
    packages: Packages | None = None
    devices_each: int = 1
    max_body_mib: int = 1
    concurrency: int | None = None
    calls: tuple[str, ...] = ()


class WatchRule(msgspec.Struct, frozen=True, kw_only=True):
    """At most `limit` (above 0, below 1) of the requests may be faults: answered with an error, or, where `over_s` is
    set, not answered well within so many seconds. `text` is how it was written.
    """

    text: str
    limit: float
    over_s: float | None = None


class ReleaseTerms(msgspec.Struct, frozen=True, kw_only=True):
    """How a new revision of a service gets its requests.

    `canary` is the fraction of the requests that it gets first (0: all as soon as it is ready), for at most
    `watch_for_s` seconds (0: until its owner decides), by which its faults are judged against the rules `watch`. Where
    no device is free beside the present revision it waits for one; with `stop_first` the present one gives way.
    """

    canary: float = 0.0
    watch: tuple[WatchRule, ...] = ()
    watch_for_s: float = 600.0
    stop_first: bool = False


def replicas_for(service: InferenceService, demand: int, minimum: int, maximum: int) -> int:
    """How many replicas a service needs for `demand` requests in flight or queued, between the bounds in force."""
    return max(minimum, min(maximum, -(-demand // service.target_in_flight)))


class JobState(enum.StrEnum):
    """The state of a job. The last four are terminal: a job enters exactly one of them, once."""

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
    """A committed, durable state of a job after `step` optimizer steps."""

    generation: int
    step: int
    path: str
    num_bytes: int = 0


def shards_for(max_workers: int, batch: AdaptiveBatch | None = None, *, least: int = LEAST_SHARDS) -> int:
    """Return the number of virtual shards: the smallest power of two that is at least `least` and `max_workers`.

    A shard is one forward and backward pass. So with a `max_local_size` there are also enough of them that no shard of
    the largest batch is larger.
    """
    needed = max(least, max_workers)
    if batch is not None and batch.max_local_size is not None:
        needed = max(needed, -(-batch.max_size // batch.max_local_size))
    return 1 << (needed - 1).bit_length()
