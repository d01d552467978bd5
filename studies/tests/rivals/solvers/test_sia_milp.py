"""Sia's program: both ways to solve it find the least cost, and nobody gets more than there is."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide_studies.bounds import highs
from springtide_studies.rivals.solvers import sia_milp
from springtide_studies.rivals.solvers.sia_milp import Offer, choose_by_table, choose_sizes

WAITING = 1.1
SIZES = (1, 2, 4, 8, 12, 16)


def draw(seed, num_jobs):
    rng = np.random.default_rng(seed)
    offers = []
    for _ in range(num_jobs):
        sizes = SIZES[: int(rng.integers(0, len(SIZES) + 1))]
        speedups = np.array(sizes, dtype=float) ** rng.uniform(0.2, 1.0) * rng.uniform(0.3, 1.0)
        offers.append(Offer(sizes=sizes, costs=tuple(np.round(speedups**-0.5, 2).tolist())))
    return offers


def cost(offers, chosen):
    return sum(
        offer.costs[offer.sizes.index(size)] if size else WAITING for offer, size in zip(offers, chosen, strict=True)
    )


def exhaustive(offers, capacity):
    choices = itertools.product(*[(0, *offer.sizes) for offer in offers])
    return min(cost(offers, chosen) for chosen in choices if sum(chosen) <= capacity)


@pytest.mark.parametrize("seed", range(8))
def test_the_table_is_exact(seed):
    offers = draw(seed, 5)
    for capacity in (0, 1, 3, 8, 20, 100):
        chosen = choose_by_table(offers, capacity, WAITING)
        assert sum(chosen) <= capacity
        assert cost(offers, chosen) == pytest.approx(exhaustive(offers, capacity))


@pytest.mark.parametrize("seed", range(6))
def test_the_integer_program_and_the_table_agree(seed):
    pytest.importorskip("scipy", reason="the solver is an extra")
    offers = draw(seed, 40)
    for capacity in (16, 64, 200):
        chosen = choose_sizes(offers, capacity, WAITING)
        assert sum(chosen) <= capacity
        assert all(size == 0 or size in offer.sizes for offer, size in zip(offers, chosen, strict=True))
        table = cost(offers, choose_by_table(offers, capacity, WAITING))
        assert table - 1e-9 <= cost(offers, chosen) <= table * (1 + sia_milp.REL_GAP) + 1e-9


def test_nothing_to_choose_from():
    pytest.importorskip("scipy", reason="the solver is an extra")
    assert choose_sizes([], 8, WAITING) == choose_by_table([], 8, WAITING) == ()
    empty = [Offer(sizes=(), costs=())]
    assert choose_sizes(empty, 8, WAITING) == choose_by_table(empty, 8, WAITING) == (0,)


def test_when_the_search_ends_without_an_answer_the_table_answers(monkeypatch):
    optimize = pytest.importorskip("scipy.optimize", reason="the solver is an extra")
    offers = draw(3, 12)

    class Nothing:
        x = None

    monkeypatch.setattr(optimize, "milp", lambda **_: Nothing())
    assert choose_sizes(offers, 16, WAITING) == choose_by_table(offers, 16, WAITING)


def test_without_the_solver_the_mend_is_told(monkeypatch):
    monkeypatch.setattr(highs, "is_available", lambda: False)
    with pytest.raises(InvalidRequest, match=r"springtide\[solvers\].*solver=table"):
        choose_sizes(draw(0, 2), 8, WAITING)


def test_costs_that_are_not_worth_it_are_not_paid():
    dear = [Offer(sizes=(1,), costs=(math.nextafter(WAITING, 2.0) + 0.01,))]
    assert choose_by_table(dear, 8, WAITING) == (0,)
