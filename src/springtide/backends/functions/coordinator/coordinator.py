"""One job on functions as a state machine: stimuli go in, orders come out. No clock, no I/O.

A step is redone and a function is replaced without certainty that they failed. That is safe: a new attempt uses other
keys, so nothing an older attempt still writes is ever read. Two things are relied on: the control record, which only
the coordinator writes, and states that every stage has saved completely.

`Coordinator.handle` takes a stimulus and returns orders. It owns the state (run.py) and begins, closes and ends
attempts. The reasons to do so are found by its parts, each with a state of its own, which answer questions or yield
verdicts (verdicts.py): the watchdog, the budget, the saved states, the stream, the parameter store, the plan switch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import singledispatchmethod

from springtide.backends.functions.coordinator import budget, function_ends, messages, saved_states
from springtide.backends.functions.coordinator.function_pool import JobFacts
from springtide.backends.functions.coordinator.invocations import OVER, WORKED, FunctionInvocation, PlaceSlot
from springtide.backends.functions.coordinator.measure import StepMeasurements
from springtide.backends.functions.coordinator.messages import Order, Stimulus
from springtide.backends.functions.coordinator.parameter_store import ParameterStore
from springtide.backends.functions.coordinator.reasons import EndCause, end_sentence
from springtide.backends.functions.coordinator.reports import RunReports
from springtide.backends.functions.coordinator.run import After, Mode, Run
from springtide.backends.functions.coordinator.run_status import run_status
from springtide.backends.functions.coordinator.saved_states import SavedStates
from springtide.backends.functions.coordinator.stream import JobStream
from springtide.backends.functions.coordinator.switch import PlanSwitch, can_follow
from springtide.backends.functions.coordinator.verdicts import (
    CLOSE_S,
    STOP_S,
    AwaitParameterStore,
    BeginAttempt,
    CloseAtBoundary,
    ConcludeIfStopped,
    Effect,
    FailJob,
    FindStart,
    FunctionFailed,
    ReplaceFunction,
    RestUntilData,
    StopNow,
)
from springtide.backends.functions.coordinator.watchdog import Watchdog
from springtide.core.events import (
    Event,
    JobFailed,
    JobFinished,
    PauseRequested,
    ReplicaLost,
)
from springtide.core.functions import FunctionPlan, Usage
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.wire.functions import ControlRecord, FunctionReport, Place

# Retries of an invocation that the provider refuses.
MAX_REFUSED = 3


class Coordinator:
    """`handle` takes one stimulus at one instant and returns orders, to be carried out in that order.

    `base` is what the job used before this coordinator began.
    """

    def __init__(self, facts: JobFacts, now_s: float, base: Usage = Usage()) -> None:  # noqa: B008 - a frozen value.
        self.run = Run.of(facts, now_s, base)
        self._measuring = StepMeasurements(facts.job_id)
        self._watchdog = Watchdog()
        self._saved = SavedStates(facts.prefix)
        self._stream = JobStream(facts)
        self._parameter_store = ParameterStore(facts)
        self._switch = PlanSwitch()
        self._orders: list[Order] = []
        self._reports = RunReports(self._saved)
        # An adopted record announces a stop or another plan that the previous coordinator did not finish.
        self._is_unsettled = False

    # --- in and out ------------------------------------------------------------------------------------------------

    def handle(self, now_s: float, stimulus: Stimulus) -> list[Order]:
        """Process one stimulus at `now_s` (platform seconds)."""
        run = self.run
        elapsed_s = max(0.0, now_s - run.now_s)
        run.now_s = max(run.now_s, now_s)
        is_up = bool(run.pool.parameter_url)
        run.ledger.pass_time(elapsed_s, stored_bytes=self._saved.stored_bytes, has_parameter_store=is_up)
        self._orders = []
        self._take(stimulus)
        is_plan_changing = self._switch.upcoming is not None
        self._orders += self._parameter_store.close_if_unneeded(run, is_plan_changing=is_plan_changing)
        return self._orders

    def adopt(self, record: ControlRecord, now_s: float, invoked_at_s: Mapping[int, float]) -> None:
        """Continue where another coordinator stopped, without touching the functions, which may be running.

        `invoked_at_s`: when the incarnations named in that coordinator's notes were invoked.
        """
        run = self.run
        run.now_s = max(run.now_s, now_s)
        run.generation = run.resized_generation = record.generation
        run.attempt, run.plan, run.record = record.attempt, record.plan, record
        run.pool.adopt(record, now_s, invoked_at_s)
        run.expect(record.plan)
        run.stays_from = record.stays_from if record.stays_from is not None else record.generation
        self._is_unsettled = record.last_step is not None or record.upcoming is not None
        self._measuring.new_attempt(record.plan)
        run.progress.furthest = record.restore_step
        run.progress_at_s = now_s
        run.mode = Mode.RUNNING
        # Functions that are alive report within the answer limit; the others count as lost after it.
        self._watchdog.expect_answers(run)

    def watched(self) -> list[tuple[Place, int]]:
        """The functions whose reports are worth reading now."""
        return [(one.place, one.incarnation) for one in self.run.pool.living() if one.retry_at_s is None]

    @property
    def wants_stream(self) -> bool:
        """Whether the job's stream is to be looked at now and then."""
        return self._stream.is_wanted(self.run)

    def status(self) -> FunctionRunStatus | None:
        """What users are told; None before there is a plan."""
        return run_status(self.run, self._saved, self._switch, self._stream)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        """Carry out each effect before the next one is requested from the generator."""
        for effect in effects:
            match effect:
                case FindStart():
                    self._look()
                case BeginAttempt(step):
                    self._begin_if_ready(step)
                case AwaitParameterStore():
                    self.run.mode = Mode.OPENING
                case CloseAtBoundary(after, within_s):
                    self._close(after, within_s)
                case StopNow(after, reason):
                    self._stop_now(after, reason)
                case FailJob(reason):
                    self._fail(reason)
                case RestUntilData(step):
                    self._rest(step)
                case ReplaceFunction(slot, invocation, reason):
                    self._replace(slot, invocation, reason)
                case FunctionFailed(slot, invocation, code, error):
                    self._carry_out(function_ends.failed(self.run, slot, invocation, code, error))
                case ConcludeIfStopped():
                    self._conclude_if_stopped()
                case _:
                    self._orders.append(effect)

    def _emit(self, event: Event) -> None:
        self._orders.append(messages.Emit(event=event))

    @singledispatchmethod
    def _take(self, stimulus: Stimulus) -> None:
        raise AssertionError(f"no way to take {type(stimulus).__name__}")

    # --- requests of the control plane -----------------------------------------------------------------------------

    @_take.register
    def _(self, asked: messages.RunRequested) -> None:
        run, upcoming = self.run, self._switch.upcoming
        newest = run.generation if upcoming is None else upcoming.generation
        if run.mode is Mode.OVER or asked.generation < newest:
            return
        if asked.generation == newest:
            if run.resized_generation == newest and run.record is not None:
                self._emit(self._reports.resized(run, "replace", 0.0))
            return
        works = run.mode in (Mode.LOOKING, Mode.OPENING, Mode.RUNNING) and run.record is not None
        if works and run.plan is not None and can_follow(run.plan, asked.plan):
            if self._switch.is_due:
                # One change at a time: all functions are on their way to the boundary of the current one.
                self._switch.postponed = asked
            else:
                self._carry_out(self._switch.prepare(run, asked.generation, asked.plan))
                # The parameter store comes up while the joining functions warm up.
                self._carry_out(self._parameter_store.prepare(run, asked.plan))
            return
        run.generation = asked.generation
        if run.mode is Mode.IDLE:
            run.plan = asked.plan
            self._look()
        elif run.mode is Mode.RESTING:
            run.plan, run.resized_generation = asked.plan, asked.generation
            self._emit(self._reports.resized(run, "replace", 0.0))
        elif run.after in (After.RESIZE, After.REST):
            run.next_plan = asked.plan
        elif run.mode in (Mode.LOOKING, Mode.OPENING) and run.record is None:
            run.plan = asked.plan
        elif works:
            # Functions belong to one generation: even the same plan needs new ones.
            run.next_plan = asked.plan
            run.paused_at_s = run.now_s
            self._close(After.RESIZE, CLOSE_S + 2 * run.pace.step_s)

    @_take.register
    def _(self, asked: messages.PreemptRequested) -> None:
        run = self.run
        if run.mode is Mode.OVER:
            self._emit(self._reports.stopped(run))
            return
        run.after = After.PREEMPT
        if run.mode in (Mode.IDLE, Mode.RESTING):
            self._conclude(self._saved.newest_step)
        elif run.mode in (Mode.LOOKING, Mode.OPENING):
            self._stop_now(After.PREEMPT)
        elif run.mode is Mode.RUNNING:
            self._close(After.PREEMPT, asked.grace_s)
        elif run.mode is Mode.CLOSING:
            run.close_by_s = min(run.close_by_s, run.now_s + asked.grace_s)

    @_take.register
    def _(self, asked: messages.StopRequested) -> None:
        if self.run.mode in (Mode.IDLE, Mode.OVER, Mode.ASSEMBLING) or self.run.record is None:
            self.run.mode = Mode.OVER
            self._emit(self._reports.stopped(self.run))
            return
        self._stop_now(After.STOP, within_s=asked.grace_s)

    @_take.register
    def _(self, told: messages.BudgetChanged) -> None:
        run = self.run
        run.ledger.budget_usd = told.budget_usd
        is_about_to_pause = run.mode in (Mode.CLOSING, Mode.LOOKING_LAST) and run.after is After.BUDGET
        if is_about_to_pause and run.plan is not None and budget.has_room(run, 1.0):
            # The pause was not reported yet: the job continues from the state that its functions are saving now.
            run.after, run.next_plan = After.RESIZE, run.plan

    # --- stores and the clock --------------------------------------------------------------------------------------

    @_take.register
    def _(self, found: messages.StatesFound) -> None:
        is_probe = self._watchdog.pop_probe()
        self._found(found)
        if is_probe and self.run.mode is Mode.RUNNING:
            self._watchdog.expect_answers(self.run)

    @_take.register
    def _(self, assembled: messages.Assembled) -> None:
        if self.run.mode is Mode.ASSEMBLING and self.run.plan is not None:
            self._finish(assembled, self.run.plan)

    @_take.register
    def _(self, failed: messages.StoreFailed) -> None:
        if self.run.mode is not Mode.OVER:
            self._report_place_lost(failed.error)

    @_take.register
    def _(self, fenced: messages.FencedOff) -> None:
        # Another coordinator owns the job and reports on it.
        self.run.pool.give_up_all(self.run.now_s)
        self.run.mode = Mode.OVER

    @_take.register
    def _(self, seen: messages.StreamRead) -> None:
        self._carry_out(self._stream.observe(self.run, seen))

    @_take.register
    def _(self, up: messages.ParameterStoreUp) -> None:
        self._carry_out(self._parameter_store.handle_up(self.run, up.url))

    @_take.register
    def _(self, lost: messages.ParameterStoreLost) -> None:
        self._carry_out(self._parameter_store.handle_broken(self.run, "it does not answer any more"))

    @_take.register
    def _(self, passed: messages.TimePassed) -> None:
        run = self.run
        run.ledger.own = passed.own
        if passed.parameter_store_s is not None:
            run.ledger.set_parameter_store(passed.parameter_store_s)
        self._run_checks()
        postponed = self._switch.pop_postponed()
        if postponed is not None:
            self._take(postponed)

    def _run_checks(self) -> None:
        """Run every check that depends on time."""
        run = self.run
        self._carry_out(self._stream.wake_if_due(run))
        if self._is_unsettled and run.mode is Mode.RUNNING:
            # A new attempt drops whatever the previous coordinator had announced.
            self._is_unsettled = False
            self._look()
        if run.mode is Mode.RUNNING:
            # After a takeover the address of the parameter store is unknown until it is opened again.
            self._carry_out(self._parameter_store.prepare(run, run.plan))
        if run.mode is Mode.CLOSING and run.now_s > run.close_by_s:
            if run.is_stepping:
                self._stop_now(run.after)
            else:
                run.pool.give_up_all(run.now_s)
                self._conclude_if_stopped()
        for check in (
            self._watchdog.retry_refused,
            self._watchdog.find_unbegun,
            self._watchdog.find_silent,
            self._switch.check,
            self._check_stream,
            self._watchdog.invoke_successors,
            self._watchdog.find_standstill,
            budget.check,
            saved_states.check_interval,
        ):
            if not run.is_stepping:
                break
            self._carry_out(check(run))
        if run.mode in (Mode.RUNNING, Mode.CLOSING) and self._reports.is_usage_due(run):
            self._emit(self._reports.usage(run))

    def _check_stream(self, run: Run) -> Iterable[Effect]:
        return self._stream.check(run, is_change_due=self._switch.is_due)

    # --- functions -------------------------------------------------------------------------------------------------

    @_take.register
    def _(self, seen: messages.ReportRead) -> None:
        run, report = self.run, seen.report
        found = run.pool.find(Place(report.stage, report.replica), report.incarnation)
        if found is None or report == found[1].report:
            return
        slot, invocation = found
        invocation.report, invocation.heard_at_s = report, run.now_s
        if invocation.began_at_s is None:
            invocation.began_at_s = run.now_s
            self._watchdog.observe_begin()
        if invocation.warm_at_s is None and report.phase in ("warm", "training"):
            invocation.warm_at_s = run.now_s
            if not invocation.is_adopted:
                run.pace.observe_start(run.now_s - invocation.invoked_at_s)
        if run.pool.is_joining(slot):
            self._carry_out(self._switch.joiner_reported(run, slot, invocation))
            return
        if not run.pool.is_present(slot):
            if report.phase in OVER:
                self._conclude_if_stopped()
            return
        if invocation is slot.successor and report.phase in WORKED and slot.invocation is not None:
            # The successor trains, so its predecessor has left.
            self._carry_out(function_ends.left(run, slot, slot.invocation))
        record = run.record
        if record is not None and (report.generation, report.attempt) == (record.generation, record.attempt):
            # Losses count whichever function reports them: one whose successor was heard of first, or one that only
            # finishes because another plan was requested, has made these steps as well.
            run.progress.observe_losses(report, record.plan)
        if invocation is slot.invocation:
            self._observe_work(slot, invocation, report)
        if report.phase == "failed" and invocation.is_uncertain:
            # The provider lost this invocation: no other notice of its end will come.
            invocation.over_at_s = run.now_s
            self._carry_out(function_ends.failed(run, slot, invocation, report.error_code, report.error))
        if report.phase in OVER:
            self._carry_out(function_ends.look_if_finished(run))
            self._conclude_if_stopped()

    def _observe_work(self, slot: PlaceSlot, invocation: FunctionInvocation, report: FunctionReport) -> None:
        run = self.run
        if report.phase == "left":
            self._carry_out(function_ends.left(run, slot, invocation))
        if report.generation != run.generation or report.attempt != run.attempt or run.plan is None:
            return
        run.progress.observe(report, run.plan)
        self._measuring.observe(report)
        if report.phase in ("training", "waiting", "parked"):
            if report.phase == "training":
                run.pace.observe(report)
            if slot.recorded != invocation.incarnation and run.mode in (Mode.RUNNING, Mode.CLOSING):
                slot.recorded = invocation.incarnation
                self._orders.append(run.amend(incarnations=run.pool.incarnations()))
            if run.resized_generation < run.generation and not self._switch.is_unconfirmed:
                self._emit(self._reports.resized_by_start(run))
        slot.step = max(slot.step, report.step)
        self._commit()
        if report.phase == "parked":
            self._carry_out(self._switch.switch_if_parked(run))
        elif report.phase == "stuck":
            self._carry_out(self._parameter_store.handle_broken(run, report.error))

    def _commit(self) -> None:
        """Report and act on the steps that every place has committed."""
        run, plan, record = self.run, self.run.plan, self.run.record
        assert plan is not None
        assert record is not None
        committed = min(slot.step for slot in run.pool)
        if committed > run.progress.furthest:
            run.progress_at_s = run.now_s
            self._watchdog.observe_progress()
            for slot in run.pool:
                slot.num_deaths = 0
        is_under_way = committed > record.restore_step
        if is_under_way:
            self._orders += self._saved.remove_left_over()
        run.progress.commit(committed)
        if self._switch.upcoming is None and is_under_way:
            # Cost per step is learned only from steady work: not before the first step, nor while joiners warm up.
            run.ledger.record_spent(committed, budget.spent_usd(run))
        if self._switch.is_unconfirmed and is_under_way:
            pause_s = self._switch.confirm(run)
            run.resized_generation = run.generation
            self._emit(self._reports.resized(run, "replace", pause_s))
            run.paused_at_s = None
        self._orders += self._reports.progress(run, plan)
        for measured in self._measuring.due(
            run.generation, lambda seconds: budget.steady_usd(run, seconds), run.ledger.requests_usd
        ):
            self._emit(measured)
        saved = run.progress.complete_state(len(plan.stages), record.save_every)
        if saved > max(self._saved.newest_step, record.restore_step):
            self._orders += self._saved.commit(run, saved)

    @_take.register
    def _(self, ended: messages.InvocationEnded) -> None:
        run, pool = self.run, self.run.pool
        found = pool.find(ended.place, ended.incarnation)
        if found is None or found[1].end is not None or ended.number != found[1].number:
            return
        slot, invocation = found
        if pool.is_joining(slot):
            self._carry_out(self._switch.joiner_ended(run, slot, invocation, ended))
            return
        is_stopping = run.record is not None and run.record.verb == "stop"
        if not pool.is_present(slot) or (ended.never_ran and is_stopping):
            self._carry_out(function_ends.ended_unneeded(run, invocation, ended))
        elif ended.never_ran:
            self._refused(slot, invocation, ended)
        elif ended.outcome == "lost":
            # It may be running, or may begin late: its reports will show that.
            invocation.is_uncertain = True
        else:
            self._carry_out(function_ends.ended(run, slot, invocation, ended))

    def _refused(self, slot: PlaceSlot, invocation: FunctionInvocation, ended: messages.InvocationEnded) -> None:
        """The provider refused an invocation: it is retried after a delay."""
        run = self.run
        run.pool.refuse(invocation, run.now_s, ended.retry_after_s)
        if ended.outcome == "throttled":
            self._watchdog.observe_throttled(run)
            slot.error = ended.error
            return
        slot.error = end_sentence(invocation, EndCause.REFUSED, ended.error)
        if invocation.num_refused > MAX_REFUSED and run.mode in (Mode.RUNNING, Mode.LOOKING):
            self._stop_now(After.LOST, slot.error)

    def _replace(self, slot: PlaceSlot, invocation: FunctionInvocation, reason: str) -> None:
        """Fill the slot with another function, within a new attempt."""
        self.run.pool.num_replaced += 1
        slot.num_replaced += 1
        slot.error = reason
        invocation.over_at_s = self.run.now_s
        if self.run.mode is Mode.RUNNING:
            self._look()

    # --- an attempt begins -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Find out from which step an attempt can begin."""
        self.run.mode = Mode.LOOKING
        self._orders.append(self._saved.look(self.run))

    def _found(self, found: messages.StatesFound) -> None:
        """The newest saved step is known: begin an attempt from it, or conclude the run with it."""
        run, step = self.run, found.step
        self._saved.observe(found)
        if run.mode not in (Mode.LOOKING, Mode.LOOKING_LAST) or not self._saved.is_newest_look(found):
            return
        run.progress.furthest = max(run.progress.furthest, step)
        if found.torn:
            self._orders.append(messages.DeleteKeys(keys=found.torn, is_awaited=True))
        total = run.progress.total_steps
        if total and step >= total and run.after not in (After.STOP, After.FAILED):
            self._assemble(step)
        elif run.mode is Mode.LOOKING_LAST:
            if step > self._saved.newest_step:
                self._orders += self._saved.commit(run, step)
            self._conclude(step)
        elif not budget.has_room_to_begin(run):
            self._saved.reached(step)
            self._stop_now(After.BUDGET, budget.reason_of(run, step))
        else:
            self._begin_unless_starved(step)

    def _begin_unless_starved(self, step: int) -> None:
        """Begin an attempt, if the stream has samples for it and the parameter store is up."""
        verdict = self._stream.verdict_instead_of_start(self.run, step)
        if verdict is None:
            self._begin_if_ready(step)
        else:
            self._carry_out((verdict,))

    def _begin_if_ready(self, step: int) -> None:
        """Begin an attempt, or have the parameter store brought up for it."""
        if self._parameter_store.is_ready(self.run, self._switch.plan_to_begin(self.run)):
            self._begin(step)
        else:
            self._carry_out(self._parameter_store.begin_later(step))

    def _begin(self, restore_step: int) -> None:
        """Begin a new attempt from a saved step: living functions join it, new ones fill the empty slots."""
        run, pool, before = self.run, self.run.pool, self.run.record
        self._switch.put_in_force(run)
        plan = run.plan
        assert plan is not None
        if not pool.slots or before is None or len(pool.slots) != plan.num_functions:
            pool.give_up_all(run.now_s)
            pool.retire(pool)
            pool.open_slots(plan)
            run.expect(plan)
            run.stays_from = run.generation
            run.num_stayed = 0
        run.attempt += 1
        run.after = After.NOTHING
        run.mode = Mode.RUNNING
        self._saved.begin(restore_step, before)
        run.num_redone_steps += max(0, run.progress.furthest - restore_step)
        run.progress.new_attempt(restore_step)
        self._measuring.new_attempt(plan)
        run.ledger.forget_steps()
        run.record = ControlRecord(
            generation=run.generation,
            attempt=run.attempt,
            restore_step=restore_step,
            plan=plan,
            incarnations={},
            save_every=saved_states.save_every(run, plan),
            upcoming=self._switch.announced(run),
            stays_from=run.stays_from,
            parameter_url=self._parameter_store.url_for(run, plan),
            **self._stream.offered(),
        )
        invokes = pool.fill(run.record, run.now_s)
        # The record is written first: a function that it does not name ends at once.
        self._orders.append(run.amend(incarnations=pool.incarnations()))
        self._orders += invokes
        run.progress_at_s = run.now_s

    # --- an attempt ends -------------------------------------------------------------------------------------------

    def _close(self, after: After, within_s: float) -> None:
        """Let all functions save and stop at the first boundary that none of them can have passed yet."""
        run = self.run
        if after is After.REST:
            self._switch.adopt(run)
        run.after = after
        run.mode = Mode.CLOSING
        run.close_by_s = run.now_s + within_s
        self._switch.forget(run)
        self._orders.append(run.amend(last_step=run.progress.furthest + 1, upcoming=None))
        self._conclude_if_stopped()

    def _stop_now(self, after: After, reason: str | None = None, *, within_s: float = STOP_S) -> None:
        """Let all functions stop at once and lose the step under way; `reason` is shown to users."""
        run = self.run
        if reason is not None:
            run.reason = reason
        if after is After.REST:
            self._switch.adopt(run)
        run.after = after
        if run.record is None:
            self._conclude(self._saved.newest_step)
            return
        run.mode = Mode.CLOSING
        run.close_by_s = run.now_s + within_s
        self._switch.forget(run)
        for invocation in run.pool.living():
            if invocation.retry_at_s is not None:
                # It waits for its retry and has never run.
                run.pool.give_up(invocation, run.now_s)
        self._orders.append(run.amend(verb="stop", upcoming=None))
        self._conclude_if_stopped()

    def _fail(self, reason: str) -> None:
        """The job cannot go on: report it as failed, and end everything."""
        run = self.run
        run.reason = reason
        self._emit(self._reports.usage(run))
        self._emit(JobFailed(job_id=run.facts.job_id, generation=run.generation, error=reason))
        self._stop_now(After.FAILED)

    def _conclude_if_stopped(self) -> None:
        """Once all functions have stopped, find what they saved and conclude the run."""
        run = self.run
        if run.mode is not Mode.CLOSING or run.pool.living():
            return
        if run.after in (After.STOP, After.FAILED):
            self._conclude(self._saved.newest_step)
            return
        run.mode = Mode.LOOKING_LAST
        self._orders.append(self._saved.look(run))

    def _conclude(self, step: int) -> None:
        """No function runs any more, and the newest saved state is that of `step`: carry out `after`."""
        run = self.run
        after, run.after = run.after, After.NOTHING
        if run.record is not None or run.pool.num_invocations:
            self._emit(self._reports.usage(run))
        match after:
            case After.RESIZE:
                run.plan, run.next_plan = run.next_plan, None
                run.empty_slots()
                self._begin_unless_starved(step)
            case After.REST:
                self._rest(step)
            case After.BUDGET | After.DATA:
                self._pause(step, after)
            case After.LOST:
                run.mode = Mode.OVER
                lost = ReplicaLost(workload_id=run.facts.job_id, replica_id=run.facts.replica_id, reason=run.reason)
                self._emit(lost)
            case _:
                run.mode = Mode.OVER
                if after is not After.FAILED:
                    self._emit(self._reports.stopped(run))

    def _rest(self, step: int) -> None:
        """No function runs until there is more to train on."""
        run = self.run
        run.mode, run.after = Mode.RESTING, After.NOTHING
        run.record = None
        if run.next_plan is not None:
            run.plan, run.next_plan = run.next_plan, None
        run.empty_slots()
        self._stream.rest(step)
        self._saved.reached(step)
        run.progress.furthest = max(run.progress.furthest, step)
        # The plan counts as in force although no function runs: there is nothing to train on.
        self._orders += self._reports.resized_unless_reported(run, "resume" if step else "start")
        run.reason = f"idle: {self._stream.idle_reason(run)}"
        self._emit(self._reports.usage(run))
        self._carry_out(self._stream.wake_if_due(run))

    def _pause(self, step: int, after: After) -> None:
        """Ask the control plane to pause the job: for its budget, or for data that is not there any more."""
        run = self.run
        run.mode, run.record = Mode.IDLE, None
        run.empty_slots()
        if after is After.BUDGET:
            run.reason = budget.reason_of(run, step)
        # The control plane cannot pause a job while it waits for a generation: confirm a cancelled one here.
        given_up = self._switch.pop_cancelled()
        if given_up is not None and given_up[0] > run.generation:
            run.generation, run.plan = given_up
        self._orders += self._reports.resized_unless_reported(run, "start")
        self._emit(PauseRequested(job_id=run.facts.job_id, reason=run.reason))

    def _report_place_lost(self, reason: str) -> None:
        """The stores do not answer, or lack what they should hold: report the replica as lost."""
        run = self.run
        run.reason = reason
        run.pool.give_up_all(run.now_s)
        run.after = After.LOST
        self._conclude(self._saved.newest_step)

    def _assemble(self, step: int) -> None:
        """The last step is saved: order the model's file to be put together."""
        run = self.run
        assert run.plan is not None
        run.mode = Mode.ASSEMBLING
        self._switch.forget(run)
        if run.record is not None and run.record.verb == "run" and run.pool.living():
            # Successors that were invoked are no longer needed.
            self._orders.append(run.amend(verb="stop", upcoming=None))
        run.progress.furthest = max(run.progress.furthest, step)
        num_layers = run.plan.stages[-1].end_layer
        self._orders.append(messages.Assemble(generation=run.generation, step=step, num_layers=num_layers))

    def _finish(self, assembled: messages.Assembled, plan: FunctionPlan) -> None:
        """The model's file is there: the job has succeeded."""
        run, step = self.run, self.run.progress.furthest
        if assembled.error:
            self._report_place_lost(
                f"the model could not be put together from the states of step {step}: {assembled.error}"
            )
            return
        run.mode = Mode.OVER
        run.progress.commit(step, is_last=True)
        self._orders += self._reports.progress(run, plan)
        if step > self._saved.newest_step:
            self._orders += self._saved.commit(run, step)
        self._emit(self._reports.usage(run))
        self._emit(
            JobFinished(
                job_id=run.facts.job_id,
                generation=run.generation,
                step=step,
                artifact_path=assembled.path,
                diverged_at_step=run.progress.diverged_at_step,
            )
        )
        if run.after is After.PREEMPT:
            self._emit(self._reports.stopped(run))
