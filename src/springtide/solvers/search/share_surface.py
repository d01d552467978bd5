"""A model of latencies by batch size and share of a device: shapes of an execution model, and deviations from them.

A shape is host time, plus device work that grows with the batch divided by the part of the device that it can use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from springtide.solvers.search.gaussian_process import Fit, Floats, squared_exponential

_NUM_SHAPES = 4096
# The smallest fraction of a device that one sample can use; how much more each doubling of the batch can use, at most.
_LEAST_USABLE, _MOST_GROWTH = 0.1, 0.3
# The largest fraction of a device that one sample could use (above 1: no share is too large for it).
_MOST_USABLE = 1.5
# Work grows with the batch to a power between these, and falls with the share to a power between the next two.
_BATCH_POWERS = (0.6, 1.0)
_SHARE_POWERS = (0.7, 1.2)
# Before the first trial: the smallest latency over the bound, as the median and the deviation of its logarithm.
_SCALE_MEDIAN, _SCALE_DEVIATION = 0.4, 1.0
# Deviations of the logarithm from a shape: smooth ones over doublings of the batch and e-folds of the share, rough ones
# (units of a device are whole, kernels change with the batch), and the noise of a measurement.
_SMOOTH, _SMOOTH_LENGTHS = 0.1, (1.5, 0.7)
_ROUGH, _ROUGH_LENGTHS = 0.06, (0.7, 0.3)
_NOISE = 0.03
# Shapes that are less likely than the most likely one by this factor are ignored.
_LEAST_WEIGHT = 1e-4

# The index in the grid and the logarithm of the latency over the bound, for each setting that was tried.
Seen = Sequence[tuple[int, float]]


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True):
    """Latency of a batch of b on a share s of a device: host + work x (f + (1-f) b^g) / (min(s, usable) / unit)^p.

    host is `host_s` x ((1-h) + h b); usable is `usable` + `usable_growth` x log2(b); unit is min(usable, 1): what one
    sample uses of a whole device. f is `fixed_fraction`, g `batch_power`, p `share_power`, h `host_growth`.
    """

    host_s: float
    host_growth: float
    work_s: float
    fixed_fraction: float
    batch_power: float
    usable: float
    usable_growth: float
    share_power: float

    def latency_s(self, batch_size: int, share: float) -> float:
        usable = self.usable + self.usable_growth * math.log2(batch_size)
        part = (min(share, usable) / min(self.usable, 1.0)) ** self.share_power
        grown = self.fixed_fraction + (1.0 - self.fixed_fraction) * batch_size**self.batch_power
        host = self.host_s * (1.0 - self.host_growth + self.host_growth * batch_size)
        return float(host + self.work_s * grown / part)


class ShapeBelief:
    """Many shapes over a grid of settings, weighted by how well they explain the measurements."""

    def __init__(self, batch_sizes: Floats, shares: Floats) -> None:
        self._draws = _spread(_NUM_SHAPES, 7)
        host, fixed, usable, growth, host_growth, batch_power, share_power = self._draws.T
        self._host = host
        self._fixed = 1.0 - fixed**2
        self._usable = _LEAST_USABLE * (_MOST_USABLE / _LEAST_USABLE) ** usable
        self._growth = _MOST_GROWTH * growth
        self._host_growth = host_growth**2
        self._batch_power = _between(_BATCH_POWERS, batch_power)
        self._share_power = _between(_SHARE_POWERS, share_power)
        # The scale is not fixed: it is the constant part of the covariance.
        self._mean: Floats = math.log(_SCALE_MEDIAN) + self._log_shapes(batch_sizes, shares)
        self._covariance = _covariance(np.log2(batch_sizes), np.log(shares))

    def _log_shapes(self, batch_sizes: Floats, shares: Floats) -> Floats:
        """Logarithms of latencies, those of one sample on a whole device being 0; shape (shapes, settings)."""
        usable = self._usable[:, None] + self._growth[:, None] * np.log2(batch_sizes)[None]
        unit = np.minimum(self._usable, 1.0)[:, None]
        part = (np.minimum(shares[None], usable) / unit) ** self._share_power[:, None]
        grown = self._fixed[:, None] + (1.0 - self._fixed[:, None]) * batch_sizes[None] ** self._batch_power[:, None]
        host = 1.0 - self._host_growth[:, None] + self._host_growth[:, None] * batch_sizes[None]
        return np.asarray(np.log(self._host[:, None] * host + (1.0 - self._host[:, None]) * grown / part))

    def predict(self, seen: Seen) -> tuple[Floats, Floats, Floats]:
        """The mean of the logarithm for each shape (rows) and setting, its deviation for each setting, and the weight
        of each shape.

        The deviation is that of a measurement, noise included.
        """
        variance = np.diag(self._covariance)
        if not seen:
            weight = np.full(len(self._mean), 1.0 / len(self._mean))
            return self._mean, np.sqrt(variance + _NOISE**2), weight
        _, white, half = self._whiten(seen)
        weight = np.exp(-0.5 * (white**2).sum(axis=1) + 0.5 * (white**2).sum(axis=1).min())
        kept = weight > _LEAST_WEIGHT
        mean = self._mean[kept] + white[kept] @ half.T
        left = np.maximum(variance - (half**2).sum(axis=1), 0.0)
        return mean, np.sqrt(left + _NOISE**2), weight[kept] / weight[kept].sum()

    def most_likely(self, seen: Seen, bound_s: float) -> LatencyModel:
        """The shape that explains the measurements best, at their scale."""
        places, white, _ = self._whiten(seen)
        best = int(np.argmin((white**2).sum(axis=1)))
        values = np.array([value for _, value in seen])
        scale_s = bound_s * math.exp(float(np.mean(values - self._mean[best, places]))) * _SCALE_MEDIAN
        return LatencyModel(
            host_s=float(self._host[best]) * scale_s,
            host_growth=float(self._host_growth[best]),
            work_s=(1.0 - float(self._host[best])) * scale_s,
            fixed_fraction=float(self._fixed[best]),
            batch_power=float(self._batch_power[best]),
            usable=float(self._usable[best]),
            usable_growth=float(self._growth[best]),
            share_power=float(self._share_power[best]),
        )

    def _whiten(self, seen: Seen) -> tuple[list[int], Floats, Floats]:
        """The indices of the measured settings, the residuals of each shape as independent values, and the settings'
        covariances with them."""
        places = [place for place, _ in seen]
        values = np.array([value for _, value in seen])
        # All shapes have the same covariance, so one factorization is enough.
        fit = Fit(self._covariance[np.ix_(places, places)], values, np.full(len(places), _NOISE))
        return places, fit.whitened(values[None] - self._mean[:, places]), fit.whitened(self._covariance[:, places])


def _between(bounds: tuple[float, float], fraction: Floats) -> Floats:
    return np.asarray(bounds[0] + (bounds[1] - bounds[0]) * fraction)


def _covariance(doublings: Floats, log_shares: Floats) -> Floats:
    """The covariance of the logarithms between all settings: the free scale, the smooth and the rough deviations."""
    total: Floats = np.full((len(doublings), len(doublings)), _SCALE_DEVIATION**2)
    for deviation, lengths in ((_SMOOTH, _SMOOTH_LENGTHS), (_ROUGH, _ROUGH_LENGTHS)):
        over_batch = squared_exponential((doublings[:, None] - doublings[None]) / lengths[0])
        over_share = squared_exponential((log_shares[:, None] - log_shares[None]) / lengths[1])
        total = total + deviation**2 * over_batch * over_share
    return total


def _spread(count: int, num_dimensions: int) -> Floats:
    """Points spread evenly over the unit cube, always the same: the additive recurrence of the root of x^(d+1) = x + 1.

    Shape (count, num_dimensions).
    """
    root = 2.0
    for _ in range(60):
        root = (1.0 + root) ** (1.0 / (num_dimensions + 1))
    steps = root ** -np.arange(1.0, num_dimensions + 1)
    return np.asarray((0.5 + np.arange(1.0, count + 1)[:, None] * steps[None]) % 1.0)
