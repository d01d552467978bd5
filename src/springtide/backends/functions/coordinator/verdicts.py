"""What the parts of a coordinator conclude, for the coordinator to carry out.

A part yields orders and verdicts one by one. The coordinator carries out each before it asks for the next, so a part
that goes on after a verdict sees the state that followed from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from springtide.backends.functions.coordinator.invocations import FunctionInvocation, PlaceSlot
from springtide.backends.functions.coordinator.messages import Order
from springtide.backends.functions.coordinator.run import After
from springtide.core.wire.functions import ErrorCode

# How long functions may take to notice that they are to stop at once: a look at the record while they wait.
STOP_S = 8.0
# A change of plan and a budget's end wait this long for the boundary, at the least.
CLOSE_S = 30.0


@dataclass(frozen=True)
class LookForStart:
    """Find the saved step from which an attempt can begin, and begin it."""


@dataclass(frozen=True)
class BeginAttempt:
    """Begin a new attempt from that step, as soon as the parameter store answers where one is needed."""

    step: int


@dataclass(frozen=True)
class AwaitParameterStore:
    """No step can be made until the parameter store answers."""


@dataclass(frozen=True)
class CloseAtBoundary:
    """Let all functions stop after the next step of which all can know, their state saved."""

    after: After
    within_s: float


@dataclass(frozen=True)
class StopNow:
    """Let all functions stop at once, whatever is lost of the step under way; `reason` is told to users."""

    after: After
    reason: str | None = None


@dataclass(frozen=True)
class FailJob:
    """The job cannot go on: report it as failed, and end every function."""

    reason: str


@dataclass(frozen=True)
class RestUntilData:
    """No function runs until the stream has enough samples to go on from that step."""

    step: int


@dataclass(frozen=True)
class ReplaceFunction:
    """A new attempt begins in which another function fills the slot; `reason` says why."""

    slot: PlaceSlot
    invocation: FunctionInvocation
    reason: str


@dataclass(frozen=True)
class FunctionFailed:
    """A function ended with an error of its own, which may be the user's code's, a store's or the data's."""

    slot: PlaceSlot
    invocation: FunctionInvocation
    code: ErrorCode
    error: str


@dataclass(frozen=True)
class ConcludeIfStopped:
    """If all functions that were told to stop have stopped: carry out what follows the stop."""


Verdict = (
    LookForStart
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
