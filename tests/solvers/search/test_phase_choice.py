"""Configurations for all phases together: as good as brute force, never worse than each phase on its own."""

import itertools
import math

import numpy as np
import pytest

from springtide.solvers.search.phase_choice import CHEAPEST, FASTEST, Aim, GoalLimits, SwitchCosts, WorkPhase, choose

CONFIDENCE = 2.0


def phase_of(seed, num_candidates=7, num_steps=50.0):
    """Faster candidates are dearer, more or less."""
    rng = np.random.default_rng(seed)
    step_s = np.exp(rng.uniform(-1.0, 1.5, num_candidates))
    return WorkPhase(
        num_steps=num_steps,
        log_step=np.log(step_s),
        spread=rng.uniform(0.01, 0.1, num_candidates),
        luck=rng.uniform(0.0, 0.02, num_candidates),
        base_usd=rng.uniform(0.0, 0.001, num_candidates),
        usd_per_s=0.01 * step_s ** rng.uniform(-2.2, -1.2, num_candidates),
        fits=rng.random(num_candidates) < 0.9,
    )


def costs_of(seed, num_candidates=7, size=1.0):
    rng = np.random.default_rng(1000 + seed)
    return SwitchCosts(
        seconds=size * rng.uniform(0.0, 5.0, num_candidates), usd=size * rng.uniform(0.0, 0.02, num_candidates)
    )


def brute_force(phases, limits, aim, first, later):
    """The least objective over all paths within the limits at the upper end, or else the least violation."""
    best, least = None, math.inf
    for path in itertools.product(*(np.flatnonzero(phase.fits).tolist() for phase in phases)):
        seconds, usd = float(first.seconds[path[0]]), float(first.usd[path[0]])
        upper_s, upper_usd = seconds, usd
        for number, (phase, candidate) in enumerate(zip(phases, path, strict=True)):
            if number and path[number - 1] != candidate:
                seconds, upper_s = (each + float(later.seconds[candidate]) for each in (seconds, upper_s))
                usd, upper_usd = (each + float(later.usd[candidate]) for each in (usd, upper_usd))
            mean, upper = phase.totals(0.0), phase.totals(CONFIDENCE)
            seconds, usd = seconds + float(mean[0][candidate]), usd + float(mean[1][candidate])
            upper_s, upper_usd = upper_s + float(upper[0][candidate]), upper_usd + float(upper[1][candidate])
        least = min(least, max(upper_s / limits.left_s, upper_usd / limits.left_usd))
        if upper_s <= limits.left_s and upper_usd <= limits.left_usd:
            value = aim.usd_weight * usd + aim.second_weight * seconds
            best = value if best is None else min(best, value)
    return best, least


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("aim", [CHEAPEST, FASTEST, Aim(usd_weight=1.0, second_weight=0.004)], ids=["usd", "s", "both"])
def test_the_joint_choice_is_that_of_brute_force(seed, aim):
    phases = tuple(phase_of(10 * seed + number, num_steps=20.0 + 15.0 * number) for number in range(3))
    first, later = costs_of(seed), costs_of(seed + 50)
    freely = choose(phases, GoalLimits(), aim, first, later, CONFIDENCE)
    limits = GoalLimits()
    if aim is CHEAPEST:
        limits = GoalLimits(left_s=0.6 * freely.upper_s)
    elif aim is FASTEST:
        limits = GoalLimits(left_usd=0.6 * freely.upper_usd)
    found = choose(phases, limits, aim, first, later, CONFIDENCE)
    expected, least = brute_force(phases, limits, aim, first, later)
    if expected is None:
        assert not found.is_within
        assert found.violation >= least - 1e-9
    else:
        assert found.is_within
        assert found.objective == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_together_is_never_dearer_than_a_share_of_the_time_for_each_phase(seed):
    phases = tuple(phase_of(200 + 10 * seed + number, num_candidates=20) for number in range(3))
    free = SwitchCosts(seconds=np.zeros(20), usd=np.zeros(20))
    slowest = choose(phases, GoalLimits(), CHEAPEST, free, free, CONFIDENCE).upper_s
    limits = GoalLimits(left_s=0.5 * slowest)
    together = choose(phases, limits, CHEAPEST, free, free, CONFIDENCE)
    # As published: each phase gets the deadline's share that its steps are of all.
    alone = [
        choose((phase,), GoalLimits(left_s=limits.left_s / 3), CHEAPEST, free, free, CONFIDENCE) for phase in phases
    ]
    assert together.upper_s <= limits.left_s
    if all(each.is_within for each in alone):
        assert together.objective <= sum(each.objective for each in alone) + 1e-12


def test_what_runs_is_kept_where_going_elsewhere_costs_more_than_it_saves():
    phase = phase_of(3)
    dear = SwitchCosts(seconds=np.full(7, 1e3), usd=np.full(7, 10.0))
    running = int(np.flatnonzero(phase.fits)[0])
    here = SwitchCosts(seconds=dear.seconds.copy(), usd=dear.usd.copy())
    here.seconds[running] = here.usd[running] = 0.0
    found = choose((phase, phase_of(4)), GoalLimits(), CHEAPEST, here, dear, CONFIDENCE, first_candidate=running)
    assert found.candidates[0] == running
    assert choose((phase,), GoalLimits(), CHEAPEST, here, dear, CONFIDENCE).candidates == (running,)


def test_a_second_is_worth_what_it_costs_elsewhere_and_nothing_without_a_limit():
    phases = tuple(phase_of(70 + number, num_candidates=30) for number in range(3))
    free = SwitchCosts(seconds=np.zeros(30), usd=np.zeros(30))
    freely = choose(phases, GoalLimits(), CHEAPEST, free, free, CONFIDENCE)
    assert freely.resource_worth == 0.0
    tight = choose(phases, GoalLimits(left_s=0.6 * freely.upper_s), CHEAPEST, free, free, CONFIDENCE)
    assert tight.resource_worth > 0.0


def test_many_candidates_and_phases_are_thinned_but_stay_within_the_limits():
    phases = tuple(phase_of(300 + number, num_candidates=400) for number in range(6))
    costs = costs_of(1, num_candidates=400, size=0.1)
    freely = choose(phases, GoalLimits(), CHEAPEST, costs, costs, CONFIDENCE)
    found = choose(phases, GoalLimits(left_s=0.5 * freely.upper_s), CHEAPEST, costs, costs, CONFIDENCE)
    assert found.is_within
    assert found == choose(phases, GoalLimits(left_s=0.5 * freely.upper_s), CHEAPEST, costs, costs, CONFIDENCE)
    upper_s = sum(float(phase.totals(CONFIDENCE)[0][one]) for phase, one in zip(phases, found.candidates, strict=True))
    assert upper_s <= found.upper_s + 1e-9
