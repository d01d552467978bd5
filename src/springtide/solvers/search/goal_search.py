"""Bayesian optimisation for a goal: which configuration to move to, to try, or to stay with for the work left.

Plain numbers: the same candidates in each phase of the work, each with the logarithm of its step time, the spread of
that, and its price. Nothing here depends on functions.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from springtide.solvers.search.gaussian_process import Floats, lognormal_improvement, normal_cdf
from springtide.solvers.search.phase_choice import Aim, GoalLimits, PhaseChoice, SwitchCosts, WorkPhase, choose

# Limits are checked with step times at so many standard deviations above the mean.
CONFIDENCE = 2.0
# A trial or a move has to promise a gain of more than this part of what is left to pay,
LEAST_GAIN_FRACTION = 0.01
# and of more than this part of the whole run, so that the last steps are not spent on changes.
_LEAST_OF_ALL_FRACTION = 0.004
# How many different configurations are tried in one phase.
MAX_TRIED = 8
# The gain has to be so many times the cost of the change or trial.
_GAIN_PER_COST = 2.0
# The steps of a trial: the first is not measured, then three are.
PROBE_STEPS = 4.0
# If no candidate keeps the limits with full confidence: the fractions of it to use instead, and how much nearer to
# unreachable limits a candidate must come to be worth a change.
_LESS_CONFIDENCE = (0.5, 0.0)
_NEARER = 0.9
# No change is made once the work left takes no longer than so many changes.
_CHANGES_LEFT = 2.0
# The part of a limit that is used in planning a move of a running job.
_ROOM = 0.97
# The standard deviation of the logarithm of a trial's measurement from that of later steps.
PROBE_NOISE = 0.025

What = Literal["stay", "move", "probe"]


class SearchState(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a decision: `phases` of the remaining work, the present one first.

    `change_s` passes from a decision to the first step after the change; the running candidate goes on until then.

    `running` is the candidate that runs (None: none yet), `is_measured` whether a step of it was measured, `is_fresh`
    whether that was the last measurement; if not, the job has just come back to it, and moves only if the goal is in
    danger. `tried` marks candidates that need no trial in the present phase (they can be moved to), `num_tried` counts
    those that were tried in it. `behind` is what the work so far has cost, in the aim's unit.

    `first` are the costs of a change from the running candidate to each other one, `later` those from any other.
    `beside` is the deviation of each log step relative to that of the running candidate, if that is less than its whole
    uncertainty.
    """

    phases: tuple[WorkPhase, ...]
    limits: GoalLimits
    aim: Aim
    first: SwitchCosts
    later: SwitchCosts
    running: int | None = None
    beside: Floats | None = None
    is_measured: bool = False
    is_fresh: bool = True
    tried: npt.NDArray[np.bool_] | None = None
    num_tried: int = 0
    behind: float = 0.0
    confidence: float = CONFIDENCE
    max_tried: int = MAX_TRIED
    has_probes: bool = True
    change_s: float = 0.0


class SearchDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision, and its value in the aim's own unit.

    `candidate` is the one to move to, try or stay with. `rest` is the objective over the work left as decided,
    `expected_gain` what the move or the trial is expected to save of it, `cost` the cost of the trial. `plan` is the
    choice for all phases. `has_settled`: no trial is worth its cost.
    """

    what: What
    candidate: int
    rest: float
    plan: PhaseChoice
    expected_gain: float = 0.0
    cost: float = 0.0
    has_settled: bool = False


def decide(state: SearchState) -> SearchDecision:
    """Stay, move to the best known candidate, or try one that may be better.

    If no candidate is certain to keep the limits, one that is likely to is used, or at last the closest one.
    """
    best, confidence = _best(state)
    if state.running is None:
        return SearchDecision(what="move", candidate=best.candidates[0], rest=best.objective, plan=best)
    running = state.running
    stays = _chosen(state, confidence, running)
    if not state.is_measured:
        # A candidate that was begun is measured before another one is considered.
        return SearchDecision(what="stay", candidate=running, rest=stays.objective, plan=stays)
    if stays.rest_s <= _CHANGES_LEFT * state.change_s:
        # The work would be nearly over before another candidate began.
        return SearchDecision(what="stay", candidate=running, rest=stays.objective, plan=stays, has_settled=True)
    best = _with_room(state, best, confidence)
    gain = stays.objective - best.objective
    is_rescue = _rescues(state, best, confidence, stays)
    # The objective includes the cost of the change once already.
    enough = max(
        _least_gain(state, best.objective),
        (_GAIN_PER_COST - 1.0) * float(state.first.objective(state.aim)[best.candidates[0]]),
    )
    moves = best.candidates[0] != running and (is_rescue or (state.is_fresh and gain > enough))
    base = best if moves else stays
    is_sure = base.is_within and confidence == state.confidence
    if is_sure and state.has_probes and state.is_fresh and state.num_tried < state.max_tried:
        probe = _best_probe(state, base)
        if probe is not None:
            candidate, expected, cost = probe
            return SearchDecision(
                what="probe", candidate=candidate, rest=base.objective, plan=base, expected_gain=expected, cost=cost
            )
    if moves:
        return SearchDecision(
            what="move", candidate=best.candidates[0], rest=best.objective, plan=best, expected_gain=max(gain, 0.0)
        )
    return SearchDecision(what="stay", candidate=running, rest=stays.objective, plan=stays, has_settled=state.is_fresh)


def _chosen(state: SearchState, confidence: float, first_candidate: int | None = None) -> PhaseChoice:
    return choose(
        state.phases,
        state.limits,
        state.aim,
        state.first,
        state.later,
        confidence,
        first_candidate=first_candidate,
    )


def _best(state: SearchState) -> tuple[PhaseChoice, float]:
    """The best choice that keeps the limits, with the largest confidence at which there is one; and that confidence."""
    for part in (1.0, *_LESS_CONFIDENCE):
        found = _chosen(state, part * state.confidence)
        if found.is_within:
            break
    return found, part * state.confidence


def _rescues(state: SearchState, best: PhaseChoice, confidence: float, stays: PhaseChoice) -> bool:
    """Whether the goal is in danger with the running candidate, and less so with `best`.

    If no choice is certain to keep the limits, a plan that is expected to keep them is not changed: a change uses up
    some of the little that is left, and the next plan would look no better. If none is expected to keep them, only one
    that comes clearly nearer is worth a change.
    """
    if stays.is_within:
        return False
    if best.is_within and confidence == state.confidence:
        return True
    if state.is_fresh and _chosen(state, 0.0, state.running).is_within:
        return False
    return best.is_within or best.violation < _NEARER * stays.violation


def _with_room(state: SearchState, best: PhaseChoice, confidence: float) -> PhaseChoice:
    """The choice to move to, with some distance to the limits, so that the next move is not due at once."""
    tighter = GoalLimits(left_s=_ROOM * state.limits.left_s, left_usd=_ROOM * state.limits.left_usd)
    found = _chosen(msgspec.structs.replace(state, limits=tighter), confidence)
    return found if found.is_within else best


def _least_gain(state: SearchState, rest: float) -> float:
    """The least gain that is worth a change: a part of the work left, and a smaller part of the whole run.

    It rises with the number of trials: near the optimum the objective is flat, and each measurement changes the
    estimates of neighbouring candidates by more than they differ.
    """
    fraction = LEAST_GAIN_FRACTION * max(1.0, 0.5 * state.num_tried)
    return max(fraction * abs(rest), _LEAST_OF_ALL_FRACTION * (abs(rest) + state.behind))


def _best_probe(state: SearchState, base: PhaseChoice) -> tuple[int, float, float] | None:
    """The candidate whose trial promises the most beyond its cost; its expected improvement over `base`; the cost."""
    expected, chance = improvements(state, base)
    cost = probe_costs(state, base, chance)
    net = np.where(is_safe(state, base), expected - _GAIN_PER_COST * cost, -math.inf)
    assert state.running is not None
    net[[base.candidates[0], state.running]] = -math.inf
    if state.tried is not None:
        net[state.tried] = -math.inf
    index = int(np.argmax(net))
    enough = max(_least_gain(state, base.objective), _GAIN_PER_COST * float(cost[index]))
    if not math.isfinite(net[index]) or expected[index] <= enough:
        return None
    return index, float(expected[index]), float(cost[index])


def improvements(state: SearchState, base: PhaseChoice) -> tuple[Floats, Floats]:
    """The expected improvement over `base` on the work left, for each candidate of the present phase, and its chance.

    A step of time t costs alpha t + beta in the objective, including the value of the limited resource if later phases
    can trade it. It is better than `base` below one time, and within the limits below another. What counts is the
    estimate after the trial (the knowledge gradient; Frazier and others 2009): its distribution now is the part of the
    uncertainty that the trial resolves, and the unresolved part is kept as a distance to the limits. Only the part of
    the uncertainty that is not shared with the running candidate can make a candidate better than it.
    """
    phase, anchor = state.phases[0], base.candidates[0]
    alpha, beta = _step_objective(state, base)
    switch = state.first.objective(state.aim) / phase.num_steps
    now = math.exp(float(phase.log_step[anchor])) * alpha[anchor] + beta[anchor] + switch[anchor]
    best_s = (now - beta - switch) / np.maximum(alpha, 1e-300)
    variance = phase.spread**2
    apart = variance if state.beside is None else np.minimum(state.beside**2, variance)
    resolved = np.maximum(apart / np.sqrt(apart + PROBE_NOISE**2), 1e-6)
    unresolved = np.sqrt(np.maximum(variance - resolved**2, 0.0) + phase.luck**2)
    limit_s = np.minimum(_time_limit(state, base), _money_limit(state, base)) * np.exp(-state.confidence * unresolved)
    saved = lognormal_improvement(phase.log_step, resolved, best_s, limit_s)
    edge = np.minimum(best_s, limit_s)
    ratio = (np.log(np.maximum(edge, 1e-300)) - phase.log_step) / resolved
    chance = np.where(edge > 0.0, normal_cdf(ratio), 0.0)
    return np.asarray(np.where(phase.fits, phase.num_steps * alpha * saved, 0.0)), np.asarray(chance)


def probe_costs(state: SearchState, base: PhaseChoice, chance: Floats) -> Floats:
    """The cost of trying each candidate if it turns out no better: two changes, and the worse steps in between.

    The cost of the change if it turns out better is part of the improvement already.
    """
    phase, anchor = state.phases[0], base.candidates[0]
    alpha, beta = _step_objective(state, base)
    each = np.exp(phase.log_step + phase.spread) * alpha + beta
    usual = math.exp(float(phase.log_step[anchor])) * alpha[anchor] + beta[anchor]
    worse = np.maximum(each - usual, 0.0) * min(PROBE_STEPS, phase.num_steps)
    there, back = state.first.objective(state.aim), state.later.objective(state.aim)[anchor]
    return np.asarray((1.0 - chance) * (there + worse + back))


def is_safe(state: SearchState, base: PhaseChoice) -> npt.NDArray[np.bool_]:
    """Which trials leave enough time and money to finish as `base` even if they go badly."""
    phase, anchor = state.phases[0], base.candidates[0]
    num_steps = min(PROBE_STEPS, phase.num_steps)
    upper_s = phase.step_s(state.confidence)
    upper_usd = phase.base_usd + upper_s * phase.usd_per_s
    later_s, later_usd = float(state.later.seconds[anchor]), float(state.later.usd[anchor])
    rest_s = base.upper_s - float(state.first.seconds[anchor]) - num_steps * float(upper_s[anchor]) + later_s
    rest_usd = base.upper_usd - float(state.first.usd[anchor]) - num_steps * float(upper_usd[anchor]) + later_usd
    in_time = state.first.seconds + num_steps * upper_s + rest_s <= state.limits.left_s
    in_money = state.first.usd + num_steps * upper_usd + rest_usd <= state.limits.left_usd
    return np.asarray(phase.fits & in_time & in_money)


def _step_objective(state: SearchState, base: PhaseChoice) -> tuple[Floats, Floats]:
    """Alpha and beta of each candidate: a step of time t counts alpha t + beta."""
    phase, aim, worth = state.phases[0], state.aim, base.resource_worth
    money = aim.usd_weight + (worth if aim.is_time_first else 0.0)
    time = aim.second_weight + (0.0 if aim.is_time_first else worth)
    return np.asarray(time + money * phase.usd_per_s), np.asarray(money * phase.base_usd)


def _time_limit(state: SearchState, base: PhaseChoice) -> Floats:
    """The step time with which each candidate just makes the deadline, if the later phases go as planned."""
    left_s = state.limits.left_s - base.later_upper_s - state.first.seconds
    return np.asarray(left_s / state.phases[0].num_steps)


def _money_limit(state: SearchState, base: PhaseChoice) -> Floats:
    """The step time with which each candidate just stays within the budget, if the later phases go as planned."""
    phase = state.phases[0]
    left_usd = state.limits.left_usd - base.later_upper_usd - state.first.usd
    if math.isinf(state.limits.left_usd):
        return np.full(phase.log_step.shape, math.inf)
    return np.asarray((left_usd / phase.num_steps - phase.base_usd) / np.maximum(phase.usd_per_s, 1e-300))
