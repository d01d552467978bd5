"""The posterior against a hand computation, improvements against numeric integration."""

import math

import numpy as np
import pytest

from springtide.solvers.search.gaussian_process import (
    Fit,
    Trend,
    lognormal_improvement,
    matern,
    normal_cdf,
    squared_exponential,
)


def normal_pdf(x, mean, deviation):
    return np.exp(-0.5 * ((x - mean) / deviation) ** 2) / (deviation * math.sqrt(2 * math.pi))


def test_the_posterior_of_two_observations_is_that_computed_by_hand():
    # Points 0 and 1, values 1 and -1, unit variance, length 1, noise 0.1; asked at 0.5 and at 3.
    k = math.exp(-0.5)
    noise = 0.1
    a, b = 1.0 + noise**2 + 1e-10, k
    det = a * a - b * b
    weights = [(a * 1.0 - b * -1.0) / det, (-b * 1.0 + a * -1.0) / det]
    expected_mean, expected_deviation = [], []
    for at in (0.5, 3.0):
        k0, k1 = math.exp(-0.5 * at**2), math.exp(-0.5 * (at - 1) ** 2)
        expected_mean.append(k0 * weights[0] + k1 * weights[1])
        explained = (a * k0 * k0 - 2 * b * k0 * k1 + a * k1 * k1) / det
        expected_deviation.append(math.sqrt(1.0 - explained))
    points = np.array([0.0, 1.0])
    trend = Trend(bias=0.0, local=1.0, lengths=(1.0,))
    among = trend.at([points[:, None]], [points], squared_exponential)
    fit = Fit(among, np.array([1.0, -1.0]), np.array([noise, noise]))
    across = trend.at([np.array([0.5, 3.0])[:, None]], [points], squared_exponential)
    mean, deviation = fit.posterior(across, trend.variance)
    assert mean == pytest.approx(expected_mean, abs=1e-9)
    assert deviation == pytest.approx(expected_deviation, abs=1e-9)


def test_the_likelihood_is_that_of_the_normal_distribution():
    covariance = np.array([[1.0, 0.3], [0.3, 1.0]])
    values, noise = np.array([0.4, -0.7]), np.array([0.2, 0.5])
    whole = covariance + np.diag(noise**2)
    expected = (
        -0.5 * values @ np.linalg.solve(whole, values) - 0.5 * math.log(np.linalg.det(whole)) - math.log(2 * math.pi)
    )
    assert Fit(covariance, values, noise).log_likelihood == pytest.approx(expected, abs=1e-8)


def test_far_from_everything_only_the_bias_is_known():
    points = np.array([0.0, 0.1, 0.2])
    trend = Trend(bias=0.5, local=0.2, lengths=(1.0,))
    fit = Fit(trend.at([points[:, None]], [points]), np.full(3, 0.3), np.full(3, 0.01))
    mean, deviation = fit.posterior(trend.at([np.array([[100.0]])], [points]), trend.variance)
    # Most of what was seen is laid to the bias, which is the larger part; what is local is all unknown there.
    assert 0.2 < float(mean[0]) < 0.3
    assert 0.2 < float(deviation[0]) < 0.35


def test_kernels_are_one_at_nothing_and_fall():
    away = np.linspace(0.0, 5.0, 50)
    for kernel in (squared_exponential, matern):
        values = kernel(away)
        assert values[0] == 1.0
        assert (np.diff(values) < 0).all()
        assert (kernel(-away) == values).all()


def test_the_distribution_function_is_accurate():
    values = np.linspace(-6.0, 6.0, 301)
    expected = [0.5 * (1.0 + math.erf(value / math.sqrt(2.0))) for value in values]
    assert normal_cdf(values) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("log_mean", "deviation", "best", "limit"),
    [(0.0, 0.3, 1.2, math.inf), (0.0, 0.3, 1.2, 0.9), (0.5, 0.1, 1.2, 2.0), (0.0, 0.5, 3.0, 1.0)],
)
def test_lognormal_improvement_is_the_integral_up_to_the_limit(log_mean, deviation, best, limit):
    x = np.linspace(log_mean - 9 * deviation, log_mean + 9 * deviation, 400_001)
    t = np.exp(x)
    saved = np.where(t <= limit, np.maximum(best - t, 0.0), 0.0)
    expected = np.trapezoid(saved * normal_pdf(x, log_mean, deviation), x)
    found = lognormal_improvement(np.array([log_mean]), np.array([deviation]), np.array([best]), np.array([limit]))
    assert found[0] == pytest.approx(expected, abs=2e-5)


def test_nothing_is_saved_where_nothing_can_be():
    found = lognormal_improvement(np.zeros(2), np.full(2, 0.2), np.array([-1.0, 2.0]), np.array([5.0, -3.0]))
    assert (found == 0.0).all()
