"""The shares of the study's models follow the paper's rules."""

from __future__ import annotations

import pytest

from springtide_studies.dilu.collocation_models import GpuModel, builtin_models, inference_share, training_share
from springtide_studies.dilu.gpu_execution_work import plan_iteration
from springtide_studies.dilu.share_latency import ShareLatency

MODEL = GpuModel(name="model", latency=ShareLatency(host_s=0.006, work_s=0.0, work_per_item_s=0.0025, saturation=0.5))


def test_the_share_of_an_inference_is_the_most_efficient_that_keeps_half_the_objective() -> None:
    batch_size, share = inference_share(MODEL)
    assert MODEL.latency.latency_s(batch_size, share.request) <= MODEL.slo_s / 2
    assert share.limit == pytest.approx(min(1.0, 2 * share.request))
    best = batch_size / (MODEL.latency.latency_s(batch_size, share.request) * share.request)
    for size in (1, 2, 4, 8):
        for tenths in range(1, 11):
            latency_s = MODEL.latency.latency_s(size, tenths / 10)
            if latency_s <= MODEL.execution_bound_s:
                assert size / (latency_s * tenths / 10) <= best + 1e-9


def test_the_share_of_a_training_is_80_and_98_percent_of_its_throughput() -> None:
    plan = plan_iteration(MODEL.latency, 32, passes=3.0, idle_fraction=0.2)
    share = training_share(plan)

    def throughput(sm: float) -> float:
        return plan.alone_s / (plan.host_s + plan.idle_s + plan.device_s / min(sm, 0.5))

    assert throughput(share.request) >= 0.8 > throughput(share.request - 0.021)
    assert throughput(share.limit) >= 0.98 > throughput(share.limit - 0.021)


def test_made_up_models_have_shares() -> None:
    for model in builtin_models().values():
        assert 0.0 < inference_share(model)[1].request <= 0.5
