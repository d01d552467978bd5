"""What users see: the shapes that the REST API answers with and the client decodes. Scripts depend on them.

Times named `_at_s` are on the platform's clock; `PlatformStatus.now_s` is that clock's present, and
`wall_clock_offset_s` turns it into Unix time.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from springtide.core.decision import PromiseCondition
from springtide.core.function_search import BatchPhase
from springtide.core.shares import Share
from springtide.core.status.admission import AdmissionStatus
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.status.pods import ClusterStatus, PodStatus
from springtide.core.status.pools import LoanInterval, NodeStatus, PoolStatus
from springtide.core.status.revisions import RevisionStatus
from springtide.core.status.search import SearchStatus, StreamStatus


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process. `share` is what it holds of its device (None: the whole).

    `phases_s` is what its start was made of, in order: seconds by phase (`schedule`, `spawn`, `import`, `load`).
    `more_devices` are those of its node that it holds beside `device_id`.
    `device_seen` is the name of the GPU that it found, which on Kubernetes the device plugin may have chosen.
    """

    replica_id: str
    device_id: str
    state: str
    rank: int | None
    started_at_s: float
    share: Share | None = None
    phases_s: dict[str, float] = {}
    device_seen: str = ""
    more_devices: tuple[str, ...] = ()


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A training job. `eta_s` is the predicted time left, `slack_s` what is left of the deadline after it.

    `resize_pause_s` holds the newest pause of each direction (grow, shrink, replace, recover): from the end of the
    last step before the change to the start of the first step after it. `is_promised` says that its deadline is;
    `given_up_at_s` since when that is missed by the plan for it, if it is; `promised_if` what a promise waits for where
    its speed was not known. The planned moments are those of a policy that plans ahead. `cost_usd` is what its
    device-seconds have cost so far.

    `is_diverged`: the newest loss is NaN or infinite, and `loss` None. `global_batch_size` is what a step is made
    of now, `initial_batch_size` what it began with, and `batch_bounds` what it may become (None: it never changes,
    and all below is None). `progress` of `total_progress` counts in steps of the initial batch. `noise_scale` is in
    samples; `efficiency_fraction` is what a sample brings against one in a batch of the initial size, and
    `goodput_samples_per_s` the speed times that.

    `on` names the function service that it runs at ("": the platform's machines), `functions` what fills its places,
    `place_reason` why it runs there, if that was left to the platform.
    `search` is set where its configuration is searched for, `stream` where its dataset grows. `batch_schedule` says
    from which epoch on a step has how many samples, `study` which search over jobs it is a trial of. `share` is what
    each of its workers is to hold of a device (None: the whole), `enforced` what enforces that, `devices_each` how many
    devices each holds. `pods` are those of its
    replicas, on Kubernetes. `resize_reason` is the part of `reason` that says why the number of
    workers changed; empty where `reason` is about something else. `stalled_since_s` is when the last step was seen of a
    job that has gone without one for too long; None for others. `env` and `secrets` name the variables that its
    owner has set; their values are not told. `packages` and `python` are the requirements and the interpreter of an
    environment of its own. `folder` is where the folder was that travelled with it, `directory` where in its copy of
    that it works on the platform's machine; empty where there is none there. `library` is the library that runs a
    script's loop, which is then elastic; empty for others. `exact_passes` says why a step of an exact job takes several
    passes, and what it costs, once its workers have told.
    """

    job_id: str
    name: str
    kind: Literal["function", "script"]
    state: str
    reason: str
    submitted_at_s: float
    started_at_s: float | None
    ended_at_s: float | None
    deadline_at_s: float | None
    budget_usd: float | None
    min_workers: int
    max_workers: int
    num_workers: int
    global_batch_size: int
    generation: int
    step: int
    total_steps: int | None
    progress_fraction: float | None
    epoch: int
    num_epochs: int
    loss: float | None
    metrics: dict[str, float]
    samples_per_s: float | None
    eta_s: float | None
    slack_s: float | None
    num_resizes: int
    num_restarts: int
    num_preemptions: int
    last_pause_s: float | None
    resize_pause_s: dict[str, float]
    checkpoint_step: int | None
    artifact_path: str
    device_seconds: float
    alternatives: tuple[str, ...]
    replicas: tuple[ReplicaStatus, ...]
    is_promised: bool = False
    given_up_at_s: float | None = None
    promised_if: PromiseCondition | None = None
    planned_start_at_s: float | None = None
    planned_finish_at_s: float | None = None
    cost_usd: float | None = None
    initial_batch_size: int | None = None
    batch_bounds: tuple[int, int] | None = None
    progress: float | None = None
    total_progress: float | None = None
    noise_scale: float | None = None
    efficiency_fraction: float | None = None
    goodput_samples_per_s: float | None = None
    learning_rate_factor: float | None = None
    is_diverged: bool = False
    on: str = ""
    place_reason: str = ""
    functions: FunctionRunStatus | None = None
    search: SearchStatus | None = None
    stream: StreamStatus | None = None
    batch_schedule: tuple[BatchPhase, ...] = ()
    study: str = ""
    is_fastest: bool = False
    share: Share | None = None
    enforced: str = ""
    pods: tuple[PodStatus, ...] = ()
    resize_reason: str = ""
    stalled_since_s: float | None = None
    env: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    python: str = ""
    folder: str = ""
    directory: str = ""
    library: str = ""
    devices_each: int = 1
    exact_passes: str = ""

    @property
    def is_plain_script(self) -> bool:
        """Whether it is a script whose loop is its own: its steps are known only if it reports them."""
        return self.kind == "script" and not self.library

    @property
    def has_steps(self) -> bool:
        """Whether its steps are known: those of a plain script are once it has reported one."""
        return not self.is_plain_script or self.step > 0


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An inference service. `share`, `enforced`, `pods`, `env`, `secrets`, `packages` and `python` are as in JobStatus.

    `folder` is where the folder was, of which each replica works in a copy of its own (empty: it has none).
    `capacity_per_s` is what one replica answers within the objective, `wanted_replicas` how many the co-scaler wants
    by it. `cold_start_s` is what the newest start was made of: seconds by phase (`schedule`, `spawn`, `import`, `load`
    of the replica, and `first_answer`, from ready to the first answer that went out). `rolled_back` says which version
    was given up for the one before it, and why; `old_revision` is the one whose replicas those of `revision` replace,
    and `releasing` a newer one that does not get all requests yet, `revisions` all that it knows. Each replica holds
    `share` of `devices_each` devices. `admission` says which requests the gateway refuses (None: it knows nothing yet).
    `next_request` says what the next request would wait for, if there is no replica and it would; only where one
    service is asked about.
    """

    service_id: str
    name: str
    state: str
    reason: str
    deployed_at_s: float
    revision: int
    min_replicas: int
    max_replicas: int
    num_ready: int
    num_starting: int
    slo_s: float | None
    arrivals_per_s: float
    in_flight: int
    queued: int
    latency_p50_s: float | None
    latency_p99_s: float | None
    device_seconds: float
    url: str
    replicas: tuple[ReplicaStatus, ...]
    share: Share | None = None
    enforced: str = ""
    capacity_per_s: float | None = None
    wanted_replicas: int | None = None
    cold_start_s: dict[str, float] = {}
    pods: tuple[PodStatus, ...] = ()
    rolled_back: str = ""
    old_revision: int | None = None
    releasing: int | None = None
    revisions: tuple[RevisionStatus, ...] = ()
    env: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    python: str = ""
    folder: str = ""
    devices_each: int = 1
    admission: AdmissionStatus | None = None
    next_request: str = ""


class DeviceHolder(msgspec.Struct, frozen=True, kw_only=True):
    """One of the replicas that share a device, and what it holds of it."""

    workload_id: str
    workload_name: str
    replica_id: str
    share: Share


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One device and its holder; where it is shared, `holders` are all and the other fields describe the first."""

    device_id: str
    node_id: str
    kind: str
    accelerator: str = ""
    workload_id: str | None
    workload_name: str | None
    replica_id: str | None
    holders: tuple[DeviceHolder, ...] = ()


class PlatformStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The whole platform at one instant, after journal step `seq`.

    `pools` and `nodes` are empty where no node belongs to one kind of workload, `cluster` is set on Kubernetes.
    `trouble` says why no decisions are made now, so that what is shown may stay as it is; it is empty while they are.
    `restarted` says for some minutes how the control plane before this one died. `clock` says what is wrong with the
    machine's wall clock and what follows, and is empty if nothing is. `num_older` jobs that have ended are not among
    `jobs`; the list of all jobs has the newest of them.
    """

    version: str
    policy: str
    seq: int
    now_s: float
    wall_clock_offset_s: float
    devices: tuple[DeviceStatus, ...]
    jobs: tuple[JobStatus, ...]
    services: tuple[ServiceStatus, ...]
    pools: tuple[PoolStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
    cluster: ClusterStatus | None = None
    trouble: str = ""
    restarted: str = ""
    clock: str = ""
    num_older: int = 0


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a workload's history, from the journal.

    `num_workers` is how many workers a job on machines has from then on, where a group has formed.
    """

    seq: int
    at_s: float
    kind: str
    text: str
    num_workers: int | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `why`: the one dominant reason, what it rests on, and what could be done.

    `expected_start_at_s` is when a job that waits is planned to start, `expected_finish_at_s` when an unfinished one is
    planned to end; None where that is not known. `device_second_worth_s` is how many seconds all jobs together save by
    one more second of the last device that was given out (0.0: devices are idle); None if the policy has no prices.
    """

    workload_id: str
    name: str
    state: str
    reason: str
    evidence: tuple[str, ...]
    next_steps: tuple[str, ...]
    history: tuple[HistoryEntry, ...]
    expected_start_at_s: float | None = None
    expected_finish_at_s: float | None = None
    device_second_worth_s: float | None = None


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A device held by one workload from start to end (None: still held): a bar of the timeline.

    `more_devices` is empty in what is told: each device of a worker has a bar.
    """

    device_id: str
    workload_id: str
    workload_name: str
    workload_kind: Literal["job", "service"]
    replica_id: str
    start_s: float
    end_s: float | None
    more_devices: tuple[str, ...] = ()

    def by_device(self, until_s: float | None = None) -> tuple[Interval, ...]:
        """One for each of the devices, until then."""
        devices = (self.device_id, *self.more_devices)
        return tuple([replace(self, device_id=device_id, more_devices=(), end_s=until_s) for device_id in devices])


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that a policy plans to give a job from start to end, both in the future."""

    workload_id: str
    workload_name: str
    num_devices: int
    start_s: float
    end_s: float


class ProgressPoint(msgspec.Struct, frozen=True, kw_only=True):
    """How far a job's training had come at one moment; what was not known then is None.

    `predicted_finish_at_s` is what its policy planned at that moment, or else what followed from its speed; the rest is
    as in JobStatus. Of a job on functions `num_workers` are its functions, `memory_mb` is what all of them have
    together, and `cost_usd` what it had cost so far. Of many `metrics` the first by name are kept.
    """

    at_s: float
    step: int
    progress_fraction: float | None = None
    num_workers: int = 0
    global_batch_size: int = 0
    samples_per_s: float | None = None
    goodput_samples_per_s: float | None = None
    noise_scale: float | None = None
    predicted_finish_at_s: float | None = None
    loss: float | None = None
    memory_mb: int | None = None
    cost_usd: float | None = None
    metrics: dict[str, float] = {}


class ProgressSeries(msgspec.Struct, frozen=True, kw_only=True):
    """A job's training over time, the oldest point first; long ones are thinned out evenly."""

    job_id: str
    now_s: float
    points: tuple[ProgressPoint, ...]


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A moment that the timeline marks: a resize with its pause, a crash, a deadline, an end; of a node (then
    `workload_id` is empty) a loan or a reclaim."""

    at_s: float
    workload_id: str
    kind: str
    text: str
    node_id: str = ""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Which workload held which device when, from the journal; `planned` is what a policy that plans ahead intends.

    `loans` says when which node was labelled for another pool than the one that owns it.
    """

    now_s: float
    intervals: tuple[Interval, ...]
    marks: tuple[Mark, ...]
    planned: tuple[Planned, ...] = ()
    loans: tuple[LoanInterval, ...] = ()
