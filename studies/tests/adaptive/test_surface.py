"""Linear between scattered points, the nearest beyond them."""

from __future__ import annotations

import numpy as np
import pytest

from springtide_studies.adaptive.surface import LinearSurface

pytest.importorskip("scipy", reason="the interpolation is an extra")
POINTS = np.array([(x, y, z) for x in (0.0, 1.0, 4.0) for y in (0.0, 2.0) for z in (0.0, 10.0)])


def plane(point: np.ndarray) -> np.ndarray:
    return np.stack([1.0 + point @ [1.0, 2.0, 3.0], point @ [0.0, 0.5, -1.0]], axis=-1)


def test_a_plane_is_found_everywhere_inside() -> None:
    surface = LinearSurface(POINTS, plane(POINTS))
    for point in ([0.5, 1.0, 5.0], [3.0, 0.1, 9.0], [4.0, 2.0, 10.0]):
        assert surface.at(point) == pytest.approx(plane(np.array(point)))


def test_beyond_the_hull_it_is_the_nearest_point_by_spans() -> None:
    surface = LinearSurface(POINTS, plane(POINTS))
    assert surface.at([5.0, 2.0, 10.0]) == pytest.approx(plane(np.array([4.0, 2.0, 10.0])))
    # Half the span along the last axis is 5; along the first, 1 is a quarter: the nearer one is (0, 0, 0).
    assert surface.at([-1.0, 0.0, 4.0]) == pytest.approx(plane(np.array([0.0, 0.0, 0.0])))
