"""The seven-parameter model of a step."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from springtide.perf.throughput import ThroughputModel

MODEL = ThroughputModel(alpha_c=0.03, beta_c=0.0007, alpha_n=0.1, beta_n=0.002, alpha_r=0.02, beta_r=0.001, gamma=1.5)


def test_a_step_is_the_norm_of_computation_and_exchange():
    step, sync = MODEL.step_s(2, 6, 64)
    compute, exchange = 0.03 + 0.0007 * 64, 0.1 + 0.002 * 4
    assert step == pytest.approx((compute**1.5 + exchange**1.5) ** (1 / 1.5))
    assert sync == pytest.approx(step - compute)


@pytest.mark.parametrize(
    ("num_nodes", "num_workers", "exchange"), [(1, 1, 0.0), (1, 2, 0.02), (1, 4, 0.022), (2, 2, 0.1)]
)
def test_the_exchange_depends_on_the_slowest_link(num_nodes, num_workers, exchange):
    assert MODEL.exchange_s(num_nodes, num_workers) == pytest.approx(exchange)


def test_one_worker_exchanges_nothing():
    step, sync = MODEL.step_s(1, 1, 100)
    assert step == pytest.approx(0.1)
    assert sync == pytest.approx(0.0, abs=1e-8)


def test_the_overlap_goes_from_none_to_nearly_all():
    none = msgspec.structs.replace(MODEL, gamma=1.0)
    most = msgspec.structs.replace(MODEL, gamma=10.0)
    assert none.step_s(2, 2, 100)[0] == pytest.approx(0.2)
    assert 0.1 < most.step_s(2, 2, 100)[0] < 0.11


def test_shapes_broadcast_and_parameters_survive_json():
    step, sync = MODEL.step_s(np.array([1, 2]), np.array([4, 8]), np.array([[32], [64], [128]]))
    assert step.shape == sync.shape == (3, 2)
    assert msgspec.json.decode(msgspec.json.encode(MODEL), type=ThroughputModel) == MODEL
