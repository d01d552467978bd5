"""Changing a job's plan while it trains: joining functions warm up beside the others, all switch at one boundary.

That is possible where every function holds the whole model under both plans. Replicas whose memory size stays keep
their process and state; joining ones load the state saved at the boundary; the others end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from springtide.backends.functions.coordinator.function_ends import MAY_PASS
from springtide.backends.functions.coordinator.function_pool import places_of
from springtide.backends.functions.coordinator.invocations import OVER, FunctionInvocation, PlaceSlot
from springtide.backends.functions.coordinator.messages import InvocationEnded, Order, RunRequested
from springtide.backends.functions.coordinator.reasons import EndCause, end_sentence
from springtide.backends.functions.coordinator.run import Mode, Run
from springtide.backends.functions.coordinator.verdicts import (
    CLOSE_S,
    BeginAttempt,
    Effect,
    FindStart,
    FunctionFailed,
)
from springtide.core.functions import FunctionPlan
from springtide.core.wire.functions import ErrorCode, Place, Upcoming

# How long joining functions may take to warm up, refusals included; then the switch is made without them.
MAX_WARMING_S = 180.0
# Deaths of joining functions at one place, after which it is filled only at the switch.
MAX_JOINER_DEATHS = 3


def can_follow(old: FunctionPlan, new: FunctionPlan) -> bool:
    """Whether one plan can follow the other without restarting every function: both have the same single stage."""
    is_whole = len(old.stages) == len(new.stages) == 1
    return is_whole and old.stages[0].end_layer == new.stages[0].end_layer


@dataclass(eq=False)
class UpcomingPlan:
    """A plan that will take over as `generation`. `is_due`: the next attempt, whatever begins it, uses this plan.

    `num_deaths` counts by place the functions that ended while they warmed up; `park_by_s` is when to stop waiting for
    functions at the boundary.
    """

    generation: int
    plan: FunctionPlan
    warm_by_s: float
    is_due: bool = False
    park_by_s: float = math.inf
    num_deaths: dict[Place, int] = field(default_factory=dict)


class PlanSwitch:
    """The change of plan under way, if there is one: `upcoming` until it takes effect at a boundary.

    `postponed` is a still later plan, requested after the upcoming one was due. `is_unconfirmed`: the plan has taken
    effect, but its first step is not made yet.
    """

    def __init__(self) -> None:
        self.upcoming: UpcomingPlan | None = None
        self.postponed: RunRequested | None = None
        # The attempt with which the present plan took effect, until its first step is made.
        self._in_force_since_attempt: int | None = None
        # A requested plan that was cancelled, with its generation, which the control plane still waits for.
        self._cancelled: tuple[int, FunctionPlan] | None = None

    @property
    def is_due(self) -> bool:
        """Whether all functions are on the way to the boundary."""
        return self.upcoming is not None and self.upcoming.is_due

    @property
    def is_unconfirmed(self) -> bool:
        """Whether a plan has taken effect whose first step is not made yet."""
        return self._in_force_since_attempt is not None

    # --- preparation -----------------------------------------------------------------------------------------------

    def prepare(self, run: Run, generation: int, plan: FunctionPlan) -> Iterator[Effect]:
        """Invoke the functions that will join, while the others train on."""
        self.forget(run)
        upcoming = UpcomingPlan(generation=generation, plan=plan, warm_by_s=run.now_s + MAX_WARMING_S)
        self.upcoming = upcoming
        joining = [place for place in places_of(plan) if not _stays(run, place, plan)]
        if len(run.pool.living()) + len(joining) <= run.facts.service.concurrency:
            run.pool.joining = {place: PlaceSlot(place=place) for place in joining}
        else:
            # The concurrency limit leaves no room for joiners beside the others, which have to end first.
            upcoming.warm_by_s = run.now_s
        invokes = [self._launch(run, upcoming, slot) for slot in run.pool.joining.values()]
        yield run.amend(upcoming=self.announced(run))
        yield from invokes
        yield from self._advance(run)

    def _launch(self, run: Run, upcoming: UpcomingPlan, slot: PlaceSlot) -> Order:
        assert run.record is not None
        record = replace(run.record, generation=upcoming.generation)
        return run.pool.launch(slot, record, run.now_s, plan=upcoming.plan)

    def announced(self, run: Run) -> Upcoming | None:
        """The field of the control record that describes the upcoming plan."""
        if self.upcoming is None:
            return None
        joiners = {
            str(place): slot.invocation.incarnation
            for place, slot in run.pool.joining.items()
            if slot.invocation is not None and slot.invocation.is_alive
        }
        return Upcoming(plan=self.upcoming.plan, joiners=joiners)

    def forget(self, run: Run) -> None:
        """Cancel the change: functions that were to join end once the record no longer names them."""
        if self.upcoming is not None:
            self._cancelled = (self.upcoming.generation, self.upcoming.plan)
        self.upcoming = None
        for slot in run.pool.joining.values():
            for invocation in slot.living():
                if invocation.retry_at_s is not None:
                    run.pool.give_up(invocation, run.now_s)
        run.pool.retire(run.pool.joining.values())
        run.pool.joining = {}
        if self.postponed is not None:
            # The control plane waits for the newest plan that it requested.
            self._cancelled, self.postponed = (self.postponed.generation, self.postponed.plan), None

    def pop_cancelled(self) -> tuple[int, FunctionPlan] | None:
        """The cancelled plan with its generation; returned once, then None."""
        given_up, self._cancelled = self._cancelled, None
        return given_up

    def pop_postponed(self) -> RunRequested | None:
        """The postponed request, once no change is under way; returned once, then None."""
        if self.upcoming is not None:
            return None
        postponed, self.postponed = self.postponed, None
        return postponed

    # --- while functions warm up -----------------------------------------------------------------------------------

    def joiner_ended(
        self, run: Run, slot: PlaceSlot, invocation: FunctionInvocation, ended: InvocationEnded
    ) -> Iterator[Effect]:
        """An invocation for the upcoming plan has ended or was refused."""
        if ended.never_ran:
            run.pool.refuse(invocation, run.now_s, ended.retry_after_s)
            slot.error = ended.error
            return
        if ended.outcome == "lost":
            invocation.is_uncertain = True
            return
        invocation.end, invocation.over_at_s = ended, run.now_s
        result = ended.result
        if result is None:
            yield from self._joiner_died(run, slot, invocation, EndCause(ended.outcome), ended.error)
        elif result.outcome == "failed":
            yield from self._joiner_failed(run, slot, invocation, result.error_code, result.error or ended.error)
        else:
            yield from self._joiner_died(run, slot, invocation, EndCause(result.outcome), "")

    def joiner_reported(self, run: Run, slot: PlaceSlot, invocation: FunctionInvocation) -> Iterator[Effect]:
        """A function for the upcoming plan has reported."""
        assert invocation.report is not None
        if invocation.is_uncertain and invocation.phase in OVER:
            # The provider lost this invocation: no other notice of its end will come.
            invocation.over_at_s = run.now_s
            if invocation.phase == "failed":
                yield from self._joiner_failed(
                    run, slot, invocation, invocation.report.error_code, invocation.report.error
                )
            else:
                yield from self._joiner_died(run, slot, invocation, EndCause(invocation.phase), "")
        else:
            yield from self._advance(run)

    def _joiner_failed(
        self, run: Run, slot: PlaceSlot, invocation: FunctionInvocation, code: ErrorCode, error: str
    ) -> Iterator[Effect]:
        if code in MAY_PASS:
            yield from self._joiner_died(run, slot, invocation, EndCause.STORE_TROUBLE, error)
        else:
            yield FunctionFailed(slot, invocation, code, error)

    def _joiner_died(
        self, run: Run, slot: PlaceSlot, invocation: FunctionInvocation, cause: EndCause, error: str
    ) -> Iterator[Order]:
        """Invoke another joiner, unless they keep ending."""
        upcoming = self.upcoming
        if upcoming is None or slot.invocation is not invocation:
            return
        run.pool.num_replaced += 1
        slot.error = end_sentence(invocation, cause, error)
        num_deaths = upcoming.num_deaths[slot.place] = upcoming.num_deaths.get(slot.place, 0) + 1
        if cause is EndCause.OUT_OF_MEMORY:
            larger = run.facts.next_larger_mb(invocation.memory_mb)
            stage = upcoming.plan.stages[0]
            if larger is not None and stage.memory_mb <= invocation.memory_mb:
                upcoming.plan = replace(upcoming.plan, stages=(replace(stage, memory_mb=larger),))
        if upcoming.is_due or num_deaths >= MAX_JOINER_DEATHS:
            # The place is filled at the switch.
            upcoming.warm_by_s = min(upcoming.warm_by_s, run.now_s)
            return
        invoke = self._launch(run, upcoming, slot)
        yield run.amend(upcoming=self.announced(run))
        yield invoke

    def check(self, run: Run) -> Iterator[Effect]:
        """Retry refused joiners, and enforce the time limits of the change."""
        upcoming = self.upcoming
        if upcoming is None or run.record is None:
            return
        limit_s = run.pace.start_limit_s()
        for slot in run.pool.joining.values():
            invocation = slot.invocation
            if invocation is None or not invocation.is_alive:
                continue
            if invocation.retry_at_s is not None:
                if invocation.retry_at_s <= run.now_s:
                    record = replace(run.record, generation=upcoming.generation)
                    yield run.pool.invoke(invocation, record, run.now_s)
            elif invocation.began_at_s is None and run.now_s - invocation.invoked_at_s > limit_s:
                run.pool.give_up(invocation, run.now_s)
                run.pool.num_lost += 1
                yield from self._joiner_died(run, slot, invocation, EndCause.UNBEGUN, "")
        if run.mode is Mode.RUNNING and run.now_s > upcoming.park_by_s:
            # A function does not reach the boundary: a new attempt serves as the boundary instead.
            upcoming.park_by_s = math.inf
            yield FindStart()
        yield from self._advance(run)

    def _advance(self, run: Run) -> Iterator[Effect]:
        """Once the joining functions are warm, let all come to a boundary and switch there."""
        upcoming = self.upcoming
        if upcoming is None or run.mode is not Mode.RUNNING or run.record is None:
            return
        if not upcoming.is_due:
            if not _are_warm(run) and run.now_s < upcoming.warm_by_s:
                return
            upcoming.is_due = True
            upcoming.park_by_s = run.now_s + CLOSE_S + 2 * run.pace.step_s
            run.paused_at_s = None
            yield run.amend(last_step=run.progress.furthest + 1, upcoming=self.announced(run))
        yield from self.switch_if_parked(run)

    def plan_to_begin(self, run: Run) -> FunctionPlan | None:
        """The plan of the next attempt."""
        upcoming = self.upcoming
        return upcoming.plan if upcoming is not None and (upcoming.is_due or _are_warm(run)) else run.plan

    def adopt(self, run: Run) -> None:
        """Make the upcoming plan the present one: no function will run for a while, and the next start under it."""
        if self.upcoming is not None:
            run.plan, run.generation = self.upcoming.plan, self.upcoming.generation

    # --- the boundary ----------------------------------------------------------------------------------------------

    def switch_if_parked(self, run: Run) -> Iterator[Effect]:
        """Begin an attempt of the upcoming plan if all functions stand at the boundary and its state is saved."""
        if self.upcoming is None or run.mode is not Mode.RUNNING:
            return
        reports = [report for report in run.pool.reports() if report is not None]
        steps = {report.step for report in reports}
        is_parked = all(report.phase == "parked" and report.attempt == run.attempt for report in reports)
        if len(reports) < len(run.pool.slots) or not is_parked or len(steps) != 1:
            return
        step = steps.pop()
        run.progress.furthest = max(run.progress.furthest, step)
        if step == 0 or any(report.saved_step == step for report in reports):
            yield BeginAttempt(step)
        else:
            # It may have been saved in an earlier attempt, or by a function that has left since: search the store.
            yield FindStart()

    def put_in_force(self, run: Run) -> None:
        """An attempt begins: put the upcoming plan into force, if it is due or its joiners are warm."""
        upcoming = self.upcoming
        if upcoming is None or not (upcoming.is_due or _are_warm(run)):
            return
        old, plan = run.pool.slots, upcoming.plan
        slots: dict[Place, PlaceSlot] = {}
        for place in places_of(plan):
            joining = run.pool.joining.get(place)
            if joining is not None:
                slots[place] = joining
            else:
                slots[place] = old[place] if _stays(run, place, plan) else PlaceSlot(place=place)
        self.upcoming, run.pool.joining = None, {}
        run.pool.slots = slots
        kept = {id(slot) for slot in slots.values()}
        run.pool.retire(slot for slot in old.values() if id(slot) not in kept)
        run.num_stayed = sum(
            slot.invocation is not None and slot.invocation.is_alive
            for slot in slots.values()
            if old.get(slot.place) is slot
        )
        run.plan, run.generation = plan, upcoming.generation
        run.paused_at_s = run.paused_at_s if run.paused_at_s is not None else run.progress_at_s
        self._in_force_since_attempt = run.attempt + 1
        run.pace = run.pace.for_plan(_expected_step_s(run, plan))

    def confirm(self, run: Run) -> float:
        """The first step under the new plan is made; returns for how many seconds functions stood still."""
        paused_at_s = run.paused_at_s if run.paused_at_s is not None else run.now_s
        pause_s = max(0.0, run.now_s - paused_at_s - run.pace.step_s)
        if self._in_force_since_attempt == run.attempt:
            reports = [report for report in run.pool.reports() if report is not None]
            # Functions that stayed have timed the pause themselves.
            pause_s = max((report.pause_s for report in reports if report.pause_s > 0.0), default=pause_s)
        self._in_force_since_attempt = None
        return pause_s


def _stays(run: Run, place: Place, plan: FunctionPlan) -> bool:
    """Whether the function at a place can continue there under another plan."""
    slot = run.pool.slots.get(place)
    memory_mb = plan.stages[place.stage].memory_mb
    if slot is None:
        return False
    return slot.invocation is None or not slot.invocation.is_alive or slot.invocation.memory_mb == memory_mb


def _are_warm(run: Run) -> bool:
    invocations = [slot.invocation for slot in run.pool.joining.values()]
    return all(one is not None and one.is_alive and one.warm_at_s is not None for one in invocations)


def _expected_step_s(run: Run, plan: FunctionPlan) -> float:
    """The duration of a step under another plan: as predicted, else inversely proportional to the total memory."""
    option = run.facts.option(plan)
    if option is not None:
        return option.step_s
    before = run.record.plan.memory_mb if run.record is not None else plan.memory_mb
    return run.pace.step_s * max(1.0, before / plan.memory_mb)
