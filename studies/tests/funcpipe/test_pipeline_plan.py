"""The bench of pipeline plans: what passes, what is drawn, what is told."""

import itertools

import pytest

from kits.simulation.sweeps import only_in_full
from springtide.perf.functions.pipeline.merge import merged
from springtide_studies.funcpipe import pipeline_plan as bench_pipeline_plan
from springtide_studies.funcpipe.model import MODELS, TABLE_1, lambda_profile
from springtide_studies.funcpipe.pipeline_plan import (
    SOLVED,
    TRIED,
    _criterion,
    drawn_model,
    markdown,
    measure,
    run_bench,
)


def ticks():
    """A clock that goes on by one second at each look."""
    return itertools.count().__next__


@pytest.mark.parametrize("shape", MODELS)
def test_drawn_models_have_the_totals_of_table_1(shape):
    profile = drawn_model(shape, 20)
    assert len(profile.layers) == 20
    assert sum(one.parameter_bytes for one in profile.layers) == pytest.approx(TABLE_1[shape][0] * 2**20, rel=1e-3)
    assert sum(one.activation_bytes for one in profile.layers) == pytest.approx(
        TABLE_1[shape][1] * 2**20 * profile.micro_batch_size, rel=1e-3
    )
    assert profile == drawn_model(shape, 20)
    assert (profile != drawn_model(shape, 20, seed=1)) == (shape != "bert-large")


def test_small_models_are_compared_with_every_plan():
    row = measure(drawn_model("amoebanet-d18", 4), 64, timer=ticks())
    assert row.oracle == TRIED
    assert row.agrees
    assert row.num_oracle_proved == row.num_plans == row.num_proved == 4
    assert row.ours_s == 1


@pytest.mark.slow
@only_in_full
def test_medium_models_are_compared_with_highs():
    pytest.importorskip("scipy")
    row = measure(merged(lambda_profile("resnet101"), 9)[0], 64, timer=ticks())
    assert row.oracle == SOLVED
    assert row.agrees
    assert row.num_oracle_proved == 4


def test_a_plan_that_is_not_the_best_fails(monkeypatch):
    real = bench_pipeline_plan.best_of
    monkeypatch.setattr(bench_pipeline_plan, "best_of", lambda *words: (real(*words)[0] * 0.999, None))
    row = measure(drawn_model("resnet101", 4), 64, timer=ticks())
    assert row.agrees is False
    assert "1 models differ" in _criterion([row])


@pytest.mark.slow
def test_the_report_passes_only_with_an_oracle(monkeypatch):
    monkeypatch.setattr(bench_pipeline_plan, "MODELS", ("resnet101",))
    monkeypatch.setattr(bench_pipeline_plan, "_MEASURED_LAYERS", 4)
    report = run_bench(sizes=[4], timer=ticks())
    assert report["passed"]
    assert {row["baseline_name"] for row in report["rows"]} == {TRIED, "none"}
    assert "| resnet101, drawn | 4 | 64 |" in markdown(report)
    monkeypatch.setattr(bench_pipeline_plan, "MAX_TRIED_LAYERS", 0)
    monkeypatch.setattr(bench_pipeline_plan, "MAX_SOLVED_LAYERS", 0)
    assert not run_bench(sizes=[4], timer=ticks())["passed"]
