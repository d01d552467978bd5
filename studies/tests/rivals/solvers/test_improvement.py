"""Improvement against numeric integration."""

import math

import numpy as np
import pytest

from springtide_studies.rivals.solvers.improvement import distances, expected_improvement


def normal_pdf(x, mean, deviation):
    return np.exp(-0.5 * ((x - mean) / deviation) ** 2) / (deviation * math.sqrt(2 * math.pi))


def test_distances_are_euclidean():
    rng = np.random.default_rng(0)
    left, right = rng.random((5, 3)), rng.random((4, 3))
    expected = np.linalg.norm(left[:, None] - right[None], axis=2)
    assert distances(left, right) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("mean", "deviation", "best"), [(1.0, 0.5, 1.2), (3.0, 0.7, 1.0), (-2.0, 1.5, -2.5)])
def test_expected_improvement_is_the_integral(mean, deviation, best):
    x = np.linspace(mean - 9 * deviation, mean + 9 * deviation, 400_001)
    expected = np.trapezoid(np.maximum(best - x, 0.0) * normal_pdf(x, mean, deviation), x)
    found = expected_improvement(np.array([mean]), np.array([deviation]), best)
    assert found[0] == pytest.approx(expected, abs=2e-6)
