"""The bench of training steps: its rows, what passes, and a short run with real processes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from kits.simulation.sweeps import only_in_full
from springtide.cli.main import cli
from springtide_studies.training.bench import LIMITS, MODELS, VARIANTS, Variant, has_passed, rows_of


def variants(**cpu_ms: list[float]) -> dict[str, Variant]:
    usual = {name: [100.0, 100.0, 100.0] for name in VARIANTS}
    named = {name.replace("_", "-"): values for name, values in cpu_ms.items()}
    return {name: Variant(cpu_ms=values, peak_mib=400.0) for name, values in {**usual, **named}.items()}


def test_ratios_are_taken_within_a_round_so_that_a_busy_moment_spoils_none():
    found = variants(plain=[50.0, 100.0, 80.0], ours_1=[51.0, 104.0, 81.0])
    row = rows_of("mlp", found)[0]
    assert row.case == "MLP of 9.5 M, 1 worker"
    assert (row.ours, row.baseline) == (81.0, 80.0)
    assert row.ratio == pytest.approx(1.02)
    assert row.ratio_low <= row.ratio <= row.ratio_high
    assert has_passed([row])


@pytest.mark.parametrize(
    ("slow", "passed"), [("ours_1", False), ("ours_2", False), ("exact_1", True), ("exact_2", True)]
)
def test_the_default_is_held_to_its_bounds_and_the_price_of_exact_is_told(slow, passed):
    rows = rows_of("cnn", variants(**{slow: [104.0, 104.0, 104.0]}))
    assert len(rows) == len(LIMITS) + 1
    assert has_passed(rows) == passed


def test_memory_is_held_to_that_of_data_parallelism():
    found = variants()
    found["ours-2"].peak_mib = 441.0
    assert not has_passed(rows_of("gpt", found))
    assert not has_passed([])


def test_another_model_is_refused():
    result = CliRunner().invoke(cli, ["bench", "training", "--only", "vgg"])
    assert result.exit_code == 2
    assert f"none of {', '.join(MODELS)}" in result.output


@only_in_full
@pytest.mark.slow
def test_a_short_run_measures_every_variant():
    result = CliRunner().invoke(cli, ["bench", "training", "--small", "--only", "mlp", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code in (0, 1)
    assert [row["baseline_name"] for row in report["rows"]] == ["plain loop", "DDP", "plain loop", "DDP", "DDP"]
    assert all(row["ours"] > 0 and row["baseline"] > 0 for row in report["rows"])
    assert report["wall_ms"]["mlp"].keys() == VARIANTS.keys()
