"""A job's parameter store: up from before its first function is called until its last one has ended."""

from __future__ import annotations

from typing import Any

from springtide.backends.functions.coordinator.messages import CloseParameterStore, OpenParameterStore
from springtide.backends.functions.coordinator.stream import StreamComponent
from springtide.core.functions import FunctionPlan

# So many attempts in a row may fail for the parameter store without any progress before the place is given back.
MAX_MENDED = 5


class Parameters(StreamComponent):
    """The part of the coordinator that knows whether what travels has a way; without a store of its own: always."""

    _is_asked_for = False
    _begin_at: int | None = None
    _num_mended = 0
    _mended_at_step = -1

    def _has_way(self, restore_step: int) -> bool:
        if not super()._has_way(restore_step):
            return False
        plan = self._plan_to_begin()
        is_needed = plan is not None and self._exchanges(plan)
        if not is_needed or (self.pool.parameter_url and self._begin_at is None):
            return True
        self.mode = "opening"
        self._begin_at = restore_step
        self._ask_for_store()
        return False

    def _exchanges(self, plan: FunctionPlan) -> bool:
        """Whether functions of a plan have anything to say to each other, and a store for it."""
        return self.facts.has_parameter_store and plan.num_functions > 1

    def _prepare(self, generation: int, plan: FunctionPlan) -> None:
        super()._prepare(generation, plan)
        if self._exchanges(plan) and not self.pool.parameter_url:
            # It comes up while those warm up who are to join.
            self._ask_for_store()

    def _extras(self) -> dict[str, Any]:
        uses = self._plan is not None and self._exchanges(self._plan)
        return {**super()._extras(), "parameter_url": self.pool.parameter_url if uses else ""}

    def _look_after_store(self) -> None:
        """A coordinator that took over finds out whether the store is there."""
        if self._plan is not None and self._exchanges(self._plan) and not self.pool.parameter_url:
            self._ask_for_store()

    def _ask_for_store(self) -> None:
        if not self._is_asked_for:
            self._is_asked_for = True
            self._orders.append(OpenParameterStore())

    def _store_up(self, url: str) -> None:
        """It answers, at the address it had before or at another one, which the next attempt's record has."""
        self._is_asked_for = False
        self.pool.parameter_url = url
        step, self._begin_at = self._begin_at, None
        used = self.record.parameter_url if self.record is not None else ""
        has_moved = bool(used) and used != url
        if has_moved and self._plan is not None and len(self._plan.stages) > 1:
            # Messages between stages keep their way for as long as a function invocations.
            self.pool.give_up_all(self._now_s)
            self.pool.retire(self.pool)
            self.pool.slots.clear()
        if (self.mode == "opening" and step is not None) or (self.mode == "running" and has_moved):
            self._look()

    def _store_lost(self, why: str) -> None:
        """What travels does not: bring it up again, and redo the step that was under way."""
        if self.mode != "running" or self._plan is None or not self._exchanges(self._plan):
            return
        if self._mended_at_step != self.progress.furthest:
            self._mended_at_step, self._num_mended = self.progress.furthest, 0
        self._num_mended += 1
        if self._num_mended > MAX_MENDED:
            self._lose(f"its parameter store fails again and again: {why}")
            return
        self.mode = "opening"
        self._begin_at = self.progress.furthest
        self._ask_for_store()

    def _tend_store(self) -> None:
        """Let go of it once nobody runs and nobody is about to."""
        is_needed = self.mode in ("looking", "opening", "closing", "looking_last") or bool(self.pool.living())
        if self.mode == "running" and self._change is None and self._plan is not None:
            # A single function has nobody to exchange with.
            is_needed = self._exchanges(self._plan)
        if self.pool.parameter_url and not is_needed:
            self.pool.parameter_url = ""
            self._orders.append(CloseParameterStore())
