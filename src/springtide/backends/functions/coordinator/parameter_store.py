"""A job's parameter store: up from before its first function is invoked until its last one has ended."""

from __future__ import annotations

from collections.abc import Iterator

from springtide.backends.functions.coordinator.function_pool import JobFacts
from springtide.backends.functions.coordinator.messages import CloseParameterStore, OpenParameterStore, Order
from springtide.backends.functions.coordinator.run import After, Mode, Run
from springtide.backends.functions.coordinator.verdicts import (
    AwaitParameterStore,
    Effect,
    FindStart,
    StopNow,
)
from springtide.core.functions import FunctionPlan

# Repairs in a row without progress of the job before the replica is reported as lost.
MAX_REPAIRS = 5


class ParameterStore:
    """Whether the parameter store is up, requested, or not needed. Its address is the pool's `parameter_url`."""

    def __init__(self, facts: JobFacts) -> None:
        self._facts = facts
        self._is_asked_for = False
        # The step from which an attempt begins once the store is up.
        self._begin_at: int | None = None
        self._num_repairs = 0
        self._repaired_at_step = -1

    def is_needed(self, plan: FunctionPlan | None) -> bool:
        """Whether functions of a plan exchange data through a store of the job's own."""
        return plan is not None and self._facts.has_parameter_store and plan.num_functions > 1

    def is_ready(self, run: Run, plan: FunctionPlan | None) -> bool:
        """Whether an attempt of that plan can begin now."""
        return not self.is_needed(plan) or (bool(run.pool.parameter_url) and self._begin_at is None)

    def url_for(self, run: Run, plan: FunctionPlan) -> str:
        """The address in an attempt's record."""
        return run.pool.parameter_url if self.is_needed(plan) else ""

    # --- up --------------------------------------------------------------------------------------------------------

    def begin_later(self, step: int) -> Iterator[Effect]:
        """An attempt from that step needs the store: order it to be opened."""
        self._begin_at = step
        yield AwaitParameterStore()
        yield from self._open()

    def prepare(self, run: Run, plan: FunctionPlan | None) -> Iterator[Order]:
        """Functions of that plan run or are about to: order the store to be opened unless it is up."""
        if self.is_needed(plan) and not run.pool.parameter_url:
            yield from self._open()

    def _open(self) -> Iterator[Order]:
        if not self._is_asked_for:
            self._is_asked_for = True
            yield OpenParameterStore()

    def handle_up(self, run: Run, url: str) -> Iterator[Effect]:
        """It answers, at its old address or at a new one, which the record of the next attempt will hold."""
        self._is_asked_for = False
        run.pool.parameter_url = url
        step, self._begin_at = self._begin_at, None
        used = run.record.parameter_url if run.record is not None else ""
        has_moved = bool(used) and used != url
        if has_moved and run.plan is not None and len(run.plan.stages) > 1:
            # Functions of a pipeline keep using the address that they started with.
            run.pool.give_up_all(run.now_s)
            run.empty_slots()
        if (run.mode is Mode.OPENING and step is not None) or (run.mode is Mode.RUNNING and has_moved):
            yield FindStart()

    # --- down ------------------------------------------------------------------------------------------------------

    def handle_broken(self, run: Run, why: str) -> Iterator[Effect]:
        """It does not answer: open it again, and redo the step under way."""
        if run.mode is not Mode.RUNNING or not self.is_needed(run.plan):
            return
        if self._repaired_at_step != run.progress.furthest:
            self._repaired_at_step, self._num_repairs = run.progress.furthest, 0
        self._num_repairs += 1
        if self._num_repairs > MAX_REPAIRS:
            yield StopNow(After.LOST, f"its parameter store fails again and again: {why}")
            return
        yield from self.begin_later(run.progress.furthest)

    def close_if_unneeded(self, run: Run, *, is_plan_changing: bool) -> Iterator[Order]:
        """Release the store once no function runs and none is about to."""
        about_to = (Mode.LOOKING, Mode.OPENING, Mode.CLOSING, Mode.LOOKING_LAST)
        is_needed = run.mode in about_to or bool(run.pool.living())
        if run.mode is Mode.RUNNING and not is_plan_changing and run.plan is not None:
            # A single function exchanges nothing.
            is_needed = self.is_needed(run.plan)
        if run.pool.parameter_url and not is_needed:
            run.pool.parameter_url = ""
            yield CloseParameterStore()
