"""Another plan for a job while it trains: joining functions warm up beside the others, all change at one boundary.

Possible where every function holds the whole model under both plans. Replicas whose memory stays what it was keep their
processes and what they hold in memory; joining ones take the saved state of the boundary; the others end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from springtide.backends.functions.coordinator.function_ends import MAY_PASS
from springtide.backends.functions.coordinator.function_pool import places_of
from springtide.backends.functions.coordinator.invocations import OVER, FunctionInvocation, PlaceSlot
from springtide.backends.functions.coordinator.messages import AskedToRun, InvocationEnded, Order
from springtide.backends.functions.coordinator.reasons import EndCause, end_sentence
from springtide.backends.functions.coordinator.run import Mode, Run
from springtide.backends.functions.coordinator.verdicts import (
    CLOSE_S,
    BeginAttempt,
    Effect,
    FunctionFailed,
    LookForStart,
)
from springtide.core.functions import FunctionPlan
from springtide.core.wire.functions import ErrorCode, Place, Upcoming

# Joining functions get so long to be warm, refusals by the provider included; then the change is made without them.
MAX_WARMING_S = 180.0
# So often a joining function may end before its place is filled only once the change is made.
MAX_JOINER_DEATHS = 3


def can_follow(old: FunctionPlan, new: FunctionPlan) -> bool:
    """Whether one plan can follow the other without a new start of every function: the same one stage under both."""
    is_whole = len(old.stages) == len(new.stages) == 1
    return is_whole and old.stages[0].end_layer == new.stages[0].end_layer


@dataclass(eq=False)
class UpcomingPlan:
    """A plan that is to follow as `generation`. `is_due`: the next attempt, whatever begins it, is one of this plan.

    `num_deaths` counts the functions that ended while they warmed up, by place; `park_by_s` is when waiting for the
    boundary ends.
    """

    generation: int
    plan: FunctionPlan
    warm_by_s: float
    is_due: bool = False
    park_by_s: float = math.inf
    num_deaths: dict[Place, int] = field(default_factory=dict)


class PlanSwitch:
    """The change of plan under way, if there is one: `upcoming` until it is taken up at a boundary.

    `postponed` is a still later plan, asked for after the upcoming one was due. `is_unconfirmed`: the first step under
    the plan that was taken up is not made yet.
    """

    def __init__(self) -> None:
        self.upcoming: UpcomingPlan | None = None
        self.postponed: AskedToRun | None = None
        # The attempt with which the present plan was taken up without a restart, until its first step is made.
        self._taken_up_in: int | None = None
        # A plan that was asked for and given up, with its generation: the control plane waits to be told of it.
        self._given_up: tuple[int, FunctionPlan] | None = None

    @property
    def is_due(self) -> bool:
        """Whether all functions are on the way to the boundary."""
        return self.upcoming is not None and self.upcoming.is_due

    @property
    def is_unconfirmed(self) -> bool:
        """Whether the first step under a plan that was taken up is still to come."""
        return self._taken_up_in is not None

    # --- before ----------------------------------------------------------------------------------------------------

    def prepare(self, run: Run, generation: int, plan: FunctionPlan) -> Iterator[Effect]:
        """Invoke the functions that are to join, and let the others train on."""
        self.forget(run)
        upcoming = UpcomingPlan(generation=generation, plan=plan, warm_by_s=run.now_s + MAX_WARMING_S)
        self.upcoming = upcoming
        joining = [place for place in places_of(plan) if not _stays(run, place, plan)]
        if len(run.pool.living()) + len(joining) <= run.facts.service.concurrency:
            run.pool.joining = {place: PlaceSlot(place=place) for place in joining}
        else:
            # There is no room for them beside the others, which have to end first.
            upcoming.warm_by_s = run.now_s
        invokes = [self._launch(run, upcoming, slot) for slot in run.pool.joining.values()]
        yield run.amend(upcoming=self.announced(run))
        yield from invokes
        yield from self._proceed(run)

    def _launch(self, run: Run, upcoming: UpcomingPlan, slot: PlaceSlot) -> Order:
        assert run.record is not None
        record = replace(run.record, generation=upcoming.generation)
        return run.pool.launch(slot, record, run.now_s, plan=upcoming.plan)

    def announced(self, run: Run) -> Upcoming | None:
        """What the control record says of the plan that is to follow."""
        if self.upcoming is None:
            return None
        joiners = {
            str(place): slot.invocation.incarnation
            for place, slot in run.pool.joining.items()
            if slot.invocation is not None and slot.invocation.is_alive
        }
        return Upcoming(plan=self.upcoming.plan, joiners=joiners)

    def forget(self, run: Run) -> None:
        """No other plan follows: functions that were to join find the record without them, and end."""
        if self.upcoming is not None:
            self._given_up = (self.upcoming.generation, self.upcoming.plan)
        self.upcoming = None
        for slot in run.pool.joining.values():
            for invocation in slot.living():
                if invocation.retry_at_s is not None:
                    run.pool.give_up(invocation, run.now_s)
        run.pool.retire(run.pool.joining.values())
        run.pool.joining = {}
        if self.postponed is not None:
            # The newest of those that were asked for counts.
            self._given_up, self.postponed = (self.postponed.generation, self.postponed.plan), None

    def take_given_up(self) -> tuple[int, FunctionPlan] | None:
        """The plan that was given up, once, with its generation."""
        given_up, self._given_up = self._given_up, None
        return given_up

    def take_postponed(self) -> AskedToRun | None:
        """The plan that was asked for meanwhile, once, as soon as no other one is on its way."""
        if self.upcoming is not None:
            return None
        postponed, self.postponed = self.postponed, None
        return postponed

    # --- while functions warm up -----------------------------------------------------------------------------------

    def joiner_ended(
        self, run: Run, slot: PlaceSlot, invocation: FunctionInvocation, ended: InvocationEnded
    ) -> Iterator[Effect]:
        """An invocation for a plan that is to follow is over, or never was."""
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
        """A function for a plan that is to follow has reported."""
        assert invocation.report is not None
        if invocation.is_uncertain and invocation.phase in OVER:
            # Its last report is all that will ever be known of its end.
            invocation.over_at_s = run.now_s
            if invocation.phase == "failed":
                yield from self._joiner_failed(
                    run, slot, invocation, invocation.report.error_code, invocation.report.error
                )
            else:
                yield from self._joiner_died(run, slot, invocation, EndCause(invocation.phase), "")
        else:
            yield from self._proceed(run)

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
        """Invoke another one, unless they keep ending."""
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
            # The place is filled when the change is made.
            upcoming.warm_by_s = min(upcoming.warm_by_s, run.now_s)
            return
        invoke = self._launch(run, upcoming, slot)
        yield run.amend(upcoming=self.announced(run))
        yield invoke

    def check(self, run: Run) -> Iterator[Effect]:
        """What is due for a change at this instant."""
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
            # One of them does not come to the boundary: a new attempt is one, too.
            upcoming.park_by_s = math.inf
            yield LookForStart()
        yield from self._proceed(run)

    def _proceed(self, run: Run) -> Iterator[Effect]:
        """Let all functions come to a boundary once the joining ones are warm, and change there."""
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
        yield from self.change_if_parked(run)

    def plan_to_begin(self, run: Run) -> FunctionPlan | None:
        """The plan of the next attempt."""
        upcoming = self.upcoming
        return upcoming.plan if upcoming is not None and (upcoming.is_due or _are_warm(run)) else run.plan

    def adopt(self, run: Run) -> None:
        """No function will run for a while: the next ones begin as the plan that was to follow."""
        if self.upcoming is not None:
            run.plan, run.generation = self.upcoming.plan, self.upcoming.generation

    # --- the boundary ----------------------------------------------------------------------------------------------

    def change_if_parked(self, run: Run) -> Iterator[Effect]:
        """Take the plan up if all functions stand at the boundary and its state is saved."""
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
            # Saved in an earlier attempt, or by a function that has left since: see what is there.
            yield LookForStart()

    def take_up(self, run: Run) -> None:
        """An attempt begins: as the plan that was to follow, if it is time."""
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
        self._taken_up_in = run.attempt + 1
        run.pace = run.pace.followed_by(_expected_step_s(run, plan))

    def confirm(self, run: Run) -> float:
        """The first step under the new plan is made: for how many seconds functions stood still for it."""
        paused_at_s = run.paused_at_s if run.paused_at_s is not None else run.now_s
        pause_s = max(0.0, run.now_s - paused_at_s - run.pace.step_s)
        if self._taken_up_in == run.attempt:
            reports = [report for report in run.pool.reports() if report is not None]
            # Functions that stayed have timed it.
            pause_s = max((report.pause_s for report in reports if report.pause_s > 0.0), default=pause_s)
        self._taken_up_in = None
        return pause_s


def _stays(run: Run, place: Place, plan: FunctionPlan) -> bool:
    """Whether the function at a place can go on there under another plan."""
    slot = run.pool.slots.get(place)
    memory_mb = plan.stages[place.stage].memory_mb
    if slot is None:
        return False
    return slot.invocation is None or not slot.invocation.is_alive or slot.invocation.memory_mb == memory_mb


def _are_warm(run: Run) -> bool:
    invocations = [slot.invocation for slot in run.pool.joining.values()]
    return all(one is not None and one.is_alive and one.warm_at_s is not None for one in invocations)


def _expected_step_s(run: Run, plan: FunctionPlan) -> float:
    """What a step of another plan may take: as predicted, else as much longer as there is less memory for it."""
    option = run.facts.option(plan)
    if option is not None:
        return option.step_s
    before = run.record.plan.memory_mb if run.record is not None else plan.memory_mb
    return run.pace.step_s * max(1.0, before / plan.memory_mb)
