"""What tenants of the modelled GPU run: iterations cut from a measured latency, and arrivals of each kind."""

from __future__ import annotations

import numpy as np
import pytest

from springtide_studies.dilu.gpu_execution_work import (
    bursty_arrivals,
    gamma_arrivals,
    percentile,
    plan_iteration,
    poisson_arrivals,
)
from springtide_studies.dilu.share_latency import ShareLatency

LATENCY = ShareLatency(host_s=0.006, work_s=0.001, work_per_item_s=0.002, saturation=0.25, saturation_per_doubling=0.1)


def test_an_iteration_takes_what_the_latency_says() -> None:
    plan = plan_iteration(LATENCY, 4)
    assert plan.alone_s == pytest.approx(LATENCY.latency_s(4, 1.0))
    assert plan.device_s == pytest.approx(LATENCY.device_s(4))
    assert {kernel.sm_fraction for kernel in plan.kernels} == {LATENCY.saturation_at(4)}
    assert plan.kernels[0].duration_s == pytest.approx(0.001, rel=0.05)


def test_a_training_step_has_three_passes_and_waits_for_its_collective() -> None:
    plan = plan_iteration(LATENCY, 4, passes=3.0, idle_fraction=0.2)
    assert plan.device_s == pytest.approx(3 * LATENCY.device_s(4))
    assert plan.idle_s / plan.alone_s == pytest.approx(0.2)


def gaps_of(arrivals: tuple[float, ...]) -> np.ndarray:
    return np.diff(np.array(arrivals))


@pytest.mark.parametrize("variation", [1.0, 3.0, 6.0])
def test_gamma_gaps_have_the_rate_and_the_variation_asked_for(variation: float) -> None:
    gaps = gaps_of(gamma_arrivals(np.random.default_rng(1), 100.0, 3000.0, variation))
    assert gaps.mean() == pytest.approx(0.01, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_arrivals_are_within_the_horizon_and_seeded() -> None:
    arrivals = poisson_arrivals(np.random.default_rng(2), 50.0, 10.0)
    assert arrivals[0] > 0.0
    assert arrivals[-1] < 10.0
    assert arrivals == poisson_arrivals(np.random.default_rng(2), 50.0, 10.0)


def test_a_burst_is_four_times_the_calm_rate() -> None:
    arrivals = np.array(bursty_arrivals(np.random.default_rng(3), 100.0, 800.0))
    assert len(arrivals) == pytest.approx(80_000, rel=0.03)
    phase = arrivals / 8.0 % 1.0
    in_burst = ((phase >= 0.25) & (phase < 0.5)).sum()
    assert in_burst / (len(arrivals) - in_burst) == pytest.approx(4 / 3, rel=0.05)


def test_percentiles() -> None:
    values = [float(number) for number in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.95), percentile([], 0.5)) == (50.0, 95.0, 0.0)
