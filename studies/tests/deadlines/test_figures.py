"""The paper's figures: what is drawn, and how its findings are checked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kits.studies.bench_data import write_folder
from springtide.core.errors import InvalidRequest
from springtide_studies.deadlines import figures as bench_figures
from springtide_studies.deadlines.figures import Panel, markdown, run_bench
from springtide_studies.deadlines.figures_page import render, write_figures
from springtide_studies.deadlines.runs import Runs

FIGURES = {
    "jobs": 10,
    "deadline_jobs": 10,
    "deadlines_met": 5,
    "declined": 0,
    "promised": 0,
    "admitted_and_broken": 0,
    "cpu_s": 0.1,
}


class Known(Runs):
    """Runs whose results are known beforehand."""

    def __init__(self, ratios: dict[str, float]) -> None:
        super().__init__(timer=itertools.count().__next__)
        self._ratios = ratios

    def _play(self, case: Any, policies: Sequence[str]) -> dict[str, dict[str, Any]]:
        return {policy: self._figures(self._ratios[policy.partition(":")[0]]) for policy in policies}

    def _figures(self, known: float) -> dict[str, Any]:
        return FIGURES | {
            "deadline_satisfactory_ratio": known,
            "cluster_efficiency_100h": known / 2,
            "makespan_s": 3600.0 / known,
            "best_effort_jct_mean_s": 100.0 / known,
            "series": {"efficiency": [[0.0, 0.1], [3600.0, known], [500_000.0, 0.0]]},
        }


AS_THE_PAPER = {
    "springtide": 0.95,
    "elasticflow": 0.9,
    "edf+elastic": 0.6,
    "edf+admission": 0.5,
    "tiresias": 0.45,
    "themis": 0.4,
    "chronus": 0.41,
    "gandiva": 0.3,
    "edf": 0.1,
}


@pytest.fixture
def everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_figures, "POLICY_NAMES", tuple(AS_THE_PAPER))


def findings(report: dict[str, Any], figure: str) -> dict[str, bool]:
    return {found["text"]: found["holds"] for found in report["ordering"][figure]["findings"]}


@pytest.mark.usefixtures("everyone")
def test_findings_hold_where_the_order_is_the_papers(tmp_path: Path) -> None:
    report = run_bench([write_folder(tmp_path)], Known(AS_THE_PAPER))
    assert set(report["ordering"]) == {"6b", "9", "10", "11"}, "no trace of figure 8 is there"
    assert all(findings(report, "6b").values())
    assert all(findings(report, "10").values())
    assert findings(report, "9")["64 devices: admission and elasticity each improve on EDF, and together on each alone"]
    assert not findings(report, "9")["elasticflow's lead over edf+elastic shrinks as the cluster grows"], (
        "it is constant"
    )
    assert report["ordering"]["6b"]["values"]["195 jobs, 128 devices"]["edf"] == 0.1
    assert report["ordering"]["6b"]["published"]["195 jobs, 128 devices"] == {"edf:caps=no": 0.0872, "tiresias": 0.4564}
    row = next(row for row in report["rows"] if row["case"].startswith("figure 6b"))
    assert row["ratio"] == pytest.approx(0.95 / 0.9)


@pytest.mark.usefixtures("everyone")
def test_findings_that_do_not_hold_say_why(tmp_path: Path) -> None:
    turned = AS_THE_PAPER | {"edf": 0.92, "edf+admission": 0.05}
    report = run_bench([write_folder(tmp_path)], Known(turned))
    assert not report["passed"]
    against = [text for found in report["ordering"]["6b"]["findings"] for text in found["against"]]
    assert "edf:caps=no 0.920 is above tiresias 0.450" in against
    leads = next(found for found in report["ordering"]["6b"]["findings"] if "at least as many" in found["text"])
    assert leads["holds"], "0.92 and 0.90 are closer than the paper's own error"
    assert "edf 0.920 and elasticflow 0.900" in leads["close"]
    text = markdown(report)
    assert "does not hold: 64 devices: admission and elasticity each improve on EDF" in text
    assert "0.920 (0.087)" in text


def test_policies_that_the_paper_does_not_tell_apart_have_no_order() -> None:
    panel = Panel(name="p", case="c", measure="m", values={"a": 0.5, "b": 0.4}, published={"a": 0.40, "b": 0.42})
    assert bench_figures._same_order(panel).holds
    apart = Panel(name="p", case="c", measure="m", values={"a": 0.5, "b": 0.4}, published={"a": 0.40, "b": 0.45})
    assert bench_figures._same_order(apart).against == ("a 0.500 is above b 0.400",)
    missing = Panel(name="p", case="c", measure="m", values={"a": 0.5, "b": None}, published={"a": 0.40, "b": 0.45})
    assert bench_figures._same_order(missing).against == ("b has no value",)


@pytest.mark.usefixtures("everyone")
def test_page_shows_every_figure_and_stands_alone(tmp_path: Path) -> None:
    report = run_bench([write_folder(tmp_path)], Known(AS_THE_PAPER))
    place = tmp_path / "figures.html"
    write_figures(place, report)
    text = place.read_text(encoding="utf-8")
    for figure in ("6b", "9", "10", "11"):
        assert f"<h2>Figure {figure}:" in text
    assert "(paper 8.7 %)" in text
    assert "://" not in text
    assert "<script" not in text
    assert render(report) == text


def test_wrong_questions_are_told_what_would_do(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    with pytest.raises(InvalidRequest, match="no figure '7' here; choose from 6b, 8a"):
        run_bench([folder], Known(AS_THE_PAPER), only=["7"])
    with pytest.raises(InvalidRequest, match="none of the traces of these figures"):
        run_bench([folder], Known(AS_THE_PAPER), only=["8a"])


def test_real_runs_fill_a_figure(tmp_path: Path) -> None:
    ticks = itertools.count()
    report = run_bench([write_folder(tmp_path)], Runs(timer=lambda: next(ticks) * 1e-3), only=["10"])
    panel = report["figures"][0]["panels"][0]
    assert panel["values"]["edf"] > 0
    assert report["ordering"]["10"]["findings"][-1]["holds"], "every policy runs every job of so easy a trace"
