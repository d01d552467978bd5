"""One job on functions as a state machine: what is seen goes in, what is to be done comes out. No clock, no I/O.

A step is redone and a function replaced without knowing for sure that they failed: a new attempt has wire keys of its
own, so that whatever an older one still writes is never read. Everything rests on the control record, which only the
coordinator writes, and on the states of which every stage is complete in the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatchmethod
from typing import Literal

from springtide.backends.functions.coordinator import messages
from springtide.backends.functions.coordinator.attempts import CLOSE_S
from springtide.backends.functions.coordinator.change import can_follow
from springtide.backends.functions.coordinator.invocations import OVER, WORKED, FunctionInvocation, PlaceSlot
from springtide.backends.functions.coordinator.messages import Order, Stimulus
from springtide.backends.functions.coordinator.reasons import death_sentence, is_data_lost, is_store_trouble
from springtide.backends.functions.coordinator.watchdog import MAX_DEATHS, Watchdog
from springtide.core.events import JobFailed
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.wire.functions import ControlRecord, FunctionReport, Place

# An invocation that the provider will not take is tried so many times more.
MAX_REFUSED = 3


class Coordinator(Watchdog):
    """`handle` takes one stimulus at one instant and returns orders, to be carried out one after the other."""

    _asked: messages.AskedToRun | None = None

    # --- in and out ------------------------------------------------------------------------------------------------

    def handle(self, now_s: float, stimulus: Stimulus) -> list[Order]:
        """Take in one stimulus at `now_s`."""
        elapsed_s = max(0.0, now_s - self._now_s)
        self._now_s = max(self._now_s, now_s)
        is_up = bool(self.pool.parameter_url)
        self.ledger.pass_time(elapsed_s, stored_bytes=2.0 * self._saved_bytes, has_parameter_store=is_up)
        self._orders = []
        self._take(stimulus)
        self._tend_store()
        return self._orders

    def adopt(self, record: ControlRecord, now_s: float, invoked_at_s: Mapping[int, float]) -> None:
        """Go on where a coordinator before left off, without touching the functions, which may be at work.

        `invoked_at_s` says of the incarnations that it noted when they were invoked.
        """
        self.generation = self._resized_generation = record.generation
        self._attempt, self._plan, self.record = record.attempt, record.plan, record
        self.pool.adopt(record, now_s, invoked_at_s)
        self._expect(record.plan)
        self._stays_from = record.stays_from if record.stays_from is not None else record.generation
        self._is_unsettled = record.last_step is not None or record.upcoming is not None
        self.measuring.new_attempt(record.plan)
        self.progress.furthest = record.restore_step
        self._progress_at_s = now_s
        self.mode = "running"
        # Whoever invocations reports again soon; who does not is found by a roll call.
        self._answer_by_s = now_s + self.pace.answer_limit_s()

    def watched(self) -> list[tuple[Place, int]]:
        """Whose reports are worth reading now."""
        return [
            (invocation.place, invocation.incarnation)
            for invocation in self.pool.living()
            if invocation.retry_at_s is None
        ]

    def status(self) -> FunctionRunStatus | None:
        """What people are told; None before there is a plan."""
        if self._plan is None:
            return None
        usage = self.ledger.usage(self._now_s)
        lifetime_s = self.facts.service.lifetime_s
        return FunctionRunStatus(
            service=self.facts.service.name,
            plan=self._plan,
            places=tuple(slot.status(self._now_s, lifetime_s) for slot in self.pool),
            step_s=self.pace.measured_step_s,
            predicted_step_s=self.pace.predicted_step_s,
            saved_step=self._checkpoint_step,
            num_invocations=self.pool.num_invocations,
            num_replaced=self.pool.num_replaced,
            num_handovers=self.pool.num_handovers,
            num_lost=self.pool.num_lost,
            num_throttled=self.pool.num_throttled,
            num_redone_steps=self.num_redone_steps,
            usage=usage,
            bill=self.ledger.bill(usage),
            budget_usd=self.ledger.budget_usd,
            upcoming=self._change.plan if self._change is not None else None,
            joining=tuple(slot.status(self._now_s, lifetime_s) for slot in self.pool.joining.values()),
            changes=self.changes,
            idle_reason=self.idle_reason,
        )

    @singledispatchmethod
    def _take(self, stimulus: Stimulus) -> None:
        raise AssertionError(f"no way to take {type(stimulus).__name__}")

    # --- what the control plane asks -------------------------------------------------------------------------------

    @_take.register
    def _(self, asked: messages.AskedToRun) -> None:
        change = self._change
        newest = self.generation if change is None else change.generation
        if self.mode == "over" or asked.generation < newest:
            return
        if asked.generation == newest:
            if self._resized_generation == newest and self.record is not None:
                self._emit_resized("replace", 0.0)
            return
        works = self.mode in ("looking", "opening", "running") and self.record is not None
        if works and self._plan is not None and can_follow(self._plan, asked.plan):
            if change is not None and change.is_due:
                # One after the other: everybody is on the way to a boundary.
                self._asked = asked
            else:
                self._prepare(asked.generation, asked.plan)
            return
        self.generation = asked.generation
        if self.mode == "idle":
            self._plan = asked.plan
            self._look()
        elif self.mode == "dry":
            self._plan, self._resized_generation = asked.plan, asked.generation
            self._emit_resized("replace", 0.0)
        elif self.after in ("resize", "dry"):
            self._next_plan = asked.plan
        elif self.mode in ("looking", "opening") and self.record is None:
            self._plan = asked.plan
        elif works:
            # Functions belong to one generation: even the same plan is begun by others.
            self._next_plan = asked.plan
            self._paused_at_s = self._now_s
            self._close("resize", CLOSE_S + 2 * self.pace.step_s)

    @_take.register
    def _(self, asked: messages.AskedToPreempt) -> None:
        if self.mode == "over":
            self._emit_stopped()
            return
        self.after = "preempt"
        if self.mode in ("idle", "dry"):
            self._conclude(self._checkpoint_step)
        elif self.mode in ("looking", "opening"):
            self._stop_now("preempt")
        elif self.mode == "running":
            self._close("preempt", asked.grace_s)
        elif self.mode == "closing":
            self._close_by_s = min(self._close_by_s, self._now_s + asked.grace_s)

    @_take.register
    def _(self, told: messages.BudgetTold) -> None:
        self.ledger.budget_usd = told.budget_usd
        is_about_to_rest = self.mode in ("closing", "looking_last") and self.after == "budget"
        if not is_about_to_rest or self._plan is None:
            return
        start_usd = self.ledger.start_usd(self._plan, self.pace.start_s)
        needed_usd = self._spent_usd() + start_usd + self._step_usd(self._plan) + self._end_usd(self._plan)
        if told.budget_usd is None or needed_usd <= told.budget_usd:
            # Nobody has been told yet that it rests: it begins again from what they save now.
            self.after, self._next_plan = "resize", self._plan

    @_take.register
    def _(self, found: messages.StatesFound) -> None:
        is_probe, self._is_probe = self._is_probe, False
        self._found(found)
        if is_probe and self.mode == "running":
            self._answer_by_s = self._now_s + self.pace.answer_limit_s()

    @_take.register
    def _(self, assembled: messages.Assembled) -> None:
        self._assembled(assembled)

    @_take.register
    def _(self, failed: messages.StoreFailed) -> None:
        if self.mode == "over":
            return
        self.reason = failed.error
        self._conclude_lost()

    @_take.register
    def _(self, fenced: messages.FencedOff) -> None:
        # Another coordinator owns the job and answers for it.
        self.pool.give_up_all(self._now_s)
        self.mode = "over"

    @_take.register
    def _(self, passed: messages.TimePassed) -> None:
        self.ledger.own = passed.own
        if passed.parameter_store_s is not None:
            self.ledger.set_parameter_store(passed.parameter_store_s)
        self._look_around()
        if self._asked is not None and self._change is None:
            asked, self._asked = self._asked, None
            self._take(asked)

    @_take.register
    def _(self, seen: messages.StreamSeen) -> None:
        self._saw_stream(seen)

    @_take.register
    def _(self, up: messages.ParameterStoreUp) -> None:
        self._store_up(up.url)

    @_take.register
    def _(self, lost: messages.ParameterStoreLost) -> None:
        self._store_lost("it does not answer any more")

    @_take.register
    def _(self, asked: messages.AskedToStop) -> None:
        if self.mode in ("idle", "over", "assembling") or self.record is None:
            self.mode = "over"
            self._emit_stopped()
            return
        self._stop_now("stop", asked.grace_s)

    # --- what functions do -----------------------------------------------------------------------------------------

    @_take.register
    def _(self, ended: messages.InvocationEnded) -> None:
        found = self.pool.find(ended.place, ended.incarnation)
        if found is None or found[1].end is not None or ended.number != found[1].number:
            return
        slot, invocation = found
        if self.pool.is_joining(slot):
            self._joiner_ended(slot, invocation, ended)
            return
        is_stopping = self.record is not None and self.record.verb == "stop"
        if not self.pool.is_present(slot) or (ended.outcome in ("throttled", "refused") and is_stopping):
            self._ended_unneeded(invocation, ended)
            return
        if ended.outcome == "throttled":
            self.pool.refuse(invocation, self._now_s, ended.retry_after_s)
            self._throttled_since_s = self._throttled_since_s or self._now_s
            slot.error = ended.error
            return
        if ended.outcome == "refused":
            self.pool.refuse(invocation, self._now_s, ended.retry_after_s)
            slot.error = death_sentence(invocation, "refused", ended.error)
            if invocation.num_refused > MAX_REFUSED and self.mode in ("running", "looking"):
                self._lose(slot.error)
            return
        if ended.outcome == "lost":
            # It may be at work, or may begin late: its reports will tell.
            invocation.is_uncertain = True
            return
        invocation.end, invocation.over_at_s = ended, self._now_s
        result = ended.result
        if result is None:
            self._died(slot, invocation, ended.outcome, ended.error)
        elif result.outcome == "left":
            self._left(slot, invocation)
        elif result.outcome == "failed":
            self._failed(slot, invocation, result.error or ended.error)
        else:
            self._ended_well(slot, invocation)

    def _ended_unneeded(self, invocation: FunctionInvocation, ended: messages.InvocationEnded) -> None:
        """Nobody needs it any more: what counts is what it is charged for."""
        if ended.outcome in ("throttled", "refused"):
            # It never ran.
            self.pool.refuse(invocation, self._now_s, None)
            self.pool.give_up(invocation, self._now_s)
        elif ended.outcome != "lost":
            invocation.end, invocation.over_at_s = ended, self._now_s
        self._check_closed()

    @_take.register
    def _(self, seen: messages.ReportSeen) -> None:
        report = seen.report
        found = self.pool.find(Place(report.stage, report.replica), report.incarnation)
        if found is None or report == found[1].report:
            return
        slot, invocation = found
        invocation.report, invocation.heard_at_s = report, self._now_s
        if invocation.began_at_s is None:
            invocation.began_at_s = self._now_s
            self._num_unbegun = 0
        if invocation.warm_at_s is None and report.phase in ("warm", "training"):
            invocation.warm_at_s = self._now_s
            if not invocation.is_adopted:
                self.pace.saw_start(self._now_s - invocation.invoked_at_s)
        if self.pool.is_joining(slot):
            self._joiner_told(slot, invocation)
            return
        if not self.pool.is_present(slot):
            if report.phase in OVER:
                self._check_closed()
            return
        if invocation is slot.successor and report.phase in WORKED and slot.invocation is not None:
            # It goes on, so the one before has left.
            self._left(slot, slot.invocation)
        record = self.record
        if record is not None and (report.generation, report.attempt) == (record.generation, record.attempt):
            # Of whom it is does not matter: one whose successor was heard of first, or who only ends what is under way
            # because another plan was asked for, has made these steps all the same.
            self.progress.saw_losses(report, record.plan)
        if invocation is slot.invocation:
            self._saw_work(slot, invocation, report)
        if report.phase == "failed" and invocation.is_uncertain:
            # Nobody else will tell of it.
            invocation.over_at_s = self._now_s
            self._failed(slot, invocation, report.error)
        if report.phase in OVER:
            self._check_finished()
            self._check_closed()

    def _saw_work(self, slot: PlaceSlot, invocation: FunctionInvocation, report: FunctionReport) -> None:
        if report.phase == "left":
            self._left(slot, invocation)
        if report.generation != self.generation or report.attempt != self._attempt or self._plan is None:
            return
        self.progress.saw(report, self._plan)
        self.measuring.saw(report)
        if report.phase in ("training", "waiting", "parked"):
            if report.phase == "training":
                self.pace.saw(report)
            if slot.recorded != invocation.incarnation and self.mode in ("running", "closing"):
                slot.recorded = invocation.incarnation
                self._write(incarnations=self.pool.incarnations())
            if self._resized_generation < self.generation and self._switched is None:
                self._resized_generation = self.generation
                first = self.record.restore_step if self.record else 0
                direction: Literal["start", "resume", "replace"] = "resume" if first else "start"
                pause_s = self._now_s - self._paused_at_s if self._paused_at_s is not None else 0.0
                self._emit_resized("replace" if self._paused_at_s is not None else direction, pause_s)
                self._paused_at_s = None
        slot.step = max(slot.step, report.step)
        self._committed()
        if report.phase == "parked" and self._change is not None and self.mode == "running":
            self._change_if_parked()
        elif report.phase == "stuck":
            self._store_lost(report.error)

    def _committed(self) -> None:
        """Draw the conclusions from the steps that every place has committed."""
        assert self._plan is not None
        assert self.record is not None
        committed = min(slot.step for slot in self.pool)
        if committed > self.progress.furthest:
            self._progress_at_s = self._now_s
            self._num_probes = 0
            for slot in self.pool:
                slot.num_deaths = 0
        if committed > self.record.restore_step:
            self._sweep()
        self.progress.commit(committed)
        if self._change is None and committed > self.record.restore_step:
            # Until the first step is made, and while others warm up beside them, what is spent is not what steps cost.
            self.ledger.learn(committed, self.ledger.bill(self.ledger.usage(self._now_s)).total_usd)
        if self._switched is not None and committed > self.record.restore_step:
            self._confirm_change()
        event = self.progress.event(self.generation, self._plan, self.pace.measured_step_s)
        if event is not None:
            self._emit(event)
        for measured in self.measuring.due(self.generation, self._steady_usd, self.ledger.requests_usd):
            self._emit(measured)
        saved = self.progress.complete_state(len(self._plan.stages), self.record.save_every)
        if saved > max(self._checkpoint_step, self.record.restore_step):
            self._checkpoint(saved)

    # --- ends of functions -----------------------------------------------------------------------------------------

    def _left(self, slot: PlaceSlot, invocation: FunctionInvocation) -> None:
        """It went in time, its state saved: the one after it goes on within the same attempt."""
        if invocation is not slot.invocation:
            if invocation is slot.successor:
                slot.successor = None
            return
        invocation.over_at_s = self._now_s
        self.pool.num_handovers += 1
        slot.num_handovers += 1
        is_of_now = invocation.report is not None and invocation.report.attempt == self._attempt
        if self.mode == "running" and not is_of_now:
            # It left in an attempt of the past, of which nobody reads any more what it left behind.
            self._replace(slot, invocation, "it left while the others began anew")
            return
        successor, slot.successor = slot.successor, None
        if successor is not None and (successor.is_alive or successor.phase in WORKED or successor.has_finished):
            slot.invocation = successor
        elif slot.abandoned_successor > invocation.incarnation and self.mode == "running":
            # One that was given up may have seen that it left, and go on: only a new attempt shuts it out.
            self._replace(slot, invocation, "it left, and who was to follow never began")
        elif self._works():
            assert self.record is not None
            self._orders.append(self.pool.launch(slot, self.record, self._now_s, is_successor=True))
        else:
            self._check_closed()

    def _ended_well(self, slot: PlaceSlot, invocation: FunctionInvocation) -> None:
        """It finished, stopped as it was asked, or gave way."""
        assert invocation.end is not None
        assert invocation.end.result is not None
        outcome = invocation.end.result.outcome
        if invocation is slot.successor and outcome == "finished" and slot.invocation is not None:
            # It took over and came to the end before anybody heard that the one before it had left.
            self._left(slot, slot.invocation)
        if invocation is slot.successor:
            slot.successor = None
        elif invocation is slot.invocation and outcome == "finished":
            slot.step = max(slot.step, invocation.end.result.step)
            self._check_finished()
            if self.mode == "running" and (invocation.report is None or invocation.report.attempt != self._attempt):
                # It made the last step in an attempt of the past, and the others wait for it in a newer one.
                self._replace(slot, invocation, "it finished while the others began anew")
        elif invocation is slot.invocation and self.mode == "running":
            # Nobody asked it to: it read a record of the past, or was taken for another.
            self._replace(slot, invocation, f"it ended as {outcome} although the job goes on")
        self._check_closed()

    def _check_finished(self) -> None:
        """Whether everybody has ended after the last step."""
        invocations = [slot.invocation for slot in self.pool if slot.invocation is not None]
        has_finished = any(invocation.has_finished for invocation in invocations)
        if self.mode == "running" and has_finished and not any(invocation.is_alive for invocation in invocations):
            self._look()

    def _forget_change(self) -> None:
        super()._forget_change()
        if self._asked is not None:
            self._owed, self._asked = (self._asked.generation, self._asked.plan), None

    def _failed(self, slot: PlaceSlot, invocation: FunctionInvocation, error: str) -> None:
        if is_store_trouble(error):
            self._died(slot, invocation, "trouble", error)
            return
        if self.mode in ("over", "assembling") or self.after in ("stop", "failed", "data"):
            self._check_closed()
            return
        slot.error = error
        if is_data_lost(error):
            self._pause_for_data(error.partition(": ")[2])
            return
        self.reason = error
        self._emit_usage()
        self._emit(JobFailed(job_id=self.facts.job_id, generation=self.generation, error=error))
        self._stop_now("failed")

    def _died(self, slot: PlaceSlot, invocation: FunctionInvocation, how: str, error: str) -> None:
        """It is gone without having been asked. The job goes on from the newest state, unless that leads nowhere."""
        if invocation is slot.successor:
            slot.successor = None
            slot.num_deaths += 1
            return
        if invocation is not slot.invocation:
            return
        sentence = death_sentence(invocation, how, error)
        if self.mode == "closing":
            slot.error = sentence
            if self._works():
                # The others would wait for it in vain.
                self._stop_now(self.after)
            self._check_closed()
            return
        if self.mode not in ("running", "looking", "opening"):
            return
        slot.num_deaths += 1
        if how == "out_of_memory" and not self._enlarge(slot, invocation):
            return
        if self.mode == "running" and slot.num_deaths >= MAX_DEATHS:
            text = f"{sentence}, {slot.num_deaths} times in a row after step {self.progress.furthest}"
            if how in ("trouble", "refused"):
                self._lose(text)
            else:
                self._fail(text)
            return
        self._replace(slot, invocation, sentence)
