"""What a coordinator learns of time and money: limits that follow, how often to save, what a budget still holds."""

from __future__ import annotations

import math

import pytest

from kits.functions.world import PRICES, plan_of, service_of
from springtide.backends.functions.coordinator.invocations import FunctionInvocation
from springtide.backends.functions.coordinator.ledger import SAFETY_FACTOR, Ledger
from springtide.backends.functions.coordinator.messages import InvocationEnded
from springtide.backends.functions.coordinator.pace import MAX_SAVE_EVERY, StepTiming
from springtide.backends.functions.coordinator.reasons import budget_reason
from springtide.core.functions import Usage
from springtide.core.wire.functions import FunctionReport, LaneTimes, Place


def report(step_s: float, save_s: float = 0.0) -> FunctionReport:
    return FunctionReport(
        stage=0,
        replica=0,
        incarnation=1,
        generation=1,
        attempt=1,
        phase="training",
        lanes=LaneTimes(step_s=step_s, save_s=save_s),
    )


def test_a_step_s_time_is_what_was_planned_until_it_is_measured() -> None:
    pace = StepTiming(service_of(), 3.0)
    assert pace.step_s == 3.0
    pace.observe(report(1.0))
    assert pace.step_s == 1.0
    pace.observe(report(2.0))
    assert 1.0 < pace.step_s < 2.0


def test_limits_grow_with_what_is_seen() -> None:
    pace = StepTiming(service_of(cold_start_s=2.0), 1.0)
    before = pace.start_limit_s(), pace.silence_limit_s(), pace.calls_before_end_s()
    pace.observe_start(30.0)
    for _ in range(20):
        pace.observe(report(60.0, save_s=5.0))
    after = pace.start_limit_s(), pace.silence_limit_s(), pace.calls_before_end_s()
    assert all(late > early for early, late in zip(before, after, strict=True))
    # A successor is called early enough to be warm when the one before it leaves.
    assert pace.calls_before_end_s() >= pace.leaves_before_end_s() + pace.start_s


def test_states_are_saved_as_often_as_it_costs_little() -> None:
    pace = StepTiming(service_of(), 1.0)
    pace.observe(report(1.0, save_s=0.01))
    assert pace.save_every(step_usd=1.0, save_usd=0.0) == 1
    # Half a step of saving at each would be half of the time.
    pace = StepTiming(service_of(), 1.0)
    pace.observe(report(1.0, save_s=0.5))
    every = pace.save_every(step_usd=1.0, save_usd=0.0)
    assert 0.07 * every >= 0.5
    assert 0.07 * every / 2 < 0.5
    # Requests count, too; and a loss must stay cheap, whatever saving costs.
    assert pace.save_every(step_usd=1e-5, save_usd=2e-5) > every
    slow = StepTiming(service_of(), 1.0)
    slow.observe(report(50.0, save_s=49.0))
    assert slow.save_every(step_usd=1.0, save_usd=0.0) == 1
    assert pace.save_every(step_usd=1e-9, save_usd=1.0) <= MAX_SAVE_EVERY


def invocation_of(number: int, invoked_at_s: float, memory_mb: int = 1024) -> FunctionInvocation:
    return FunctionInvocation(
        place=Place(0, 0), incarnation=number, memory_mb=memory_mb, invoked_at_s=invoked_at_s, number=number
    )


def ended(number: int, duration_s: float | None) -> InvocationEnded:
    return InvocationEnded(
        number=number, place=Place(0, 0), incarnation=number, outcome="killed", duration_s=duration_s
    )


def test_the_account_is_what_is_billed_or_as_much_as_it_may_be() -> None:
    ledger = Ledger(service_of(lifetime_s=100.0), Usage(num_puts=7), None)
    done, running, given_up = invocation_of(1, 0.0), invocation_of(2, 10.0, 2048), invocation_of(3, 20.0)
    for invocation in (done, running, given_up):
        ledger.open(invocation)
        ledger.count_invocation()
    done.end = ended(1, 4.0)
    given_up.is_given_up, given_up.over_at_s = True, 25.0
    usage = ledger.usage(30.0)
    assert usage.function_gb_s == pytest.approx(4.0 + 2 * 20.0 + 5.0)
    assert (usage.num_invocations, usage.num_puts) == (3, 7)
    assert ledger.settled_usage(30.0).function_gb_s == pytest.approx(9.0)
    # Asked again, nobody is counted twice; a late word on the one given up still counts.
    given_up.end = ended(3, 11.0)
    assert ledger.usage(30.0).function_gb_s == pytest.approx(4.0 + 40.0 + 11.0)
    assert ledger.usage(30.0) == ledger.usage(30.0)


def test_a_budget_holds_so_many_steps_more() -> None:
    plan = plan_of()
    free = Ledger(service_of(), Usage(), None)
    assert free.affordable_steps(10.0, 1.0, 1.0) == math.inf
    ledger = Ledger(service_of(), Usage(), 1.0)
    assert ledger.affordable_steps(0.5, 0.1, 0.05) == 4
    assert ledger.affordable_steps(0.5, 0.1, 0.5) == 0
    assert ledger.affordable_steps(2.0, 0.1, 0.0) == 0
    function_usd = plan.memory_mb / 1024 * 2.0 * PRICES.usd_per_gb_s
    assert ledger.step_usd(plan, 2.0, 0.0) == pytest.approx(SAFETY_FACTOR * function_usd)
    # What steps have cost lately is believed more than what was planned, never less than the functions' time.
    ledger.record_spent(1, 0.1)
    ledger.record_spent(3, 0.1 + 20 * function_usd)
    assert ledger.step_usd(plan, 2.0, 0.0) == pytest.approx(SAFETY_FACTOR * 10 * function_usd)


def test_a_paused_job_is_told_how_to_go_on() -> None:
    text = budget_reason("j", 0.5, 0.47, 120, 1.234)
    assert text.startswith("its budget of $0.5 is nearly spent ($0.47 so far): a checkpoint of step 120 is kept")
    amount = float(text.rpartition("--budget ")[2].rstrip("`"))
    assert amount >= 1.234
