"""Forecasts of the tide: how many devices services will need in the coming bins, with bands from past errors.

The forecast is a seasonal profile (of a day, or of a week once two weeks are known) plus a fading part of today's
deviation from it. The bands are quantiles of the errors of such forecasts in the past, for each horizon.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.tide import MAX_DAYS, Tide

Floats = NDArray[np.float64]

DEFAULT_QUANTILE = 0.95
# The season is the median over this many days; the span with the smallest past errors is chosen. One day follows any
# change at once, seven contain every weekday once, fourteen vary least.
_SPANS = (1, 3, 7, 14)
_DAYS_PER_WEEK = 7
# Once this many days have had a weekly season, only their errors are used for it.
_FEWEST_DAYS = 3
# Differences of a weekday are smoothed over this fraction of a day to both sides, because few weeks are known.
_WEEKDAY_FRACTION = 1 / 24
# Today's deviation is the mean of the last bins' deviations from the season; the weights fall by this factor per bin.
_FADING = 0.6
_NUM_FADING = 12
# Past errors are computed for these horizons, in bins; between them they are interpolated.
_HORIZONS = (1, 2, 4, 8, 16, 32, 64, 96)
# How often a day the model is fitted again; today's deviation is updated in every bin.
_FITS_PER_DAY = 24
# The scale of errors at any time of day is at least this fraction of the overall one.
_LEAST_SCALE = 0.25
# Deviations are clipped at this many times the usual one: larger ones are special events, not the day's course.
_OUTLIER = 6.0


class TideForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The needed devices in bin `first_bin` (the open one) and the following bins, each as the maximum within the bin.

    The need of a bin is at most `upper` with the probability of the quantile, and at least `lower` with the same
    probability. `most` is the highest need of all days at about that time, plus the largest excess of any day over all
    earlier ones, plus today's excess. If `is_known` is false, less than a day is known; if `has_bands` is false, there
    are no past errors yet. In both cases the bands are 0 and the caller's reserve. `num_days` counts whole known days.
    An instant after the last bin counts as the last bin.
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
        """The index of the bin of an instant; the first bin for past ones, the last bin for later ones."""
        return max(0, min(int(at_s // self.bin_s) - self.first_bin, len(self.expected) - 1))

    def highest(self, from_s: float, until_s: float) -> float:
        """The highest upper band between two instants, in devices."""
        first = self.index_at(from_s)
        return max(self.upper[first : max(first, self.index_at(until_s)) + 1])


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    """The fit at `fitted_bin`: arrays by bin of a day that starts there; `season` starts a day earlier."""

    fitted_bin: int
    season: Floats
    scale: Floats
    most: Floats
    # By horizon: the remaining fraction of today's deviation, and the quantiles of past errors, in units of `scale`.
    kept: Floats
    above: Floats
    below: Floats
    # The mean deviation from the season, in devices.
    usual: float


class Forecaster:
    """Forecasts for one quantile. The last model is kept only for speed: the same tide and bins give the same."""

    def __init__(self, quantile: float = DEFAULT_QUANTILE, *, weekly: bool = True) -> None:
        self.quantile = quantile
        self.weekly = weekly
        self._fitted: tuple[Tide, int, _Model] | None = None
        self._last_forecast: tuple[Tide, int, int, float, TideForecast] | None = None

    def forecast(self, tide: Tide, now_s: float, horizon_s: float, reserve: float | None = None) -> TideForecast:
        """Forecast the need of services from the bin of `now_s` up to `now_s + horizon_s`.

        `reserve` is the most that services can ever need; unknown upper bands are set to it (None: infinite). If the
        tide ends before `now_s`, its last level is assumed since then.
        """
        if tide.level is not None and tide.bin_at(now_s) > tide.open_bin:
            tide = tide.noted(now_s, tide.level)
        first = tide.open_bin if tide.level is not None else tide.bin_at(now_s)
        num_bins = max(1, tide.bin_at(now_s + horizon_s) - first + 1)
        most = math.inf if reserve is None else reserve
        last = self._last_forecast
        if last is not None and last[0] is tide and last[1:4] == (first, num_bins, most):
            return last[4]
        found = self._forecast(tide, first, num_bins, most)
        self._last_forecast = (tide, first, num_bins, most, found)
        return found

    def _forecast(self, tide: Tide, first: int, num_bins: int, reserve: float) -> TideForecast:
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
        expected = _season_at(model, bins) + model.kept[ahead - 1] * _todays_deviation(model, tide)
        upper = np.minimum(expected + model.above[ahead - 1] * model.scale[days], reserve)
        lower = np.maximum(expected + model.below[ahead - 1] * model.scale[days], 0.0)
        # If today's need is above all earlier days, it may stay so.
        most = model.most[days] + max(0.0, level - float(model.most[days[0]]))
        most = np.minimum(most, reserve)
        # The present need is known.
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
        """The model of the last bin at which one is fitted, from the past up to it."""
        per_day = tide.bins_per_day
        every = max(1, per_day // _FITS_PER_DAY)
        fitted_bin = tide.open_bin - tide.open_bin % every
        # The oldest bins are dropped one by one; start where the past stays the same until the next fit.
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
    """One forecaster, with its fitted model, per quantile and kind of season."""

    def __init__(self) -> None:
        self._known: dict[tuple[float, bool], Forecaster] = {}

    def of(self, quantile: float, *, weekly: bool) -> Forecaster:
        """The forecaster for this quantile, with or without weekly seasons."""
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
    """A single forecast; see `Forecaster`."""
    return Forecaster(quantile, weekly=weekly).forecast(tide, now_s, horizon_s, reserve)


def _same_past(known: Tide, tide: Tide, start: int, end: int) -> bool:
    if known.peaks is tide.peaks:
        return True
    before = known.peaks[start - known.first_bin : end - known.first_bin]
    return before == tide.peaks[start - tide.first_bin : end - tide.first_bin]


def fit(past: Floats, per_day: int, fitted_bin: int, quantile: float, *, weekly: bool = True) -> _Model:
    """Fit the model to `past`: at least a day of bins, the last of which ends where `fitted_bin` begins.

    Where there are too few past errors for the quantile, the band is infinite.
    """
    # Days are counted from the end. Missing bins of the first day are copied from the second, without counting as
    # errors.
    num_copied = -past.size % per_day
    first = past.size % per_day
    days = np.concatenate([past[first : first + num_copied], past]).reshape(-1, per_day)
    num_days = len(days)
    is_measured = np.arange(per_day, days.size) >= per_day + num_copied
    candidates = [_median_season(days, span) for span in _SPANS if span < max(2, num_days)]
    candidates += [_smoothed(season) for season in candidates]
    total_errors = [np.abs((days[1:] - season[1:-1]).ravel()[is_measured]).sum() for season in candidates]
    season = candidates[int(np.argmin(total_errors))]
    if weekly and past.size >= 2 * _DAYS_PER_WEEK * per_day:
        by_week = _weekly_season(days, season)
        last = slice(-_DAYS_PER_WEEK, None)
        if np.abs(days[last] - by_week[:-1][last]).mean() < np.abs(days[last] - season[:-1][last]).mean():
            season = by_week
            first_week = (2 * _DAYS_PER_WEEK - 1) * per_day
            # Before its first week the season was not weekly, so earlier errors do not count for it.
            if is_measured.size - first_week >= _FEWEST_DAYS * per_day:
                is_measured[:first_week] = False
    # The first day has no season.
    distance = (days[1:] - season[1:-1]).ravel()
    usual = float(np.abs(distance[is_measured]).mean()) if is_measured.any() else 0.0
    scale = _scale_by_bin(distance, is_measured, per_day, usual)
    ahead, kept, above, below = _error_quantiles(distance, is_measured, scale, usual, quantile)
    horizons = np.arange(1, per_day + 1)
    return _Model(
        fitted_bin=fitted_bin,
        season=season[-2:].ravel(),
        scale=scale,
        most=_most(days, num_copied),
        kept=np.interp(horizons, ahead, kept) if ahead else np.zeros(per_day),
        above=_between(horizons, ahead, above, math.inf),
        below=_between(horizons, ahead, below, -math.inf),
        usual=usual,
    )


def _median_season(days: Floats, span: int) -> Floats:
    """For every day [day, bin], and the next one, the median of up to `span` days before it; the first day has none."""
    season = np.empty((len(days) + 1, days.shape[1]))
    season[0] = days[0]
    for day in range(1, min(span, len(days) + 1)):
        season[day] = np.median(days[:day], axis=0)
    if len(days) >= span:
        windows = np.lib.stride_tricks.sliding_window_view(days, span, axis=0)
        season[span:] = windows[:, :, 0] if span == 1 else np.median(windows, axis=2)
    return season


def _smoothed(season: Floats) -> Floats:
    """The season with each bin averaged with its neighbours."""
    flat = np.concatenate([season.ravel()[:1], season.ravel(), season.ravel()[-1:]])
    found: Floats = ((flat[:-2] + flat[1:-1] + flat[2:]) / 3.0).reshape(season.shape)
    return found


def _weekly_season(days: Floats, season: Floats) -> Floats:
    """The season plus the smoothed mean difference of the same weekday in earlier weeks."""
    num_days, per_day = days.shape
    differs = (days - season[:-1]).ravel()
    width = max(1, round(per_day * _WEEKDAY_FRACTION))
    ones = np.ones(2 * width + 1)
    differs = np.convolve(differs, ones, "same") / np.convolve(np.ones(differs.size), ones, "same")
    by_day = differs.reshape(num_days, per_day)
    found = season.copy()
    for day in range(2 * _DAYS_PER_WEEK, num_days + 1):
        # The first week is left out: it has no median of a whole week before it.
        weeks = range(day - _DAYS_PER_WEEK, _DAYS_PER_WEEK - 1, -_DAYS_PER_WEEK)
        found[day] += np.mean([by_day[week] for week in weeks], axis=0)
    return found


def _scale_by_bin(distance: Floats, is_measured: NDArray[np.bool_], per_day: int, usual: float) -> Floats:
    """The mean absolute error at each time of day, over the bins around it."""
    if not is_measured.any():
        return np.ones(per_day)
    total = np.abs(distance * is_measured).reshape(-1, per_day).sum(axis=0)
    count = is_measured.reshape(-1, per_day).sum(axis=0)
    around = sum(np.roll(total, shift) for shift in range(-2, 3))
    counts = sum(np.roll(count, shift) for shift in range(-2, 3))
    by_bin = np.where(counts > 0, around / np.maximum(counts, 1), usual)
    found: Floats = np.maximum(by_bin, max(_LEAST_SCALE * usual, 1e-9))
    return found


def _faded(distance: Floats) -> Floats:
    """The weighted mean of the last deviations from the season at each bin, with the newest weighted most."""
    weights = _FADING ** np.arange(_NUM_FADING)
    found: Floats = np.convolve(distance, weights)[: distance.size]
    found /= np.cumsum(weights)[np.minimum(np.arange(distance.size), _NUM_FADING - 1)]
    return found


def _error_quantiles(
    distance: Floats, is_measured: NDArray[np.bool_], scale: Floats, usual: float, quantile: float
) -> tuple[list[int], list[float], list[float], list[float]]:
    """By horizon: the remaining fraction of today's deviation, and the quantiles of the errors with it, in scales.

    Conformal quantiles: of n errors, the one of rank (n + 1) times the quantile; infinite if that is more than n. The
    errors within a day are correlated, so the quantile is also corrected for the number d of days: the probability
    beyond it is multiplied by d / (d + 1).
    """
    scales = np.tile(scale, len(distance) // len(scale))[is_measured]
    distance = distance[is_measured]
    num_days = distance.size / len(scale)
    quantile = 1.0 - (1.0 - quantile) * num_days / (num_days + 1.0)
    limit = _OUTLIER * usual
    deviations = _faded(np.clip(distance, -limit, limit)) if distance.size else distance
    per_day = len(scale)
    ahead: list[int] = []
    kept: list[float] = []
    above: list[float] = []
    below: list[float] = []
    for horizon in sorted({min(bins, per_day) for bins in _HORIZONS} | {per_day}):
        if horizon >= distance.size:
            break
        before, after = deviations[:-horizon], distance[horizon:]
        weight = float(before @ before)
        clipped = np.clip(after, -limit, limit)
        share = min(1.0, max(0.0, float(before @ clipped) / weight)) if weight > 0 else 0.0
        share = min(share, kept[-1]) if kept else share
        errors = np.sort((after - share * before) / scales[horizon:])
        rank = math.ceil((errors.size + 1) * quantile)
        ahead.append(horizon)
        kept.append(share)
        above.append(max(0.0, float(errors[rank - 1])) if rank <= errors.size else math.inf)
        below.append(min(0.0, float(errors[-rank])) if rank <= errors.size else -math.inf)
    return ahead, kept, above, below


def _between(horizons: NDArray[np.int64], ahead: list[int], values: list[float], beyond: float) -> Floats:
    """Interpolate values between horizons. Infinite ones are replaced by the last finite value before them."""
    finite = [(at, value) for at, value in zip(ahead, values, strict=True) if math.isfinite(value)]
    if not finite:
        return np.full(len(horizons), beyond)
    found = np.interp(horizons, [at for at, _ in finite], [value for _, value in finite])
    return found


def _most(days: Floats, num_copied: int) -> Floats:
    """For the next day, the highest need of all days at about each time, plus the largest excess over earlier days.

    Infinite until two whole days are known.
    """
    num_days, per_day = days.shape
    if num_days - bool(num_copied) < 2:
        return np.full(per_day, math.inf)
    width = max(1, round(per_day * _WEEKDAY_FRACTION))
    flat = np.pad(days.ravel(), width, mode="edge")
    around = np.lib.stride_tricks.sliding_window_view(flat, 2 * width + 1).max(axis=1).reshape(num_days, per_day)
    highest = np.maximum.accumulate(around, axis=0)
    margin = max(0.0, float((days[1:] - highest[:-1]).max()))
    found: Floats = highest[-1] + margin
    return found


def _todays_deviation(model: _Model, tide: Tide) -> float:
    """Today's deviation from the season, in devices, from the last bins; the open bin counts only if it is higher."""
    recent = tide.peaks[-_NUM_FADING:]
    bins = tide.open_bin - len(recent) + np.arange(len(recent))
    distance = np.array(recent, dtype=np.float64) - _season_at(model, bins)
    limit = _OUTLIER * model.usual
    weights = _FADING ** np.arange(len(recent))[::-1]
    deviation = float(np.clip(distance, -limit, limit) @ weights / weights.sum())
    now = tide.peak - float(_season_at(model, np.array(tide.open_bin)))
    return max(deviation, _FADING * deviation + (1 - _FADING) * min(now, limit))


def _season_at(model: _Model, bins: NDArray[np.int64]) -> Floats:
    """The season in these bins: of the day before the fit, or of the day after it, repeated."""
    per_day = len(model.scale)
    offset = bins - model.fitted_bin
    found: Floats = model.season[np.where(offset < 0, offset % per_day, offset % per_day + per_day)]
    return found
