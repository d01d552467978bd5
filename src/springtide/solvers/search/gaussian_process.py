"""Gaussian processes in plain numpy: the posterior of noisy observations, and the expected improvement (Rasmussen and
Williams 2006, chapter 2; Jones and others 1998).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Kernel = Callable[[Floats], Floats]

_ROOT_5 = math.sqrt(5.0)
_ROOT_2_PI = math.sqrt(2.0 * math.pi)
# Keeps the matrix of observations of one point, all alike, from being singular.
_JITTER = 1e-10


def squared_exponential(distance: Floats) -> Floats:
    """exp(-d^2/2) of distances in lengths."""
    return np.asarray(np.exp(-0.5 * distance**2))


def matern(distance: Floats) -> Floats:
    """The Matern kernel with nu = 5/2: (1 + sqrt(5) d + 5 d^2/3) exp(-sqrt(5) d) of distances in lengths."""
    scaled = _ROOT_5 * np.abs(distance)
    return np.asarray((1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled))


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """A covariance: a constant for all (`bias` is its standard deviation), and a part that fades with the distance.

    The part of deviation `local` is a product over the coordinates, each with its own length.
    """

    bias: float
    local: float
    lengths: tuple[float, ...]

    def at(self, left: Sequence[Floats], right: Sequence[Floats], shape: Kernel = matern) -> Floats:
        """Between points given coordinate by coordinate, as arrays of shape (..., 1) and (n,): (..., n)."""
        product: Floats = np.asarray(1.0)
        for one, other, length in zip(left, right, self.lengths, strict=True):
            product = product * shape((one - other) / length)
        return np.asarray(self.bias**2 + self.local**2 * product)

    @property
    def variance(self) -> float:
        """Of one point before anything is observed."""
        return self.bias**2 + self.local**2


class Fit:
    """Observations of a process with mean zero: `covariance` among them (n, n), `values` and `noise` deviations (n)."""

    def __init__(self, covariance: Floats, values: Floats, noise: Floats) -> None:
        self.values = values
        matrix = covariance + np.diag(noise**2 + _JITTER)
        self._factor: Floats = np.asarray(np.linalg.cholesky(matrix), dtype=np.float64)
        self._inverse: Floats = np.asarray(np.linalg.inv(self._factor), dtype=np.float64)
        self._white: Floats = self._inverse @ values

    @property
    def log_likelihood(self) -> float:
        """Of the observations (equation 2.30)."""
        return float(
            -0.5 * self._white @ self._white
            - np.log(np.diag(self._factor)).sum()
            - 0.5 * len(self.values) * math.log(2.0 * math.pi)
        )

    def whitened(self, across: Floats) -> Floats:
        """Covariances with the observations as independent ones: what is known of two points is their dot product."""
        return np.asarray(across @ self._inverse.T)

    def posterior(self, across: Floats, variance: float | Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation where the covariance with the observations is `across` (..., n).

        `variance` is that before anything was observed (equations 2.25, 2.26).
        """
        half = self.whitened(across)
        mean = half @ self._white
        left = np.maximum(variance - np.einsum("...n,...n->...", half, half), 1e-12)
        return np.asarray(mean), np.sqrt(left)


def normal_cdf(values: Floats) -> Floats:
    """The standard normal distribution function, to 1e-7 (Abramowitz and Stegun 26.2.17), fast on large arrays."""
    absolute = np.abs(values)
    t = 1.0 / (1.0 + 0.2316419 * absolute)
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail = np.exp(-0.5 * absolute**2) / _ROOT_2_PI * series
    return np.asarray(np.where(values >= 0.0, 1.0 - tail, tail))


def lognormal_improvement(log_mean: Floats, log_deviation: Floats, best: Floats, limit: Floats) -> Floats:
    """E[max(0, best - t); t <= limit] of a time t whose logarithm is normal: what it saves where it is allowed.

    In closed form: best x P(t <= e) - E[t; t <= e] with e = min(best, limit). 0 where nothing can be saved.
    """
    edge = np.minimum(best, limit)
    possible = edge > 0.0
    edge_log = np.log(np.where(possible, edge, 1.0))
    ratio = (edge_log - log_mean) / log_deviation
    expected = np.exp(log_mean + 0.5 * log_deviation**2) * normal_cdf(ratio - log_deviation)
    return np.asarray(np.where(possible, np.maximum(best * normal_cdf(ratio) - expected, 0.0), 0.0))
