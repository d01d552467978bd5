"""The messages between a job's coordinator and its functions. Without a connection: they are objects in a store.

All objects of a job have one prefix. The key of an object that belongs to one attempt at a step contains the job's
generation and the attempt, so that objects of a late writer from an older attempt are never read. A function is
addressed by its place (stage, replica); `incarnation` counts the functions that have filled the place, and only the one
that the control record names may go on.

    control                         ControlRecord, written only by the coordinator
    notes                           the coordinator's notes for its successor, maybe on another machine (JSON)
    job, bundle                     TrainingJob (JSON), the name of the code artifact (JSON)
    reports/S.R.I                   FunctionReport, written only by that function
    state/STEP/S                    state of stage S after STEP committed steps (safetensors), by one of its replicas
    state/STEP/S.meta               StageState (JSON), written after the tensors; without it they do not count
    wire/G.A/STEP/...               activations, gradients and parts of gradients in transit
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from springtide.core.functions import FunctionPlan, Usage
from springtide.core.workload import WorkloadId

# Providers limit the payload of an invocation, so everything large is in the store.
MAX_ORDER_BYTES = 64 * 1024
MAX_RECORD_BYTES = 1 << 20
MAX_LOSSES = 256
Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
# Of a step: its number, its mean loss (None: NaN or infinite), the number of samples.
ReportedLoss = tuple[int, Finite | None, int]
# Functions of earlier versions report this for a loss that is not finite.
LARGEST_LOSS = 1e300


class Place(msgspec.Struct, frozen=True, order=True):
    """A function's place in the job: stage and replica, both from 0."""

    stage: int
    replica: int

    def __str__(self) -> str:
        """As in keys: `S.R`."""
        return f"{self.stage}.{self.replica}"


class FunctionOrder(msgspec.Struct, frozen=True, kw_only=True, tag_field="order", tag="train"):
    """An invocation's payload (JSON): fill a place until the work is done or the lifetime is nearly over.

    `restore_step` is the step of the state to start from (0: the model as built). A successor warms up and then waits
    until the previous incarnation, `follows`, has left. A function with a `plan` is invoked for a plan that is to
    follow the present one: it warms up for it and then waits until the control record names it.
    """

    job_id: WorkloadId
    store_url: str
    prefix: str
    generation: int
    attempt: int
    stage: int
    replica: int
    incarnation: int
    restore_step: int = 0
    parameter_url: str = ""
    is_successor: bool = False
    follows: int = -1
    plan: FunctionPlan | None = None


class ProfileOrder(msgspec.Struct, frozen=True, kw_only=True, tag_field="order", tag="profile"):
    """An invocation's payload: measure the layers of the job's model in this function, and return the times."""

    job_id: WorkloadId
    store_url: str
    prefix: str
    micro_batch_size: int
    num_rounds: int = 5


Order = FunctionOrder | ProfileOrder


class Upcoming(msgspec.Struct, frozen=True, kw_only=True):
    """The plan that is to follow the present one. `joiners` (incarnation by "S.R") may warm up for it and wait."""

    plan: FunctionPlan
    joiners: dict[str, int] = {}


class ControlRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's orders to all functions. In a new attempt, functions stop waiting, load the state of
    `restore_step` and go on from there.

    `incarnations` (by "S.R") are the functions that may write. After `last_step`, if it is set, each function saves its
    state and returns. States are saved every `save_every` steps, by the replicas in turn. `verb` "stop" means: return
    at once and write nothing more.

    With `upcoming` a function that reaches `last_step` does not return but waits there for the next attempt, whose
    record has the new plan and names the functions that go on. Functions of generations before `stays_from` may not go
    on (None: no earlier generation may). `num_available` is how many samples of the job's stream may be used; with
    `is_stream_closed` there will never be more. It grows within an attempt until `last_step` is set; a function that
    then lacks samples for a step ends where it is. `parameter_url` is the store for exchanges between replicas in this
    attempt (empty: that of their orders). `term` numbers the control planes, if several may lead one after the other
    (0: there is only one): a record of a later term is never replaced by one of an earlier term. Functions ignore it.
    """

    generation: int
    attempt: int
    restore_step: int
    plan: FunctionPlan
    incarnations: dict[str, int]
    last_step: int | None = None
    save_every: int = 1
    verb: Literal["run", "stop"] = "run"
    upcoming: Upcoming | None = None
    stays_from: int | None = None
    num_available: int | None = None
    is_stream_closed: bool = False
    parameter_url: str = ""
    term: int = 0


class LaneTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How the time of the newest step was spent (FuncPipe, figure 6), in seconds of work of each lane.

    `forward_s` and `backward_s` are computation, `upload_s` and `download_s` transfers of activations and their
    gradients, `sync_s` the exchange among replicas, `update_s` the optimizer, `save_s` the upload of the state. Lanes
    overlap, so `step_s` is less than the sum. `flush_s` is the part of the step in which this function neither computed
    nor synchronised.
    """

    step_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    upload_s: float = 0.0
    download_s: float = 0.0
    sync_s: float = 0.0
    update_s: float = 0.0
    save_s: float = 0.0
    flush_s: float = 0.0


class StepTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the `num_steps` newest steps of one place, all of one attempt, one batch size and one gradient size.

    The first step after a start is left out. `step_s` is the time from commit to commit, without waits for samples that
    have not arrived; `step_sqr` is the sum of its squares. `compute_s` is forward, backward and update.
    """

    global_batch_size: int = 0
    gradient_bytes: int = 0
    num_steps: int = 0
    step_s: float = 0.0
    step_sqr: float = 0.0
    compute_s: float = 0.0
    sync_s: float = 0.0


# "parked": waits at the boundary for the next plan. "waiting": for samples of a stream. "stuck": a transfer has failed,
# and the function waits for a new attempt.
Phase = Literal[
    "starting",
    "warm",
    "training",
    "waiting",
    "parked",
    "stuck",
    "leaving",
    "left",
    "finished",
    "stopped",
    "superseded",
    "failed",
]


# What failed in a function: the user's code, a store or a peer (another function may reach it), or data that is lost
# for good. Empty: not known.
ErrorCode = Literal["", "user_code", "store", "data"]


class FunctionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one function; each report overwrites the previous one.

    `step` steps are committed; `saved_step` is the newest state whose meta record this function has written (None: it
    has written none). `losses` are the newest (step, mean loss over its own samples, number of samples), from the last
    stage only; `ids_digest` chains the sample ids of every committed step, from the first stage's replicas only.
    `num_samples` is the total number of samples that this place has processed, `memory_bytes` its peak memory. `usage`
    counts this incarnation's requests (function time is on the provider's bill). `totals` are over its newest steps;
    `pause_s` is the time between its last step before the present attempt and its first step in it (0: it did not run
    before).
    """

    stage: int
    replica: int
    incarnation: int
    generation: int
    attempt: int
    phase: Phase
    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    global_batch_size: int = 0
    num_samples: int = 0
    saved_step: int | None = None
    losses: tuple[ReportedLoss, ...] = ()
    ids_digest: str = ""
    lanes: LaneTimes = LaneTimes()
    totals: StepTotals = StepTotals()
    pause_s: float = 0.0
    memory_bytes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    usage: Usage = Usage()
    metrics: dict[str, Finite] = {}
    error: str = ""
    error_code: ErrorCode = ""


class StageState(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a stage's saved tensors, with the digest of their bytes. Tensors without it do not count."""

    stage: int
    step: int
    num_seen: int
    key: str
    num_bytes: int
    sha256: str
    first_layer: int
    end_layer: int
    ids_digest: str = ""


class FunctionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an invocation of a FunctionOrder returns (JSON). "left": its lifetime was nearly over; state saved."""

    stage: int
    replica: int
    incarnation: int
    outcome: Literal["left", "finished", "stopped", "superseded", "failed"]
    step: int = 0
    error: str = ""
    usage: Usage = Usage()
    error_code: ErrorCode = ""


class ConversionOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of the platform's machine converts (JSON): a checkpoint in `work_dir`, to a state of functions.

    The job and its code are under `prefix` in the store already. The model has `num_layers` layers, as its menu says. A
    ConversionResult is written to `result_path`.
    """

    store_url: str
    prefix: str
    work_dir: str
    num_layers: int
    result_path: str


class ConversionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The step of the state that was written, with the digest of its sample ids; or why none was."""

    step: int = 0
    ids_digest: str = ""
    error: str = ""


class Keys:
    """The full keys of a job's objects, with the prefix in front."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.rstrip("/")
        self.control = f"{self.prefix}/control"
        self.notes = f"{self.prefix}/notes"
        self.job = f"{self.prefix}/job"
        self.bundle = f"{self.prefix}/bundle"
        self.artifact = f"{self.prefix}/artifact/model.safetensors"

    def report(self, place: Place, incarnation: int) -> str:
        """The key of that function's report."""
        return f"{self.prefix}/reports/{place}.{incarnation}"

    def state(self, step: int, stage: int) -> str:
        """The key of a stage's tensors after `step` steps."""
        return f"{self.prefix}/state/{step:09d}/{stage}"

    def state_meta(self, step: int, stage: int) -> str:
        """The key of the record that makes these tensors count."""
        return f"{self.state(step, stage)}.meta"

    def wire(self, generation: int, attempt: int, step: int) -> str:
        """The prefix of everything that is sent in one attempt at a step."""
        return f"{self.prefix}/wire/{generation}.{attempt}/{step:09d}"

    def left(self, place: Place, incarnation: int) -> str:
        """The key of what an incarnation leaves to its successor: the step it stopped after and its losses, as JSON."""
        return f"{self.prefix}/left/{place}.{incarnation}"
