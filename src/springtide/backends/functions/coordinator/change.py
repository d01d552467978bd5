"""Another plan for a job while it trains: who is to join warms up beside the others, and all change at one boundary.

Possible where every function holds the whole model under both plans. Replicas whose memory stays what it was keep their
processes and what they hold in memory; joiners take the saved state of the boundary; the others end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from springtide.backends.functions.coordinator.attempts import CLOSE_S, Attempts
from springtide.backends.functions.coordinator.invocations import OVER, FunctionInvocation, PlaceSlot
from springtide.backends.functions.coordinator.messages import InvocationEnded, Order
from springtide.backends.functions.coordinator.reasons import death_sentence, is_store_trouble
from springtide.core.functions import FunctionPlan
from springtide.core.wire.functions import Place, Upcoming

# Joiners get so long to be warm, put-offs by the provider included; then the change is made without waiting for them.
MAX_WARMING_S = 180.0
# So often one who is to join may die before it is called again only once the change is made.
MAX_JOINER_DEATHS = 3


def can_follow(old: FunctionPlan, new: FunctionPlan) -> bool:
    """Whether one plan can follow the other without everybody starting anew: the same one stage under both."""
    is_whole = len(old.stages) == len(new.stages) == 1
    return is_whole and old.stages[0].end_layer == new.stages[0].end_layer


@dataclass(eq=False)
class PlanSwitch:
    """A plan that is to follow as `generation`. `is_due`: the next attempt, whatever begins it, is one of this plan.

    `num_deaths` counts those who died warming up, by place; `park_by_s` is when waiting for the boundary ends.
    """

    generation: int
    plan: FunctionPlan
    warm_by_s: float
    is_due: bool = False
    park_by_s: float = math.inf
    num_deaths: dict[Place, int] = field(default_factory=dict)


class Changes(Attempts):
    """The part of the coordinator that changes the plan while functions go on."""

    _change: PlanSwitch | None = None
    # The step after which the present plan was taken up without a restart, and under which attempt.
    _switched: tuple[int, int] | None = None

    # --- before ----------------------------------------------------------------------------------------------------

    def _prepare(self, generation: int, plan: FunctionPlan) -> None:
        """Call whoever is to join, and let the others train on."""
        assert self.record is not None
        self._forget_change()
        change = PlanSwitch(generation=generation, plan=plan, warm_by_s=self._now_s + MAX_WARMING_S)
        self._change = change
        joiners = [place for place in _places(plan) if not self._stays(place, plan)]
        if len(self.pool.living()) + len(joiners) <= self.facts.service.concurrency:
            self.pool.joining = {place: PlaceSlot(place=place) for place in joiners}
        else:
            # There is no room for them beside the others, who have to end first.
            change.warm_by_s = self._now_s
        calls = [self._invoke_joiner(slot) for slot in self.pool.joining.values()]
        self._write(upcoming=self._upcoming())
        self._orders += calls
        self._go_on_changing()

    def _stays(self, place: Place, plan: FunctionPlan) -> bool:
        """Whether who fills a place now can go on there under another plan."""
        slot = self.pool.slots.get(place)
        memory_mb = plan.stages[place.stage].memory_mb
        if slot is None:
            return False
        return slot.invocation is None or not slot.invocation.is_alive or slot.invocation.memory_mb == memory_mb

    def _invoke_joiner(self, slot: PlaceSlot) -> Order:
        assert self.record is not None
        assert self._change is not None
        record = replace(self.record, generation=self._change.generation)
        return self.pool.launch(slot, record, self._now_s, plan=self._change.plan)

    def _upcoming(self) -> Upcoming | None:
        if self._change is None:
            return None
        joiners = {
            str(place): slot.invocation.incarnation
            for place, slot in self.pool.joining.items()
            if slot.invocation is not None and slot.invocation.is_alive
        }
        return Upcoming(plan=self._change.plan, joiners=joiners)

    def _extras(self) -> dict[str, Any]:
        return {**super()._extras(), "upcoming": self._upcoming()}

    def _forget_change(self) -> None:
        """Whoever was called for it finds the record without them, and ends."""
        super()._forget_change()
        if self._change is not None:
            self._owed = (self._change.generation, self._change.plan)
        self._change = None
        for slot in self.pool.joining.values():
            for invocation in slot.living():
                if invocation.retry_at_s is not None:
                    self.pool.give_up(invocation, self._now_s)
        self.pool.retire(self.pool.joining.values())
        self.pool.joining = {}

    # --- while joiners warm up -------------------------------------------------------------------------------------

    def _joiner_ended(self, slot: PlaceSlot, invocation: FunctionInvocation, ended: InvocationEnded) -> None:
        """An invocation for a plan that is to follow is over, or never was."""
        if ended.outcome in ("throttled", "refused"):
            self.pool.refuse(invocation, self._now_s, ended.retry_after_s)
            slot.error = ended.error
            return
        if ended.outcome == "lost":
            invocation.is_uncertain = True
            return
        invocation.end, invocation.over_at_s = ended, self._now_s
        result = ended.result
        if result is None:
            self._joiner_died(slot, invocation, ended.outcome, ended.error)
        elif result.outcome == "failed":
            self._joiner_failed(slot, invocation, result.error or ended.error)
        else:
            self._joiner_died(slot, invocation, f"ended as {result.outcome}", "")

    def _joiner_told(self, slot: PlaceSlot, invocation: FunctionInvocation) -> None:
        """A function for a plan that is to follow has reported."""
        assert invocation.report is not None
        if invocation.is_uncertain and invocation.phase in OVER:
            # Nobody else will tell of its end.
            invocation.over_at_s = self._now_s
            if invocation.phase == "failed":
                self._joiner_failed(slot, invocation, invocation.report.error)
            else:
                self._joiner_died(slot, invocation, f"ended as {invocation.phase}", "")
        else:
            self._go_on_changing()

    def _joiner_failed(self, slot: PlaceSlot, invocation: FunctionInvocation, error: str) -> None:
        if is_store_trouble(error):
            self._joiner_died(slot, invocation, "trouble", error)
        else:
            self._failed(slot, invocation, error)

    def _failed(self, slot: PlaceSlot, invocation: FunctionInvocation, error: str) -> None:
        """The user's code has failed in a function."""
        raise NotImplementedError

    def _joiner_died(self, slot: PlaceSlot, invocation: FunctionInvocation, how: str, error: str) -> None:
        """Call another one, unless they keep dying."""
        change = self._change
        if change is None or slot.invocation is not invocation:
            return
        self.pool.num_replaced += 1
        slot.error = death_sentence(invocation, how, error)
        num_deaths = change.num_deaths[slot.place] = change.num_deaths.get(slot.place, 0) + 1
        if how == "out_of_memory":
            larger = [size.memory_mb for size in self.facts.service.sizes if size.memory_mb > invocation.memory_mb]
            if larger and change.plan.stages[0].memory_mb <= invocation.memory_mb:
                change.plan = replace(change.plan, stages=(replace(change.plan.stages[0], memory_mb=larger[0]),))
        if change.is_due or num_deaths >= MAX_JOINER_DEATHS:
            # The place is filled when the change is made.
            change.warm_by_s = min(change.warm_by_s, self._now_s)
            return
        call = self._invoke_joiner(slot)
        self._write(upcoming=self._upcoming())
        self._orders.append(call)

    def _look_after_change(self) -> None:
        """What is due for a change at this instant."""
        change = self._change
        if change is None or self.record is None:
            return
        limit_s = self.pace.start_limit_s()
        for slot in self.pool.joining.values():
            invocation = slot.invocation
            if invocation is None or not invocation.is_alive:
                continue
            if invocation.retry_at_s is not None:
                if invocation.retry_at_s <= self._now_s:
                    record = replace(self.record, generation=change.generation)
                    self._orders.append(self.pool.invoke(invocation, record, self._now_s))
            elif invocation.began_at_s is None and self._now_s - invocation.invoked_at_s > limit_s:
                self.pool.give_up(invocation, self._now_s)
                self.pool.num_lost += 1
                self._joiner_died(slot, invocation, "unbegun", "")
        if self.mode == "running" and self._now_s > change.park_by_s:
            # Somebody does not come to the boundary: a new attempt is one, too.
            change.park_by_s = math.inf
            self._look()
        self._go_on_changing()

    def _go_on_changing(self) -> None:
        """Let everybody come to a boundary once those are warm who are to join, and change there."""
        change = self._change
        if change is None or self.mode != "running" or self.record is None:
            return
        if not change.is_due:
            if not self._are_warm() and self._now_s < change.warm_by_s:
                return
            change.is_due = True
            change.park_by_s = self._now_s + CLOSE_S + 2 * self.pace.step_s
            self._paused_at_s = None
            self._write(last_step=self.progress.furthest + 1, upcoming=self._upcoming())
        self._change_if_parked()

    def _are_warm(self) -> bool:
        invocations = [slot.invocation for slot in self.pool.joining.values()]
        return all(
            invocation is not None and invocation.is_alive and invocation.warm_at_s is not None
            for invocation in invocations
        )

    def _plan_to_begin(self) -> FunctionPlan | None:
        """What the next attempt runs as."""
        change = self._change
        return change.plan if change is not None and (change.is_due or self._are_warm()) else self._plan

    def _adopt_change(self) -> None:
        """Nobody will run for a while: whoever begins next begins as the plan that was to follow."""
        if self._change is not None:
            self._plan, self.generation = self._change.plan, self._change.generation

    def _change_if_parked(self) -> None:
        """Whether everybody stands at the boundary, its state saved: then the plan is taken up."""
        reports = [slot.invocation.report if slot.invocation is not None else None for slot in self.pool]
        steps = {report.step for report in reports if report is not None}
        is_parked = all(
            report is not None and report.phase == "parked" and report.attempt == self._attempt for report in reports
        )
        if not is_parked or len(steps) != 1:
            return
        step = steps.pop()
        is_saved = any(report is not None and report.saved_step == step for report in reports)
        self.progress.furthest = max(self.progress.furthest, step)
        if is_saved or step == 0:
            if self._has_way(step):
                self._begin(step)
        else:
            # Saved in an earlier attempt, or by one who left since: see what is there.
            self._look()

    # --- the boundary ----------------------------------------------------------------------------------------------

    def _take_up_plan(self, restore_step: int) -> None:
        super()._take_up_plan(restore_step)
        change = self._change
        if change is None or not (change.is_due or self._are_warm()):
            return
        old, plan = self.pool.slots, change.plan
        slots: dict[Place, PlaceSlot] = {}
        for place in _places(plan):
            joining = self.pool.joining.get(place)
            if joining is not None:
                slots[place] = joining
            else:
                slots[place] = old[place] if self._stays(place, plan) else PlaceSlot(place=place)
        self._change, self.pool.joining = None, {}
        self.pool.slots = slots
        kept = {id(slot) for slot in slots.values()}
        self.pool.retire(slot for slot in old.values() if id(slot) not in kept)
        self._num_stayed = sum(
            slot.invocation is not None and slot.invocation.is_alive
            for slot in slots.values()
            if old.get(slot.place) is slot
        )
        self._plan, self.generation = plan, change.generation
        self._paused_at_s = self._paused_at_s if self._paused_at_s is not None else self._progress_at_s
        self._switched = (restore_step, self._attempt + 1)
        self.pace = self.pace.followed_by(self._expected_s(plan))

    def _expected_s(self, plan: FunctionPlan) -> float:
        """What a step of another plan may take: as predicted, else as much longer as there is less memory for it."""
        option = self.facts.option(plan)
        if option is not None:
            return option.step_s
        before = self.record.plan.memory_mb if self.record is not None else plan.memory_mb
        return self.pace.step_s * max(1.0, before / plan.memory_mb)

    def _confirm_change(self) -> None:
        """The first step of a plan that was taken up is made: say how long everybody stood still for it."""
        assert self._switched is not None
        _, attempt = self._switched
        paused_at_s = self._paused_at_s if self._paused_at_s is not None else self._now_s
        pause_s = max(0.0, self._now_s - paused_at_s - self.pace.step_s)
        if attempt == self._attempt:
            reports = [slot.invocation.report for slot in self.pool if slot.invocation is not None]
            told = [report.pause_s for report in reports if report is not None and report.pause_s > 0.0]
            # Those who stayed have timed it.
            pause_s = max(told, default=pause_s)
        self._resized_generation = self.generation
        self._emit_resized("replace", pause_s)
        self._paused_at_s = self._switched = None

    def _steady_usd(self, seconds: float) -> float:
        """What so many seconds of the present plan cost, requests left out."""
        assert self._plan is not None
        return self.ledger.steady_usd(self._plan, seconds, has_parameter_store=bool(self.pool.parameter_url))


def _places(plan: FunctionPlan) -> list[Place]:
    return [Place(stage, replica) for stage in range(len(plan.stages)) for replica in range(plan.num_replicas)]
