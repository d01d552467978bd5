"""The bench of clusters of several models: a small world under every rule, and Gavel's table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide_studies.heterogeneous.bench import markdown, run_bench
from springtide_studies.heterogeneous.jobs import MODELS, draw_jobs, draw_throughputs, read_throughputs

GAVEL = Path(__file__).parents[4] / "shared" / "data" / "gavel"


@pytest.mark.slow
def test_every_rule_ends_all_jobs_and_ours_is_compared_with_gavel() -> None:
    report = run_bench(draw_throughputs(0), num_jobs=10, jobs_per_hour=2.0, seeds=[0], timer=lambda: 0.0)
    assert [row["case"] for row in report["rows"]] == ["arriving, seed 0", "all at once, seed 0"]
    for row in report["rows"]:
        assert {figures["num_ended"] for figures in row["policies"].values()} == {10.0}
        assert row["ratio"] == row["ours"] / row["policies"]["gavel"]["jct_mean_s"]
        # Nobody is faster than alone on the fastest devices.
        assert all(figures["makespan_s"] >= figures["jct_mean_s"] > 0.0 for figures in row["policies"].values())
    assert "gavel makespan" in markdown(report)


def test_jobs_are_drawn_from_their_seed() -> None:
    tables = draw_throughputs(1)
    assert draw_jobs(tables, 20, 3, 5.0) == draw_jobs(tables, 20, 3, 5.0)
    assert draw_jobs(tables, 20, 3, 5.0) != draw_jobs(tables, 20, 4, 5.0)
    assert {at_s for at_s, _ in draw_jobs(tables, 20, 3, 0.0)} == {0.0}


@pytest.mark.skipif(not GAVEL.is_dir(), reason="needs the shared data")
def test_gavels_table_has_variants_on_all_models() -> None:
    tables = read_throughputs(GAVEL)
    assert tables["ResNet-50 (batch size 64)", 1] == {
        "v100": pytest.approx(4.39, abs=0.01),
        "p100": pytest.approx(2.62, abs=0.01),
        "k80": pytest.approx(0.62, abs=0.01),
    }
    assert all(set(rates) == set(MODELS) and np.all(np.array(list(rates.values())) > 0) for rates in tables.values())


def test_a_folder_without_the_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="--data"):
        read_throughputs(tmp_path)
