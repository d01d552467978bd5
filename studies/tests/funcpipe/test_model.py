"""FuncPipe's evaluation by the model: the shipped profiles, who is better than whom, and closed form against walk."""

from __future__ import annotations

import msgspec
import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.functions import FunctionPlan, FunctionStage, LayerProfile, ModelProfile
from springtide_studies.funcpipe import bench as bench_funcpipe
from springtide_studies.funcpipe.bench import PARTS, markdown, plan_text, run_bench
from springtide_studies.funcpipe.model import (
    FUNCPIPE,
    MODELS,
    OURS,
    RIVALS,
    TABLE_1,
    at_bandwidth,
    baseline_points,
    lambda_profile,
    measured_profile,
    pipeline_points,
    recommended_point,
    rival_points,
)
from springtide_studies.funcpipe.walk import walk
from springtide_studies.rivals.pipeline_baselines import BASELINES


@pytest.mark.parametrize("model", MODELS)
def test_the_shipped_profiles_are_of_the_models_of_table_1(model: str) -> None:
    profile = measured_profile(model)
    parameters = sum(layer.parameter_bytes for layer in profile.layers) / (1 << 20)
    assert parameters == pytest.approx(TABLE_1[model][0], rel=0.03)
    assert (profile.model, profile.micro_batch_size) == (model, 4)
    assert profile.source.startswith("measured: medians of")
    assert 1.0 <= profile.slowdown < 1.5
    assert all(layer.forward_s[0] > 0 for layer in profile.layers)
    held = lambda_profile(model, has_table_1_activations=True)
    assert sum(layer.activation_bytes for layer in held.layers) / 4 / (1 << 20) == pytest.approx(TABLE_1[model][1])


def test_a_small_batch_needs_no_exchange_and_more_functions_are_faster_only_in_a_pipeline() -> None:
    profile = lambda_profile("resnet101")
    baselines = baseline_points(profile, 16)
    assert [point.method for point in baselines] == list(BASELINES)
    assert {point.sync_s for point in baselines} == {0.0}
    ours = pipeline_points(profile, 16, OURS)
    assert [point.alpha_2 for point in ours] == [0.0, 2.0**16, 2.0**19, 2.0**22]
    assert min(point.step_s for point in ours) < min(point.step_s for point in baselines)
    # A larger weight on time never makes a plan slower, nor a smaller one a plan dearer.
    assert [point.step_s for point in ours] == sorted((point.step_s for point in ours), reverse=True)
    assert [point.cost_usd for point in ours] == sorted(point.cost_usd for point in ours)
    assert recommended_point(ours).is_recommended
    assert plan_text(ours[0]).startswith("Springtide resnet101 batch 16 alpha2 0: 0-34@")


def test_a_large_model_is_both_faster_and_cheaper_in_a_pipeline() -> None:
    profile = lambda_profile("bert-large")
    lambda_ml = baseline_points(profile, 64)[0]
    published = recommended_point(pipeline_points(profile, 64, FUNCPIPE))
    assert published.step_s < lambda_ml.step_s / 1.3
    assert published.cost_usd < lambda_ml.cost_usd
    # Most of LambdaML's step is the exchange (section 5.3).
    assert lambda_ml.sync_s > lambda_ml.computation_s


@pytest.mark.slow
def test_faster_links_help_those_more_who_exchange_more() -> None:
    slow, fast = at_bandwidth("bert-large", 1.0), at_bandwidth("bert-large", 20.0)
    gain = [
        recommended_point(pipeline_points(slow, 64, FUNCPIPE)).step_s
        / recommended_point(pipeline_points(fast, 64, FUNCPIPE)).step_s,
        baseline_points(slow, 64)[0].step_s / baseline_points(fast, 64)[0].step_s,
    ]
    assert 1.0 < gain[0] < gain[1]


@pytest.mark.slow
def test_rivals_are_never_better_under_the_same_weights() -> None:
    profile = lambda_profile("resnet101")
    ours = {point.alpha_2: point for point in pipeline_points(profile, 64, FUNCPIPE)}
    theirs = [point for method in RIVALS for point in rival_points(profile, 64, method, seeds=(0,))]
    assert {point.method for point in theirs} == set(RIVALS)
    assert {point.plan.num_replicas for point in theirs if point.method == RIVALS[1] and point.plan} == {1}
    for point in theirs:
        best, alpha = ours[point.alpha_2], point.alpha_2 or 0.0
        assert best.step_s * (best.memory_mb + alpha) <= point.step_s * (point.memory_mb + alpha) * (1 + 1e-9)


def _chain(num_layers: int, output_bytes: int) -> ModelProfile:
    layer = LayerProfile(
        name="a",
        parameter_bytes=1000,
        activation_bytes=1,
        output_bytes=output_bytes,
        gradient_bytes=output_bytes,
        forward_s=(1.0,),
        backward_s=(2.0,),
    )
    return ModelProfile(
        model="chain",
        micro_batch_size=1,
        memory_mb=(1024,),
        bytes_per_s=(100.0,),
        layers=(layer,) * num_layers,
        latency_s=0.0,
    )


def test_the_closed_form_of_one_stage_is_what_its_tasks_take() -> None:
    plan = FunctionPlan(stages=(FunctionStage(first_layer=0, end_layer=3, memory_mb=1024),), num_micro_batches=5)
    found = walk(_chain(3, 10), plan)
    assert found.walked_s == found.closed_s == 5 * 3 * (1.0 + 2.0)


def test_the_walk_of_a_balanced_pipeline_is_what_the_closed_form_says() -> None:
    stages = tuple(FunctionStage(first_layer=i, end_layer=i + 1, memory_mb=1024) for i in range(3))
    plan = FunctionPlan(stages=stages, num_micro_batches=4)
    found = walk(_chain(3, 10), plan)
    assert found.closed_s == pytest.approx(found.walked_s, rel=1e-9)
    replicated = walk(_chain(3, 10), msgspec.structs.replace(plan, num_replicas=2, collective="funcpipe"))
    assert replicated.walked_s > found.walked_s
    assert abs(replicated.difference_fraction) < 1e-9


def test_the_closed_form_counts_a_slow_middle_cut_for_every_stage() -> None:
    stages = tuple(FunctionStage(first_layer=i, end_layer=i + 1, memory_mb=1024) for i in range(3))
    found = walk(_chain(3, 300), FunctionPlan(stages=stages, num_micro_batches=6))
    # A link carries a transfer of 3 s for each micro-batch, computation takes 1 and 2 s.
    assert found.closed_s >= found.walked_s * (1 - 1e-9)


def test_a_plan_that_is_beaten_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_funcpipe, "NEAR_TABLE_1", 1e-6)
    assert not run_bench(only=("table1",), timer=lambda: 0.0)["passed"]


def test_parts_make_rows_and_a_page() -> None:
    report = run_bench(only=("table1", "8"), timer=lambda: 0.0)
    assert report["passed"]
    assert {row["part"] for row in report["rows"]} == {"table1", "8"}
    syncs = [row["ratio"] for row in report["rows"] if "sync of FuncPipe" in row["case"]]
    # With two replicas both exchanges take as long; with more the pipelined one wins up to a third, less its latencies.
    assert syncs[0] == pytest.approx(1.0)
    assert all(2 / 3 < value < 0.9 for value in syncs[1:])
    ours = [row["ratio"] for row in report["rows"] if "sync of Springtide" in row["case"]]
    assert all(one <= other for one, other in zip(ours, syncs, strict=True))
    text = markdown(report)
    assert "## 8\n\nPublished: 6 % less time" in text
    assert "| amoebanet-d36: parameters |" in text
    with pytest.raises(InvalidRequest, match="no part '7'; choose of table1, 5"):
        run_bench(only=("7",), timer=lambda: 0.0)
    assert len(PARTS) == len(set(PARTS))
