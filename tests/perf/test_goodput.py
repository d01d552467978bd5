"""Goodput: the worth of a larger batch, its split, and the search for the best one."""

from __future__ import annotations

import itertools
import math
import typing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.core.job_parts import GradientNoise
from springtide.core.workload import AdaptiveBatch, LearningRateRule
from springtide.perf.goodput import (
    best_batches,
    efficiency,
    gain,
    learning_rate_factor,
    noise_scale,
    step_total_s,
)
from springtide.perf.throughput import ThroughputModel
from springtide_studies.fapes.truth import split_batch

MODEL = ThroughputModel(alpha_c=0.03, beta_c=0.0007, alpha_n=0.1, beta_n=0.002, alpha_r=0.02, beta_r=0.001, gamma=1.5)
NOISE = GradientNoise(grad_sqr=0.1, grad_var=0.5)
BOUNDS = AdaptiveBatch(min_size=128, max_size=4096, min_local_size=32, max_local_size=256)
PLACEMENTS = [(-(-n // 4), n) for n in range(1, 65)]


def test_gain_is_one_at_the_initial_batch_and_ends_at_one_plus_the_noise():
    assert gain(NOISE, 1.0) == pytest.approx(1.0)
    assert gain(NOISE, 1e9) == pytest.approx(1.0 + 0.5 / 0.1)
    # At the noise scale a step is worth half of the most that it can be.
    assert gain(GradientNoise(grad_sqr=1.0, grad_var=9.0), 9.0) == pytest.approx(5.0)
    assert efficiency(NOISE, [1.0, 2.0, 8.0]) == pytest.approx(gain(NOISE, [1.0, 2.0, 8.0]) / [1.0, 2.0, 8.0])


def test_without_noise_a_larger_batch_is_credited_with_nothing():
    for unknown in (None, GradientNoise(grad_sqr=0.0, grad_var=0.0), GradientNoise(grad_sqr=math.nan, grad_var=1.0)):
        assert gain(unknown, [1.0, 4.0]).tolist() == [1.0, 1.0]
        assert noise_scale(unknown, 128) is None
    assert noise_scale(NOISE, 128) == pytest.approx(640.0)


def test_a_gradient_of_noise_alone_makes_every_sample_count():
    assert gain(GradientNoise(grad_sqr=0.0, grad_var=1.0), 16.0) == pytest.approx(16.0)
    assert noise_scale(GradientNoise(grad_sqr=0.0, grad_var=1.0), 16) is None


@pytest.mark.parametrize(
    ("global_size", "num_workers", "expected"),
    [(128, 1, (128, 1)), (129, 1, (65, 2)), (1024, 1, (256, 4)), (1024, 4, (256, 1)), (1028, 4, (129, 2))],
)
def test_a_batch_is_split_into_as_few_passes_as_fit(global_size, num_workers, expected):
    assert split_batch(global_size, num_workers, BOUNDS, 128) == expected
    assert split_batch(global_size, num_workers, BOUNDS) == expected


def test_a_fixed_batch_is_one_pass():
    assert split_batch(100, 3, None) == (34, 1)


@given(
    num_workers=st.integers(1, 64),
    local=st.integers(1, 64),
    most=st.integers(1, 64),
    least=st.integers(1, 512),
    spread=st.integers(0, 4096),
    var=st.floats(0.0, 100.0),
)
def test_the_choice_lies_within_the_bounds_and_splits_as_told(num_workers, local, most, least, spread, var):
    bounds = AdaptiveBatch(
        min_size=least, max_size=least + spread, min_local_size=min(local, most), max_local_size=max(local, most)
    )
    noise = GradientNoise(grad_sqr=1.0, grad_var=var)
    best = best_batches(MODEL, noise, [(1, num_workers)], bounds, least)
    if best.progress_per_s[0] == 0.0:
        return
    size = int(best.global_batch_size[0])
    assert bounds.min_size <= size <= bounds.max_size
    assert bounds.min_local_size <= best.local_batch_size[0] <= max(local, most)
    assert (best.local_batch_size[0], best.num_passes[0]) == split_batch(size, num_workers, bounds, least)


@pytest.mark.slow
def test_no_batch_within_the_bounds_is_much_better_than_the_choice():
    best = best_batches(MODEL, NOISE, PLACEMENTS, BOUNDS, 128)
    for index, (num_nodes, num_workers) in enumerate(PLACEMENTS):
        most = 0.0
        for size in range(max(128, 32 * num_workers), 4097):
            local, passes = split_batch(size, num_workers, BOUNDS, 128)
            step, sync = MODEL.step_s(num_nodes, num_workers, local)
            most = max(most, float(gain(NOISE, size / 128) / step_total_s(step, sync, passes)))
        assert most * 0.97 <= best.progress_per_s[index] <= most * (1 + 1e-9)


def test_what_cannot_run_within_the_bounds_brings_nothing():
    best = best_batches(MODEL, NOISE, [(1, 1), (33, 129)], BOUNDS, 128)
    assert best.progress_per_s[0] > 0.0
    assert best.progress_per_s[1] == best.goodput_per_s[1] == 0.0


@pytest.mark.parametrize(("bounds", "noise"), [(None, NOISE), (BOUNDS, None)])
def test_fixed_batches_and_jobs_of_unknown_noise_keep_theirs(bounds, noise):
    best = best_batches(MODEL, noise, [(1, 1), (1, 2), (1, 4)], bounds, 128)
    assert best.global_batch_size.tolist() == [128, 128, 128]
    assert best.num_passes.tolist() == [1, 1, 1]
    steps, _ = MODEL.step_s([1, 1, 1], [1, 2, 4], [128, 64, 32])
    assert best.progress_per_s == pytest.approx(1.0 / steps)


def test_more_workers_than_samples_cannot_run_a_fixed_batch():
    assert best_batches(MODEL, NOISE, [(1, 4)], None, 3).progress_per_s.tolist() == [0.0]


def test_the_smallest_shares_demand_a_larger_batch_even_without_noise():
    best = best_batches(MODEL, None, [(2, 8)], BOUNDS, 128)
    assert best.global_batch_size.tolist() == [256]


def test_a_job_counted_in_samples_is_chosen_alike_and_told_in_samples():
    samples = best_batches(MODEL, NOISE, PLACEMENTS, BOUNDS, 128, "samples")
    progress = best_batches(MODEL, NOISE, PLACEMENTS, BOUNDS, 128, "progress")
    assert samples.global_batch_size.tolist() == progress.global_batch_size.tolist()
    assert samples.goodput_per_s == pytest.approx(progress.progress_per_s)
    assert samples.progress_per_s == pytest.approx(samples.global_batch_size / 128 / samples.step_s)


def test_noisier_gradients_are_worth_larger_batches():
    sizes = [
        int(best_batches(MODEL, GradientNoise(grad_sqr=1.0, grad_var=var), [(4, 16)], BOUNDS, 128).global_batch_size[0])
        for var in (0.1, 1.0, 10.0, 100.0)
    ]
    assert all(low <= high for low, high in itertools.pairwise(sizes))
    assert sizes[0] < sizes[-1]


def test_one_call_answers_as_one_by_one_would():
    together = best_batches(MODEL, NOISE, np.array(PLACEMENTS), BOUNDS, 128)
    alone = [best_batches(MODEL, NOISE, [placement], BOUNDS, 128) for placement in PLACEMENTS]
    assert together.progress_per_s.tolist() == [float(best.progress_per_s[0]) for best in alone]


KNOWN_NOISE = GradientNoise(grad_sqr=1.0, grad_var=3.0)
RULES = typing.get_args(LearningRateRule)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("adascale", 4.0 / 1.75), ("none", 1.0)])
def test_each_rule_follows_in_its_way(rule, factor):
    assert learning_rate_factor(rule, KNOWN_NOISE, 4.0) == pytest.approx(factor)


@pytest.mark.parametrize("rule", RULES)
def test_at_the_initial_batch_the_rate_is_as_given(rule):
    assert learning_rate_factor(rule, KNOWN_NOISE, 1.0) == pytest.approx(1.0)
    assert learning_rate_factor(rule, None, 1.0) == pytest.approx(1.0)


def test_adascale_lies_between_none_and_linear_and_waits_for_the_noise():
    for scale in (1.5, 2.0, 8.0, 64.0):
        assert 1.0 < learning_rate_factor("adascale", KNOWN_NOISE, scale) < scale
        assert learning_rate_factor("adascale", None, scale) == 1.0
    quiet, loud = GradientNoise(grad_sqr=1.0, grad_var=0.0), GradientNoise(grad_sqr=0.0, grad_var=1.0)
    assert learning_rate_factor("adascale", quiet, 8.0) == pytest.approx(1.0)
    assert learning_rate_factor("adascale", loud, 8.0) == pytest.approx(8.0)
