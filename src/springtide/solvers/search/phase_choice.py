"""Chooses one configuration for each phase of the work left, all together: money is spent where a second is cheapest.

Phases differ in the time of a step (a batch schedule); a limit on time or money holds for all of them together. Labels
of (limited resource, objective) are extended phase by phase, and dominated ones are dropped.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

from springtide.solvers.search.gaussian_process import Floats

Ints = npt.NDArray[np.int64]

# Above these numbers, candidates and labels are thinned out; below, the choice is exact.
MAX_CANDIDATES = 48
MAX_LABELS = 400


_NOTHING = 1e-9


class WorkPhase(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the work with constant steps, in arrays of one entry for each candidate.

    `log_step` is the logarithm of the expected seconds of a step, `spread` the standard deviation of that, and `luck`
    the part of the phase's time by which it deviates even if the step is known. A step of t seconds costs `base_usd` +
    t x `usd_per_s`. `fits`: a step is possible.
    """

    num_steps: float
    log_step: Floats
    spread: Floats
    luck: Floats
    base_usd: Floats
    usd_per_s: Floats
    fits: npt.NDArray[np.bool_]

    def step_s(self, confidence: float) -> Floats:
        """Seconds of a step at so many deviations above the mean."""
        return np.asarray(np.exp(self.log_step + confidence * np.hypot(self.spread, self.luck)))

    def totals(self, confidence: float) -> tuple[Floats, Floats]:
        """Seconds and dollars of the phase at so many deviations above the mean."""
        step_s = self.step_s(confidence)
        return self.num_steps * step_s, self.num_steps * (self.base_usd + step_s * self.usd_per_s)


class GoalLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The time and money left."""

    left_s: float = math.inf
    left_usd: float = math.inf


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """The objective to minimise: `usd_weight` x dollars + `second_weight` x seconds."""

    usd_weight: float
    second_weight: float

    @property
    def is_time_first(self) -> bool:
        """Whether money has no weight."""
        return self.usd_weight == 0.0

    def value(self, seconds: Floats, usd: Floats) -> Floats:
        return np.asarray(self.usd_weight * usd + self.second_weight * seconds)


CHEAPEST = Aim(usd_weight=1.0, second_weight=0.0)
FASTEST = Aim(usd_weight=0.0, second_weight=1.0)


class SwitchCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a change to each candidate: seconds without training, and dollars."""

    seconds: Floats
    usd: Floats

    def objective(self, aim: Aim) -> Floats:
        return aim.value(self.seconds, self.usd)


class PhaseChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate for each phase, and the time and cost of all phases, as expected and at the upper end.

    `later_...` are without the present phase. `resource_worth` is the value in the objective of a unit of the limited
    resource (seconds, or dollars if the aim is time) that later phases can trade; 0 with a single phase. `violation` is
    the factor by which a limit is broken at the upper end (at most 1: none is).
    """

    candidates: tuple[int, ...]
    objective: float
    rest_s: float
    rest_usd: float
    upper_s: float
    upper_usd: float
    later_upper_s: float = 0.0
    later_upper_usd: float = 0.0
    resource_worth: float = 0.0
    violation: float = 0.0

    @property
    def is_within(self) -> bool:
        """Whether the choice keeps the limits at the upper end."""
        return self.violation <= 1.0


def choose(
    phases: tuple[WorkPhase, ...],
    limits: GoalLimits,
    aim: Aim,
    first: SwitchCosts,
    later: SwitchCosts,
    confidence: float,
    *,
    first_candidate: int | None = None,
) -> PhaseChoice:
    """The candidates with the least objective within the limits at the upper end, or else those closest to them.

    `first` is the cost of a change to each candidate now, `later` that between two phases. `first_candidate` fixes the
    candidate of the first phase. Exact up to MAX_CANDIDATES worthwhile candidates and MAX_LABELS labels; beyond, it may
    miss the optimum, but its totals are those of the choice.
    """
    allowed = _worthwhile(phases, confidence, first, first_candidate)
    tables = [_Table(phase, aim, limits, confidence, allowed) for phase in phases]
    start = allowed if first_candidate is None else np.array([first_candidate])
    labels = _begin(tables[0], allowed, start, first, aim)
    trail = []
    moves = _Moves(later, aim, limits, allowed)
    for number, table in enumerate(tables[1:], 1):
        spare = moves.limit - sum(float(one.resource.min()) for one in tables[number + 1 :])
        labels, parents = _extend(labels, table, moves, spare)
        trail.append(parents)
    violation = np.maximum(_over(labels.upper_s, limits.left_s), _over(labels.upper_usd, limits.left_usd))
    within = violation <= 1.0
    index = int(np.argmin(np.where(within, labels.value, math.inf))) if within.any() else int(np.argmin(violation))
    path = [int(labels.last[index])]
    at = index
    for parents in reversed(trail):
        at = int(parents.index[at])
        path.append(int(parents.last[at]))
    head = path[-1]
    return PhaseChoice(
        candidates=tuple(int(allowed[each]) for each in reversed(path)),
        objective=float(labels.value[index]),
        rest_s=float(labels.rest_s[index]),
        rest_usd=float(labels.rest_usd[index]),
        upper_s=float(labels.upper_s[index]),
        upper_usd=float(labels.upper_usd[index]),
        later_upper_s=float(labels.upper_s[index] - tables[0].upper_s[head] - first.seconds[allowed[head]]),
        later_upper_usd=float(labels.upper_usd[index] - tables[0].upper_usd[head] - first.usd[allowed[head]]),
        resource_worth=_worth(labels, index, tables) if len(phases) > 1 else 0.0,
        violation=float(violation[index]),
    )


def _over(used: Floats, left: float) -> Floats:
    """The factor by which more is used than is left."""
    if math.isinf(left):
        return np.zeros(used.shape)
    # If nothing is left, the candidate that uses least is still the best.
    return np.asarray(used / max(left, _NOTHING))


def _worthwhile(
    phases: tuple[WorkPhase, ...], confidence: float, first: SwitchCosts, first_candidate: int | None
) -> Ints:
    """The candidates to consider: with one phase all that fit, with more those on the Pareto front of some phase."""
    fits = np.logical_or.reduce([phase.fits for phase in phases])
    possible = np.flatnonzero(fits) if fits.any() else np.arange(len(fits))
    if len(phases) == 1 or len(possible) <= MAX_CANDIDATES:
        chosen = set(possible.tolist())
    else:
        # The running candidate: going on with it costs nothing.
        chosen = {int(np.argmin(first.seconds))}
        each = max(2, MAX_CANDIDATES // len(phases))
        for phase in phases:
            upper_s, _ = phase.totals(confidence)
            _, usd = phase.totals(0.0)
            front = _front(np.where(phase.fits, upper_s, math.inf), np.where(phase.fits, usd, math.inf))
            places = np.unique(np.linspace(0, len(front) - 1, min(each, len(front))).round().astype(np.int64))
            chosen.update(int(front[place]) for place in places)
    if first_candidate is not None:
        chosen.add(first_candidate)
    return np.array(sorted(chosen), dtype=np.int64)


def _front(one: Floats, other: Floats) -> Ints:
    """The indices of the Pareto front, ascending in the first value."""
    order = np.lexsort((other, one))
    values = other[order]
    before = np.concatenate([[math.inf], np.minimum.accumulate(values)[:-1]])
    return np.asarray(order[values < before], dtype=np.int64)


class _Table:
    """One phase's totals for the considered candidates; infinite where a step is not possible."""

    def __init__(self, phase: WorkPhase, aim: Aim, limits: GoalLimits, confidence: float, allowed: Ints) -> None:
        rest_s, rest_usd = (total[allowed] for total in phase.totals(0.0))
        self.upper_s, self.upper_usd = (total[allowed] for total in phase.totals(confidence))
        self.rest_s, self.rest_usd = rest_s, rest_usd
        fits = phase.fits[allowed]
        self.value: Floats = np.where(fits, aim.value(rest_s, rest_usd), math.inf)
        if not fits.any():
            # No candidate is possible: the one that is least infeasible is still returned.
            self.value = aim.value(rest_s, rest_usd)
        self.resource: Floats = _resource(self.upper_s, self.upper_usd, aim, limits)


def _resource(seconds: Floats, usd: Floats, aim: Aim, limits: GoalLimits) -> Floats:
    """The use of the limited resource that is not minimised: seconds or dollars at the upper end, or zeros."""
    if aim.is_time_first:
        return usd if math.isfinite(limits.left_usd) else np.zeros(usd.shape)
    return seconds if math.isfinite(limits.left_s) else np.zeros(seconds.shape)


class _Moves:
    """The costs of a change to each of the candidates between two phases."""

    def __init__(self, later: SwitchCosts, aim: Aim, limits: GoalLimits, allowed: Ints) -> None:
        self.seconds, self.usd = later.seconds[allowed], later.usd[allowed]
        self.value = aim.value(self.seconds, self.usd)
        self.resource = _resource(self.seconds, self.usd, aim, limits)
        self.limit = limits.left_usd if aim.is_time_first else limits.left_s


class _Labels(msgspec.Struct, frozen=True):
    """Partial choices, one entry each; `last` is the index of its last candidate among the considered ones."""

    last: Ints
    value: Floats
    resource: Floats
    rest_s: Floats
    rest_usd: Floats
    upper_s: Floats
    upper_usd: Floats

    def some(self, kept: Ints) -> _Labels:
        return _Labels(*(getattr(self, name)[kept] for name in self.__struct_fields__))


class _Parents(msgspec.Struct, frozen=True):
    """For each label the index of the label that it extends, and the last candidates of those labels."""

    index: Ints
    last: Ints


def _begin(table: _Table, allowed: Ints, start: Ints, first: SwitchCosts, aim: Aim) -> _Labels:
    last = np.searchsorted(allowed, start)
    seconds, usd = first.seconds[start], first.usd[start]
    resource = table.resource[last]
    upper_s, upper_usd = table.upper_s[last] + seconds, table.upper_usd[last] + usd
    return _Labels(
        last=last,
        value=table.value[last] + aim.value(seconds, usd),
        resource=resource + (usd if aim.is_time_first else seconds) * (resource > 0.0),
        rest_s=table.rest_s[last] + seconds,
        rest_usd=table.rest_usd[last] + usd,
        upper_s=upper_s,
        upper_usd=upper_usd,
    )


def _extend(labels: _Labels, table: _Table, moves: _Moves, spare: float) -> tuple[_Labels, _Parents]:
    """Every label extended by every candidate for the next phase, without dominated ones."""
    num_labels, num_candidates = len(labels.last), len(table.value)
    parent = np.repeat(np.arange(num_labels), num_candidates)
    last = np.tile(np.arange(num_candidates), num_labels)
    moved = (labels.last[parent] != last).astype(np.float64)

    def grown(before: Floats, more: Floats, move: Floats) -> Floats:
        return np.asarray(before[parent] + more[last] + moved * move[last])

    value = grown(labels.value, table.value, moves.value)
    resource = grown(labels.resource, table.resource, moves.resource)
    kept = _kept(last, value, resource, moves, spare)
    parent, last, moved = parent[kept], last[kept], moved[kept]
    found = _Labels(
        last=last,
        value=value[kept],
        resource=resource[kept],
        rest_s=grown(labels.rest_s, table.rest_s, moves.seconds),
        rest_usd=grown(labels.rest_usd, table.rest_usd, moves.usd),
        upper_s=grown(labels.upper_s, table.upper_s, moves.seconds),
        upper_usd=grown(labels.upper_usd, table.upper_usd, moves.usd),
    )
    return found, _Parents(parent, labels.last)


def _kept(last: Ints, value: Floats, resource: Floats, moves: _Moves, spare: float) -> Ints:
    """The labels to keep: one is dropped if another is no worse with the same last candidate, or better by a change."""
    index = np.flatnonzero((resource <= spare) & np.isfinite(value))
    if not len(index):
        # Every label breaks the limit: keep those that break it least.
        index = np.flatnonzero(np.isfinite(value))
        index = index[np.argsort(resource[index], kind="stable")[:MAX_LABELS]]
    order = index[np.lexsort((value[index], resource[index]))]
    sorted_resource, sorted_value = resource[order], value[order]
    least = np.minimum.accumulate(sorted_value)
    before = np.searchsorted(sorted_resource, sorted_resource - float(moves.resource.max()), side="right")
    best = np.where(before > 0, least[np.maximum(before - 1, 0)], math.inf)
    order = order[sorted_value <= best + float(moves.value.max())]
    # Among labels with the same last candidate, in the order of the resource, each must have a better value than those
    # before it.
    order = order[np.argsort(last[order], kind="stable")]
    ends, values = last[order], value[order]
    borders = np.flatnonzero(np.diff(ends)) + 1
    keep = np.ones(len(order), dtype=bool)
    for low, high in zip([0, *borders.tolist()], [*borders.tolist(), len(order)], strict=True):
        keep[low + 1 : high] = values[low + 1 : high] < np.minimum.accumulate(values[low:high])[:-1]
    return _thinned(order[keep], value, resource)


def _thinned(kept: Ints, value: Floats, resource: Floats) -> Ints:
    """At most about MAX_LABELS labels: the best value in each interval of the resource, and the smallest resource."""
    if len(kept) <= MAX_LABELS:
        return kept
    order = kept[np.argsort(resource[kept], kind="stable")]
    width = -(-len(order) // MAX_LABELS)
    padded = np.full(width * -(-len(order) // width), math.inf)
    padded[: len(order)] = value[order]
    rows = padded.reshape(-1, width)
    chosen = np.arange(len(rows)) * width + np.argmin(rows, axis=1)
    return np.asarray(order[np.unique(np.concatenate([[0], chosen]))], dtype=np.int64)


def _worth(labels: _Labels, index: int, tables: list[_Table]) -> float:
    """The value of a unit of the limited resource: the least cost of giving up a little of it in a later phase."""
    value, resource = float(labels.value[index]), float(labels.resource[index])
    freely = sum(float(table.value.min()) for table in tables)
    saved = resource - labels.resource
    thriftier = saved > 1e-12 * max(resource, 1e-300)
    if not thriftier.any() or value <= freely * (1.0 + 1e-9):
        return 0.0
    return max(0.0, float(((labels.value[thriftier] - value) / saved[thriftier]).min()))
