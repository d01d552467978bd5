"""The distribution of errors: the mathematics, and how well it covers worlds that it was not written for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from springtide.core.job_parts import JobOutcome
from springtide.perf.calibration import (
    ErrorDistribution,
    FailureRate,
    FinishRisk,
    SpeedErrors,
    normal_score,
    t_value,
)

# Quantiles of Student's t with five degrees of freedom, from tables.
T_QUANTILES = {0.75: 0.7267, 0.9: 1.4759, 0.975: 2.5706, 0.99: 3.3649}


def outcome(family: str, error: float) -> JobOutcome:
    return JobOutcome(family=family, basis="declared", error=error, device_hours=1.0)


def covered(seed: int, num: int, *, shift: float = 0.0) -> np.ndarray:
    """The probabilities that outcomes had when they came, in a world whose speeds fall by `shift` half-way."""
    rng = np.random.default_rng(seed)
    levels, errors, found = rng.normal(0.1, 0.3, 20), SpeedErrors(), []
    for index in range(num):
        family = int(rng.integers(20))
        error = levels[family] + 0.07 * rng.standard_t(4) + (shift if index >= num // 2 else 0.0)
        found.append(errors.expected(str(family), "declared").probability(error))
        errors.learn(outcome(str(family), error))
    return np.array(found)


@pytest.mark.parametrize(("probability", "value"), T_QUANTILES.items())
def test_scores_follow_the_t_of_the_tables(probability: float, value: float) -> None:
    said = ErrorDistribution(location=0.0, scale=1.0)
    assert said.probability(value) == pytest.approx(probability, abs=0.002)
    assert t_value(normal_score(-value)) == pytest.approx(-value)


def test_quantiles_and_probabilities_undo_each_other() -> None:
    said = ErrorDistribution(location=0.2, scale=0.1, scores=(-0.3, 0.1, 0.4, 2.0))
    for level in np.linspace(0.01, 0.99, 25):
        assert said.probability(said.quantile(level)) == pytest.approx(level)
    assert (said.probability(-math.inf), said.probability(math.inf)) == (0.0, 1.0)


def test_outcomes_fall_below_each_quantile_as_often_as_it_says() -> None:
    found = covered(3, 500)[100:]
    for level in (0.1, 0.5, 0.9, 0.99):
        assert np.mean(found <= level) == pytest.approx(level, abs=0.03)


def test_a_change_of_all_speeds_is_believed_after_some_jobs() -> None:
    found = covered(4, 400, shift=0.2)[200:]
    assert np.mean(found[:8] <= 0.9) < 0.5
    assert np.mean(found[30:] <= 0.9) == pytest.approx(0.9, abs=0.06)
    assert np.mean(found[30:] <= 0.5) == pytest.approx(0.5, abs=0.12)


def test_a_family_is_known_by_its_own_runs_and_a_new_one_by_the_others() -> None:
    errors = SpeedErrors(outcome(f"f{n % 10}", 0.1 * (n % 10) + 0.001 * n) for n in range(60))
    assert errors.expected("f7", "declared").location == pytest.approx(0.73, abs=0.05)
    known, new = errors.expected("f7", "declared"), errors.expected("another", "declared")
    assert new.scale > 3 * known.scale
    assert errors.expected("f7", "fitted").location == 0.0


def test_failures_are_a_gamma_poisson() -> None:
    chances = dict(FailureRate(failures=2.0, device_hours=50.0).counts(100.0))
    assert sum(chances.values()) == pytest.approx(1.0, abs=1e-5)
    assert sum(count * chance for count, chance in chances.items()) == pytest.approx(4.0, rel=1e-3)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_a_plan_slower_by_the_factor_keeps_its_level(level: float) -> None:
    error = ErrorDistribution(location=0.05, scale=0.1)
    risk = FinishRisk(error=error, failures=FailureRate(failures=5.0, device_hours=500.0), lost_s=60.0)
    factor = risk.slow_factor(level, 3600.0, 8)
    assert risk.kept(3600.0, 3600.0 * factor, 8) == pytest.approx(level, abs=1e-4)
    assert factor >= math.exp(error.quantile(level))
    assert risk.kept(3600.0, 0.0, 8) == 0.0
