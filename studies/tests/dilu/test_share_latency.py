"""The latency of an iteration on a part of a device: what it says, and that a fit finds what points were made of."""

from __future__ import annotations

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide_studies.dilu.share_latency import LatencyPoint, ShareLatency, fit_share_latency

MODEL = ShareLatency(host_s=0.012, work_s=0.001, work_per_item_s=0.0022, saturation=0.2, saturation_per_doubling=0.12)


def points(noise: float = 0.0, seed: int = 0) -> list[LatencyPoint]:
    rng = np.random.default_rng(seed)
    return [
        LatencyPoint(
            batch_size=size,
            share=percent / 100,
            latency_s=MODEL.latency_s(size, percent / 100) * float(np.exp(noise * rng.standard_normal())),
        )
        for size in (1, 2, 4, 8, 16, 32)
        for percent in range(10, 101, 10)
    ]


def test_more_of_the_device_helps_until_the_batch_fills_no_more() -> None:
    assert MODEL.latency_s(1, 0.1) > MODEL.latency_s(1, 0.2) == MODEL.latency_s(1, 1.0)
    assert MODEL.saturation_at(1) == pytest.approx(0.2)
    assert MODEL.saturation_at(4) == pytest.approx(0.44)
    assert MODEL.saturation_at(1024) == 1.0
    assert MODEL.latency_s(4, 0.22) == pytest.approx(0.012 + (0.001 + 4 * 0.0022) / 0.22)


def test_a_fit_finds_the_model_that_points_were_made_of() -> None:
    fit = fit_share_latency(points())
    assert fit.max_error < 0.03
    assert fit.latency.host_s == pytest.approx(MODEL.host_s, rel=0.05)


def test_a_fit_says_how_far_off_noise_leaves_it() -> None:
    fit = fit_share_latency(points(noise=0.05))
    assert 0.015 < fit.median_error < 0.06
    assert fit.median_error <= fit.p90_error <= fit.max_error
    assert fit.latency.work_per_item_s == pytest.approx(MODEL.work_per_item_s, rel=0.1)


def test_no_part_of_a_model_is_negative() -> None:
    flat = [
        LatencyPoint(batch_size=size, share=share, latency_s=0.03 - 0.0002 * size)
        for size in (1, 2, 4)
        for share in (0.1, 0.5, 1.0)
    ]
    latency = fit_share_latency(flat).latency
    assert min(latency.host_s, latency.work_s, latency.work_per_item_s) >= 0.0


@pytest.mark.parametrize("bad", [{"latency_s": 0.0}, {"share": 1.2}, {"batch_size": 0}])
def test_points_that_cannot_be_are_refused(bad: dict[str, float]) -> None:
    broken = LatencyPoint(**({"batch_size": 1, "share": 0.5, "latency_s": 0.1} | bad))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        fit_share_latency([*points(), broken])


def test_too_few_points_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least as many"):
        fit_share_latency(points()[:4])
