"""Verdicts: what the parts of a coordinator conclude, for the coordinator to carry out.

A part yields orders and verdicts one by one. The coordinator carries out each before it asks for the next, so a part
that continues after a verdict sees the resulting state.
"""

from __future__ import annotations

from dataclasses import dataclass

from springtide.backends.functions.coordinator.invocations import FunctionInvocation, PlaceSlot
from springtide.backends.functions.coordinator.messages import Order
from springtide.backends.functions.coordinator.run import After
from springtide.core.wire.functions import ErrorCode

# How long functions may take to notice an immediate stop: they read the record while they wait.
STOP_S = 8.0
# The least time to wait for the boundary at a change of plan or the end of a budget.
CLOSE_S = 30.0


@dataclass(frozen=True)
class FindStart:
    """Find the saved step from which an attempt can begin, and begin it."""


@dataclass(frozen=True)
class BeginAttempt:
    """Begin a new attempt from that step, as soon as the parameter store answers where one is needed."""

    step: int


@dataclass(frozen=True)
class AwaitParameterStore:
    """Wait: no step can be made until the parameter store answers."""


@dataclass(frozen=True)
class CloseAtBoundary:
    """Let all functions save and stop at the first boundary that none of them can have passed yet."""

    after: After
    within_s: float


@dataclass(frozen=True)
class StopNow:
    """Let all functions stop at once and lose the step under way; `reason` is shown to users."""

    after: After
    reason: str | None = None


@dataclass(frozen=True)
class FailJob:
    """The job cannot go on: report it as failed, and end every function."""

    reason: str


@dataclass(frozen=True)
class RestUntilData:
    """Run no function until the stream has enough samples to continue from that step."""

    step: int


@dataclass(frozen=True)
class ReplaceFunction:
    """Begin a new attempt in which another function fills the slot; `reason` says why."""

    slot: PlaceSlot
    invocation: FunctionInvocation
    reason: str


@dataclass(frozen=True)
class FunctionFailed:
    """A function reported an error: of the user's code, of a store or of the data."""

    slot: PlaceSlot
    invocation: FunctionInvocation
    code: ErrorCode
    error: str


@dataclass(frozen=True)
class ConcludeIfStopped:
    """If all functions have stopped, do what was to follow the stop."""


Verdict = (
    FindStart
    | BeginAttempt
    | AwaitParameterStore
    | CloseAtBoundary
    | StopNow
    | FailJob
    | RestUntilData
    | ReplaceFunction
    | FunctionFailed
    | ConcludeIfStopped
)
Effect = Order | Verdict
