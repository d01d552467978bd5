"""What a job on functions has used so far, what it costs, and whether one more step is within its budget."""

from __future__ import annotations

import math

from springtide.backends.functions.coordinator.invocations import FunctionInvocation
from springtide.core.functions import Bill, FunctionPlan, FunctionPrices, FunctionService, Usage
from springtide.perf.functions.bill import BYTES_PER_GB, bill_of, gb_s_of, usage_of_start

# Factor on every predicted cost: a budget is a cap, not an average.
SAFETY_FACTOR = 1.15


class Ledger:
    """The usage of one job over all its generations. `base` is what was used before this coordinator began."""

    def __init__(self, service: FunctionService, base: Usage, budget_usd: float | None) -> None:
        self.service = service
        self.budget_usd = budget_usd
        self.base = base
        self.own = Usage()
        self._ended = Usage()
        self._open: list[FunctionInvocation] = []
        self._stored_gb_s = 0.0
        self._parameter_store_s = 0.0
        self._is_store_counted = False
        self._num_invocations = 0
        self._spent_at_step: list[tuple[int, float]] = []

    @property
    def prices(self) -> FunctionPrices:
        """What is charged."""
        return self.service.prices

    def count_invocation(self, number: int = 1) -> None:
        """Add invocations to the count; a refused one is subtracted again."""
        self._num_invocations += number

    def open(self, invocation: FunctionInvocation) -> None:
        """Charge an invocation until its end is known or its lifetime is over."""
        self._open.append(invocation)

    def pass_time(self, seconds: float, *, stored_bytes: float, has_parameter_store: bool) -> None:
        """Charge this much time of storage, and of the parameter store where it ran."""
        self._stored_gb_s += seconds * stored_bytes / BYTES_PER_GB
        if has_parameter_store and not self._is_store_counted:
            self._parameter_store_s += seconds

    def set_parameter_store(self, seconds: float) -> None:
        """Set the total uptime of the parameter store as counted by its host; `pass_time` stops counting it."""
        self._is_store_counted = True
        self._parameter_store_s = max(self._parameter_store_s, seconds)

    def usage(self, now_s: float) -> Usage:
        """Everything up to now, running functions included."""
        for invocation in [invocation for invocation in self._open if self._is_final(invocation, now_s)]:
            self._open.remove(invocation)
            self._ended = self._ended.plus(_usage_of(invocation, now_s))
        usage = self.base.plus(self._ended).plus(self.own)
        usage = usage.plus(
            Usage(
                num_invocations=self._num_invocations,
                stored_gb_s=self._stored_gb_s,
                parameter_store_s=self._parameter_store_s,
            )
        )
        for invocation in self._open:
            usage = usage.plus(_usage_of(invocation, now_s))
        return usage

    def running(self) -> list[FunctionInvocation]:
        """The invocations whose charge may still grow."""
        return [
            invocation
            for invocation in self._open
            if invocation.end is None and invocation.over_at_s is None and invocation.retry_at_s is None
        ]

    def settled_usage(self, now_s: float) -> Usage:
        """Everything but what the running functions have used."""
        usage = self.usage(now_s)
        for invocation in self.running():
            spent = _usage_of(invocation, now_s)
            usage = Usage(**{name: getattr(usage, name) - getattr(spent, name) for name in usage.__struct_fields__})
        return usage

    def bill(self, usage: Usage) -> Bill:
        """What that costs."""
        return bill_of(usage, self.prices)

    # --- predictions -----------------------------------------------------------------------------------------------

    def record_spent(self, step: int, spent_usd: float) -> None:
        """Record what was spent when `step` steps were committed; the last few records give the cost of a step."""
        if self._spent_at_step and step <= self._spent_at_step[-1][0]:
            return
        self._spent_at_step = [*self._spent_at_step[-7:], (step, spent_usd)]

    def forget_steps(self) -> None:
        """Forget what steps cost: another plan follows, or functions started between the records."""
        self._spent_at_step = []

    def step_usd(self, plan: FunctionPlan, step_s: float, predicted_usd: float) -> float:
        """The cost of the next step: the highest of the last steps' (else the predicted) and that of its duration."""
        known = [predicted_usd, gb_s_of(plan.memory_mb, step_s) * self.prices.usd_per_gb_s]
        if len(self._spent_at_step) > 1:
            (first, spent_first), (last, spent_last) = self._spent_at_step[0], self._spent_at_step[-1]
            # Measured costs replace the predicted one.
            known[0] = (spent_last - spent_first) / (last - first)
        return SAFETY_FACTOR * max(known)

    def requests_usd(self, usage: Usage) -> float:
        """What the requests of a usage cost."""
        return self.bill(usage).request_usd

    def steady_usd(self, plan: FunctionPlan, seconds: float, *, has_parameter_store: bool) -> float:
        """What it costs to run a plan's functions for that long, requests excluded."""
        usage = Usage(
            function_gb_s=gb_s_of(plan.memory_mb, seconds), parameter_store_s=seconds if has_parameter_store else 0.0
        )
        return self.bill(usage).total_usd

    def seconds_usd(self, plan: FunctionPlan, seconds: float) -> float:
        """The cost of all functions of a plan for that long, with the requests of one save and one report each."""
        puts = 2 * len(plan.stages)
        request_usd = puts * self.prices.usd_per_put + plan.num_functions * self.prices.usd_per_put
        return SAFETY_FACTOR * gb_s_of(plan.memory_mb, seconds) * self.prices.usd_per_gb_s + request_usd

    def uncertain_usd(self, now_s: float, start_s: float) -> float:
        """What uncertain invocations may still cost: each may start, read the record and end."""
        strays = [
            invocation
            for invocation in self._open
            if invocation.end is None and (invocation.is_given_up or invocation.is_uncertain)
        ]
        memory_mb = sum(
            invocation.memory_mb for invocation in strays if now_s < invocation.invoked_at_s + self.service.lifetime_s
        )
        return SAFETY_FACTOR * gb_s_of(memory_mb, start_s) * self.prices.usd_per_gb_s

    def start_usd(self, plan: FunctionPlan, start_s: float) -> float:
        """The cost of starting all functions of a plan, until they are warm."""
        return SAFETY_FACTOR * bill_of(usage_of_start(plan, start_s), self.prices).total_usd

    def affordable_steps(self, spent_usd: float, step_usd: float, end_usd: float) -> float:
        """How many more steps the budget covers besides the cost of the end. Infinite without a budget."""
        if self.budget_usd is None:
            return math.inf
        left_usd = self.budget_usd - spent_usd - end_usd
        return max(0.0, math.floor(left_usd / step_usd)) if step_usd > 0 and left_usd > 0 else 0.0

    def _is_final(self, invocation: FunctionInvocation, now_s: float) -> bool:
        """Whether the usage of an invocation can no longer change."""
        if invocation.end is not None and invocation.end.duration_s is not None:
            return True
        return invocation.over_at_s is not None and now_s > invocation.invoked_at_s + self.service.lifetime_s


def _usage_of(invocation: FunctionInvocation, now_s: float) -> Usage:
    return invocation.usage.plus(Usage(function_gb_s=gb_s_of(invocation.memory_mb, invocation.function_s(now_s))))
