"""Pollux's search for allocations: a genetic algorithm (NSGA-II) over matrices of workers by job and node.

Qiao et al., "Pollux", OSDI'21, section 4.2, with the operators and settings of the published osdi21-artifact; NSGA-II
as in Deb et al., 2002. Written anew over whole populations at a time; every draw has the artifact's distribution.
"""

from __future__ import annotations

import bisect
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int8]
Floats = NDArray[np.float64]

# Chances of the artifact and of its library: to cross two parents at all, to reset a job's row to what it holds, to
# thin a row out, and then each of its entries.
_CROSSOVER = 0.9
_RESET = 0.1
_THIN_ROW = 0.1
_THIN_ENTRY = 0.1
# Added to a speedup so that its power mean is finite for a job that holds nothing (the artifact's).
_LEAST_SPEEDUP = 1e-3
# A generation looks this often in a row for children that are not there yet before it gives up. The library tries
# 100 times, which on one job of few workers takes minutes and finds the same.
_NUM_FRUITLESS = 4
# More than any crowding distance of a solution between two others.
_EXTREME = 1e14


class AllocationProblem(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What is searched: J jobs, N columns for nodes, of which the first `num_nodes` are real.

    `capacities` [N] are devices, 0 beyond the real nodes, at most 127. `held` [J, N] is what each job holds, `least`
    and `most` [J] bound its workers (fewer than `least`: none), `max_nodes` its nodes. `speedups` [J, 2, R] is by one
    node or several and by workers (0 for none). `restart_factors` [J] scales a job's speedup if its row changes. With
    `spares_single` a node's second distributed job alone is kept off it; the artifact takes every job off that comes
    after it in order.
    """

    capacities: NDArray[np.int64]
    num_nodes: int
    held: Counts
    least: NDArray[np.int64]
    most: NDArray[np.int64]
    max_nodes: int
    speedups: Floats
    restart_factors: Floats
    spares_single: bool = False


class Found(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The `best` matrix [J, N] by the first objective, and the `front` [F, J, N] of all that nothing found beats."""

    best: Counts
    front: Counts
    mean_speedup: float
    num_generations: int


def search(
    problem: AllocationProblem,
    initial: Counts,
    rng: np.random.Generator,
    *,
    population: int = 100,
    generations: int = 100,
) -> Found:
    """Search from the matrices `initial` [P, J, N] (P at least 1), which are repaired first.

    Ends early only where no child is new, as the library does: from then on no generation would change anything.
    """
    states, seen = _unseen(_repair(problem, initial.copy(), rng), {})
    values = _evaluate(problem, states)
    kept, ranks, crowding = _survive(values, population, rng)
    states, values = states[kept], values[kept]
    done = 1
    for _ in range(generations - 1):
        children, seen = _children(problem, states, values, crowding, rng, population, seen)
        if not len(children):
            break
        done += 1
        states = np.concatenate([states, children])
        values = np.concatenate([values, _evaluate(problem, children)])
        kept, ranks, crowding = _survive(values, population, rng)
        states, values = states[kept], values[kept]
    front = ranks == 0
    states, values = states[front], values[front]
    best = int(np.argmin(values[:, 0]))
    return Found(best=states[best], front=states, mean_speedup=-float(values[best, 0]), num_generations=done)


# --- objectives -------------------------------------------------------------------------------------------------------


def _evaluate(problem: AllocationProblem, states: Counts) -> Floats:
    """The two objectives of each matrix, to be minimised: [P, 2].

    Minus the harmonic mean of all jobs' speedups over their fair share (power mean with p = -1), in units of a node's
    share, restarts charged; and minus the speedup in all per device of the nodes in use (the artifact's utility).
    """
    workers, nodes = _sums(states)
    rows = np.arange(states.shape[1])
    speedups = problem.speedups[rows, (nodes > 1).astype(np.intp), workers]
    is_changed = _differ(states, problem.held)
    scale = problem.num_nodes / max(1.0, float(problem.capacities.sum()))
    scaled = speedups * scale * np.where(is_changed, problem.restart_factors, 1.0)
    mean = states.shape[1] / (1.0 / (scaled + _LEAST_SPEEDUP)).sum(axis=1)
    in_use = (states != 0).any(axis=1) @ problem.capacities
    utility = speedups.sum(axis=1) / np.maximum(in_use, 1)
    return np.column_stack([-mean, -utility])


def _sums(states: Counts) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Workers and nodes of each job: [P, J] each. Products with ones add short rows far faster than sums do."""
    ones = np.ones(states.shape[2], dtype=np.float32)
    workers = states.astype(np.float32) @ ones
    nodes = (states != 0).astype(np.float32) @ ones
    return workers.astype(np.intp), nodes.astype(np.intp)


def _differ(states: Counts, held: Counts) -> NDArray[np.bool_]:
    """Whether a job's row is other than what it holds: [P, J]. Rows are compared eight entries at a time."""
    width = states.shape[2]
    if width % 8 == 0 and states.flags.c_contiguous:
        words = states.view(np.uint64) != np.ascontiguousarray(held).view(np.uint64)
        return np.asarray(words.any(axis=2))
    return np.asarray((states != held).any(axis=2))


# --- children ---------------------------------------------------------------------------------------------------------


def _children(
    problem: AllocationProblem,
    states: Counts,
    values: Floats,
    crowding: Floats,
    rng: np.random.Generator,
    count: int,
    seen: dict[bytes, None],
) -> tuple[Counts, dict[bytes, None]]:
    """Up to `count` repaired matrices that the population does not have, and the keys of all that it then has."""
    found: list[Counts] = []
    num_found = num_fruitless = 0
    known = dict.fromkeys(_keys(states))
    while num_found < count and num_fruitless < _NUM_FRUITLESS:
        num_pairs = -(-(count - num_found) // 2)
        parents = _tournament(values, crowding, 2 * num_pairs, rng).reshape(2, num_pairs)
        children = _mutate(problem, _cross(states[parents], rng), rng)
        children, known = _unseen(_repair(problem, children, rng), known)
        children = children[: count - num_found]
        num_fruitless = 0 if len(children) else num_fruitless + 1
        num_found += len(children)
        found.append(children)
    return np.concatenate(found), known


def _keys(states: Counts) -> list[bytes]:
    return [state.tobytes() for state in states]


def _unseen(states: Counts, known: dict[bytes, None]) -> tuple[Counts, dict[bytes, None]]:
    """Those that are new, each once, in order; and what is known with them."""
    new = []
    for index, key in enumerate(_keys(states)):
        if key not in known:
            known[key] = None
            new.append(index)
    return states[new], known


def _tournament(values: Floats, crowding: Floats, count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """`count` winners of duels: the dominating one, else the less crowded, else drawn by lot."""
    size = len(values)
    rounds = -(-2 * count // size)
    order = rng.permuted(np.tile(np.arange(size), (rounds, 1)), axis=1).ravel()[: 2 * count]
    one, two = order[0::2], order[1::2]
    least, most = values[one] <= values[two], values[one] >= values[two]
    wins, loses = least.all(axis=1) & ~most.all(axis=1), most.all(axis=1) & ~least.all(axis=1)
    lead = crowding[one] - crowding[two]
    lot = rng.random(count) < 0.5
    return np.where(wins | (~loses & ((lead > 0) | ((lead == 0) & lot))), one, two)


def _cross(pairs: Counts, rng: np.random.Generator) -> Counts:
    """Two children of each pair [2, M, J, N]: the rows of the first jobs up to a random one are exchanged."""
    _, num_pairs, num_jobs, num_nodes = pairs.shape
    points: NDArray[np.int64] = rng.integers(num_jobs, size=(num_pairs,))
    points[rng.random(num_pairs) >= _CROSSOVER] = 0
    swapped = (np.arange(num_jobs) < points[:, None])[:, :, None]
    children = np.where(swapped, pairs[::-1], pairs)
    return children.reshape(-1, num_jobs, num_nodes)


def _mutate(problem: AllocationProblem, states: Counts, rng: np.random.Generator) -> Counts:
    """Reset rows to what is held, thin rows out, and let jobs grow on nodes with idle devices."""
    num, num_jobs, _ = states.shape
    draws = rng.random((num, num_jobs), dtype=np.float32)
    states = np.where((draws < _RESET)[:, :, None], problem.held, states)
    thinned = np.nonzero(rng.random((num, num_jobs), dtype=np.float32) < _THIN_ROW)
    rows = states[thinned]
    rows[rng.random(rows.shape, dtype=np.float32) < _THIN_ENTRY] = 0
    states[thinned] = rows
    # Each idle node offers itself to one job of all and to one of its own, on average.
    used = np.add.reduce(states, axis=1, dtype=np.int16)
    at, node = np.nonzero(problem.capacities - used >= 1)
    columns = states[at, :, node]
    is_here = columns != 0
    any_job = 1.0 / num_jobs
    own = 1.0 / np.maximum(is_here.sum(axis=1), 1)[:, None]
    chance = np.where(is_here, any_job + own - any_job * own, any_job)
    which, job = np.nonzero(rng.random(columns.shape, dtype=np.float32) < chance)
    before = columns[which, job]
    room = problem.capacities[node[which]] - before + 1
    states[at[which], job, node[which]] = before + (rng.random(len(which)) * room).astype(np.int8)
    return states


# --- mending ----------------------------------------------------------------------------------------------------------


def _repair(problem: AllocationProblem, states: Counts, rng: np.random.Generator) -> Counts:
    """Make matrices possible, in place: one distributed job a node, the jobs' bounds, the nodes' devices."""
    workers, nodes = _sums(states)
    is_spread = nodes > 1
    spread = (states != 0) & is_spread[:, :, None]
    at, node = np.nonzero(np.add.reduce(spread, axis=1, dtype=np.int16) > 1)
    if len(at):
        columns, is_second = states[at, :, node], spread[at, :, node]
        drops = np.add.accumulate(is_second, axis=1, dtype=np.int16) > 1
        columns[drops & is_second if problem.spares_single else drops] = 0
        states[at, :, node] = columns
        workers, nodes = _sums(states)
    too_large = np.nonzero((workers > problem.most) | (nodes > problem.max_nodes))
    if len(too_large[0]):
        states[too_large] = _cut(states[too_large], problem.most[too_large[1]], problem.max_nodes, rng)
    used = np.add.reduce(states, axis=1, dtype=np.int16)
    at, node = np.nonzero(used > problem.capacities)
    if len(at):
        columns = np.add.accumulate(states[at, :, node], axis=1, dtype=np.int16)
        columns = np.minimum(columns, problem.capacities[node][:, None])
        states[at, :, node] = np.diff(columns, axis=1, prepend=0)
    if problem.least.max(initial=0) > 0:
        states[_sums(states)[0] < problem.least] = 0
    return states


def _cut(rows: Counts, most: NDArray[np.int64], max_nodes: int, rng: np.random.Generator) -> Counts:
    """Cut rows [K, N] down to `most` workers [K] on `max_nodes` nodes, over the nodes in random order."""
    order = np.argsort(rng.random(rows.shape, dtype=np.float32), axis=1)
    shuffled = np.take_along_axis(rows, order, axis=1)
    shuffled = np.diff(np.minimum(np.cumsum(shuffled, axis=1, dtype=np.int64), most[:, None]), axis=1, prepend=0)
    shuffled[np.cumsum(shuffled > 0, axis=1) > max_nodes] = 0
    cut = np.empty_like(rows)
    np.put_along_axis(cut, order, shuffled.astype(rows.dtype), axis=1)
    return cut


# --- survival ---------------------------------------------------------------------------------------------------------


def _survive(values: Floats, count: int, rng: np.random.Generator) -> tuple[NDArray[np.intp], NDArray[np.intp], Floats]:
    """Survivors of all [P, 2]: front by front, of the last one the least crowded. With their fronts and distances."""
    ranks = _ranks(values)
    crowding = _crowding(values, ranks)
    lots = rng.random(len(values))
    order = np.lexsort((lots, -crowding, ranks))
    kept = np.sort(order[:count])
    return kept, ranks[kept], crowding[kept]


def _ranks(values: Floats) -> NDArray[np.intp]:
    """The number of each solution's front [P]: 0 for those that no other beats in both objectives.

    In order of the first objective, a solution belongs to the first front whose best second objective it improves.
    """
    order = np.lexsort((values[:, 1], values[:, 0])).tolist()
    firsts, seconds = values[:, 0].tolist(), values[:, 1].tolist()
    ranks = [0] * len(order)
    bests: list[float] = []
    last: tuple[float, float, int] | None = None
    for index in order:
        first, second = firsts[index], seconds[index]
        if last is not None and last[0] == first and last[1] == second:
            ranks[index] = last[2]
            continue
        low = bisect.bisect_right(bests, second)
        if low == len(bests):
            bests.append(second)
        else:
            bests[low] = second
        ranks[index] = low
        last = (first, second, low)
    return np.array(ranks, dtype=np.intp)


def _crowding(values: Floats, ranks: NDArray[np.intp]) -> Floats:
    """How far apart each solution's neighbours in its front are [P]; the ends are extreme, repeated ones count 0."""
    order = np.lexsort((values[:, 0], ranks))
    rank, ordered = ranks[order], values[order]
    is_repeated = np.zeros(len(order), dtype=np.bool_)
    is_repeated[1:] = (rank[1:] == rank[:-1]) & (ordered[1:] == ordered[:-1]).all(axis=1)
    crowding: Any = np.zeros(len(order))
    order, rank, ordered = order[~is_repeated], rank[~is_repeated], ordered[~is_repeated]
    starts = np.nonzero(np.concatenate([[True], rank[1:] != rank[:-1]]))[0]
    ends = np.concatenate([starts[1:], [len(rank)]]) - 1
    spans = np.abs(ordered[ends] - ordered[starts])
    spans[spans == 0.0] = np.inf
    front = np.repeat(np.arange(len(starts)), ends - starts + 1)
    gaps = np.zeros_like(ordered)
    gaps[1:-1] = np.abs(ordered[2:] - ordered[:-2])
    distance = (gaps / spans[front]).sum(axis=1) / 2.0
    distance[starts] = distance[ends] = _EXTREME
    crowding[order] = distance
    return np.asarray(crowding)
