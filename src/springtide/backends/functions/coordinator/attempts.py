"""How the attempts of one job on functions begin and end: from which state, by whom, and what follows a stop."""

from __future__ import annotations

import math
from typing import Any, Literal

from msgspec.structs import replace

from springtide.backends.functions.coordinator.function_pool import FunctionPool, JobFacts
from springtide.backends.functions.coordinator.invocations import FunctionInvocation, PlaceSlot
from springtide.backends.functions.coordinator.ledger import Ledger
from springtide.backends.functions.coordinator.measure import Measuring
from springtide.backends.functions.coordinator.messages import (
    Assemble,
    Assembled,
    DeleteKeys,
    Emit,
    LookForStates,
    Order,
    StatesFound,
    WriteControl,
)
from springtide.backends.functions.coordinator.pace import StepTiming
from springtide.backends.functions.coordinator.progress import FunctionProgress
from springtide.backends.functions.coordinator.reasons import budget_reason, out_of_memory_reason
from springtide.core.events import (
    CheckpointCommitted,
    Event,
    JobFailed,
    JobFinished,
    JobResized,
    PauseRequested,
    ReplicaLost,
    ReplicaStopped,
    UsageReported,
)
from springtide.core.functions import FunctionPlan, Usage
from springtide.core.status.functions import MAX_CHANGES, PlanChange
from springtide.core.wire.functions import ControlRecord, Keys

# How long functions may take to notice that they are to stop at once: a look at the record while they wait.
STOP_S = 8.0
# A change of plan and a budget's end wait this long for the boundary, at the least.
CLOSE_S = 30.0
# What is seen of functions is this old at most: their reports' interval, and the coordinator's.
LAG_S = 3.0

# "dry": no function runs, because the stream has too few samples. "opening": the parameter store is on its way.
Mode = Literal["idle", "looking", "opening", "running", "closing", "looking_last", "dry", "assembling", "over"]
After = Literal["", "resize", "preempt", "stop", "budget", "lost", "failed", "dry", "data"]


class Attempts:
    """The state of one job and how its attempts begin and end. `after` is what a closing leads to.

    What a change of plan, a stream and a parameter store bring into that is said by the classes above this one, which
    override the methods that do nothing here. `record` is the newest control record, `reason` the sentence for people.
    Times are the platform's seconds.
    """

    def __init__(self, facts: JobFacts, now_s: float, base: Usage = Usage()) -> None:  # noqa: B008 - a frozen value.
        self.facts = facts
        self.keys = Keys(facts.prefix)
        self.ledger = Ledger(facts.service, base, facts.budget_usd)
        self.pool = FunctionPool(facts, self.ledger)
        self.pace = StepTiming(facts.service, None)
        self.progress = FunctionProgress(facts.job_id)
        self.measuring = Measuring(facts.job_id)
        self.changes: tuple[PlanChange, ...] = ()
        self.mode: Mode = "idle"
        self.after: After = ""
        self.record: ControlRecord | None = None
        self.generation = 0
        self.reason = ""
        self.num_redone_steps = 0
        self._plan: FunctionPlan | None = None
        self._attempt = 0
        self._now_s = now_s
        self._orders: list[Order] = []
        self._close_by_s = math.inf
        self._progress_at_s = now_s
        self._answer_by_s = math.inf
        self._num_probes = 0
        self._num_unbegun = 0
        self._usage_at_s = -math.inf
        self._resized_generation = 0
        self._paused_at_s: float | None = None
        self._checkpoint_step = 0
        self._swept_step = 0
        # The steps of states that are known to be whole, the newest last; older ones are not needed any more.
        self._known_states: list[int] = []
        self._saved_bytes = 0
        self._throttled_since_s: float | None = None
        self._next_plan: FunctionPlan | None = None
        self._stays_from = 0
        self._num_stayed = 0
        # A plan that was asked for and given up, as that generation: somebody waits for word of it.
        self._owed: tuple[int, FunctionPlan] | None = None
        self._is_stopped_told = False
        self._is_probe = False
        self._num_looks = 0
        self._unswept: list[str] = []

    # --- orders ----------------------------------------------------------------------------------------------------

    def _emit(self, event: Event) -> None:
        self._orders.append(Emit(event=event))

    def _write(self, **changes: object) -> None:
        assert self.record is not None
        self.record = replace(self.record, **changes)
        self._orders.append(WriteControl(record=self.record))

    def _emit_usage(self) -> None:
        usage = self.ledger.usage(self._now_s)
        self._usage_at_s = self._now_s
        self._emit(UsageReported(job_id=self.facts.job_id, usage=usage, bill=self.ledger.bill(usage)))

    def _emit_resized(self, direction: Literal["start", "resume", "replace"], pause_s: float) -> None:
        step = self.record.restore_step if self.record is not None else self._checkpoint_step
        if self._plan is not None:
            change = PlanChange(
                step=step, at_s=self._now_s, plan=self._plan, pause_s=pause_s, num_stayed=self._num_stayed
            )
            self.changes = (*self.changes, change)[-MAX_CHANGES:]
        self._emit(
            JobResized(
                job_id=self.facts.job_id,
                generation=self.generation,
                world_size=1,
                step=max(step, self.progress.furthest if direction == "replace" else step),
                pause_s=pause_s,
                direction=direction,
            )
        )

    def _emit_stopped(self) -> None:
        self._is_stopped_told = True
        self._emit(ReplicaStopped(workload_id=self.facts.job_id, replica_id=self.facts.replica_id))

    def _spent_usd(self) -> float:
        return self.ledger.bill(self.ledger.usage(self._now_s)).total_usd

    def _checkpoint(self, step: int) -> None:
        assert self._plan is not None
        known, self._checkpoint_step = [*self._known_states, step], step
        path = f"{self.facts.store_url}/{self.keys.prefix}/state/{step:09d}"
        self._emit(
            CheckpointCommitted(
                job_id=self.facts.job_id, generation=self.generation, step=step, path=path, num_bytes=self._saved_bytes
            )
        )
        # While states are looked for, an answer to another question would be taken for the one that is waited for, and
        # what may be found must not go.
        is_looking = self.mode not in ("running", "closing")
        if not self._saved_bytes and not is_looking:
            # How much lies there is asked once, for the bill.
            self._ask_for_states()
        # The newest two stay: a function may be reading the one before. So does what lies behind the steps whose losses
        # are not final: what a place has not told of them before it dies is told only if they are done again.
        final = 0 if is_looking else self.progress.final_step
        before = max((one for one in known[:-1] if one <= final), default=0)
        self._known_states = [one for one in known if one >= before]
        old = range(self._swept_step, before)
        keys = [key for k in old for stage in range(len(self._plan.stages)) for key in self._state_keys(k, stage)]
        self._swept_step = max(before, self._swept_step)
        if keys:
            self._orders.append(DeleteKeys(keys=tuple(keys)))

    def _state_keys(self, step: int, stage: int) -> tuple[str, str]:
        return self.keys.state_meta(step, stage), self.keys.state(step, stage)

    # --- an attempt begins -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Find out from which step an attempt can begin."""
        self.mode = "looking"
        self._ask_for_states(self._newest_told())

    def _newest_told(self) -> int | None:
        """The newest step to begin from; None where any will do. What was not told of is told when it is done again."""
        total, told = self.progress.total_steps, self.progress.told_step
        is_at_end = total is not None and told is not None and told >= total
        return None if is_at_end else told

    def _ask_for_states(self, newest: int | None = None) -> None:
        assert self._plan is not None
        self._num_looks += 1
        number, num_layers, anew = self._num_looks, self._plan.stages[-1].end_layer, 0 in self._known_states
        order = LookForStates(number=number, num_layers=num_layers, newest=newest, may_begin_anew=anew)
        self._orders.append(order)

    def _expect(self, plan: FunctionPlan) -> None:
        option = self.facts.option(plan)
        self.pace = StepTiming(self.facts.service, option.step_s if option is not None else None)

    def _found(self, found: StatesFound) -> None:
        assert self._plan is not None
        self._saved_bytes = max(self._saved_bytes, found.num_bytes)
        if self.mode not in ("looking", "looking_last") or found.number != self._num_looks:
            return
        self.progress.furthest = max(self.progress.furthest, found.step)
        if found.torn:
            self._orders.append(DeleteKeys(keys=found.torn, is_awaited=True))
        total = self.progress.total_steps
        is_complete = bool(total) and found.step >= (total or 0) and self.after not in ("stop", "failed")
        if is_complete:
            self._assemble(found.step)
        elif self.mode == "looking_last":
            if found.step > self._checkpoint_step:
                self._checkpoint(found.step)
            self._conclude(found.step)
        elif self._is_too_dear(found.step):
            self._checkpoint_step = max(self._checkpoint_step, found.step)
            self.reason = self._budget_reason(found.step)
            self._stop_now("budget")
        elif self._may_begin(found.step) and self._has_way(found.step):
            self._begin(found.step)

    def _may_begin(self, restore_step: int) -> bool:
        """Whether an attempt can begin now from that step; where not, it is begun later or not at all."""
        return True

    def _has_way(self, restore_step: int) -> bool:
        """Whether what travels has a way; where not, the attempt begins once there is one."""
        return True

    def _take_up_plan(self, restore_step: int) -> None:
        """An attempt begins from that step: the plan that was to follow is followed now, if it is time."""

    def _forget_change(self) -> None:
        """The plan that was to follow does not: whoever was called for it ends."""

    def _extras(self) -> dict[str, Any]:
        """What else a new attempt's record says."""
        return {}

    def _begin(self, restore_step: int) -> None:
        """Begin a new attempt from a saved step: whoever invocations joins it, the empty places are filled."""
        assert self._plan is not None
        old = self.record
        self._take_up_plan(restore_step)
        plan = self._plan
        if not self.pool.slots or old is None or len(self.pool.slots) != plan.num_functions:
            self.pool.give_up_all(self._now_s)
            self.pool.retire(self.pool)
            self.pool.open_slots(plan)
            self._expect(plan)
            self._stays_from = self.generation
            self._num_stayed = 0
        self._attempt += 1
        self.after = ""
        self.mode = "running"
        self._checkpoint_step = max(self._checkpoint_step, restore_step)
        self._swept_step = max(self._swept_step, restore_step - 1)
        # Later ones were removed, or are of steps that are done again.
        self._known_states = [*(one for one in self._known_states if one < restore_step), restore_step]
        self.num_redone_steps += max(0, self.progress.furthest - restore_step)
        self.progress.new_attempt(restore_step)
        self.measuring.new_attempt(plan)
        self.ledger.forget_steps()
        self.record = ControlRecord(
            generation=self.generation,
            attempt=self._attempt,
            restore_step=restore_step,
            plan=plan,
            incarnations={},
            save_every=self._save_every(plan),
            stays_from=self._stays_from,
            **self._extras(),
        )
        calls: list[Order] = []
        for slot in self.pool:
            slot.step = restore_step
            if slot.invocation is None or not slot.invocation.is_alive:
                successor, slot.successor = slot.successor, None
                if successor is not None and successor.is_alive:
                    slot.invocation = successor
                else:
                    calls.append(self.pool.launch(slot, self.record, self._now_s))
            assert slot.invocation is not None
            slot.recorded = slot.invocation.incarnation
        self._write(incarnations=self.pool.incarnations())
        self._orders += calls
        self._progress_at_s = self._now_s
        if old is not None:
            self._unswept.append(f"{self.keys.prefix}/wire/{old.generation}.{old.attempt}/")

    def _sweep(self) -> None:
        """Everybody works in the newest attempt: what is still on its way under older ones is read by nobody."""
        if self._unswept:
            self._orders.append(DeleteKeys(prefixes=tuple(self._unswept)))
            self._unswept = []

    def _save_every(self, plan: FunctionPlan) -> int:
        if self.pace.measured_step_s is None:
            return self.record.save_every if self.record is not None else 1
        save_usd = 2 * len(plan.stages) * self.ledger.prices.usd_per_put
        return self.pace.save_every(self._step_usd(plan), save_usd)

    # --- the budget ------------------------------------------------------------------------------------------------

    def _step_usd(self, plan: FunctionPlan) -> float:
        option = self.facts.option(plan)
        return self.ledger.step_usd(plan, self.pace.step_s, option.step_usd if option is not None else 0.0)

    def _end_usd(self, plan: FunctionPlan) -> float:
        """What it costs to come to an end in order: the step under way, the saving, and noticing it."""
        stray_usd = self.ledger.stray_usd(self._now_s, self.pace.start_s)
        return stray_usd + self.ledger.seconds_usd(plan, self.pace.step_s + self.pace.save_s + LAG_S)

    def _is_too_dear(self, restore_step: int) -> bool:
        """Whether the budget has no room for beginning an attempt and making one step."""
        assert self._plan is not None
        if self.ledger.budget_usd is None:
            return False
        empty = sum(slot.invocation is None or not slot.invocation.is_alive for slot in self.pool)
        share = empty / len(self.pool.slots) if self.pool.slots else 1.0
        start_usd = share * self.ledger.start_usd(self._plan, self.pace.start_s)
        needed_usd = start_usd + self._step_usd(self._plan) + self._end_usd(self._plan)
        return self._spent_usd() + needed_usd > self.ledger.budget_usd

    def _budget_reason(self, step: int) -> str:
        assert self._plan is not None
        assert self.ledger.budget_usd is not None
        spent_usd = self._spent_usd()
        total, needed_usd = self.progress.total_steps, None
        if total is not None:
            start_usd = self.ledger.start_usd(self._plan, self.pace.start_s)
            rest_usd = max(0, total - step) * self._step_usd(self._plan) + self._end_usd(self._plan)
            needed_usd = spent_usd + start_usd + rest_usd
        return budget_reason(self.facts.job_id, self.ledger.budget_usd, spent_usd, step, needed_usd)

    # --- an end ----------------------------------------------------------------------------------------------------

    def _close(self, after: After, within_s: float) -> None:
        """Let everybody stop at the next boundary that all can know of, their state saved."""
        self.after = after
        self.mode = "closing"
        self._close_by_s = self._now_s + within_s
        self._forget_change()
        self._write(last_step=self.progress.furthest + 1, upcoming=None)
        self._check_closed()

    def _stop_now(self, after: After, within_s: float = STOP_S) -> None:
        """Let everybody stop at once, whatever is lost of the step under way."""
        self.after = after
        if self.record is None:
            self._conclude(self._checkpoint_step)
            return
        self.mode = "closing"
        self._close_by_s = self._now_s + within_s
        self._forget_change()
        for invocation in self.pool.living():
            if invocation.retry_at_s is not None:
                # It was put off and has never run.
                self.pool.give_up(invocation, self._now_s)
        self._write(verb="stop", upcoming=None)
        self._check_closed()

    def _check_closed(self) -> None:
        """Whether everybody has gone who was asked to: then see what there is, and draw the conclusion."""
        if self.mode != "closing" or self.pool.living():
            return
        if self.after in ("stop", "failed"):
            self._conclude(self._checkpoint_step)
            return
        self.mode = "looking_last"
        self._ask_for_states(self._newest_told())

    def _conclude(self, step: int) -> None:
        """Nobody runs any more, and the newest state is that of `step`."""
        after, self.after = self.after, ""
        if self.record is not None or self.pool.num_invocations:
            self._emit_usage()
        if after == "resize":
            self._plan, self._next_plan = self._next_plan, None
            self.pool.retire(self.pool)
            self.pool.slots.clear()
            if self._may_begin(step) and self._has_way(step):
                self._begin(step)
            return
        if after == "dry":
            self._rest(step)
            return
        is_paused = after in ("budget", "data")
        self.mode = "idle" if is_paused else "over"
        if is_paused:
            self.record = None
            self.pool.retire(self.pool)
            self.pool.slots.clear()
            if after == "budget":
                self.reason = self._budget_reason(step)
            self._confirm_owed()
            self._emit(PauseRequested(job_id=self.facts.job_id, reason=self.reason))
        elif after == "lost":
            self._emit(ReplicaLost(workload_id=self.facts.job_id, replica_id=self.facts.replica_id, reason=self.reason))
            self._is_stopped_told = True
        elif after != "failed":
            self._emit_stopped()

    def _rest(self, step: int) -> None:
        """No function runs until there is more to train on."""
        raise AssertionError("only a job on a stream rests")

    def _lose(self, reason: str) -> None:
        """Give the place back for a cause outside the job: it is tried again later, from the newest state."""
        self.reason = reason
        self._stop_now("lost")

    def _confirm_owed(self) -> None:
        """The control plane pauses nothing while it waits for a generation: there will be no other word of this one."""
        if self._owed is not None:
            generation, plan = self._owed
            if generation > self.generation:
                self.generation, self._plan = generation, plan
        self._owed = None
        if self._resized_generation < self.generation:
            self._resized_generation = self.generation
            self._emit_resized("replace" if self.changes else "start", 0.0)

    def _pause_for_data(self, reason: str) -> None:
        """Rest at the newest state until its owner has brought the data back: nothing else would do."""
        self.reason = reason
        self._stop_now("data")

    def _fail(self, reason: str) -> None:
        """The job cannot go on: say so, and end everything."""
        self.reason = reason
        self._emit_usage()
        self._emit(JobFailed(job_id=self.facts.job_id, generation=self.generation, error=reason))
        self._stop_now("failed")

    def _assemble(self, step: int) -> None:
        assert self._plan is not None
        self.mode = "assembling"
        self._forget_change()
        if self.record is not None and self.record.verb == "run" and self.pool.living():
            # Successors that were called and are not needed any more.
            self._write(verb="stop", upcoming=None)
        self.progress.furthest = max(self.progress.furthest, step)
        num_layers = self._plan.stages[-1].end_layer
        self._orders.append(Assemble(generation=self.generation, step=step, num_layers=num_layers))

    def _assembled(self, assembled: Assembled) -> None:
        if self.mode != "assembling" or self._plan is None:
            return
        step = self.progress.furthest
        if assembled.error:
            self.reason = f"the model could not be put together from the states of step {step}: {assembled.error}"
            self._conclude_lost()
            return
        self.mode = "over"
        self.progress.commit(step, is_last=True)
        event = self.progress.event(self.generation, self._plan, self.pace.measured_step_s)
        if event is not None:
            self._emit(event)
        if step > self._checkpoint_step:
            self._checkpoint(step)
        self._emit_usage()
        self._emit(
            JobFinished(job_id=self.facts.job_id, generation=self.generation, step=step, artifact_path=assembled.path)
        )
        if self.after == "preempt":
            self._emit_stopped()

    def _conclude_lost(self) -> None:
        """Nothing more can be asked of the stores or need be: the place is given back at once."""
        self.pool.give_up_all(self._now_s)
        self.after = "lost"
        self._conclude(self._checkpoint_step)

    # --- replacing functions ---------------------------------------------------------------------------------------

    def _replace(self, slot: PlaceSlot, invocation: FunctionInvocation, sentence: str) -> None:
        """Someone else is to take a place, within a new attempt."""
        self.pool.num_replaced += 1
        slot.num_replaced += 1
        slot.error = sentence
        invocation.over_at_s = self._now_s
        if self.mode == "running":
            self._look()

    def _enlarge(self, slot: PlaceSlot, invocation: FunctionInvocation) -> bool:
        """Give a stage that ran out of memory the next larger size; False where there is none, and the job ends."""
        assert self._plan is not None
        stage = invocation.place.stage
        used_mb = invocation.end.max_memory_mb if invocation.end is not None else 0
        now_mb = self._plan.stages[stage].memory_mb
        larger = [size.memory_mb for size in self.facts.service.sizes if size.memory_mb > invocation.memory_mb]
        if not larger:
            self._fail(out_of_memory_reason(invocation, used_mb))
            return False
        if now_mb <= invocation.memory_mb:
            stages = list(self._plan.stages)
            stages[stage] = replace(stages[stage], memory_mb=larger[0])
            self._plan = replace(self._plan, stages=tuple(stages))
        return True
