"""How good a pipeline can become below a layer: lower bounds by a relaxation that is solved for all weights at once.

The relaxed problem keeps the sums and the exchanges and replaces the two lags by one (the largest sum of both of any
stage), of which a grid of levels is tried; memory is priced by a grid of multipliers, which yields a convex outline of
(memory, time) at each layer and level. The product of memory and time over an outline is least at one of its corners.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from springtide.solvers.pipeline.problem import Bools, Floats, Indices, Stage, StageTables

NUM_LEVELS = 24
NUM_MULTIPLIERS = 20
FEW_SHARES = (0.0, 1.0)
MANY_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Labels:
    """Ways to fill the layers from `first` on, one entry each: sums, lags, the latest end so far, and memory.

    `parent` is the index of the label that the newest of `num_stages` stages, of size `size`, was put below.
    """

    forward: Floats
    forward_lag: Floats
    backward: Floats
    backward_lag: Floats
    end: Floats
    memory: Floats
    first: Indices
    size: Indices
    parent: Indices
    num_stages: Indices

    def __len__(self) -> int:
        return len(self.forward)

    def take(self, chosen: Indices | Bools) -> Labels:
        """Those of these indices, or where it is true."""
        return Labels(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    def plus(self, other: Labels) -> Labels:
        """These, then those."""
        return Labels(
            *(np.concatenate([getattr(self, name), getattr(other, name)]) for name in self.__dataclass_fields__)
        )


@dataclass(frozen=True)
class Outline:
    """Corners (memory, time) by layer and level, [L + 1, levels, corners]: the first `num_corners` [L + 1, levels]."""

    memory: Floats
    seconds: Floats
    num_corners: Indices


@dataclass(frozen=True)
class PipelineBounds:
    """Outlines of what the layers below a cut add at least, for prefixes whose lags are within each level.

    Of the two ends that hold a step up, that of what is above the cut and that of what is below, a share of the latter
    and the rest of the former is a bound, too: `plain` has the outline for each of `shares`, without lags, and `lagged`
    that with each stage's own lags above the level's lower end.
    """

    tables: StageTables
    levels: Floats
    least_memory: Floats
    shares: tuple[float, ...]
    plain: tuple[Outline, ...]
    lagged: tuple[Outline, ...]
    plans: tuple[tuple[Stage, ...], ...]

    def of(self, layer: int, labels: Labels, weights: tuple[float, float], limit: float = np.inf) -> Floats:
        """At least what equation 3a comes to for each label at this layer, whatever follows.

        Where it is `limit` or more it may be less sharp than it could be: such a label is of no use.
        """
        num_lags, num_replicas = self.tables.num_lags, self.tables.degree.num_replicas
        price, offset = weights[0] * num_replicas, weights[1]
        lags = labels.forward_lag + labels.backward_lag

        def raise_(values: Floats, outline: Outline, level: int, chosen: Indices, seconds: Floats) -> None:
            """Raise the values that are below the limit, and are of these labels, to what the outline says."""
            low = np.nonzero(values < limit)[0]
            of = chosen[low]
            corner = slice(0, outline.num_corners[layer, level])
            total = price * labels.memory[of, None] + (price * outline.memory[layer, level, corner] + offset)
            least = (total * (seconds[of, None] + outline.seconds[layer, level, corner])).min(axis=1)
            values[low] = np.maximum(values[low], least)

        ends = [
            labels.forward + (1.0 - share) * labels.end + share * labels.backward + num_lags * labels.forward_lag
            for share in self.shares
        ]
        back = [num_lags * share * labels.backward_lag for share in self.shares]
        turn = sorted(range(len(self.shares)), key=lambda one: self.shares[one] not in (0.0, 1.0))
        everyone, last = np.arange(len(labels)), len(self.levels) - 1
        # First whatever the level, which spares most labels the rest.
        bound = np.zeros(len(labels))
        for one in turn:
            raise_(bound, self.plain[one], last, everyone, ends[one] + back[one])
        remaining = np.nonzero(bound < limit)[0]
        sharper = np.full(len(labels), np.inf)
        below = 0.0
        for number, level in enumerate(self.levels):
            # A prefix within an earlier level than the label's lags adds none: the last such level stands for them all.
            chosen = remaining if number == last else remaining[self.levels[number + 1] > lags[remaining]]
            if len(chosen) and self.plain[-1].num_corners[layer, number]:
                value = np.zeros(len(chosen))
                beyond = np.where(level > lags[chosen], 0.0, np.inf)
                for one in turn:
                    raise_(value, self.plain[one], number, chosen, ends[one] + back[one])
                    share = self.shares[one]
                    if share:
                        own = value + beyond
                        waited = num_lags * share * (below - labels.forward_lag)
                        raise_(own, self.lagged[one], number, chosen, ends[one] + waited)
                        value = np.where(np.isfinite(beyond), own, value)
                sharper[chosen] = np.minimum(sharper[chosen], value)
            below = float(level)
        bound[remaining] = np.maximum(bound[remaining], sharper[remaining])
        return bound


def bounds_of(
    tables: StageTables, weights: tuple[tuple[float, float], ...], shares: tuple[float, ...] = FEW_SHARES
) -> PipelineBounds | None:
    """The bounds at one degree, sharpest for these weights, or None where no plan fits at all.

    `shares` begin with 0 and end with 1; more of them are sharper where exchanges take most of the time, and cost more.
    """
    least_memory = _least_memory(tables)
    if not np.isfinite(least_memory[-1]):
        return None
    lag = tables.forward_lag_s + np.maximum(tables.backward_lag_s, tables.hand_down_s)
    known = lag[tables.fits]
    levels = np.array([known.max()])
    if tables.num_lags:
        # No plan is within less than the least of its longest lags.
        longest = max(float(known.max()), 1e-12)
        levels = np.geomspace(max(_least_lag(tables, lag), longest * 1e-4), longest, NUM_LEVELS)
        levels[-1] = longest
    multipliers = _multipliers(tables, float(least_memory[-1]), weights)
    plain, lagged, choice = _relaxed(tables, lag, levels, multipliers, shares)
    return PipelineBounds(
        tables=tables,
        levels=levels,
        least_memory=least_memory,
        shares=shares,
        plain=tuple(_outline(one, multipliers, least_memory) for one in plain),
        lagged=tuple(_outline(one, multipliers, least_memory) for one in lagged),
        plans=_plans(choice, np.isfinite(plain[-1, -1]), tables),
    )


def _least_memory(tables: StageTables) -> Floats:
    """The least memory in MB that holds the first i layers, of one replica."""
    least = np.full(tables.num_layers + 1, np.inf)
    least[0] = 0.0
    for end in range(1, tables.num_layers + 1):
        each = np.where(tables.fits[:end, end], least[:end, None] + tables.memory_mb, np.inf)
        least[end] = each.min()
    return least


def _least_lag(tables: StageTables, lag: Floats) -> float:
    """The longest lag of the plan whose longest lag is least."""
    least = np.full(tables.num_layers + 1, np.inf)
    least[0] = 0.0
    for end in range(1, tables.num_layers + 1):
        each = np.where(tables.fits[:end, end], np.maximum(lag[:end, end], least[:end, None]), np.inf)
        least[end] = each.min()
    return float(least[-1])


def _multipliers(tables: StageTables, least_memory: float, weights: tuple[tuple[float, float], ...]) -> Floats:
    """Prices of memory in s per MB around those that hold at the best plans: time over memory and alpha_2 / alpha_1."""
    whole = np.where(tables.fits, tables.forward_s + tables.backward_s, np.inf)
    fastest = np.full(tables.num_layers + 1, np.inf)
    fastest[0] = 0.0
    for end in range(1, tables.num_layers + 1):
        fastest[end] = (fastest[:end, None] + whole[:end, end]).min()
    shortest = max(float(fastest[-1]), 1e-9)
    # Beyond some thousand times the memory that there is, it may as well cost nothing: multiplier 0 stands for that.
    offsets = [
        min(alpha_2 / max(alpha_1 * tables.degree.num_replicas, 1e-30), 4096.0 * least_memory)
        for alpha_1, alpha_2 in weights
    ]
    low = shortest / (max(offsets) + 64.0 * least_memory)
    high = 8.0 * shortest * (1 + tables.num_lags) / (min(offsets) + least_memory)
    return np.concatenate([[0.0], np.geomspace(low / 2, max(high, low), NUM_MULTIPLIERS - 1)])


def _relaxed(
    tables: StageTables, lag: Floats, levels: Floats, multipliers: Floats, shares: tuple[float, ...]
) -> tuple[Floats, Floats, Indices]:
    """Least priced times of the first i layers, [shares, L + 1, levels, multipliers], and the stage last chosen for 1.

    Forward time plus a share of the end. A stage is done when its exchange is, or when the stages below are, and the
    larger of two is at least any mixture of them: of those that a grid of shares makes possible the largest counts.
    """
    num_layers, num_sizes = tables.num_layers, len(tables.memory_mb)
    shape = (len(shares), num_layers + 1, len(levels), len(multipliers))
    plain, lagged = np.full(shape, np.inf), np.full(shape, np.inf)
    choice = np.zeros(shape[1:], dtype=np.int64)
    plain[:, 0] = lagged[:, 0] = 0.0
    below = np.concatenate([[0.0], levels[:-1]])
    own_lag = tables.forward_lag_s + tables.backward_lag_s

    def mixed(table: Floats, span: slice, number: int, alone: Floats, after: Floats) -> Floats:
        each = [
            (shares[number] - share) * alone + share * after + table[lower, span]
            for lower, share in enumerate(shares[: number + 1])
        ]
        return np.asarray(np.maximum.reduce(each))

    for end in range(1, num_layers + 1):
        for size in range(num_sizes):
            firsts = np.nonzero(tables.fits[:end, end, size])[0]
            if not len(firsts):
                continue
            span = slice(int(firsts[0]), end)
            key = (span, end, size)
            price = multipliers * tables.memory_mb[size]
            allowed = np.where((lag[key][:, None] <= levels) & tables.fits[key][:, None], 0.0, np.inf)[:, :, None]
            whole = tables.forward_s[key][:, None, None] + allowed
            alone = (tables.backward_s[key] + tables.sync_s[key])[:, None, None]
            after = (tables.backward_s[key] + tables.hand_down_s[key])[:, None, None]
            beyond = tables.num_lags * (own_lag[key][:, None] - below)[:, :, None]
            if span.start == 0:
                # The lowest stage ends last of all: every lag counts for it, so at least the level's lower end.
                beyond[0] = np.maximum(beyond[0], 0.0)
            for number in range(len(shares)):
                each = mixed(plain, span, number, alone, after) + whole
                if number + 1 == len(shares):
                    best = each.argmin(axis=0)
                    least = np.take_along_axis(each, best[None], axis=0)[0] + price
                    choice[end] = np.where(
                        least < plain[number, end], (best + span.start) * num_sizes + size, choice[end]
                    )
                else:
                    least = each.min(axis=0) + price
                plain[number, end] = np.minimum(plain[number, end], least)
                if number:
                    each = mixed(lagged, span, number, alone + beyond, after) + whole
                    lagged[number, end] = np.minimum(lagged[number, end], each.min(axis=0) + price)
            lagged[0, end] = plain[0, end]
    return plain, lagged, choice


def _outline(priced: Floats, multipliers: Floats, least_memory: Floats) -> Outline:
    """Corners of all (memory, time) with time >= priced - multiplier x memory for every multiplier.

    Neighbouring lines meet in the corners only if no line lies below the others everywhere; such are raised first.
    """
    priced = _concave(priced, multipliers)
    floor = least_memory[:, None, None]
    with np.errstate(invalid="ignore"):
        between = (priced[..., 1:] - priced[..., :-1]) / (multipliers[1:] - multipliers[:-1])
        memory = np.concatenate([np.maximum(between, floor), np.broadcast_to(floor, (*priced.shape[:2], 1))], axis=-1)
        seconds = np.full(memory.shape, -np.inf)
        for number, multiplier in enumerate(multipliers):
            seconds = np.maximum(seconds, priced[..., number : number + 1] - multiplier * memory)
    missing = ~(np.isfinite(memory) & np.isfinite(seconds))
    # Corners that lie left of the least memory have all become one.
    missing[..., 1:] |= memory[..., 1:] == memory[..., :-1]
    order = np.argsort(missing, axis=-1, kind="stable")
    return Outline(
        np.take_along_axis(memory, order, axis=-1),
        np.take_along_axis(seconds, order, axis=-1),
        (~missing).sum(axis=-1),
    )


def _concave(values: Floats, at: Floats) -> Floats:
    """The least concave function of `at` that is no smaller, along the last axis."""
    flat = values.reshape(-1, values.shape[-1]).copy()
    with np.errstate(invalid="ignore"):
        slopes = np.diff(flat, axis=1) / np.diff(at)
        bent = np.nonzero((np.diff(slopes, axis=1) > 0.0).any(axis=1))[0]
    rows = flat[bent]
    for middle in range(1, len(at) - 1):
        left, right = at[middle] - at[:middle, None], at[middle + 1 :] - at[middle]
        share = right / (left + right)
        between = rows[:, :middle, None] * share + rows[:, None, middle + 1 :] * (1.0 - share)
        flat[bent, middle] = np.maximum(rows[:, middle], between.max(axis=(1, 2)))
    return flat.reshape(values.shape)


def _plans(choice: Indices, exists: Bools, tables: StageTables) -> tuple[tuple[Stage, ...], ...]:
    """The relaxed problem's solutions, as plans to begin with, each once."""
    found: dict[tuple[Stage, ...], None] = {}
    for level, multiplier in np.argwhere(exists):
        end = tables.num_layers
        stages: list[Stage] = []
        while end > 0:
            first, size = divmod(int(choice[end, level, multiplier]), len(tables.memory_mb))
            stages.append((first, end, size))
            end = first
        found[tuple(reversed(stages))] = None
    return tuple(found)
