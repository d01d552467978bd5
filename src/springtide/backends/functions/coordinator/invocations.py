"""Invocations from the order to their end, and the slot of each place, which they fill one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

from springtide.backends.functions.coordinator.messages import InvocationEnded
from springtide.core.functions import FunctionPlan, Usage
from springtide.core.status.functions import PlaceStatus
from springtide.core.wire.functions import FunctionReport, LaneTimes, Place

# Phases of a successor that has taken over.
WORKED = frozenset({"training", "waiting", "parked", "stuck", "leaving", "left", "finished"})
# Phases after which a function does nothing, whatever the provider reports later.
OVER = frozenset({"left", "finished", "stopped", "superseded", "failed"})


@dataclass(eq=False)
class FunctionInvocation:
    """One incarnation at one place. `is_uncertain`: the provider lost track of it; it may be running, or start later.

    `follows` is the incarnation that a successor replaces; `plan` is the upcoming plan that it was invoked for, if any.
    `invoked_at_s` is the time of the newest try, `retry_at_s` that of the next one after a refusal.
    """

    place: Place
    incarnation: int
    memory_mb: int
    invoked_at_s: float
    number: int = 0
    is_successor: bool = False
    follows: int = -1
    plan: FunctionPlan | None = None
    is_adopted: bool = False
    began_at_s: float | None = None
    warm_at_s: float | None = None
    heard_at_s: float = 0.0
    report: FunctionReport | None = None
    end: InvocationEnded | None = None
    is_uncertain: bool = False
    is_given_up: bool = False
    retry_at_s: float | None = None
    num_refused: int = 0
    over_at_s: float | None = None

    @property
    def phase(self) -> str:
        """The phase of its last report; without a report: throttled, lost or invoked."""
        if self.report is not None:
            return self.report.phase
        if self.retry_at_s is not None:
            return "throttled"
        return "lost" if self.end is not None else "invoked"

    @property
    def has_left(self) -> bool:
        """Whether it left for a successor, its state saved."""
        told = self.end is not None and self.end.result is not None and self.end.result.outcome == "left"
        return told or (self.report is not None and self.report.phase == "left")

    @property
    def has_finished(self) -> bool:
        """Whether it ended because the last step was done."""
        told = self.end is not None and self.end.result is not None and self.end.result.outcome == "finished"
        return told or self.phase == "finished"

    @property
    def is_alive(self) -> bool:
        """Whether it may still be running and is still waited for."""
        if self.end is not None or self.is_given_up:
            return False
        return self.report is None or self.report.phase not in OVER

    @property
    def usage(self) -> Usage:
        """Its requests to the stores, as far as it has reported them."""
        result = self.end.result if self.end is not None else None
        if result is not None:
            return result.usage
        return self.report.usage if self.report is not None else Usage()

    def function_s(self, now_s: float) -> float:
        """The seconds charged, up to now while it runs; an upper bound where the provider has not told the duration."""
        if self.end is not None and self.end.duration_s is not None:
            return self.end.duration_s
        if self.retry_at_s is not None:
            return 0.0
        return max(0.0, (self.over_at_s if self.over_at_s is not None else now_s) - self.invoked_at_s)


@dataclass(eq=False)
class PlaceSlot:
    """A place of a plan, the invocation in it, and its successor.

    `recorded` is the incarnation in the control record; `step` the newest step committed here in the present attempt;
    `num_deaths` the number of functions in a row that died here without progress of the job; `abandoned_successor` the
    incarnation of a successor that was given up and may be waiting nevertheless. `invocations` are the newest ones of
    this place, ended ones included.
    """

    place: Place
    invocation: FunctionInvocation | None = None
    successor: FunctionInvocation | None = None
    num_replaced: int = 0
    num_handovers: int = 0
    num_deaths: int = 0
    step: int = 0
    recorded: int = 0
    abandoned_successor: int = 0
    error: str = ""
    invocations: list[FunctionInvocation] = field(default_factory=list)

    def living(self) -> list[FunctionInvocation]:
        """Those that may still be running: the one in place, its successor."""
        return [
            invocation
            for invocation in (self.invocation, self.successor)
            if invocation is not None and invocation.is_alive
        ]

    def of(self, incarnation: int) -> FunctionInvocation | None:
        """The invocation with that incarnation number, ended or not."""
        for invocation in self.invocations:
            if invocation.incarnation == incarnation:
                return invocation
        return None

    def status(self, now_s: float, lifetime_s: float) -> PlaceStatus:
        """What users are told about it."""
        invocation = self.invocation
        report = invocation.report if invocation is not None else None
        is_alive = invocation is not None and invocation.is_alive
        is_over = report is not None and report.phase in OVER
        left_s = max(0.0, invocation.invoked_at_s + lifetime_s - now_s) if invocation is not None and is_alive else None
        return PlaceStatus(
            stage=self.place.stage,
            replica=self.place.replica,
            incarnation=invocation.incarnation if invocation is not None else 0,
            phase=invocation.phase if invocation is not None and (is_alive or is_over) else "lost",
            memory_mb=invocation.memory_mb if invocation is not None else 0,
            memory_used_bytes=report.memory_bytes if report is not None else 0,
            invoked_at_s=invocation.invoked_at_s if invocation is not None else 0.0,
            lifetime_left_s=left_s,
            step=report.step if report is not None else 0,
            lanes=report.lanes if report is not None else LaneTimes(),
            num_replaced=self.num_replaced,
            num_handovers=self.num_handovers,
            error=self.error,
        )
