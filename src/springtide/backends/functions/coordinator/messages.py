"""The inputs and orders of a coordinator, all of them plain values, so that tests can replay them."""

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


class AskedToRun(_Value, frozen=True, kw_only=True):
    """Run as this plan, as this generation, from the newest saved state (ResizeJob)."""

    generation: int
    plan: FunctionPlan


class AskedToPreempt(_Value, frozen=True, kw_only=True):
    """Save at the next boundary and end every function, by force after `grace_s` (PreemptJob)."""

    generation: int
    grace_s: float


class AskedToStop(_Value, frozen=True, kw_only=True):
    """End every function now, nothing need be saved; give up waiting after `grace_s` (StopReplica, EndJob)."""

    grace_s: float = 2.0


class BudgetTold(_Value, frozen=True, kw_only=True):
    """From now on this much may be spent in all (None: whatever it takes)."""

    budget_usd: float | None


class InvocationEnded(_Value, frozen=True, kw_only=True):
    """An invocation is over, as the provider tells it (provider.InvocationEnd). `duration_s` None: unknown.

    `number` is that of the Invoke: what comes late of an earlier try at the same place is not mistaken for the newest.
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
        """Whether the provider did not take it."""
        return self.outcome in ("throttled", "refused")


class ReportSeen(_Value, frozen=True, kw_only=True):
    """A function's report was read; it may be one that was read before."""

    report: FunctionReport


class StatesFound(_Value, frozen=True, kw_only=True):
    """Look `number`: the newest step of which every stage's state is in the store (0: none), and its bytes.

    `torn` are the keys of states of later steps.
    """

    number: int
    step: int
    num_bytes: int = 0
    torn: tuple[str, ...] = ()


class Assembled(_Value, frozen=True, kw_only=True):
    """The model's file is in the artifacts, or it cannot be (`error`)."""

    path: str = ""
    error: str = ""


class StoreFailed(_Value, frozen=True, kw_only=True):
    """A store has not done for a while what the coordinator asked; the sentence says which and why."""

    error: str


class FencedOff(_Value, frozen=True, kw_only=True):
    """The store names a newer generation, or a later control plane: another coordinator owns the job."""


class TimePassed(_Value, frozen=True, kw_only=True):
    """Nothing happened but time. `own` is what the coordinator itself has asked of the stores so far.

    `parameter_store_s` is for how long the job's parameter store has been up (None: it is not counted).
    """

    own: Usage = Usage()
    parameter_store_s: float | None = None


class StreamSeen(_Value, frozen=True, kw_only=True):
    """The job's stream was looked at; `error` says why it can be read no more."""

    stream: StreamView | None = None
    error: str = ""


class ParameterStoreUp(_Value, frozen=True, kw_only=True):
    """The job's parameter store answers at this address."""

    url: str


class ParameterStoreLost(_Value, frozen=True, kw_only=True):
    """The job's parameter store does not answer any more; what it held is gone."""


Stimulus = (
    AskedToRun
    | AskedToPreempt
    | AskedToStop
    | BudgetTold
    | InvocationEnded
    | ReportSeen
    | StatesFound
    | Assembled
    | StoreFailed
    | FencedOff
    | TimePassed
    | StreamSeen
    | ParameterStoreUp
    | ParameterStoreLost
)


# --- orders ---------------------------------------------------------------------------------------------------------


class Invoke(_Value, frozen=True, kw_only=True):
    """Invoke a function of this memory with this order. No two have the same number."""

    number: int
    memory_mb: int
    order: FunctionOrder


class WriteControl(_Value, frozen=True, kw_only=True):
    """Replace the control record. Whatever is ordered after it must not happen before it."""

    record: ControlRecord


class LookForStates(_Value, frozen=True, kw_only=True):
    """Find the newest step with a complete state of `num_layers` layers; answer StatesFound with this number.

    A step after `newest` will do only where there is no earlier one: what happened up to there is not known in full.
    With `may_begin_anew` the beginning is such a one: then no state has been removed since.
    """

    number: int
    num_layers: int
    newest: int | None = None
    may_begin_anew: bool = False


class Assemble(_Value, frozen=True, kw_only=True):
    """Put the stages' states of `step` together as the model's file of this generation; answer Assembled."""

    generation: int
    step: int
    num_layers: int


class DeleteKeys(_Value, frozen=True, kw_only=True):
    """Remove these objects, and everything under these prefixes.

    With `is_awaited` nothing that is ordered afterwards may happen before: objects of these names may be written again.
    """

    is_awaited: bool = False
    keys: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()


class OpenParameterStore(_Value, frozen=True, kw_only=True):
    """Bring up the job's parameter store, or a new one where it is found dead; answer ParameterStoreUp."""


class CloseParameterStore(_Value, frozen=True, kw_only=True):
    """No function synchronises any more."""


class Emit(_Value, frozen=True, kw_only=True):
    """Tell the control plane."""

    event: Event


Order = Invoke | WriteControl | LookForStates | Assemble | DeleteKeys | OpenParameterStore | CloseParameterStore | Emit
