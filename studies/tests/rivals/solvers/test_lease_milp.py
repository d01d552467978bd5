"""Leases: as many jobs as can make it, the accepted ones before all others."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from springtide_studies.rivals.solvers.lease_milp import HORIZON, LeaseJob, plan_leases

pytest.importorskip("scipy", reason="the solver is an extra")


def job(width, needed, usable, *, accepted=False):
    return LeaseJob(width=width, num_needed=needed, num_usable=usable, is_accepted=accepted)


def test_what_fits_is_packed_late():
    plan = plan_leases([job(2, 2, 4), job(2, 1, 4)], 4)
    assert plan.makes_it == (True, True)
    assert plan.runs_now == (False, False), "two leases of four are needed, so the first stays free"
    assert plan_leases([job(2, 4, 4)], 4).runs_now == (True,)


def test_who_cannot_make_it_alone_is_left_out():
    assert plan_leases([job(1, 3, 2), job(8, 1, 2), job(1, 1, 2)], 4).makes_it == (False, False, True)


def test_many_small_ones_win_over_one_large():
    assert plan_leases([job(4, 2, 2), job(2, 2, 2), job(2, 2, 2)], 4).makes_it == (False, True, True)


def test_an_accepted_one_wins_over_any_number():
    plan = plan_leases([job(4, 2, 2, accepted=True), *[job(1, 2, 2)] * 4], 4)
    assert plan.makes_it == (True, False, False, False, False)
    assert plan.runs_now[0]


def test_nothing_to_plan():
    assert plan_leases([], 4).makes_it == ()


def test_what_lies_beyond_the_horizon_counts_as_room():
    far = job(4, HORIZON + 10, HORIZON + 20)
    assert plan_leases([far, job(4, 10, HORIZON)], 4).makes_it == (True, True)
    assert sum(plan_leases([far, job(4, 11, HORIZON)], 4).makes_it) == 1


def _fits(jobs, capacity):
    """Whether all jobs fit, by trying every way."""
    length = max((each.num_usable for each in jobs), default=0)

    def place(index, free):
        if index == len(jobs):
            return True
        each = jobs[index]
        for slots in combinations(range(each.num_usable), each.num_needed):
            if all(free[slot] >= each.width for slot in slots):
                taken = list(free)
                for slot in slots:
                    taken[slot] -= each.width
                if place(index + 1, taken):
                    return True
        return False

    return place(0, [capacity] * length)


@pytest.mark.parametrize("seed", range(25))
def test_against_every_choice(seed):
    """Within the first two leases the program is exact; there the number chosen is the largest there is."""
    rng = np.random.default_rng(seed)
    jobs = []
    for _ in range(6):
        usable = int(rng.integers(1, 3))
        jobs.append(job(int(rng.integers(1, 5)), int(rng.integers(1, usable + 1)), usable))
    plan = plan_leases(jobs, 4)
    chosen = [each for each, makes in zip(jobs, plan.makes_it, strict=True) if makes]
    best = max(
        sum(mask)
        for mask in product((0, 1), repeat=6)
        if _fits([each for each, take in zip(jobs, mask, strict=True) if take], 4)
    )
    assert len(chosen) == best
    assert sum(each.width for each, runs in zip(jobs, plan.runs_now, strict=True) if runs) <= 4


def test_the_same_jobs_give_the_same_plan():
    jobs = [job(1 + index % 4, 1 + index % 3, 3 + index % 5) for index in range(30)]
    assert plan_leases(jobs, 8) == plan_leases(jobs, 8)
