"""How much of a sweep is played: all of it, or in CI a fixed part (see SAMPLE in the Makefile)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")

# Of a sweep over crash points, steps or drawn cases one in this many is played.
STRIDE = int(os.environ.get("SPRINGTIDE_SWEEP_STRIDE", "1"))
# Whether property tests draw examples that no run had before.
DRAWS_AFRESH = "SPRINGTIDE_DRAWS_AFRESH" in os.environ
# For whole comparisons of half a minute and more whose parts other tests hold.
only_in_full = pytest.mark.skipif(STRIDE > 1, reason="long computation: make full plays it")


def part(count: int, least: int = 4) -> int:
    """How many of `count` drawn cases are played: all, or in CI one in STRIDE, but at least so many."""
    return max(min(count, least), count // STRIDE)


def sampled(cases: Iterable[Case]) -> list[Case]:
    """Those of `cases` that are played: all, or in CI the first of every STRIDE."""
    return list(cases)[::STRIDE]


def begin_in_ci(index: int) -> int:
    """The first index of a search that `make full` begins at 0."""
    return index if STRIDE > 1 else 0
