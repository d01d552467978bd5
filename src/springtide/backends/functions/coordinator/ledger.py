"""What a job on functions has used so far, what it costs, and whether one more step is within its budget."""

from __future__ import annotations

import math

from springtide.backends.functions.coordinator.invocations import FunctionInvocation
from springtide.core.functions import Bill, FunctionPlan, FunctionPrices, FunctionService, Usage
from springtide.perf.functions.bill import BYTES_PER_GB, bill_of, gb_s_of, usage_of_start

# Costs are expected with this much on top: a budget is a cap, not an average.
CAUTION = 1.15


class Ledger:
    """Keeps the account of one job over all its generations. `base` is what was used before this coordinator."""

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
        self._marks: list[tuple[int, float]] = []

    @property
    def prices(self) -> FunctionPrices:
        """What is charged."""
        return self.service.prices

    def count_invocation(self, number: int = 1) -> None:
        """So many functions more were invoked; one that was refused is taken back."""
        self._num_invocations += number

    def open(self, invocation: FunctionInvocation) -> None:
        """An invocation begins; it is charged until it is known to be over, or its lifetime is."""
        self._open.append(invocation)

    def pass_time(self, seconds: float, *, stored_bytes: float, has_parameter_store: bool) -> None:
        """So long this much lay in the store, and the parameter store ran."""
        self._stored_gb_s += seconds * stored_bytes / BYTES_PER_GB
        if has_parameter_store and not self._is_store_counted:
            self._parameter_store_s += seconds

    def set_parameter_store(self, seconds: float) -> None:
        """So long the parameter store was up in all, as its host counts it."""
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

    # --- what is to come -------------------------------------------------------------------------------------------

    def learn(self, step: int, spent_usd: float) -> None:
        """So much was spent when `step` steps were committed; the last few say what a step costs."""
        if self._marks and step <= self._marks[-1][0]:
            return
        self._marks = [*self._marks[-7:], (step, spent_usd)]

    def forget_steps(self) -> None:
        """Forget what steps cost: another plan follows, or functions started in between."""
        self._marks = []

    def step_usd(self, plan: FunctionPlan, step_s: float, predicted_usd: float) -> float:
        """What the next step is expected to cost at most: as planned, as its time says, or as the last ones did."""
        known = [predicted_usd, gb_s_of(plan.memory_mb, step_s) * self.prices.usd_per_gb_s]
        if len(self._marks) > 1:
            (first, spent_first), (last, spent_last) = self._marks[0], self._marks[-1]
            # What was seen counts for more than what was planned.
            known[0] = (spent_last - spent_first) / (last - first)
        return CAUTION * max(known)

    def requests_usd(self, usage: Usage) -> float:
        """What the requests of a usage cost."""
        return self.bill(usage).request_usd

    def steady_usd(self, plan: FunctionPlan, seconds: float, *, has_parameter_store: bool) -> float:
        """What it costs to run a plan's functions for so long, requests left out."""
        usage = Usage(
            function_gb_s=gb_s_of(plan.memory_mb, seconds), parameter_store_s=seconds if has_parameter_store else 0.0
        )
        return self.bill(usage).total_usd

    def seconds_usd(self, plan: FunctionPlan, seconds: float) -> float:
        """What it costs to have all functions of a plan running for so long, whatever they do."""
        puts = 2 * len(plan.stages)
        request_usd = puts * self.prices.usd_per_put + plan.num_functions * self.prices.usd_per_put
        return CAUTION * gb_s_of(plan.memory_mb, seconds) * self.prices.usd_per_gb_s + request_usd

    def stray_usd(self, now_s: float, start_s: float) -> float:
        """What uncertain invocations may still cost: each may begin, read the record and end."""
        strays = [
            invocation
            for invocation in self._open
            if invocation.end is None and (invocation.is_given_up or invocation.is_uncertain)
        ]
        memory_mb = sum(
            invocation.memory_mb for invocation in strays if now_s < invocation.invoked_at_s + self.service.lifetime_s
        )
        return CAUTION * gb_s_of(memory_mb, start_s) * self.prices.usd_per_gb_s

    def start_usd(self, plan: FunctionPlan, start_s: float) -> float:
        """What it costs until all functions of a plan are warm."""
        return CAUTION * bill_of(usage_of_start(plan, start_s), self.prices).total_usd

    def affordable_steps(self, spent_usd: float, step_usd: float, end_usd: float) -> float:
        """How many more steps the budget allows, the end paid for. Infinite without a budget."""
        if self.budget_usd is None:
            return math.inf
        left_usd = self.budget_usd - spent_usd - end_usd
        return max(0.0, math.floor(left_usd / step_usd)) if step_usd > 0 and left_usd > 0 else 0.0

    def _is_final(self, invocation: FunctionInvocation, now_s: float) -> bool:
        """Whether what it used cannot change any more."""
        if invocation.end is not None and invocation.end.duration_s is not None:
            return True
        return invocation.over_at_s is not None and now_s > invocation.invoked_at_s + self.service.lifetime_s


def _usage_of(invocation: FunctionInvocation, now_s: float) -> Usage:
    return invocation.usage.plus(Usage(function_gb_s=gb_s_of(invocation.memory_mb, invocation.function_s(now_s))))
