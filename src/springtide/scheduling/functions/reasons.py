"""What a search for a goal says to people, in one sentence each."""

from __future__ import annotations

import math

from springtide.core.functions import FunctionPlan
from springtide.core.workload import Goal
from springtide.scheduling.functions.plan_text import money
from springtide.solvers.search.goal_search import MAX_TRIED, SearchDecision
from springtide.solvers.search.phase_choice import Aim, GoalLimits


def configuration_words(plan: FunctionPlan) -> str:
    """`6 workers of 1792 MB`."""
    workers = "1 worker" if plan.num_replicas == 1 else f"{plan.num_replicas} workers"
    return f"{workers} of {plan.stages[0].memory_mb} MB"


def seconds_words(seconds: float) -> str:
    """`42 s`, `3m10s`, `2h05m`."""
    if not math.isfinite(seconds):
        return "for ever"
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 90:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"


def goal_words(goal: Goal, keeps_up: bool) -> str:
    """What is searched for."""
    if keeps_up:
        return "cheapest that keeps up with what arrives"
    within = f"within {money(goal.budget_usd)}" if goal.budget_usd is not None else ""
    if goal.is_fastest or (goal.deadline_s is None and within):
        return f"fastest {within}".strip()
    if goal.deadline_s is not None:
        return f"cheapest that makes the deadline {within}".strip()
    return "speed that is worth its cost"


def decision_words(
    decision: SearchDecision,
    aim: Aim,
    limits: GoalLimits,
    plan: FunctionPlan,
    num_tried: int,
    *,
    is_first: bool,
    is_measured: bool,
    is_known: bool,
) -> str:
    """Why this is done now. Where it is not known how much is left (`is_known`), savings are parts of what is spent."""
    where, rest = configuration_words(plan), decision.plan
    unit = seconds_words if aim.is_time_first else money
    saves = f"{100.0 * decision.expected_gain / max(abs(decision.rest), 1e-300):.0f} %"
    if is_first:
        expected = f": {seconds_words(rest.rest_s)} and {money(rest.rest_usd)} expected" if is_known else ""
        return f"begins with {where}{expected}"
    if decision.what == "probe":
        gain = f"{unit(decision.expected_gain)} of {unit(decision.rest)}" if is_known else saves
        return f"tries {where}: may save {gain} (configuration {num_tried + 1} of at most {MAX_TRIED})"
    if decision.what == "move" and decision.expected_gain > 0 and rest.is_within:
        if not is_known:
            return f"moves to {where}: saves about {saves}"
        return (
            f"moves to {where}: saves about {unit(decision.expected_gain)} of what is left, {unit(decision.rest)} then"
        )
    if decision.what == "move":
        return f"moves to {where}: {_risk(decision, limits)}"
    if not is_measured:
        return f"measures {where}"
    if not rest.is_within:
        return f"stays with {where}, the closest to its goal: {_risk(decision, limits)}"
    left = f": {seconds_words(rest.rest_s)} and {money(rest.rest_usd)} to go" if is_known else ""
    return f"stays with {where}, {num_tried} tried{left}"


def _risk(decision: SearchDecision, limits: GoalLimits) -> str:
    """Which limit is in danger."""
    rest = decision.plan
    if rest.upper_usd > limits.left_usd:
        return f"up to {money(rest.upper_usd)} more, and {money(max(0.0, limits.left_usd))} of the budget are left"
    if rest.upper_s > limits.left_s:
        return f"up to {seconds_words(rest.upper_s)} more, and {seconds_words(max(0.0, limits.left_s))} are left"
    return "what ran before would not have kept its goal"
