"""Linear interpolation of a function of a few variables between scattered points, by SciPy's triangulation."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from springtide.core.errors import InvalidRequest


class LinearSurface:
    """Values of shape [K, V] at points of shape [K, D], interpolated barycentrically (Qhull's Delaunay simplices).

    Outside of the hull of the points it takes the value of the nearest one, distances counted in spans of each axis.
    Raises InvalidRequest if SciPy is not installed.
    """

    def __init__(self, points: ArrayLike, values: ArrayLike) -> None:
        if importlib.util.find_spec("scipy") is None:
            raise InvalidRequest(
                "interpolating measurements needs SciPy; install it with pip install springtide[solvers]"
            )
        interpolate: Any = importlib.import_module("scipy.interpolate")
        self._points = np.asarray(points, dtype=float)
        self._values = np.asarray(values, dtype=float)
        span = np.ptp(self._points, axis=0)
        self._span = np.where(span > 0.0, span, 1.0)
        self._inside: Any = interpolate.LinearNDInterpolator(self._points, self._values)

    def at(self, point: ArrayLike) -> NDArray[np.float64]:
        """The values [V] at one point [D]."""
        where = np.asarray(point, dtype=float)
        found: NDArray[np.float64] = self._inside(where[None, :])[0]
        if np.isfinite(found).all():
            return found
        distances = (((self._points - where) / self._span) ** 2).sum(axis=1)
        nearest: NDArray[np.float64] = self._values[int(np.argmin(distances))]
        return nearest
