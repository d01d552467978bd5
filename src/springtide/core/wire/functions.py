"""The messages between a job's coordinator and its functions. They have no connection: all of it is objects in a store.

Everything of a job lies under one prefix. What belongs to one attempt at a step carries the job's generation and the
attempt in its key, so that a late writer of an older attempt is never read. Functions are addressed by (stage,
replica); `incarnation` counts the functions that have filled that place, and only the one that the control record names
may go on.

    control                         ControlRecord, overwritten by the coordinator alone
    notes                           its notes for the coordinator that follows it, maybe on another machine (JSON)
    job, bundle                     TrainingJob (JSON), which code artifact is the user's code (JSON)
    reports/S.R.I                   FunctionReport, overwritten by that function alone
    state/STEP/S                    what stage S is after STEP committed steps (safetensors), by one of its replicas
    state/STEP/S.meta               StageState (JSON), written after the tensors: it makes them count
    wire/G.A/STEP/...               activations, gradients and parts of gradients on their way
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from springtide.core.functions import FunctionPlan, Usage
from springtide.core.workload import WorkloadId

# An invocation's payload is small on every provider: everything large is in the store.
MAX_ORDER_BYTES = 64 * 1024
MAX_RECORD_BYTES = 1 << 20
MAX_LOSSES = 256
Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]


class Place(msgspec.Struct, frozen=True, order=True):
    """Which part of the work: stage and replica, both from 0."""

    stage: int
    replica: int

    def __str__(self) -> str:
        """As in keys: S.R."""
        return f"{self.stage}.{self.replica}"


class FunctionOrder(msgspec.Struct, frozen=True, kw_only=True, tag_field="order", tag="train"):
    """An invocation's payload (JSON): fill a place until the work is done or the lifetime is nearly over.

    `restore_step` is the state to begin from (0: the model as it is built). A successor warms up first and then waits
    until the incarnation before it, `follows`, has left. With `plan` it is called for a plan that is to follow the
    present one: it warms up for that and then waits until the control record names it.
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
    """An invocation's payload: time the layers of the job's model where this function runs, and return the figures."""

    job_id: WorkloadId
    store_url: str
    prefix: str
    micro_batch_size: int
    num_rounds: int = 5


Order = FunctionOrder | ProfileOrder


class Upcoming(msgspec.Struct, frozen=True, kw_only=True):
    """The plan that is to follow the present one: those that are to join for it, by "S.R", may warm up and wait."""

    plan: FunctionPlan
    joiners: dict[str, int] = {}


class ControlRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for every function. A new attempt means: leave what you wait for, take the state of `restore_step`,
    redo.

    `incarnations` (by "S.R") are those that may write; `last_step`, where it is set, is the step after which each
    function saves its state and returns. States are saved after every `save_every` steps, by the replica whose turn it
    is. `verb` "stop" means: return at once, write nothing more.

    With `upcoming` a function that comes to `last_step` does not return but waits there for the next attempt: its
    record has the new plan, and says which functions go on. Functions of generations before `stays_from` may not (None:
    of none before). `num_available` is how much of the job's stream may be used; with `is_stream_closed` that is all
    there will ever be. It grows within an attempt until `last_step` is set: a function that then lacks samples for a
    step ends where it stands. `parameter_url` is the store through which replicas exchange in this attempt (empty: the
    one of their orders). `term` numbers the control planes where several may lead one after the other (0: there is only
    one): a record of a later term is not replaced by one of an earlier. Functions do not look at it.
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
    """Where the time of the newest step went (FuncPipe, figure 6): seconds of each lane's work, and of waiting.

    `forward_s` and `backward_s` are computation; `upload_s` and `download_s` carry activations and their gradients;
    `sync_s` is the exchange among replicas, `update_s` the optimizer, `save_s` the state's way to the store. Lanes
    overlap: `step_s` is less than the sum. `flush_s` is the part of the step in which this function did not compute
    and did not synchronise.
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

    The first step after a begin is left out. `step_s` runs from commit to commit, with all that lies between but for
    waits for samples that have not arrived; `step_sqr` sums its squares. `compute_s` is forward, backward and update.
    """

    global_batch_size: int = 0
    gradient_bytes: int = 0
    num_steps: int = 0
    step_s: float = 0.0
    step_sqr: float = 0.0
    compute_s: float = 0.0
    sync_s: float = 0.0


# "parked": at the boundary where another plan follows. "waiting": for samples of a stream. "stuck": what travels does
# not, so a new attempt is waited for.
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


# What failed in a function: the user's code, a store or a peer (which may answer another one), or data that is gone
# for good. Empty: it does not say.
ErrorCode = Literal["", "user_code", "store", "data"]


class FunctionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one function has to say, newest state first; each overwrites the one before.

    `step` steps are committed, `saved_step` is the newest state whose meta record it has written (None: none by it).
    `losses` are the newest (step, mean loss over its own samples, number of samples), from the last stage only;
    `ids_digest` chains the sample ids of every committed step, from the first stage's replicas only. `num_samples` is
    what this place has worked off in all. `memory_bytes` is the most it has held. `usage` counts this incarnation's
    requests (function time is the provider's to say). `totals` measure its newest steps; `pause_s` is how long it stood
    still between its last step before the present attempt and the first one in it (0: it was not there before).
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
    losses: tuple[tuple[int, Finite, int], ...] = ()
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
    """Makes a stage's saved tensors count: what they are, and the digest of their bytes."""

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
    """What an invocation of a FunctionOrder returns (JSON). "left" means: its lifetime was nearly over, state saved."""

    stage: int
    replica: int
    incarnation: int
    outcome: Literal["left", "finished", "stopped", "superseded", "failed"]
    step: int = 0
    error: str = ""
    usage: Usage = Usage()
    error_code: ErrorCode = ""


class Keys:
    """The names of a job's objects, relative to nothing: with the prefix in front. Cheap; holds no state."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.rstrip("/")
        self.control = f"{self.prefix}/control"
        self.notes = f"{self.prefix}/notes"
        self.job = f"{self.prefix}/job"
        self.bundle = f"{self.prefix}/bundle"
        self.artifact = f"{self.prefix}/artifact/model.safetensors"

    def report(self, place: Place, incarnation: int) -> str:
        """Where that function reports."""
        return f"{self.prefix}/reports/{place}.{incarnation}"

    def state(self, step: int, stage: int) -> str:
        """The tensors of a stage after `step` steps."""
        return f"{self.prefix}/state/{step:09d}/{stage}"

    def state_meta(self, step: int, stage: int) -> str:
        """The record that makes them count."""
        return f"{self.state(step, stage)}.meta"

    def wire(self, generation: int, attempt: int, step: int) -> str:
        """The prefix of everything that travels in one attempt at a step."""
        return f"{self.prefix}/wire/{generation}.{attempt}/{step:09d}"

    def left(self, place: Place, incarnation: int) -> str:
        """Written by an incarnation that has left for its successor: the step it stopped after, its losses, as JSON."""
        return f"{self.prefix}/left/{place}.{incarnation}"
