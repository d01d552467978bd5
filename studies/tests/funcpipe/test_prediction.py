"""The benchmark of predictions: its plans fit its model, and profiles of single sizes become one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from springtide.core.functions import LayerProfile, ModelProfile
from springtide.perf.functions.pipeline.step_time import estimate_step
from springtide.perf.functions.services import emulator

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def bench() -> Iterator[ModuleType]:
    pytest.importorskip("boto3")
    name = "pipeline_prediction"
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


def _profile(memory_mb: int, seconds: float) -> ModelProfile:
    layer = LayerProfile(
        name="a",
        parameter_bytes=4 << 20,
        activation_bytes=1 << 20,
        output_bytes=1 << 19,
        gradient_bytes=1 << 19,
        forward_s=(seconds,),
        backward_s=(2 * seconds,),
    )
    return ModelProfile(
        model="m", micro_batch_size=4, memory_mb=(memory_mb,), bytes_per_s=(1.0,), layers=(layer,) * 8, base_bytes=1
    )


def test_every_case_is_a_plan_that_the_model_can_predict(bench: ModuleType) -> None:
    service = emulator(bench.MEMORY_MB, bytes_per_s=bench.BYTES_PER_S, latency_s=bench.LATENCY_S)
    small, large = (_profile(size, seconds) for size, seconds in zip(bench.MEMORY_MB, (0.2, 0.1), strict=True))
    profile = bench.joined([small, large], service)
    assert profile.layers[0].forward_s == (0.2, 0.1)
    assert profile.memory_mb == bench.MEMORY_MB
    for case in bench.CASES:
        plan = bench.plan_of(case)
        assert plan.stages[-1].end_layer == bench.NUM_LAYERS
        assert plan.num_replicas * plan.num_micro_batches * plan.micro_batch_size == bench.BATCH
        assert estimate_step(profile, plan).step_s > 0
    assert [stage.memory_mb for stage in bench.plan_of("4x1m").stages] == [*bench.MEMORY_MB] * 2
    assert {stage.memory_mb for stage in bench.plan_of("2x1l").stages} == {bench.MEMORY_MB[1]}


def test_an_error_is_relative_to_what_was_measured(bench: ModuleType) -> None:
    case = bench.Case(
        case="1x1", predicted_s=9.0, scaled_s=11.0, measured_s=10.0, num_steps=6, slowest_s=12.0, fastest_s=9.5
    )
    assert case.error_fraction == pytest.approx(0.1)
    assert bench.line_of(case) == "| 1x1 | 9.00 | 11.00 | 10.00 | 9.50 to 12.00 | 6 | 10.0% | 10.0% |"
