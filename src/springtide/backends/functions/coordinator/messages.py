"""The stimuli (inputs) and orders (outputs) of a coordinator: plain values, so that tests can replay them."""

from __future__ import annotations

import msgspec

from springtide.backends.functions.provider import Outcome
from springtide.core.events import Event
from springtide.core.function_search import StreamView
from springtide.core.functions import FunctionPlan, Usage
from springtide.core.wire.functions import ControlRecord, FunctionOrder, FunctionReport, FunctionResult, Place


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    pass


# --- stimuli --------------------------------------------------------------------------------------------------------


class RunRequested(_Value, frozen=True, kw_only=True):
    """Run this plan as this generation, from the newest saved state (ResizeJob)."""

    generation: int
    plan: FunctionPlan


class PreemptRequested(_Value, frozen=True, kw_only=True):
    """Save at the next boundary and end every function, by force after `grace_s` (PreemptJob)."""

    generation: int
    grace_s: float


class StopRequested(_Value, frozen=True, kw_only=True):
    """End every function now, without saving; stop waiting for them after `grace_s` (StopReplica, EndJob)."""

    grace_s: float = 2.0


class BudgetChanged(_Value, frozen=True, kw_only=True):
    """The job's total budget has changed (None: no limit)."""

    budget_usd: float | None


class InvocationEnded(_Value, frozen=True, kw_only=True):
    """The provider reports the end of an invocation (provider.InvocationEnd). `duration_s` None: unknown.

    `number` is that of the Invoke, so that the late end of an earlier try is not mistaken for that of the newest.
    """

    number: int
    place: Place
    incarnation: int
    outcome: Outcome
    result: FunctionResult | None = None
    error: str = ""
    duration_s: float | None = 0.0
    max_memory_mb: int = 0
    retry_after_s: float | None = None

    @property
    def never_ran(self) -> bool:
        """Whether the provider refused it."""
        return self.outcome in ("throttled", "refused")


class ReportRead(_Value, frozen=True, kw_only=True):
    """A function's report was read; it may be the same as before."""

    report: FunctionReport


class StatesFound(_Value, frozen=True, kw_only=True):
    """Answer to FindStates `number`: the newest step whose state is complete in the store (0: none), and its bytes.

    `torn` are the keys of states of later steps.
    """

    number: int
    step: int
    num_bytes: int = 0
    torn: tuple[str, ...] = ()


class Assembled(_Value, frozen=True, kw_only=True):
    """The model's file is in the artifacts, or could not be made (`error`)."""

    path: str = ""
    error: str = ""


class StoreFailed(_Value, frozen=True, kw_only=True):
    """Requests to a store have failed for a while; `error` is a sentence with which and why."""

    error: str


class FencedOff(_Value, frozen=True, kw_only=True):
    """The store names a newer generation, or a later control plane: another coordinator owns the job."""


class TimePassed(_Value, frozen=True, kw_only=True):
    """Time has passed. `own` counts the coordinator's own requests to the stores so far.

    `parameter_store_s` is how long the job's parameter store has been up (None: that is not counted).
    """

    own: Usage = Usage()
    parameter_store_s: float | None = None


class StreamRead(_Value, frozen=True, kw_only=True):
    """The job's stream was read; `error` says why it can no longer be."""

    stream: StreamView | None = None
    error: str = ""


class ParameterStoreUp(_Value, frozen=True, kw_only=True):
    """The job's parameter store answers at this address."""

    url: str


class ParameterStoreLost(_Value, frozen=True, kw_only=True):
    """The job's parameter store does not answer any more; what it held is gone."""


Stimulus = (
    RunRequested
    | PreemptRequested
    | StopRequested
    | BudgetChanged
    | InvocationEnded
    | ReportRead
    | StatesFound
    | Assembled
    | StoreFailed
    | FencedOff
    | TimePassed
    | StreamRead
    | ParameterStoreUp
    | ParameterStoreLost
)


# --- orders ---------------------------------------------------------------------------------------------------------


class Invoke(_Value, frozen=True, kw_only=True):
    """Invoke a function of this memory with this order. Numbers are unique."""

    number: int
    memory_mb: int
    order: FunctionOrder


class WriteControl(_Value, frozen=True, kw_only=True):
    """Replace the control record. Orders after this one are carried out only once it is durable."""

    record: ControlRecord


class FindStates(_Value, frozen=True, kw_only=True):
    """Find the newest step with a complete state of `num_layers` layers; answer StatesFound with this number.

    A step after `newest` is accepted only if there is no earlier one: not all its losses are known. With
    `may_begin_anew` step 0 counts as such an earlier one: no state has been removed yet.
    """

    number: int
    num_layers: int
    newest: int | None = None
    may_begin_anew: bool = False


class Assemble(_Value, frozen=True, kw_only=True):
    """Put the stages' states of `step` together to the model's file of this generation; answer Assembled."""

    generation: int
    step: int
    num_layers: int


class DeleteKeys(_Value, frozen=True, kw_only=True):
    """Remove these objects, and everything under these prefixes.

    With `is_awaited` later orders wait for it: objects of these names may be written again.
    """

    is_awaited: bool = False
    keys: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()


class OpenParameterStore(_Value, frozen=True, kw_only=True):
    """Bring up the job's parameter store, or a new one where it is found dead; answer ParameterStoreUp."""


class CloseParameterStore(_Value, frozen=True, kw_only=True):
    """Release the job's parameter store: no function exchanges data any more."""


class Emit(_Value, frozen=True, kw_only=True):
    """Report an event to the control plane."""

    event: Event


Order = Invoke | WriteControl | FindStates | Assemble | DeleteKeys | OpenParameterStore | CloseParameterStore | Emit
