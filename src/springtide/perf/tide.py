"""A forecast of the tide: how many devices services will need in the coming bins, with bands that were checked on it.

A season (the usual course of a day, of a week once two are known), moved by how today runs against it, and between
quantiles of what such forecasts missed by in the past, each at its own horizon.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.tide import MAX_DAYS, Tide

Floats = NDArray[np.float64]

DEFAULT_QUANTILE = 0.95
# A season is the median over so many days; which of them is asked of the past. One day follows any change at once,
# seven hold every weekday once, fourteen are quietest.
_SPANS = (1, 3, 7, 14)
_DAYS_PER_WEEK = 7
# So many days have to be known by a season of weeks before only they say how far off it is.
_FEWEST_DAYS = 3
# What a weekday differs by is averaged over so much of a day to both sides: it changes slowly, and few weeks are known.
_WEEKDAY_FRACTION = 1 / 24
# How today runs is the mean of the last bins' distances from the season, each weighing this much of the one after it.
_FADING = 0.6
_NUM_FADING = 12
# What was missed by is looked at this many bins ahead; between them it is interpolated.
_HORIZONS = (1, 2, 4, 8, 16, 32, 64, 96)
# A model is fitted anew so often a day, on all that is known up to then; how today runs is looked at in every bin.
_FITS_PER_DAY = 24
# Time of day at which little was missed by is not taken for certain: its scale is at least this part of the whole.
_LEAST_SCALE = 0.25
# Beyond so many times the usual distance, a bin shows that something happened, not how today runs.
_OUTLIER = 6.0


class TideForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Needs in devices of bin `first_bin` (the open one) and those after it, each the highest in its bin.

    With the chance of the quantile a bin's need is at most `upper`, and with the same chance at least `lower`. `most`
    is the highest of all days at about that time, with what a day has ever been above all before it on top, and what
    is needed now above that. Where `is_known` is false, less than a day is known: the bands are then nothing and the
    caller's reserve; so they are where `has_bands` is false, since no day has shown how far off such a forecast is.
    `num_days` are the whole days known. A moment after the last bin counts as the last bin.
    """

    bin_s: float
    first_bin: int
    is_known: bool
    has_bands: bool
    num_days: int
    expected: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    most: tuple[float, ...]

    def until_s(self, index: int) -> float:
        """When bin `index` of this forecast ends."""
        return (self.first_bin + index + 1) * self.bin_s

    def index_at(self, at_s: float) -> int:
        """Which of the bins a moment lies in; the first for what is past, the last for what lies beyond."""
        return max(0, min(int(at_s // self.bin_s) - self.first_bin, len(self.expected) - 1))

    def highest(self, from_s: float, until_s: float) -> float:
        """The highest upper band between two moments, in devices."""
        first = self.index_at(from_s)
        return max(self.upper[first : max(first, self.index_at(until_s)) + 1])


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a tide at `fitted_bin`: arrays by bin of a day that begins there, the season a day before."""

    fitted_bin: int
    season: Floats
    scale: Floats
    most: Floats
    # How much of today's distance is left so many bins ahead, and the quantiles of what was missed by, in scales.
    kept: Floats
    above: Floats
    below: Floats
    # The usual distance from the season, in devices.
    usual: float


class Forecaster:
    """Forecasts for one quantile. Remembers the last model only to save time: the same tide gives the same forecast."""

    def __init__(self, quantile: float = DEFAULT_QUANTILE, *, weekly: bool = True) -> None:
        self.quantile = quantile
        self.weekly = weekly
        self._fitted: tuple[Tide, int, _Model] | None = None
        self._said: tuple[Tide, float, float | None, TideForecast] | None = None

    def forecast(self, tide: Tide, now_s: float, horizon_s: float, reserve: float | None = None) -> TideForecast:
        """What services will need from the bin of `now_s` up to `now_s + horizon_s`.

        `reserve` is the most they can ever need; what is not known lies there (infinite without it). If the tide ends
        before `now_s`, the last level is taken to have held.
        """
        if tide.level is not None and tide.bin_at(now_s) > tide.open_bin:
            tide = tide.noted(now_s, tide.level)
        said = self._said
        if said is not None and said[0] is tide and said[1] == horizon_s and said[2] == reserve:
            return said[3]
        found = self._forecast(tide, now_s, horizon_s, math.inf if reserve is None else reserve)
        self._said = (tide, horizon_s, reserve, found)
        return found

    def _forecast(self, tide: Tide, now_s: float, horizon_s: float, reserve: float) -> TideForecast:
        first = tide.open_bin if tide.level is not None else tide.bin_at(now_s)
        num_bins = max(1, tide.bin_at(now_s + horizon_s) - first + 1)
        per_day = tide.bins_per_day
        num_days = len(tide.peaks) // per_day
        level = float(tide.level or 0)
        if num_days < 1:
            return TideForecast(
                bin_s=tide.bin_s,
                first_bin=first,
                is_known=False,
                has_bands=False,
                num_days=0,
                expected=(level,) * num_bins,
                lower=(0.0,) * num_bins,
                upper=(max(level, reserve),) * num_bins,
                most=(max(level, reserve),) * num_bins,
            )
        model = self._model(tide)
        bins = first + np.arange(num_bins)
        days = (bins - model.fitted_bin) % per_day
        ahead = np.minimum(bins - first + 1, per_day)
        expected = _season_at(model, bins) + model.kept[ahead - 1] * _standing(model, tide)
        upper = np.minimum(expected + model.above[ahead - 1] * model.scale[days], reserve)
        lower = np.maximum(expected + model.below[ahead - 1] * model.scale[days], 0.0)
        # Where today is above all days before it, it may stay so.
        most = model.most[days] + max(0.0, level - float(model.most[days[0]]))
        most = np.minimum(most, reserve)
        # What is needed now is known.
        for band in (expected, lower, upper, most):
            band[0] = max(band[0], level)
        return TideForecast(
            bin_s=tide.bin_s,
            first_bin=first,
            is_known=True,
            has_bands=math.isfinite(model.above[0]),
            num_days=num_days,
            expected=tuple(np.clip(expected, 0.0, max(reserve, level)).tolist()),
            lower=tuple(lower.tolist()),
            upper=tuple(upper.tolist()),
            most=tuple(most.tolist()),
        )

    def _model(self, tide: Tide) -> _Model:
        """The model of the last moment at which one is fitted, on what was known then."""
        per_day = tide.bins_per_day
        every = max(1, per_day // _FITS_PER_DAY)
        fitted_bin = tide.open_bin - tide.open_bin % every
        # The past is forgotten bin by bin; the fit begins where it stays the same until the next fit.
        fitted_bin = max(fitted_bin, tide.first_bin + per_day)
        start = max(tide.first_bin, fitted_bin - (MAX_DAYS - 1) * per_day)
        if self._fitted is not None:
            known, known_start, model = self._fitted
            is_same = (known.day_s, known.bins_per_day, known_start) == (tide.day_s, per_day, start)
            if is_same and model.fitted_bin == fitted_bin and _same_past(known, tide, start, fitted_bin):
                return model
        past = np.array(tide.peaks[start - tide.first_bin : fitted_bin - tide.first_bin], dtype=np.float64)
        model = fit(past, per_day, fitted_bin, self.quantile, weekly=self.weekly)
        self._fitted = (tide, start, model)
        return model


class Forecasters:
    """One forecaster for each quantile and season asked for. They keep what they have fitted."""

    def __init__(self) -> None:
        self._known: dict[tuple[float, bool], Forecaster] = {}

    def of(self, quantile: float, *, weekly: bool) -> Forecaster:
        """The forecaster for that quantile, with seasons of weeks or without."""
        found = self._known.get((quantile, weekly))
        if found is None:
            found = self._known[quantile, weekly] = Forecaster(quantile, weekly=weekly)
        return found


def forecast(
    tide: Tide,
    now_s: float,
    horizon_s: float,
    *,
    quantile: float = DEFAULT_QUANTILE,
    weekly: bool = True,
    reserve: float | None = None,
) -> TideForecast:
    """A forecast for a caller that asks once; see `Forecaster`."""
    return Forecaster(quantile, weekly=weekly).forecast(tide, now_s, horizon_s, reserve)


def _same_past(known: Tide, tide: Tide, start: int, end: int) -> bool:
    if known.peaks is tide.peaks:
        return True
    before = known.peaks[start - known.first_bin : end - known.first_bin]
    return before == tide.peaks[start - tide.first_bin : end - tide.first_bin]


def fit(past: Floats, per_day: int, fitted_bin: int, quantile: float, *, weekly: bool = True) -> _Model:
    """The model of `past`: at least a day of bins, the last of which ends where `fitted_bin` begins.

    Where too little was missed by to tell a quantile, its band is infinitely far.
    """
    # Days are counted from the end. What is missing of the first is lent by the second, and not counted as missed.
    num_lent = -past.size % per_day
    first = past.size % per_day
    days = np.concatenate([past[first : first + num_lent], past]).reshape(-1, per_day)
    num_days = len(days)
    is_told = np.arange(per_day, days.size) >= per_day + num_lent
    candidates = [_median_season(days, span) for span in _SPANS if span < max(2, num_days)]
    candidates += [_smoothed(season) for season in candidates]
    misses = [np.abs((days[1:] - season[1:-1]).ravel()[is_told]).sum() for season in candidates]
    season = candidates[int(np.argmin(misses))]
    if weekly and past.size >= 2 * _DAYS_PER_WEEK * per_day:
        by_week = _weekly_season(days, season)
        last = slice(-_DAYS_PER_WEEK, None)
        if np.abs(days[last] - by_week[:-1][last]).mean() < np.abs(days[last] - season[:-1][last]).mean():
            season = by_week
            first_week = (2 * _DAYS_PER_WEEK - 1) * per_day
            # Before it, the season did not know of weeks: what it missed by says nothing about this one.
            if is_told.size - first_week >= _FEWEST_DAYS * per_day:
                is_told[:first_week] = False
    # The first day has no season before it.
    distance = (days[1:] - season[1:-1]).ravel()
    usual = float(np.abs(distance[is_told]).mean()) if is_told.any() else 0.0
    scale = _scale_by_bin(distance, is_told, per_day, usual)
    ahead, kept, above, below = _misses(distance, is_told, scale, usual, quantile)
    horizons = np.arange(1, per_day + 1)
    return _Model(
        fitted_bin=fitted_bin,
        season=season[-2:].ravel(),
        scale=scale,
        most=_most(days, num_lent),
        kept=np.interp(horizons, ahead, kept) if ahead else np.zeros(per_day),
        above=_between(horizons, ahead, above, math.inf),
        below=_between(horizons, ahead, below, -math.inf),
        usual=usual,
    )


def _median_season(days: Floats, span: int) -> Floats:
    """For every day [day, bin], and the one to come, the median of up to `span` days before it; the first has none."""
    season = np.empty((len(days) + 1, days.shape[1]))
    season[0] = days[0]
    for day in range(1, min(span, len(days) + 1)):
        season[day] = np.median(days[:day], axis=0)
    if len(days) >= span:
        windows = np.lib.stride_tricks.sliding_window_view(days, span, axis=0)
        season[span:] = windows[:, :, 0] if span == 1 else np.median(windows, axis=2)
    return season


def _smoothed(season: Floats) -> Floats:
    """The same, each bin averaged with its neighbours."""
    flat = np.concatenate([season.ravel()[:1], season.ravel(), season.ravel()[-1:]])
    found: Floats = ((flat[:-2] + flat[1:-1] + flat[2:]) / 3.0).reshape(season.shape)
    return found


def _weekly_season(days: Floats, season: Floats) -> Floats:
    """The season with what the same weekday differed by in the weeks before: smoothed, and averaged over the weeks."""
    num_days, per_day = days.shape
    differs = (days - season[:-1]).ravel()
    width = max(1, round(per_day * _WEEKDAY_FRACTION))
    ones = np.ones(2 * width + 1)
    differs = np.convolve(differs, ones, "same") / np.convolve(np.ones(differs.size), ones, "same")
    by_day = differs.reshape(num_days, per_day)
    found = season.copy()
    for day in range(2 * _DAYS_PER_WEEK, num_days + 1):
        # In the first week there was no median of a whole week before.
        weeks = range(day - _DAYS_PER_WEEK, _DAYS_PER_WEEK - 1, -_DAYS_PER_WEEK)
        found[day] += np.mean([by_day[week] for week in weeks], axis=0)
    return found


def _scale_by_bin(distance: Floats, is_told: NDArray[np.bool_], per_day: int, usual: float) -> Floats:
    """How far off it usually is at each time of day, over the bins around it."""
    if not is_told.any():
        return np.ones(per_day)
    total = np.abs(distance * is_told).reshape(-1, per_day).sum(axis=0)
    count = is_told.reshape(-1, per_day).sum(axis=0)
    around = sum(np.roll(total, shift) for shift in range(-2, 3))
    told = sum(np.roll(count, shift) for shift in range(-2, 3))
    by_bin = np.where(told > 0, around / np.maximum(told, 1), usual)
    found: Floats = np.maximum(by_bin, max(_LEAST_SCALE * usual, 1e-9))
    return found


def _faded(distance: Floats) -> Floats:
    """How each moment runs against the season: the mean of the last distances, the newest weighing most."""
    weights = _FADING ** np.arange(_NUM_FADING)
    found: Floats = np.convolve(distance, weights)[: distance.size]
    found /= np.cumsum(weights)[np.minimum(np.arange(distance.size), _NUM_FADING - 1)]
    return found


def _misses(
    distance: Floats, is_told: NDArray[np.bool_], scale: Floats, usual: float, quantile: float
) -> tuple[list[int], list[float], list[float], list[float]]:
    """By horizon: what is kept of how it runs, and the quantiles of what the forecast with that missed by, in scales.

    Conformal: with n misses, the one of rank (n + 1) times the quantile, and infinite where that is more than n. The
    misses of one day are alike, so that it is days which are few: of d days, d / (d + 1) of what may lie beyond does.
    """
    scales = np.tile(scale, len(distance) // len(scale))[is_told]
    distance = distance[is_told]
    num_days = distance.size / len(scale)
    quantile = 1.0 - (1.0 - quantile) * num_days / (num_days + 1.0)
    limit = _OUTLIER * usual
    runs = _faded(np.clip(distance, -limit, limit)) if distance.size else distance
    per_day = len(scale)
    ahead: list[int] = []
    kept: list[float] = []
    above: list[float] = []
    below: list[float] = []
    for horizon in sorted({min(bins, per_day) for bins in _HORIZONS} | {per_day}):
        if horizon >= distance.size:
            break
        before, after = runs[:-horizon], distance[horizon:]
        weight = float(before @ before)
        clipped = np.clip(after, -limit, limit)
        share = min(1.0, max(0.0, float(before @ clipped) / weight)) if weight > 0 else 0.0
        share = min(share, kept[-1]) if kept else share
        missed = np.sort((after - share * before) / scales[horizon:])
        rank = math.ceil((missed.size + 1) * quantile)
        ahead.append(horizon)
        kept.append(share)
        above.append(max(0.0, float(missed[rank - 1])) if rank <= missed.size else math.inf)
        below.append(min(0.0, float(missed[-rank])) if rank <= missed.size else -math.inf)
    return ahead, kept, above, below


def _between(horizons: NDArray[np.int64], ahead: list[int], values: list[float], beyond: float) -> Floats:
    """Values between the horizons that were looked at; the infinite ones reach back to the last that is not."""
    finite = [(at, value) for at, value in zip(ahead, values, strict=True) if math.isfinite(value)]
    if not finite:
        return np.full(len(horizons), beyond)
    found = np.interp(horizons, [at for at, _ in finite], [value for _, value in finite])
    return found


def _most(days: Floats, num_lent: int) -> Floats:
    """For the day to come, the highest of all days at about each time, and what a day was ever above those before it.

    Infinite before the second day is over: nothing has shown by then how far a day may go.
    """
    num_days, per_day = days.shape
    if num_days - bool(num_lent) < 2:
        return np.full(per_day, math.inf)
    width = max(1, round(per_day * _WEEKDAY_FRACTION))
    flat = np.pad(days.ravel(), width, mode="edge")
    around = np.lib.stride_tricks.sliding_window_view(flat, 2 * width + 1).max(axis=1).reshape(num_days, per_day)
    highest = np.maximum.accumulate(around, axis=0)
    margin = max(0.0, float((days[1:] - highest[:-1]).max()))
    found: Floats = highest[-1] + margin
    return found


def _standing(model: _Model, tide: Tide) -> float:
    """How the last bins run against the season, in devices; the open one counts where it is above them already."""
    recent = tide.peaks[-_NUM_FADING:]
    bins = tide.open_bin - len(recent) + np.arange(len(recent))
    distance = np.array(recent, dtype=np.float64) - _season_at(model, bins)
    limit = _OUTLIER * model.usual
    weights = _FADING ** np.arange(len(recent))[::-1]
    standing = float(np.clip(distance, -limit, limit) @ weights / weights.sum())
    now = tide.peak - float(_season_at(model, np.array(tide.open_bin)))
    return max(standing, _FADING * standing + (1 - _FADING) * min(now, limit))


def _season_at(model: _Model, bins: NDArray[np.int64]) -> Floats:
    """The season in these bins: of the day before the fit, or of the day after it, again and again."""
    per_day = len(model.scale)
    offset = bins - model.fitted_bin
    found: Floats = model.season[np.where(offset < 0, offset % per_day, offset % per_day + per_day)]
    return found
