"""The noise scale: estimates against gradients whose noise is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from springtide.perf.noise_scale import NoiseMeter, NoiseSample, sample_noise

NUM_PARAMETERS = 400
TRUE_SQR = 2.0
TRUE_TRACE = 50.0


def gradients(rng, sizes):
    """Mean gradients over so many samples each, of |G|^2 and tr(Sigma) as above."""
    true = np.full(NUM_PARAMETERS, math.sqrt(TRUE_SQR / NUM_PARAMETERS))
    deviation = math.sqrt(TRUE_TRACE / NUM_PARAMETERS)
    return [true + rng.normal(0.0, deviation / math.sqrt(size), NUM_PARAMETERS) for size in sizes]


def measured(rng, sizes, num_steps, initial=8):
    meter = NoiseMeter()
    for _ in range(num_steps):
        parts = gradients(rng, sizes)
        whole = np.average(parts, axis=0, weights=sizes)
        sample = sample_noise([float(part @ part) for part in parts], sizes, float(whole @ whole))
        meter = meter.update(sample, scale=sum(sizes) / initial)
    return meter


@pytest.mark.parametrize("sizes", [(8, 8), (4, 4, 4, 4), (8, 8, 5), (16, 1)])
def test_both_parts_come_out_for_equal_and_unequal_shares(sizes):
    noise = measured(np.random.default_rng(7), sizes, 400).noise(8)
    assert noise.grad_sqr == pytest.approx(TRUE_SQR, rel=0.1)
    assert noise.grad_var == pytest.approx(TRUE_TRACE / 8, rel=0.1)


def test_the_answer_does_not_depend_on_how_a_batch_is_split():
    few = measured(np.random.default_rng(1), (32, 32), 800).noise(8)
    many = measured(np.random.default_rng(2), (4,) * 16, 800).noise(8)
    assert few.grad_var / few.grad_sqr == pytest.approx(many.grad_var / many.grad_sqr, rel=0.1)


def test_single_steps_are_unbiased_even_where_they_come_out_negative():
    rng = np.random.default_rng(3)
    samples = []
    for _ in range(4000):
        parts = gradients(rng, (1, 1))
        whole = (parts[0] + parts[1]) / 2
        samples.append(sample_noise([float(p @ p) for p in parts], (1, 1), float(whole @ whole)))
    assert min(sample.grad_sqr for sample in samples) < 0.0
    assert np.mean([sample.grad_sqr for sample in samples]) == pytest.approx(TRUE_SQR, rel=0.1)
    assert np.mean([sample.trace for sample in samples]) == pytest.approx(TRUE_TRACE, rel=0.05)


def test_what_says_nothing_changes_nothing():
    assert sample_noise([1.0], [8], 1.0) is None
    assert sample_noise([1.0, 2.0], [8, 0], 1.0) is None
    assert sample_noise([1.0, math.inf], [8, 8], 1.0) is None
    meter = NoiseMeter().update(NoiseSample(grad_sqr=1.0, trace=8.0))
    assert meter.update(None) is meter
    assert NoiseMeter().noise(8) is None


def test_the_first_sample_counts_whole_and_later_ones_replace_it():
    meter = NoiseMeter().update(NoiseSample(grad_sqr=1.0, trace=8.0))
    assert meter.noise(8).grad_sqr == pytest.approx(1.0)
    assert meter.noise(8).grad_var == pytest.approx(1.0)
    for _ in range(10_000):
        meter = meter.update(NoiseSample(grad_sqr=0.5, trace=16.0))
    assert meter.noise(8).grad_sqr == pytest.approx(0.5, rel=1e-3)
    assert meter.noise(8).grad_var == pytest.approx(2.0, rel=1e-3)


def test_a_larger_batch_forgets_faster_but_never_all_at_once():
    start = NoiseMeter().update(NoiseSample(grad_sqr=1.0, trace=8.0))
    new = NoiseSample(grad_sqr=3.0, trace=8.0)
    small, large = (start.update(new, scale=scale).noise(8).grad_sqr for scale in (1.0, 1e6))
    assert small == pytest.approx(2.0, rel=1e-3)
    assert small < large < 3.0


def test_an_average_below_zero_is_zero():
    meter = NoiseMeter().update(NoiseSample(grad_sqr=-1.0, trace=8.0))
    assert meter.noise(8).grad_sqr == 0.0
    assert NoiseMeter().update(NoiseSample(grad_sqr=-1.0, trace=-1.0)).noise(8) is None
