"""Scaling curves: what was measured is believed, and nothing is ever negative."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.perf.curve import fit_scaling


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
