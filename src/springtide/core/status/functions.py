"""Status of a job on functions as users see it: which function fills which place, where time goes, the cost so far."""

from __future__ import annotations

import msgspec

from springtide.core.functions import Bill, FunctionPlan, Usage
from springtide.core.wire.functions import LaneTimes


class PlaceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One place of the pipeline and the function that fills it now (`phase` "lost": none, a successor is invoked).

    `lifetime_left_s` is how much longer its invocation may run. `num_replaced` counts the functions that died here,
    `num_handovers` those that left in time for a successor.
    """

    stage: int
    replica: int
    incarnation: int
    phase: str
    memory_mb: int
    memory_used_bytes: int = 0
    invoked_at_s: float = 0.0
    lifetime_left_s: float | None = None
    step: int = 0
    lanes: LaneTimes = LaneTimes()
    num_replaced: int = 0
    num_handovers: int = 0
    error: str = ""


class PlanChange(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that a job came to run as: after which step, when (platform seconds), and what the change took.

    `pause_s` is the standstill between the last step before and the first one after it; `num_stayed` functions went on
    without a restart.
    """

    step: int
    at_s: float
    plan: FunctionPlan
    pause_s: float = 0.0
    num_stayed: int = 0


# Changes of plan that are kept; the oldest is dropped first.
MAX_CHANGES = 64


class FunctionRunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job's functions at one instant. `step_s` is the newest step's time, `predicted_step_s` what was planned.

    `num_redone_steps` counts committed steps that were redone after a loss, `num_throttled` invocations that the
    provider put off, `num_lost` those that never began. `upcoming` is the plan that is to follow, for which `joining`
    warm up; `changes` are the plans so far, the present one last. `idle_reason` says what a job whose functions have
    all ended waits for.
    """

    service: str
    plan: FunctionPlan
    places: tuple[PlaceStatus, ...] = ()
    step_s: float | None = None
    predicted_step_s: float | None = None
    saved_step: int = 0
    num_invocations: int = 0
    num_replaced: int = 0
    num_handovers: int = 0
    num_lost: int = 0
    num_throttled: int = 0
    num_redone_steps: int = 0
    usage: Usage = Usage()
    bill: Bill = Bill()
    budget_usd: float | None = None
    upcoming: FunctionPlan | None = None
    joining: tuple[PlaceStatus, ...] = ()
    changes: tuple[PlanChange, ...] = ()
    idle_reason: str = ""
