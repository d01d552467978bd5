"""The plan for a real device (benchmarks/gpu_interposition.py): what it draws and concludes, and a rehearsal."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kits.simulation.sweeps import only_in_full

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_interposition.py"


@pytest.fixture(scope="module")
def plan() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_interposition", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("variation", [1.0, 4.0])
def test_arrivals_have_the_rate_and_the_variation_that_were_asked(plan: ModuleType, variation: float) -> None:
    moments = plan.gamma_moments(50.0, variation, 4000.0, 1)
    assert moments == plan.gamma_moments(50.0, variation, 4000.0, 1)
    assert moments == sorted(moments)
    assert len(moments) == pytest.approx(200_000, rel=0.05)
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)


def test_overhead_is_met_only_if_the_whole_interval_is_below(plan: ModuleType) -> None:
    low = plan.overhead_of([1.002, 1.004] * 10)
    assert low["is_met"]
    assert low["ratio"] == pytest.approx(1.003)
    assert low["interval"][0] < low["ratio"] < low["interval"][1] < 1.01
    assert not plan.overhead_of([0.97, 1.03] * 10)["is_met"]
    assert not plan.overhead_of([1.02, 1.021] * 10)["is_met"]


def test_arms_are_compared_with_the_exclusive_run_of_the_same_turn(plan: ModuleType) -> None:
    def trial(factor: float, samples_per_s: float, num_served: int = 100) -> object:
        return plan.Trial([factor * s for s in (0.01, 0.02, 0.03, 0.04)], num_served, samples_per_s)

    trials = {plan.EXCLUSIVE: [trial(1, 100), trial(2, 50)], plan.OURS: [trial(2, 90), trial(4, 45, 50)]}
    alone, ours = plan.compare(trials, slo_s=0.1)
    assert alone["ratios_to_exclusive"] == {"p50": 1.0, "p95": 1.0, "p99": 1.0, "training": 1.0, "aggregate": 2.0}
    assert ours["ratios_to_exclusive"] == {"p50": 2.0, "p95": 2.0, "p99": 2.0, "training": 0.9, "aggregate": 1.65}
    assert ours["slo_misses"] == 0.25
    assert not math.isnan(alone["slo_misses"])


def test_what_cannot_run_here_is_named_with_its_reason(plan: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")
    monkeypatch.delenv("HAMI_CORE_LIBRARY", raising=False)
    arms, missing = plan.arms_here(plan.small_plan("cuda:0", 0))
    assert set(arms) == {plan.EXCLUSIVE, plan.NO_CONTROL, plan.MONITOR, plan.OURS}
    assert set(missing) == {plan.MPS_REQUEST, plan.MPS_LIMIT, plan.HAMI}
    assert "starts none" in missing[plan.MPS_LIMIT]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a device here")
def test_without_a_device_nothing_is_measured_and_it_is_said() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "skipped" in done.stderr


@pytest.mark.slow
@only_in_full
def test_a_rehearsal_plays_both_together_and_says_what_it_is() -> None:
    command = [sys.executable, str(SCRIPT), "--small", "--device", "cpu"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert report["is_rehearsal"]
    assert "overhead" not in report
    assert [arm["arm"] for arm in report["pairs"][0]["arms"]] == ["exclusive", "no control"]
    assert all(arm["num_requests"] > 0 for arm in report["pairs"][0]["arms"])
