"""FuncPipe's co-optimisation (section 3.4) solved exactly: stages, the memory of each, and the degree of parallelism.

From the last layer down, stages are put below one another; of two ways to fill the same layers the one that is no
better in memory and four times is dropped (equation 11 looks only upwards, so what is above is settled), and so is
every way whose lower bound is no better than the best plan known. A narrow search finds that plan first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from springtide.solvers.pipeline.bounds import MANY_SHARES, Labels, PipelineBounds, bounds_of
from springtide.solvers.pipeline.problem import (
    TOLERANCE,
    Degree,
    Floats,
    Indices,
    PipelineProblem,
    PipelineSolution,
    Stage,
    stage_tables,
)

Weights = tuple[float, float]
_BEAM = 30
# So many labels at one degree are worth sharper bounds.
_PATIENCE = 800
_NOTHING = -1


class PipelineSolver:
    """Solves one problem for any weights; what does not depend on them is worked out once."""

    def __init__(self, problem: PipelineProblem, weights: Sequence[Weights]) -> None:
        """`weights` are the pairs (alpha_1, alpha_2) to come: bounds are sharpest around them, and hold for all."""
        self.problem = problem
        self._weights = tuple(weights)
        found = (bounds_of(stage_tables(problem, degree), self._weights) for degree in problem.degrees)
        self._bounds = [bounds for bounds in found if bounds is not None]
        self._is_sharp = [False] * len(self._bounds)
        self._scores = [
            [
                (*bounds.tables.score(stages), stages)
                for stages in bounds.plans
                if bounds.tables.degree.allows(len(stages))
            ]
            for bounds in self._bounds
        ]

    def best(self, weights: Weights, *, max_labels: int | None = None) -> PipelineSolution | None:
        """The plan of the least equation 3a, or None where none fits.

        With `max_labels` the search keeps at most so many labels a layer: it ends sooner, and `bound` says how far the
        plan may be from the best one. Without, the plan is the best one.
        """
        best: PipelineSolution | None = None
        for bounds, scores in zip(self._bounds, self._scores, strict=True):
            for step_s, memory_mb, stages in scores:
                if _is_less((weights[0] * memory_mb + weights[1]) * step_s, best):
                    best = _solution(bounds, stages, weights)
        roots = [_root_bound(bounds, weights) for bounds in self._bounds]
        order = sorted(range(len(roots)), key=lambda number: roots[number])
        dropped: dict[int, float] = {}
        num_labels = 0
        for width in (_BEAM, max_labels):
            for number in order:
                # Nothing better is left at this degree: its bound says so, or all of it has been searched.
                if not _is_less(max(roots[number], dropped.get(number, -np.inf)), best):
                    continue
                search = _Search(self._bounds[number], weights, best)
                patience = None if self._is_sharp[number] or width is not None else _PATIENCE
                is_done = search.run(width, patience)
                num_labels += search.num_labels
                if not is_done:
                    self._sharpen(number)
                    roots[number] = max(roots[number], _root_bound(self._bounds[number], weights))
                    search = _Search(self._bounds[number], weights, best)
                    search.run(width)
                    num_labels += search.num_labels
                best, dropped[number] = search.best, search.dropped
        if best is None:
            return None
        bound = min(max(root, dropped.get(number, root)) for number, root in enumerate(roots))
        return dataclasses.replace(best, bound=min(bound, best.value), num_labels=num_labels)

    def _sharpen(self, number: int) -> None:
        """Take the bounds that cost more, at a degree where the others leave too much to search."""
        sharp = bounds_of(self._bounds[number].tables, self._weights, MANY_SHARES)
        assert sharp is not None
        self._bounds[number] = sharp
        self._is_sharp[number] = True


def solve(problem: PipelineProblem, weights: Weights) -> PipelineSolution | None:
    """The best plan under one pair of weights, or None where none fits."""
    return PipelineSolver(problem, [weights]).best(weights)


def unfit_layers(problem: PipelineProblem, degree: Degree) -> list[tuple[int, float]]:
    """The layers that fit no function even alone, at this degree, and the bytes that each needs at least."""
    unfit = []
    for layer in range(len(problem.parameter_bytes)):
        needed = problem.needed_bytes(layer, layer + 1, degree)
        has_times = np.isfinite(problem.forward_s[layer]) & np.isfinite(problem.backward_s[layer])
        if not (has_times & (needed <= problem.memory_mb * 2.0**20)).any():
            unfit.append((layer, needed))
    return unfit


class _Search:
    """One pass over the layers at one degree. `dropped` is the least bound of what was left out for want of width."""

    def __init__(self, bounds: PipelineBounds, weights: Weights, best: PipelineSolution | None) -> None:
        self.bounds = bounds
        self.weights = weights
        self.best = best
        self.dropped = np.inf
        self.num_labels = 0

    def run(self, width: int | None, patience: int | None = None) -> bool:
        """Find what is better than the best plan; with a width, keep only the most promising labels of each layer.

        False if it gave up because there were more than `patience` labels: then nothing is found or proved.
        """
        tables = self.bounds.tables
        kept = _root(self.bounds)
        for first in range(tables.num_layers - 1, 0, -1):
            found = self._extended(kept, first)
            limit = np.inf if self.best is None else self.best.value * (1.0 - TOLERANCE)
            found = found.take(self._quick(found, first) < limit)
            bound = self.bounds.of(first, found, self.weights, limit)
            promising = bound < limit
            found, bound = found.take(promising), bound[promising]
            if width is not None and len(found) > 4 * width:
                order = np.argsort(bound, kind="stable")
                self.dropped = min(self.dropped, float(bound[order[4 * width]]))
                order = order[: 4 * width]
                found, bound = found.take(order), bound[order]
            chosen = undominated(found, counts_stages=tables.degree.max_stages is not None)
            if width is not None and len(chosen) > width:
                chosen = chosen[np.argsort(bound[chosen], kind="stable")]
                self.dropped = min(self.dropped, float(bound[chosen[width]]))
                chosen = chosen[:width]
            self.num_labels += len(chosen)
            if patience is not None and self.num_labels > patience:
                return False
            kept = kept.plus(found.take(chosen))
        self._close(kept, self._extended(kept, 0))
        return True

    def _extended(self, kept: Labels, first: int) -> Labels:
        """Every label with every stage below it that begins at `first`."""
        tables = self.bounds.tables
        room = np.inf if tables.degree.max_stages is None else tables.degree.max_stages - (first > 0)
        above = np.nonzero((kept.first > first) & (kept.num_stages < room))[0]
        ends = kept.first[above]
        which, size = np.nonzero(tables.fits[first, ends])
        parent = above[which]
        key = (first, ends[which], size)
        backward = kept.backward[parent] + tables.backward_s[key]
        lag = np.maximum(kept.backward_lag[parent], tables.backward_lag_s[key])
        end = np.maximum(kept.end[parent], backward + tables.num_lags * lag + tables.sync_s[key])
        handed = tables.hand_down_s[key]
        return Labels(
            forward=kept.forward[parent] + tables.forward_s[key],
            forward_lag=np.maximum(kept.forward_lag[parent], tables.forward_lag_s[key]),
            backward=backward + handed,
            backward_lag=np.maximum(lag, handed),
            end=end,
            memory=kept.memory[parent] + tables.memory_mb[size],
            first=np.full(len(parent), first),
            size=size,
            parent=parent,
            num_stages=kept.num_stages[parent] + 1,
        )

    def _quick(self, labels: Labels, first: int) -> Floats:
        """Equation 3a with what is there already, and the least memory for the rest."""
        tables = self.bounds.tables
        memory = (labels.memory + self.bounds.least_memory[first]) * tables.degree.num_replicas
        seconds = labels.forward + tables.num_lags * labels.forward_lag + labels.end
        return np.asarray((self.weights[0] * memory + self.weights[1]) * seconds)

    def _close(self, kept: Labels, whole: Labels) -> None:
        """Take the best of the labels that hold every layer, if it is better."""
        if not len(whole):
            return
        value = self._quick(whole, 0)
        chosen = int(value.argmin())
        if not _is_less(float(value[chosen]), self.best):
            return
        stages: list[Stage] = []
        parent, first, size = int(whole.parent[chosen]), 0, int(whole.size[chosen])
        while parent != _NOTHING:
            end = int(kept.first[parent])
            stages.append((first, end, size))
            first, size, parent = end, int(kept.size[parent]), int(kept.parent[parent])
        self.best = _solution(self.bounds, tuple(stages), self.weights)


def undominated(labels: Labels, *, counts_stages: bool = False) -> Indices:
    """The labels that no other is as good as in memory, both lags, forward and end, forward and backward.

    With `counts_stages` also in the number of stages, which matters where that is limited.
    """
    columns = [
        labels.memory,
        labels.forward + labels.end,
        labels.forward + labels.backward,
        labels.forward_lag,
        labels.backward_lag,
    ]
    keys = np.stack([*columns, labels.num_stages] if counts_stages else columns, axis=1)
    order = np.lexsort(keys.T[::-1])
    keys = keys[order]
    kept = np.empty_like(keys)
    chosen: list[int] = []
    for number, key in enumerate(keys):
        if not (kept[: len(chosen)] <= key).all(axis=1).any():
            kept[len(chosen)] = key
            chosen.append(number)
    return np.asarray(order[np.array(chosen, dtype=np.int64)])


def _root(bounds: PipelineBounds) -> Labels:
    """The one label that holds no layer yet."""
    zero = np.zeros(1)
    nothing = np.full(1, _NOTHING)
    return Labels(
        zero, zero, zero, zero, zero, zero, np.array([bounds.tables.num_layers]), nothing, nothing, nothing + 1
    )


def _root_bound(bounds: PipelineBounds, weights: Weights) -> float:
    """What no plan at this degree is below."""
    return float(bounds.of(bounds.tables.num_layers, _root(bounds), weights)[0])


def _is_less(value: float, best: PipelineSolution | None) -> bool:
    """Whether it is better than the best plan by more than nothing."""
    return best is None or value < best.value * (1.0 - TOLERANCE)


def _solution(bounds: PipelineBounds, stages: tuple[Stage, ...], weights: Weights) -> PipelineSolution:
    step_s, memory_mb = bounds.tables.score(stages)
    return PipelineSolution(
        stages=stages,
        degree=bounds.tables.degree,
        value=(weights[0] * memory_mb + weights[1]) * step_s,
        step_s=step_s,
        memory_mb=memory_mb,
        bound=0.0,
    )
