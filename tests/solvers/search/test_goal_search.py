"""Decisions on plain numbers: what is tried, what is safe, when it is over, and that goals are never gambled away."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from springtide.solvers.search.goal_search import SearchState, decide, improvements, is_safe
from springtide.solvers.search.phase_choice import CHEAPEST, FASTEST, GoalLimits, SwitchCosts, WorkPhase, choose

NONE = np.array([False, False, False])


def phase_of(step_s, usd_per_s, spread, num_steps=100.0, fits=None):
    step_s = np.asarray(step_s, dtype=float)
    return WorkPhase(
        num_steps=num_steps,
        log_step=np.log(step_s),
        spread=np.asarray(spread, dtype=float),
        luck=np.zeros(len(step_s)),
        base_usd=np.zeros(len(step_s)),
        usd_per_s=np.asarray(usd_per_s, dtype=float),
        fits=np.ones(len(step_s), dtype=bool) if fits is None else np.asarray(fits),
    )


def state_of(phase, *, running=0, limits=None, aim=CHEAPEST, switch_s=0.0, switch_usd=0.0, **fields):
    number = len(phase.log_step)
    there = SwitchCosts(seconds=np.full(number, switch_s), usd=np.full(number, switch_usd))
    first = SwitchCosts(seconds=there.seconds.copy(), usd=there.usd.copy())
    if running is not None:
        first.seconds[running] = first.usd[running] = 0.0
    return SearchState(
        phases=(phase,),
        limits=limits or GoalLimits(left_s=200.0),
        aim=aim,
        first=first,
        later=there,
        running=running,
        **{"is_measured": True, **fields},
    )


def test_it_begins_with_the_cheapest_that_makes_the_deadline_with_confidence():
    phase = phase_of([1.0, 1.8, 2.5], [3.0, 1.5, 1.0], [0.02, 0.02, 0.02])
    decision = decide(state_of(phase, running=None))
    assert (decision.what, decision.candidate) == ("move", 1)


def test_where_nothing_is_certain_what_is_likely_is_begun_with_and_not_the_fastest():
    phase = phase_of([1.0, 1.5, 2.5], [5.0, 1.5, 1.0], [0.7, 0.7, 0.7])
    decision = decide(state_of(phase, running=None))
    assert decision.candidate == 1
    hopeless = decide(state_of(phase, running=None, limits=GoalLimits(left_s=10.0)))
    assert hopeless.candidate == 0
    assert not hopeless.plan.is_within


def test_what_was_begun_is_measured_before_anything_else():
    phase = phase_of([1.0, 0.5, 0.5], [1.0, 1.0, 1.0], [0.3, 0.3, 0.3])
    decision = decide(state_of(phase, is_measured=False))
    assert (decision.what, decision.candidate, decision.has_settled) == ("stay", 0, False)


def test_an_uncertain_candidate_is_tried_and_a_certain_one_moved_to():
    tried = decide(state_of(phase_of([1.0, 1.05, 9.0], [1.0, 0.95, 1.0], [0.02, 0.25, 0.25])))
    assert (tried.what, tried.candidate) == ("probe", 1)
    assert tried.expected_gain > 2.0 * tried.cost > 0.0
    moved = decide(state_of(phase_of([1.0, 0.8, 9.0], [1.0, 1.0, 1.0], [0.02, 0.01, 0.01])))
    assert (moved.what, moved.candidate) == ("move", 1)


def test_it_is_over_when_a_trial_costs_more_than_it_brings():
    phase = phase_of([1.0, 1.05, 9.0], [1.0, 0.95, 1.0], [0.02, 0.25, 0.25])
    assert decide(state_of(phase)).what == "probe"
    for state in (
        state_of(phase, switch_usd=30.0),
        state_of(replace(phase, num_steps=3.0)),
        state_of(phase, num_tried=8),
        state_of(phase, has_probes=False),
        state_of(phase, tried=np.array([True, True, True])),
        state_of(phase, beside=np.array([0.0, 0.001, 0.001])),
    ):
        decision = decide(state)
        assert (decision.what, decision.candidate, decision.has_settled) == ("stay", 0, True)


def test_a_trial_never_endangers_the_goal():
    # The trial itself, at its upper end, would leave too little time for the rest as it runs now.
    phase = phase_of([1.0, 1.2, 1.0], [1.0, 0.7, 1.0], [0.01, 0.5, 0.01], num_steps=100.0)
    roomy = state_of(phase, limits=GoalLimits(left_s=130.0))
    base = choose(roomy.phases, roomy.limits, CHEAPEST, roomy.first, roomy.later, 2.0, first_candidate=0)
    assert is_safe(roomy, base)[1]
    tight = state_of(phase, limits=GoalLimits(left_s=103.0))
    base = choose(tight.phases, tight.limits, CHEAPEST, tight.first, tight.later, 2.0, first_candidate=0)
    assert base.is_within
    assert not is_safe(tight, base)[1]
    assert decide(tight).what == "stay"


def test_what_endangers_the_goal_is_left_even_for_a_dearer_one():
    phase = phase_of([2.5, 1.5, 1.0], [0.5, 1.0, 4.0], [0.02, 0.02, 0.02])
    decision = decide(state_of(phase))
    assert (decision.what, decision.candidate) == ("move", 1)
    # Just back from elsewhere: only that moves it.
    assert decide(state_of(phase, is_fresh=False)).what == "move"
    better = phase_of([1.0, 0.8, 9.0], [1.0, 1.0, 1.0], [0.02, 0.01, 0.01])
    assert decide(state_of(better, is_fresh=False)).what == "stay"


def test_who_is_moved_for_its_goal_gets_some_room():
    # 1.96 s a step is just within the 200 s left, 1.9 s leaves some of them free, and is hardly dearer.
    phase = phase_of([2.5, 1.96, 1.9], [0.5, 1.0, 1.05], [0.01, 0.005, 0.005])
    assert decide(state_of(phase, has_probes=False)).candidate == 2
    no_choice = replace(phase, fits=np.array([True, True, False]))
    assert decide(state_of(no_choice, has_probes=False)).candidate == 1, "where there is no room the goal still counts"


def test_who_is_expected_to_keep_its_goal_stays_where_nothing_is_certain_to():
    # None of them is within the limit for certain; the running one is on average.
    phase = phase_of([1.95, 1.9, 9.0], [0.5, 0.6, 1.0], [0.05, 0.06, 0.05])
    decision = decide(state_of(phase))
    assert (decision.what, decision.candidate) == ("stay", 0)
    late = phase_of([2.05, 1.9, 9.0], [0.5, 0.6, 1.0], [0.05, 0.06, 0.05])
    assert decide(state_of(late)).candidate == 1


def test_the_more_was_tried_the_more_a_move_has_to_bring():
    phase = phase_of([1.0, 0.97, 9.0], [1.0, 1.0, 1.0], [0.001, 0.001, 0.001])
    assert decide(state_of(phase, num_tried=2)).what == "move"
    assert decide(state_of(phase, num_tried=8)).what == "stay"


@pytest.mark.parametrize("aim", [CHEAPEST, FASTEST], ids=["usd", "s"])
def test_the_improvement_is_that_of_drawn_outcomes(aim):
    phase = phase_of([1.0, 1.1, 0.9], [1.0, 0.9, 1.3], [0.02, 0.2, 0.15])
    limits = GoalLimits(left_s=118.0) if aim is CHEAPEST else GoalLimits(left_usd=112.0)
    state = state_of(phase, limits=limits, aim=aim, switch_s=1.0, switch_usd=0.5)
    base = choose(state.phases, limits, aim, state.first, state.later, 2.0, first_candidate=0)
    found, chance = improvements(state, base)
    rng = np.random.default_rng(0)
    noise = 0.025
    for candidate in (1, 2):
        variance = float(phase.spread[candidate]) ** 2
        told = variance / math.sqrt(variance + noise**2)
        untold = math.sqrt(variance - told**2)
        step_s = np.exp(phase.log_step[candidate] + told * rng.standard_normal(400_000))
        seconds = 100.0 * step_s + 1.0
        usd = 100.0 * step_s * phase.usd_per_s[candidate] + 0.5
        upper = math.exp(2.0 * untold)
        within = (100.0 * step_s * upper + 1.0 <= limits.left_s) & (
            100.0 * step_s * upper * phase.usd_per_s[candidate] + 0.5 <= limits.left_usd
        )
        value = usd if aim is CHEAPEST else seconds
        saved = np.where(within, np.maximum(100.0 - value, 0.0), 0.0)
        assert found[candidate] == pytest.approx(saved.mean(), rel=0.03, abs=0.02)
        assert chance[candidate] == pytest.approx((saved > 0).mean(), abs=0.01)


def test_later_phases_count_with_the_worth_of_what_they_lack():
    now = phase_of([1.0, 1.3, 0.8], [1.0, 0.7, 1.3], [0.02, 0.2, 0.02])
    later = phase_of([2.0, 1.0, 0.6], [0.3, 0.9, 2.0], [0.02, 0.02, 0.02])
    alone = state_of(now, limits=GoalLimits(left_s=200.0))
    both = replace(alone, phases=(now, later), limits=GoalLimits(left_s=210.0))
    decision = decide(both)
    assert decision.plan.is_within
    assert len(decision.plan.candidates) == 2
    assert decide(both) == decision


@pytest.mark.parametrize("seed", range(30))
def test_no_sequence_of_decisions_breaks_a_goal_that_can_be_met(seed):
    """A job walks to its end on a drawn truth within what is believed; every decision is followed."""
    rng = np.random.default_rng(seed)
    number, num_steps = 12, 120
    step_s = np.exp(rng.uniform(0.0, 1.5, number))
    usd_per_s = 0.01 * step_s ** rng.uniform(-2.2, -1.2, number)
    truth = step_s * np.exp(0.15 * rng.standard_normal(number).clip(-1.9, 1.9))
    left_s = 1.4 * num_steps * float(np.sort(truth)[2])
    aim, limits = (CHEAPEST, GoalLimits(left_s=left_s)) if seed % 2 else (FASTEST, GoalLimits(left_usd=math.inf))
    if aim is FASTEST:
        limits = GoalLimits(left_usd=1.3 * num_steps * float(np.sort(truth * usd_per_s)[3]))
    spent_s = spent_usd = 0.0
    done, running, seen = 0, None, {}
    while done < num_steps:
        log_step, spread = np.log(step_s), np.full(number, 0.15)
        for candidate in seen:
            log_step[candidate], spread[candidate] = math.log(truth[candidate]), 0.01
        phase = WorkPhase(
            num_steps=float(num_steps - done), log_step=log_step, spread=spread, luck=np.zeros(number),
            base_usd=np.zeros(number), usd_per_s=usd_per_s, fits=np.ones(number, dtype=bool),
        )  # fmt: skip
        switch = SwitchCosts(seconds=np.full(number, 1.0), usd=np.full(number, 0.001))
        first = SwitchCosts(seconds=switch.seconds.copy(), usd=switch.usd.copy())
        if running is not None:
            first.seconds[running] = first.usd[running] = 0.0
        left = GoalLimits(left_s=limits.left_s - spent_s, left_usd=limits.left_usd - spent_usd)
        tried = np.isin(np.arange(number), list(seen))
        decision = decide(
            SearchState(
                phases=(phase,), limits=left, aim=aim, first=first, later=switch, running=running,
                is_measured=running in seen, num_tried=len(seen), tried=tried,
            )
        )  # fmt: skip
        if decision.what != "stay":
            running = decision.candidate
            spent_s, spent_usd = spent_s + 1.0, spent_usd + 0.001
        for _ in range(min(4, num_steps - done)):
            spent_s += float(truth[running])
            spent_usd += float(truth[running] * usd_per_s[running])
            done += 1
        seen[running] = True
    assert spent_s <= limits.left_s
    assert spent_usd <= limits.left_usd
