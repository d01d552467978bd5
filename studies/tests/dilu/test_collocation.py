"""The study of collocation: cases fit a device, figures are ratios to the tenants alone, the text shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.shares import has_room, load_of
from springtide_studies.dilu import collocation as dilu_collocation
from springtide_studies.dilu.collocation import (
    ARMS,
    CollocationCase,
    TenantLoad,
    compare,
    make_cases,
    play_case,
    run_study,
    study_text,
    tenants_of,
)
from springtide_studies.dilu.collocation_models import builtin_models, inference_share, measured_models
from springtide_studies.dilu.gpu_execution import TenantFigures


def figures(tenant_id: str, *, is_slo: bool, per_s: float, p95_s: float = 0.0) -> TenantFigures:
    return TenantFigures(
        tenant_id=tenant_id, is_slo=is_slo, iterations_per_s=per_s, requests_per_s=per_s, p50_s=p95_s, p95_s=p95_s
    )


def write_surfaces(folder: Path) -> Path:
    """Two small surfaces in the format of the published profiles."""
    profiles = folder / "profiles"
    profiles.mkdir()
    for number, name in enumerate(("bs_sm_one.csv", "bs_sm_the_other.csv")):
        rows = []
        for size in (1, 2, 4, 8):
            for percent in range(10, 101, 10):
                latency_s = 0.005 + 0.002 * size / min(percent / 100, 0.2 + 0.1 * number)
                rows.append(f"{size:f},{percent:f},{latency_s:f},{size / latency_s:f}")
        (profiles / name).write_text("\n".join(rows))
    return folder


def test_every_case_fits_one_device_and_every_kind_is_there() -> None:
    models = builtin_models()
    for is_small in (True, False):
        cases = make_cases(models, is_small=is_small)
        assert {case.kind for case in cases} == set(dilu_collocation.KINDS)
        for case in cases:
            first, second = tenants_of(case, models, 2.0, seed=0)
            assert has_room(load_of([first.share]), second.share)


def test_loads_are_those_that_were_asked_for() -> None:
    models = builtin_models()
    rates = []
    for fraction in (0.2, 0.8):
        case = CollocationCase(
            kind="training-inference",
            pair=("vision", "small-encoder"),
            load=TenantLoad(pattern="poisson", fraction=fraction),
        )
        served, trained = tenants_of(case, models, 30.0, seed=0)
        assert trained.arrivals == ()
        rates.append(len(served.arrivals) / 30.0)
    largest = inference_share(models["vision"])[0]
    capacity_per_s = largest / models["vision"].latency.latency_s(largest, 1.0)
    assert rates == pytest.approx([0.2 * capacity_per_s, 0.8 * capacity_per_s], rel=0.06)


def test_a_case_compares_every_arm_with_each_tenant_alone() -> None:
    case = CollocationCase(
        kind="training-inference", pair=("vision", "small-encoder"), load=TenantLoad(pattern="poisson", fraction=0.5)
    )
    row = play_case(case, builtin_models(), 4.0, seed=1)
    assert tuple(row["arms"]) == ARMS
    for tenant in row["arms"]["exclusive"]["tenants"].values():
        assert tenant["throughput_ratio"] == 1.0
    assert row["arms"]["tgs"]["aggregate_throughput"] < row["arms"]["springtide"]["aggregate_throughput"]
    assert play_case(case, builtin_models(), 4.0, seed=1) == row


def test_saved_device_time_is_what_exclusive_devices_would_have_needed_more() -> None:
    alone = {
        "served": figures("served", is_slo=True, per_s=10.0, p95_s=0.1),
        "trained": figures("trained", is_slo=False, per_s=4.0),
    }
    together = {
        "served": figures("served", is_slo=True, per_s=10.0, p95_s=0.13),
        "trained": figures("trained", is_slo=False, per_s=2.4),
    }
    row = compare(together, alone)
    assert row["aggregate_throughput"] == pytest.approx(1.6)
    assert row["saved_gpu_fraction"] == pytest.approx(0.6 / 1.6)
    assert row["tenants"]["served"]["p95_ratio"] == pytest.approx(1.3)


def test_measured_surfaces_become_models(tmp_path: Path) -> None:
    models = measured_models(write_surfaces(tmp_path))
    assert list(models) == ["one", "the-other"]
    assert models["one"].latency.latency_s(8, 0.1) == pytest.approx(0.005 + 0.016 / 0.1, rel=0.05)
    assert models["one"].fit_median_error is not None
    assert models["one"].fit_median_error < 0.05


def test_one_surface_is_no_pair(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="at least two surfaces"):
        measured_models(tmp_path)


@pytest.mark.slow
def test_the_small_study_runs_and_says_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dilu_collocation, "SMALL_HORIZON_S", 2.0)
    told: list[tuple[str, int, int]] = []
    answer = run_study(
        data=write_surfaces(tmp_path), seed=0, is_small=True, on_progress=lambda *each: told.append(each)
    )
    assert told[-1][1] == told[-1][2] == len(answer["cases"])
    text = study_text(answer)
    for arm in ARMS:
        assert f"\n{arm} " in text
    assert "The paper's figures" in text
