"""Speed curves: what a profile, measurements or neither say about every number of devices."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.core.decision import JobView
from springtide.core.job_parts import JobBounds, LearntSpeed
from springtide.core.workload import Entrypoint, JobState, TrainingJob, WorkloadId
from springtide.perf.curve import curve_of, fit_scaling, interpolate

PROFILES = st.dictionaries(
    st.integers(1, 64), st.one_of(st.floats(0.01, 1e3), st.just(0.0), st.just(math.nan)), min_size=1, max_size=8
)


def view(profile, *, measured=None, most=64, least=1, elastic=True):
    job = TrainingJob(
        job_id=WorkloadId("job"),
        name="job",
        entrypoint=Entrypoint(source_path="job.py"),
        global_batch_size=10,
        max_workers=most,
        num_virtual_shards=64,
        elastic=elastic,
        profile_steps_per_s=profile,
    )
    return JobView(
        job=job,
        state=JobState.PENDING,
        submitted_at_s=0.0,
        bounds=JobBounds(min_workers=least, max_workers=most),
        learnt=LearntSpeed(throughput_samples_per_s=measured or {}),
    )


def test_between_profiled_counts_the_speed_is_linear():
    assert interpolate({1: 1.0, 2: 2.0, 4: 3.0}, 8) == (0.0, 1.0, 2.0, 2.5, 3.0)
    assert interpolate({1: 1.0, 4: 4.0}, 2) == (0.0, 1.0, 2.0)


def test_what_was_not_measured_is_left_out():
    assert interpolate({1: 1.0, 2: math.nan, 4: 4.0, 8: 0.0}, 64) == (0.0, 1.0, 2.0, 3.0, 4.0)
    assert interpolate({}, 64) == (0.0,)


def test_a_job_that_needs_two_devices_does_not_run_on_one():
    curve = curve_of(view({2: 1.0, 4: 2.0}))
    assert curve.rate(1) == 0.0
    assert curve.sizes == (2, 3, 4)


def test_sizes_that_slow_the_job_down_are_not_worth_having():
    # The shape of ncf on T4: two devices are slower than one.
    curve = curve_of(view({1: 46.9, 2: 37.6, 4: 56.3, 8: 23.2}))
    assert curve.doubling_sizes == (1, 4)
    assert curve.sizes == (1, 3, 4)
    assert curve.source == "profile"


def test_measurements_scale_the_profile():
    curve = curve_of(view({1: 1.0, 2: 1.8}, measured={1: 5.0}))
    assert curve.rate(1) == pytest.approx(0.5)
    assert curve.rate(2) == pytest.approx(0.9)


def test_without_a_profile_measurements_are_fitted_and_without_either_it_is_a_guess():
    assert curve_of(view({}, measured={1: 100.0})).source == "measured"
    guess = curve_of(view({}))
    assert guess.source == "guess"
    assert guess.rate(2) > guess.rate(1) > 0


def test_bounds_in_force_bound_the_sizes():
    assert curve_of(view({1: 1.0, 64: 64.0}, least=3, most=5)).sizes == (3, 4, 5)


@given(PROFILES, st.integers(1, 64))
def test_every_size_is_faster_than_every_smaller_one(profile, most):
    curve = curve_of(view(profile, most=most))
    rates = [curve.rate(n) for n in curve.sizes]
    assert all(low < high for low, high in itertools.pairwise(rates))
    assert all(1 <= n <= most for n in curve.sizes)
    assert len(curve.steps_per_s) <= most + 1 or curve.source == "guess"


def test_without_measurements_only_the_shape_means_anything():
    curve = fit_scaling({})
    assert not curve.is_measured
    assert curve.speedup(1) == 1.0
    assert 1.0 < curve.speedup(2) < 2.0


def test_two_sizes_determine_both_parts():
    curve = fit_scaling({1: 100.0, 4: 250.0})
    assert curve.samples_per_s(1) == pytest.approx(100.0, rel=0.05)
    assert curve.samples_per_s(4) == pytest.approx(250.0, rel=0.05)
    assert curve.samples_per_s(2) == pytest.approx(166.0, rel=0.1)


def test_one_size_takes_the_scale_and_keeps_the_prior_shape():
    curve = fit_scaling({2: 500.0})
    assert curve.samples_per_s(2) == pytest.approx(500.0, rel=0.05)
    assert curve.speedup(4) > curve.speedup(2) > 1.0


@given(st.dictionaries(st.integers(1, 16), st.floats(1e-3, 1e6), min_size=1, max_size=6))
def test_any_measurements_give_a_curve_that_never_falls(throughput):
    curve = fit_scaling(throughput)
    rates = [curve.samples_per_s(count) for count in range(1, 17)]
    assert rates[0] > 0
    assert all(later >= earlier * 0.999 for earlier, later in itertools.pairwise(rates))
