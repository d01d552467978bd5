"""How useful a remainder is: the part of the demand that it still takes, and that too many levels never promise."""

from __future__ import annotations

import random

import numpy as np
import pytest

from springtide.scheduling.sharing.demand import UNITS, ShareDemand
from springtide.scheduling.sharing.outlook import MAX_LEVELS, FitOutlook, Remainders

LIMIT = UNITS * 3 // 2


def demand(request: float, limit: float, memory_mb: int) -> ShareDemand:
    return ShareDemand(round(request * UNITS), round(limit * UNITS), memory_mb)


def outlook_of(*demands: ShareDemand, memory_mb: int) -> FitOutlook:
    mix = {each: demands.count(each) for each in demands}
    return FitOutlook(mix, ShareDemand(UNITS, LIMIT, memory_mb))


def left(request: float, limit: float, memory_mb: int) -> Remainders:
    requests, limits, memory = (np.array([each]) for each in demand(request, limit, memory_mb))
    return requests, limits, memory


def test_what_is_large_counts_for_more() -> None:
    outlook = outlook_of(demand(0.8, 0.9, 10), demand(0.2, 0.3, 10), memory_mb=40)
    assert outlook.usefulness(left(1.0, 1.5, 40))[0] == 1.0
    # Four fifths of a device and a quarter (of memory): the small one is worth 0.25 of 1.05.
    assert outlook.usefulness(left(0.5, 1.5, 40))[0] == pytest.approx(0.25 / 1.05)
    assert outlook.usefulness(left(0.5, 0.29, 40))[0] == 0.0
    assert outlook.usefulness(left(-0.1, -0.1, -1))[0] == 0.0


def test_as_many_as_there_are_of_each() -> None:
    half, whole = demand(0.5, 0.5, 0), demand(1.0, 1.0, 0)
    outlook = outlook_of(half, half, half, whole, memory_mb=0)
    assert outlook.usefulness(left(0.6, 1.5, 0))[0] == pytest.approx(1.5 / 2.5)


def test_a_newcomer_spoils_only_for_those_larger_than_itself() -> None:
    small, large = demand(0.2, 0.2, 0), demand(0.7, 0.7, 0)
    outlook = outlook_of(small, large, memory_mb=0)
    # Room for the large one goes, and with it its part of what is asked for.
    assert outlook.losses(small, left(0.8, 1.5, 0))[0] == pytest.approx(0.7 / 0.9)
    assert outlook.spoils(small, left(0.8, 1.5, 0))[0]
    assert not outlook.spoils(small, left(1.0, 1.5, 0))[0]
    # The last of its own kind loses usefulness, but spoils nothing.
    assert outlook.losses(small, left(0.3, 1.5, 0))[0] == pytest.approx(0.2 / 0.9)
    assert not outlook.spoils(small, left(0.3, 1.5, 0))[0]
    assert not outlook.spoils(large, left(0.9, 1.5, 0))[0]


def test_against_counting_one_by_one_and_never_more_with_too_many_levels() -> None:
    rng = random.Random(1)
    few = [demand(rng.randint(1, 9) / 10, rng.randint(1, 12) / 10, rng.randint(1, 8)) for _ in range(200)]
    many = [demand(rng.random(), rng.uniform(0.1, 1.5), rng.randint(1, 1000)) for _ in range(400)]
    assert len(set(many)) > MAX_LEVELS
    for demands, memory_mb in ((few, 8), (many, 1000)):
        outlook = outlook_of(*demands, memory_mb=memory_mb)
        sizes = [max(each.request / UNITS, each.limit / LIMIT, each.memory_mb / memory_mb) for each in demands]
        for _ in range(100):
            rest = (rng.random(), rng.uniform(0, 1.5), rng.randint(0, memory_mb))
            room = demand(*rest)
            fits = [all(a <= b for a, b in zip(each, room, strict=True)) for each in demands]
            exact = sum(size for size, is_fit in zip(sizes, fits, strict=True) if is_fit) / sum(sizes)
            found = outlook.usefulness(left(*rest))[0]
            if demands is few:
                assert found == pytest.approx(exact, abs=1e-6)
            else:
                assert exact - 0.25 <= found <= exact + 1e-6
