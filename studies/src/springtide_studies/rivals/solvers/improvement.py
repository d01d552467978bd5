"""Expected improvement, and distances of points: what searches by Gaussian processes choose their next trial by."""

from __future__ import annotations

import math

import numpy as np

from springtide.solvers.search.gaussian_process import Floats, normal_cdf

_ROOT_2_PI = math.sqrt(2.0 * math.pi)


def distances(left: Floats, right: Floats) -> Floats:
    """How far each row of one array is from each row of the other, shape (rows, rows)."""
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None] - 2.0 * left @ right.T
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


def expected_improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    """How much a normal value is expected to be below `best`, nothing where it is above (SMLT, section 3.2)."""
    ratio = (best - mean) / deviation
    return np.asarray((best - mean) * normal_cdf(ratio) + deviation * np.exp(-0.5 * ratio**2) / _ROOT_2_PI)
