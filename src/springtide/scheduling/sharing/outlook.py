"""How useful the rest of a device is: how many of the shares that are in use here would still fit into it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from springtide.scheduling.sharing.demand import ShareDemand

# How many different requests, limits and sizes of memory are distinguished; others are rounded up to the next of these.
MAX_LEVELS = 32
# An outlook is made anew once this fraction of the shares that it was made from may have changed.
STALE_FRACTION = 0.125

_WEIGHT_UNITS = 10**9
# How many classes of sizes there are; a share in the newcomer's own class or below does not count as larger.
NUM_CLASSES = 8

Counts = NDArray[np.int64]
Fractions = NDArray[np.float64]
Flags = NDArray[np.bool_]
# What is left of some devices: requests and limits in units, memory in MB.
Remainders = tuple[Counts, Counts, Counts]
# Below every class of sizes: no workload is left out.
_ALL = -1


class _Demands(NamedTuple):
    """The demands in columns. A demand fits into a remainder if the remainder reaches the demand's level."""

    classes: Counts
    weights: Counts
    total: int
    levels: tuple[Counts, ...]
    own: tuple[Counts, ...]


class FitOutlook:
    """The usefulness of a remainder (request, limit, memory): the part of the present demands that would fit into it.

    Each demand that is held now is weighted by its size, the largest fraction that it takes of a device's request,
    limit or memory: large demands are hard to place later, so room for them is worth more. 1: all of them fit.
    """

    def __init__(self, mix: Mapping[ShareDemand, int], capacity: ShareDemand) -> None:
        """`mix` (not changed any more) counts how often each demand is held (at least one), on devices of this
        `capacity`."""
        self._mix, self._capacity = mix, capacity
        self._tables: dict[int, Fractions] = {}

    @cached_property
    def _demands(self) -> _Demands:
        """Only what is asked for is worked out: most outlooks are out of date before any device has room."""
        mix = self._mix
        values = np.fromiter(chain.from_iterable(mix), dtype=np.int64, count=3 * len(mix)).reshape(-1, 3)
        sizes = (values / np.maximum(1, np.array(self._capacity))).max(axis=1)
        # Whole numbers: their sums do not depend on the order of arrival.
        weights = (sizes * _WEIGHT_UNITS).astype(np.int64) * np.fromiter(mix.values(), np.int64, len(mix))
        levels = tuple(_levels(values[:, axis]) for axis in range(3))
        return _Demands(
            classes=(sizes * NUM_CLASSES).astype(np.int64),
            weights=weights,
            total=max(1, int(weights.sum())),
            levels=levels,
            own=tuple(np.searchsorted(each, values[:, axis]) + 1 for axis, each in enumerate(levels)),
        )

    def usefulness(self, rest: Remainders) -> Fractions:
        """The usefulness of each remainder, from 0 to 1."""
        found: Fractions = self._table(_ALL)[self._reached(rest)]
        return found

    def losses(self, newcomer: ShareDemand, left: Remainders) -> Fractions:
        """The usefulness that each remainder loses to the newcomer."""
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
            np.searchsorted(levels, each, side="right") for levels, each in zip(self._demands.levels, rest, strict=True)
        )
        return requests, limits, memory

    def _table(self, own_class: int) -> Fractions:
        """The usefulness by levels of request, limit and memory, counting only demands of a class above this one."""
        known = self._tables.get(own_class)
        if known is None:
            demands = self._demands
            sums = np.zeros([len(levels) + 1 for levels in demands.levels], dtype=np.int64)
            larger = demands.classes > own_class
            np.add.at(sums, tuple(own[larger] for own in demands.own), demands.weights[larger])
            for axis in range(3):
                np.cumsum(sums, axis=axis, out=sums)
            known = self._tables[own_class] = sums / demands.total
        return known


def _without(left: Remainders, newcomer: ShareDemand) -> Remainders:
    return left[0] - newcomer.request, left[1] - newcomer.limit, left[2] - newcomer.memory_mb


def _levels(values: Counts) -> Counts:
    """The different values, ascending; if there are too many, an even selection with the largest."""
    levels = np.unique(values)
    if len(levels) > MAX_LEVELS:
        levels = levels[np.linspace(0, len(levels) - 1, MAX_LEVELS).round().astype(np.int64)]
    return levels
