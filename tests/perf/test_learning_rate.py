"""The rules by which the learning rate follows the batch."""

from __future__ import annotations

import typing

import pytest

from springtide.core.decision import GradientNoise
from springtide.core.workload import LearningRateRule
from springtide.perf.goodput import learning_rate_factor

NOISE = GradientNoise(grad_sqr=1.0, grad_var=3.0)
RULES = typing.get_args(LearningRateRule)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("adascale", 4.0 / 1.75), ("none", 1.0)])
def test_each_rule_follows_in_its_way(rule, factor):
    assert learning_rate_factor(rule, NOISE, 4.0) == pytest.approx(factor)


@pytest.mark.parametrize("rule", RULES)
def test_at_the_initial_batch_the_rate_is_as_given(rule):
    assert learning_rate_factor(rule, NOISE, 1.0) == pytest.approx(1.0)
    assert learning_rate_factor(rule, None, 1.0) == pytest.approx(1.0)


def test_adascale_lies_between_none_and_linear_and_waits_for_the_noise():
    for scale in (1.5, 2.0, 8.0, 64.0):
        assert 1.0 < learning_rate_factor("adascale", NOISE, scale) < scale
        assert learning_rate_factor("adascale", None, scale) == 1.0
    quiet, loud = GradientNoise(grad_sqr=1.0, grad_var=0.0), GradientNoise(grad_sqr=0.0, grad_var=1.0)
    assert learning_rate_factor("adascale", quiet, 8.0) == pytest.approx(1.0)
    assert learning_rate_factor("adascale", loud, 8.0) == pytest.approx(8.0)
