"""What the rest of a device is good for: how much of what people here ask for would still fit there."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from springtide.scheduling.sharing.demand import ShareDemand

# So many different values of requests, of limits and of memory are distinguished; more are rounded up to the next of
# them.
MAX_LEVELS = 32
# An outlook is made anew once so large a part of what it was made of may have changed.
STALE_FRACTION = 0.125

_WEIGHT_UNITS = 10**9
# Sizes are distinguished in so many steps: what is in the newcomer's own step or below is not larger than it.
NUM_CLASSES = 8

Counts = NDArray[np.int64]
Fractions = NDArray[np.float64]
Flags = NDArray[np.bool_]
# What is left of some devices: requests and limits in units, memory in MB.
Remainders = tuple[Counts, Counts, Counts]
# Below every class of sizes: no workload is left out.
_ALL = -1


class FitOutlook:
    """The usefulness of a remainder (request, limit, memory): how much of what people ask for it could still take.

    Demands are those that are held now, one by one, each weighted by its size, the largest fraction of a device that
    it takes of anything: what is large is hard to place later, so room for it is worth more. 1 is all of them.
    """

    def __init__(self, mix: Mapping[ShareDemand, int], capacity: ShareDemand) -> None:
        """`mix` counts how often each demand is held (at least one), on devices of this `capacity`."""
        self._capacity = capacity
        self._values = np.fromiter(chain.from_iterable(mix), dtype=np.int64, count=3 * len(mix)).reshape(-1, 3)
        sizes = (self._values / np.maximum(1, np.array(capacity))).max(axis=1)
        self._classes = (sizes * NUM_CLASSES).astype(np.int64)
        # Whole numbers: their sums do not depend on the order in which people came.
        self._weights = (sizes * _WEIGHT_UNITS).astype(np.int64) * np.fromiter(mix.values(), np.int64, len(mix))
        self._total = max(1, int(self._weights.sum()))
        self._levels = tuple(_levels(self._values[:, axis]) for axis in range(3))
        # A remainder reaches so many levels; a demand fits once it reaches the demand's own.
        self._own = tuple(
            np.searchsorted(levels, self._values[:, axis]) + 1 for axis, levels in enumerate(self._levels)
        )
        self._tables: dict[int, Fractions] = {}

    def usefulness(self, rest: Remainders) -> Fractions:
        """How useful each remainder is: one number from 0 to 1 for each."""
        found: Fractions = self._table(_ALL)[self._reached(rest)]
        return found

    def losses(self, newcomer: ShareDemand, left: Remainders) -> Fractions:
        """What usefulness each remainder loses to the newcomer."""
        table = self._table(_ALL)
        return table[self._reached(left)] - table[self._reached(_without(left, newcomer))]

    def spoils(self, newcomer: ShareDemand, left: Remainders) -> Flags:
        """Whether any workload larger than the newcomer loses room on each of these remainders.

        A workload in the newcomer's own class of sizes or below finds room as easily as the newcomer does.
        """
        size = max(each / max(1, most) for each, most in zip(newcomer, self._capacity, strict=True))
        table = self._table(int(size * NUM_CLASSES))
        return table[self._reached(left)] > table[self._reached(_without(left, newcomer))]

    def _reached(self, rest: Remainders) -> tuple[Counts, Counts, Counts]:
        """Which levels each remainder reaches."""
        requests, limits, memory = (
            np.searchsorted(levels, each, side="right") for levels, each in zip(self._levels, rest, strict=True)
        )
        return requests, limits, memory

    def _table(self, own_class: int) -> Fractions:
        """The usefulness by levels of request, limit and memory, for those in a class of sizes above this one."""
        known = self._tables.get(own_class)
        if known is None:
            sums = np.zeros([len(levels) + 1 for levels in self._levels], dtype=np.int64)
            larger = self._classes > own_class
            np.add.at(sums, tuple(own[larger] for own in self._own), self._weights[larger])
            for axis in range(3):
                np.cumsum(sums, axis=axis, out=sums)
            known = self._tables[own_class] = sums / self._total
        return known


def _without(left: Remainders, newcomer: ShareDemand) -> Remainders:
    return left[0] - newcomer.request, left[1] - newcomer.limit, left[2] - newcomer.memory_mb


def _levels(values: Counts) -> Counts:
    """The different values, ascending; of too many an even choice that holds the largest."""
    levels = np.unique(values)
    if len(levels) > MAX_LEVELS:
        levels = levels[np.linspace(0, len(levels) - 1, MAX_LEVELS).round().astype(np.int64)]
    return levels
