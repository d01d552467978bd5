"""The least number of devices for a set of shares: the packing program by column generation, and a packing."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest
from springtide_studies.bounds import highs

# What one of a kind takes of each resource, in whole numbers; and so many of each kind on one device.
Size = tuple[int, ...]
Pattern = tuple[tuple[Size, int], ...]

# Reduced costs are trusted to this much.
_SLACK = 1e-7
MAX_ROUNDS = 1000
# A resource of which some instance takes nothing does not limit how many more fit.
_UNBOUNDED = 10**9


class PackingBound(msgspec.Struct, frozen=True, kw_only=True):
    """`relaxed` is the program's value in devices; no packing has fewer than `least`, and one with `found` is known.

    Where `least` equals `found` that is the best there is. `patterns` are the columns, to begin another program with.
    """

    relaxed: float
    least: int
    found: int
    patterns: tuple[Pattern, ...] = ()


def bound_packing(sizes: Sequence[Size], capacity: Size, patterns: Sequence[Pattern] = ()) -> PackingBound:
    """Bound how many devices of `capacity` hold things of these sizes, each on one device (Gilmore and Gomory, 1961).

    min sum_p x_p with sum_p a_ip x_p >= n_i: a column is what one device may hold. New columns come from the exact
    pricing problem, by depth-first search; so the value bounds every packing, and Farley's rule makes it hold before
    the last round too. `found` is the better of first fit in descending order and the rounded program.
    Raises InvalidRequest without the solver, or where a thing is larger than a device.
    """
    if not highs.is_available():
        raise InvalidRequest(
            "the bound of a packing is a linear program and needs SciPy: pip install 'springtide[solvers]'"
        )
    if any(each > most for size in sizes for each, most in zip(size, capacity, strict=True)):
        raise InvalidRequest("something is larger than a device in one of its resources; nothing holds it")
    counts = Counter(sizes)
    kinds = sorted(counts)
    if not kinds:
        return PackingBound(relaxed=0.0, least=0, found=0)
    by_hand = first_fit(sizes, capacity)
    columns: dict[Pattern, None] = dict.fromkeys(((kind, 1),) for kind in kinds)
    columns.update(dict.fromkeys(by_hand))
    columns.update(dict.fromkeys(each for each in patterns if all(kind in counts for kind, _ in each)))
    best = 0.0
    for _ in range(MAX_ROUNDS):
        value, chosen, prices = _solve(kinds, counts, tuple(columns))
        fresh, worth = price_patterns(kinds, prices, counts, capacity)
        best = max(best, value / max(1.0, worth))
        num_before = len(columns)
        columns.update(dict.fromkeys(fresh))
        if len(columns) == num_before:
            break
    known = tuple(columns)
    found = min(len(by_hand), _rounded(counts, capacity, known, chosen))
    return PackingBound(relaxed=best, least=math.ceil(best - 1e-6), found=found, patterns=known)


def first_fit(sizes: Sequence[Size], capacity: Size) -> list[Pattern]:
    """The largest first (by the sum of parts of a device), each on the first device that has room: a column each."""
    order = sorted(sizes, key=lambda size: (-sum(a / b for a, b in zip(size, capacity, strict=True)), size))
    free: NDArray[np.int64] = np.tile(np.array(capacity, dtype=np.int64), (len(order), 1))
    held: list[Counter[Size]] = []
    for size in order:
        at = int((free >= np.array(size)).all(axis=1).argmax())
        free[at] -= np.array(size)
        if at == len(held):
            held.append(Counter())
        held[at][size] += 1
    return [tuple(sorted(each.items())) for each in held]


def price_patterns(
    kinds: Sequence[Size], prices: NDArray[np.float64], counts: Mapping[Size, int], capacity: Size
) -> tuple[list[Pattern], float]:
    """For each kind the best column that begins with it, if it is worth more than 1; and what the best of all is worth.

    Kinds are searched from the dearest down, so no later one can add more than its price times how many more fit.
    """
    order = sorted((at for at in range(len(kinds)) if prices[at] > _SLACK), key=lambda at: (-prices[at], at))
    dear = [kinds[at] for at in order]
    worth = [float(prices[at]) for at in order]
    least = tuple(min(size[axis] for size in kinds) for axis in range(len(capacity)))
    found: list[Pattern] = []
    best = 1.0
    for first in range(len(dear)):
        if _most(capacity, least) * worth[first] <= 1.0 + _SLACK:
            break
        search = _Search(dear, worth, counts, least)
        search.look(first, _less(capacity, dear[first]), worth[first], [first])
        if search.chosen:
            best = max(best, search.value)
            found.append(tuple(sorted(Counter(dear[at] for at in search.chosen).items())))
    return found, best


class _Search:
    """Depth-first search for the column that is worth most, over kinds in descending order of price."""

    def __init__(self, dear: Sequence[Size], worth: Sequence[float], counts: Mapping[Size, int], least: Size) -> None:
        self._dear, self._worth, self._counts, self._least = dear, worth, counts, least
        self.value = 1.0 + _SLACK
        self.chosen: tuple[int, ...] = ()

    def look(self, start: int, room: Size, value: float, held: list[int]) -> None:
        """Add kinds from `start` on to what is `held`, worth `value`, while there is `room`."""
        if value > self.value + 1e-12:
            self.value, self.chosen = value, tuple(held)
        more = _most(room, self._least)
        if not more:
            return
        for at in range(start, len(self._dear)):
            if value + more * self._worth[at] <= self.value + 1e-12:
                return
            rest = _less(room, self._dear[at])
            if min(rest) >= 0 and held.count(at) < self._counts[self._dear[at]]:
                held.append(at)
                self.look(at, rest, value + self._worth[at], held)
                held.pop()


def _most(room: Size, least: Size) -> int:
    """How many more of the smallest fit, at most; `least` is what every instance takes of each resource."""
    return min((left // small for left, small in zip(room, least, strict=True) if small), default=_UNBOUNDED)


def _less(room: Size, size: Size) -> Size:
    return tuple(left - taken for left, taken in zip(room, size, strict=True))


def _solve(
    kinds: Sequence[Size], counts: Mapping[Size, int], columns: Sequence[Pattern]
) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
    """The relaxed program over these columns: its value, how often each is used, and the price of each kind."""
    optimize: Any = importlib.import_module("scipy.optimize")
    sparse: Any = importlib.import_module("scipy.sparse")
    row_of = {kind: row for row, kind in enumerate(kinds)}
    rows = [row_of[kind] for column in columns for kind, _ in column]
    values = [-float(num) for column in columns for _, num in column]
    places = np.repeat(np.arange(len(columns)), [len(column) for column in columns])
    matrix = sparse.csc_matrix((values, (rows, places)), shape=(len(kinds), len(columns)))
    needed = -np.array([counts[kind] for kind in kinds], dtype=np.float64)
    solved = optimize.linprog(np.ones(len(columns)), A_ub=matrix, b_ub=needed, method="highs")
    if solved.x is None:
        raise InvalidRequest(f"the solver found no bound of the packing: {solved.message:.80}")
    prices: NDArray[np.float64] = np.maximum(0.0, -solved.ineqlin.marginals)
    return float(solved.fun), solved.x, prices


def _rounded(counts: Mapping[Size, int], capacity: Size, columns: Sequence[Pattern], used: NDArray[np.float64]) -> int:
    """Devices of the packing that takes each column as often as the program does, rounded down, and packs the rest."""
    left = Counter(dict(counts))
    num_devices = 0
    for column, times in zip(columns, used.tolist(), strict=False):
        whole = min([math.floor(times + 1e-6), *(left[kind] // num for kind, num in column)])
        num_devices += whole
        for kind, num in column:
            left[kind] -= whole * num
    return num_devices + len(first_fit(sorted(left.elements()), capacity))
