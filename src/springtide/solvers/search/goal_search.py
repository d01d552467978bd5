"""Which configuration to run as, to try next, or to stay with, for a goal: Bayesian optimisation over what is left.

Plain numbers: the same candidates in each phase of the work, each with the logarithm of its step time, the spread of
that, and its price. Nothing here knows what a function is.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from springtide.solvers.search.gaussian_process import Floats, lognormal_improvement, normal_cdf
from springtide.solvers.search.phase_choice import Aim, GoalLimits, PhaseChoice, SwitchCosts, WorkPhase, choose

# A configuration is counted on at so many standard deviations above what is expected of it.
CONFIDENCE = 2.0
# Trying, or moving, is over once nothing promises more than this part of what is left to pay.
LEAST_GAIN_FRACTION = 0.01
# Nor more than this part of the whole run, so that the last steps are not spent on changes.
_LEAST_OF_ALL_FRACTION = 0.004
# So many different configurations are tried in one situation.
MAX_TRIED = 8
# What is won has to be so many times what changing, or trying, costs.
_GAIN_PER_COST = 2.0
# Steps that a trial takes: the first is left out of the measurement, and three are measured.
PROBE_STEPS = 4.0
# Where nothing keeps the limits with full confidence: parts of it that are tried then, and how much nearer to limits
# out of reach is worth a change.
_LESS_CONFIDENCE = (0.5, 0.0)
_NEARER = 0.9
# Nothing is changed any more once what is left takes no longer than so many changes.
_CHANGES_LEFT = 2.0
# Of what is left of a limit, so much is planned with where a job is moved while it runs.
_ROOM = 0.97
# What a trial leaves in the dark: the deviation of the logarithm of what it measures from what later steps take.
PROBE_NOISE = 0.025

What = Literal["stay", "move", "probe"]


class SearchState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when a decision is due: `phases` of the remaining work, the present one first.

    `change_s` is what passes from a decision to the first step under it, while what runs goes on.

    `running` is the candidate that runs (None: nothing does yet), `is_measured` whether a step of it has been seen,
    `is_fresh` whether that was the last that was seen (if not, it has just come back to it, and only what endangers the
    goal moves it), `tried` which candidates need not be tried in the present situation (they can be moved to),
    `num_tried` how many candidates have been in the present situation. `behind` is what the work so far has cost, in
    the aim's unit. `first` are the costs of going from what runs to each candidate, `later` those of going there from
    any other. `beside` is the deviation of each log step over that of what runs, if that is less than all that is
    unknown of it.
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
    """What to do now, and what it is worth, in the aim's own unit.

    `candidate` is where to go or stay. `rest` is the objective over what is left as decided, `expected_gain` what the
    move or the trial is expected to save of it, `cost` what trying costs. `plan` holds the choice for all phases.
    `has_settled` says that no trial is worth its cost.
    """

    what: What
    candidate: int
    rest: float
    plan: PhaseChoice
    expected_gain: float = 0.0
    cost: float = 0.0
    has_settled: bool = False


def decide(state: SearchState) -> SearchDecision:
    """Stay, move to what is best as far as is known, or try what may be better.

    Where nothing is certain to keep the limits, what is likely to is counted on, at last what comes closest to them.
    """
    best, confidence = _best(state)
    if state.running is None:
        return SearchDecision(what="move", candidate=best.candidates[0], rest=best.objective, plan=best)
    running = state.running
    stays = _chosen(state, confidence, running)
    if not state.is_measured:
        # What was begun is looked at before anything else is.
        return SearchDecision(what="stay", candidate=running, rest=stays.objective, plan=stays)
    if stays.rest_s <= _CHANGES_LEFT * state.change_s:
        # It would be nearly over before anything else began.
        return SearchDecision(what="stay", candidate=running, rest=stays.objective, plan=stays, has_settled=True)
    best = _with_room(state, best, confidence)
    gain = stays.objective - best.objective
    is_rescue = _rescues(state, best, confidence, stays)
    # What going there costs is in the objective once already.
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
    """The best that keeps the limits with confidence; where nothing does, with as much of it as there is."""
    for part in (1.0, *_LESS_CONFIDENCE):
        found = _chosen(state, part * state.confidence)
        if found.is_within:
            break
    return found, part * state.confidence


def _rescues(state: SearchState, best: PhaseChoice, confidence: float, stays: PhaseChoice) -> bool:
    """Whether the goal is in danger where it is, and less so at `best`.

    Where nothing keeps the limits for certain, a plan that is expected to keep them stays: each change costs of the
    little that is left, and the next one would look no better. Where nothing is expected to keep them, only what is
    clearly nearer to them is worth a change.
    """
    if stays.is_within:
        return False
    if best.is_within and confidence == state.confidence:
        return True
    if state.is_fresh and _chosen(state, 0.0, state.running).is_within:
        return False
    return best.is_within or best.violation < _NEARER * stays.violation


def _with_room(state: SearchState, best: PhaseChoice, confidence: float) -> PhaseChoice:
    """Where a job is moved to, with some room beyond the limits, lest it must be moved again at once."""
    tighter = GoalLimits(left_s=_ROOM * state.limits.left_s, left_usd=_ROOM * state.limits.left_usd)
    found = _chosen(msgspec.structs.replace(state, limits=tighter), confidence)
    return found if found.is_within else best


def _least_gain(state: SearchState, rest: float) -> float:
    """What is not worth a change: a part of what is left, and a smaller part of the whole run.

    The more has been tried, the more it has to be: near its best the objective is flat, and what is believed of
    neighbours changes with each measurement by more than they differ.
    """
    fraction = LEAST_GAIN_FRACTION * max(1.0, 0.5 * state.num_tried)
    return max(fraction * abs(rest), _LEAST_OF_ALL_FRACTION * (abs(rest) + state.behind))


def _best_probe(state: SearchState, base: PhaseChoice) -> tuple[int, float, float] | None:
    """The candidate whose trial promises most beyond its cost, its expected improvement over `base`, and that cost."""
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
    """The expected improvement over `base` on what is left, for each candidate of the present phase, and its chance.

    A step of time t costs alpha t + beta in the objective, with the worth of the limited resource in it where later
    phases can make up for it; better than `base` is a step below some time, and allowed one below another. What counts
    is what will be expected after the trial: its mean is as uncertain now as the trial makes it certain (the knowledge
    gradient; Frazier and others 2009), and what the trial leaves uncertain is kept off the limits then, too. Only by
    what sets it apart from what runs can it be better than that.
    """
    phase, anchor = state.phases[0], base.candidates[0]
    alpha, beta = _step_objective(state, base)
    switch = state.first.objective(state.aim) / phase.num_steps
    now = math.exp(float(phase.log_step[anchor])) * alpha[anchor] + beta[anchor] + switch[anchor]
    best_s = (now - beta - switch) / np.maximum(alpha, 1e-300)
    variance = phase.spread**2
    apart = variance if state.beside is None else np.minimum(state.beside**2, variance)
    told = np.maximum(apart / np.sqrt(apart + PROBE_NOISE**2), 1e-6)
    untold = np.sqrt(np.maximum(variance - told**2, 0.0) + phase.luck**2)
    limit_s = np.minimum(_time_limit(state, base), _money_limit(state, base)) * np.exp(-state.confidence * untold)
    saved = lognormal_improvement(phase.log_step, told, best_s, limit_s)
    edge = np.minimum(best_s, limit_s)
    ratio = (np.log(np.maximum(edge, 1e-300)) - phase.log_step) / told
    chance = np.where(edge > 0.0, normal_cdf(ratio), 0.0)
    return np.asarray(np.where(phase.fits, phase.num_steps * alpha * saved, 0.0)), np.asarray(chance)


def probe_costs(state: SearchState, base: PhaseChoice, chance: Floats) -> Floats:
    """What trying each candidate costs if it turns out no better: going there, steps that are worse, and going on.

    What going there costs if it is better is in the improvement already.
    """
    phase, anchor = state.phases[0], base.candidates[0]
    alpha, beta = _step_objective(state, base)
    each = np.exp(phase.log_step + phase.spread) * alpha + beta
    usual = math.exp(float(phase.log_step[anchor])) * alpha[anchor] + beta[anchor]
    worse = np.maximum(each - usual, 0.0) * min(PROBE_STEPS, phase.num_steps)
    there, back = state.first.objective(state.aim), state.later.objective(state.aim)[anchor]
    return np.asarray((1.0 - chance) * (there + worse + back))


def is_safe(state: SearchState, base: PhaseChoice) -> npt.NDArray[np.bool_]:
    """Where a trial leaves enough time and money to finish as `base` does, even if the trial goes badly."""
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
