"""Whether a job's budget covers what is about to happen, and the stop before it is exceeded."""

from __future__ import annotations

import math
from collections.abc import Iterator

from springtide.backends.functions.coordinator.reasons import budget_reason
from springtide.backends.functions.coordinator.run import After, Mode, Run
from springtide.backends.functions.coordinator.verdicts import CLOSE_S, CloseAtBoundary, Effect, StopNow
from springtide.core.functions import FunctionPlan

# Age of the newest knowledge of functions, at most: the interval of their reports plus that of reading them.
LAG_S = 3.0


def spent_usd(run: Run) -> float:
    """What the job has cost so far."""
    return run.ledger.bill(run.ledger.usage(run.now_s)).total_usd


def step_usd(run: Run, plan: FunctionPlan) -> float:
    """What the next step may cost."""
    option = run.facts.option(plan)
    return run.ledger.step_usd(plan, run.pace.step_s, option.step_usd if option is not None else 0.0)


def steady_usd(run: Run, seconds: float) -> float:
    """What that many seconds of the present plan cost, requests excluded."""
    assert run.plan is not None
    return run.ledger.steady_usd(run.plan, seconds, has_parameter_store=bool(run.pool.parameter_url))


def _end_usd(run: Run, plan: FunctionPlan) -> float:
    """What an orderly end costs: the step under way, saving the state, and the delay of noticing the end."""
    uncertain_usd = run.ledger.uncertain_usd(run.now_s, run.pace.start_s)
    return uncertain_usd + run.ledger.seconds_usd(plan, run.pace.step_s + run.pace.save_s + LAG_S)


def has_room(run: Run, started_part: float) -> bool:
    """Whether the budget covers invoking this fraction of the plan's functions, one step, and an orderly end."""
    assert run.plan is not None
    if run.ledger.budget_usd is None:
        return True
    start_usd = started_part * run.ledger.start_usd(run.plan, run.pace.start_s)
    needed_usd = start_usd + step_usd(run, run.plan) + _end_usd(run, run.plan)
    return spent_usd(run) + needed_usd <= run.ledger.budget_usd


def has_room_to_begin(run: Run) -> bool:
    """Whether the budget covers an attempt of one step in which only the empty slots need new functions."""
    slots = run.pool.slots.values()
    empty = sum(slot.invocation is None or not slot.invocation.is_alive for slot in slots)
    return has_room(run, empty / len(slots) if slots else 1.0)


def reason_of(run: Run, step: int) -> str:
    """Why the job stops at that step for its budget, and how to continue it."""
    assert run.plan is not None
    assert run.ledger.budget_usd is not None
    spent = spent_usd(run)
    total, needed_usd = run.progress.total_steps, None
    if total is not None:
        start_usd = run.ledger.start_usd(run.plan, run.pace.start_s)
        rest_usd = max(0, total - step) * step_usd(run, run.plan) + _end_usd(run, run.plan)
        needed_usd = spent + start_usd + rest_usd
    return budget_reason(run.facts.job_id, run.ledger.budget_usd, spent, step, needed_usd)


def check(run: Run) -> Iterator[Effect]:
    """Stop before a step that the budget does not cover, saving and ending included."""
    assert run.plan is not None
    assert run.record is not None
    budget_usd = run.ledger.budget_usd
    if budget_usd is None:
        return
    spent = spent_usd(run)
    if spent + run.ledger.seconds_usd(run.plan, LAG_S) >= budget_usd:
        yield StopNow(After.BUDGET)
        return
    if run.mode is not Mode.RUNNING:
        return
    total = run.progress.total_steps
    rest = math.inf if total is None else total - run.progress.furthest
    steps = run.ledger.affordable_steps(spent, step_usd(run, run.plan), _end_usd(run, run.plan))
    # Functions learn of a decision this many steps later.
    lag = math.ceil(LAG_S / run.pace.step_s)
    if steps < rest and steps <= lag + 1 and run.progress.furthest > run.record.restore_step:
        yield CloseAtBoundary(After.BUDGET, CLOSE_S + 2 * run.pace.step_s)
