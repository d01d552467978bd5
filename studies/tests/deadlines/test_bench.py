"""Deadlines on every trace: the cases, what others reached, the table, and a run that goes on where it was cut off."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kits.studies.bench_data import write_folder, write_trace
from springtide.core.errors import InvalidRequest
from springtide_studies.deadlines import runs as bench_runs
from springtide_studies.deadlines.bench import is_good, markdown, run_bench
from springtide_studies.deadlines.deadlines_page import render, write_deadlines
from springtide_studies.deadlines.references import read_references
from springtide_studies.deadlines.runs import Runs, find_cases, source_digest, trace_files


def ticking() -> Callable[[], float]:
    """A timer that needs no clock."""
    ticks = itertools.count()
    return lambda: next(ticks) * 1e-3


def make_runs(**options: Any) -> Runs:
    return Runs(timer=ticking(), **options)


def test_cases_are_the_clusters_of_the_paper(tmp_path: Path) -> None:
    files = trace_files([write_folder(tmp_path)])
    assert files[0].stem == "somewhere", "the smallest comes first"
    labels = {case.label: case.num_devices for case in find_cases(files)}
    assert labels["195job on 16x8"] == 128
    assert labels["gen_fig9_1000jobs_lam1500 on 8x8"] == 64
    assert "gen_fig9_1000jobs_lam1500 on 16x8" in labels
    assert not any(label.startswith("somewhere") for label in labels), "nobody says where it ran"
    assert [case.label for case in find_cases(files, ["somewhere"], "2x4")] == ["somewhere on 2x4"]


def test_known_traces_that_are_kept_elsewhere_have_their_clusters() -> None:
    assert bench_runs.KNOWN_CLUSTERS["cluster06"] == ("64x8",)
    assert {bench_runs.KNOWN_CLUSTERS[f"cluster0{n}"] for n in (4, 7, 8, 9)} == {("128x8",)}


def test_wrong_questions_are_told_what_would_do(tmp_path: Path) -> None:
    files = trace_files([write_folder(tmp_path)])
    with pytest.raises(InvalidRequest, match="no trace 'nowhere'; there are 195job"):
        find_cases(files, ["nowhere"])
    with pytest.raises(InvalidRequest, match="--cluster NODESxDEVICES"):
        find_cases(files, ["somewhere"])
    with pytest.raises(InvalidRequest, match="--traces DIR or in SPRINGTIDE_TRACES"):
        trace_files([])
    (tmp_path / "upper_bounds.csv").write_text("trace,gpus\n195job,128\n")
    with pytest.raises(InvalidRequest, match=r"upper_bounds\.csv cannot be read"):
        read_references([tmp_path])


def test_references_know_the_tags_and_names_of_others(tmp_path: Path) -> None:
    known = read_references([write_folder(tmp_path) / "traces"])
    assert known.bounds == {("195job", 128): 6}
    assert known.artifact["195job", 128, "elasticflow"].met == 3
    assert known.artifact["195job", 128, "elasticflow"].mended_met == 5
    assert known.artifact["195job", 128, "tiresias"].met == 2
    assert ("195job", 128, "themis") not in known.artifact, "it did not finish there"
    assert known.published["195job", 0, "tiresias"] == 0.4564
    assert known.published["gen_fig9_1000jobs_lam1500", 64, "edf+elastic"] == 0.452
    assert known.published["gen_fig11_200jobs_lam900_be0.5", 0, "edf"] == 0.23
    assert known.published["philly_103959", 0, "edf"] == 0.01


def test_references_that_are_missing_stay_empty(tmp_path: Path) -> None:
    known = read_references([tmp_path / "nowhere"])
    assert not known.bounds
    assert not known.artifact


def test_report_sets_each_policy_beside_what_others_reached(tmp_path: Path) -> None:
    report = run_bench([write_folder(tmp_path)], make_runs(), policies=["edf", "fifo"], only=["195job"])
    by_policy = {entry["policy"]: entry for entry in report["table"]}
    assert by_policy["edf"]["deadline_jobs"] == 6
    assert by_policy["edf"]["deadlines_met"] == 6, "six jobs on 128 devices do not meet each other"
    assert by_policy["edf"]["share_of_bound"] == 1.0
    assert by_policy["edf"]["published_ratio"] == 0.0872
    assert by_policy["fifo"]["cpu_s"] > 0
    assert not report["rows"], "a row compares our own policy"
    assert not report["passed"], "what was not measured has not passed"
    text = markdown(report)
    assert "| 195job | 16x8 | 6 | " in text
    assert text.splitlines()[-1].startswith("| 195job | 16x8 | 6 | ")


def test_page_shows_every_trace_with_its_bound(tmp_path: Path) -> None:
    report = run_bench([write_folder(tmp_path)], make_runs(), policies=["edf", "fifo"])
    assert "springtide was not among the policies." in render(report)
    report["table"][0] |= {"error": "it <broke>"}
    report["table"].append(
        report["table"][-1] | {"policy": "springtide", "promised": 6, "admitted_and_broken": 1, "share_of_bound": 0.9}
    )
    place = tmp_path / "page.html"
    write_deadlines(place, report)
    text = place.read_text(encoding="utf-8")
    for name in ("195job on 16x8", "gen_fig9_1000jobs_lam1500 on 8x8", "bound 6", "breaks 1 promises", "failed"):
        assert name in text
    assert "at least 90.0 % of the bound" in text
    report["table"].append(report["table"][-1] | {"error": "it broke"})
    assert "It failed on 1 more." in render(report)
    assert "<broke>" not in text
    assert "://" not in text


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    folder, cache, told = write_folder(tmp_path / "data"), tmp_path / "cache", []
    cases = find_cases(trace_files([folder]), ["195job"])
    first = make_runs(cache=cache, tell=told.append).all(cases, ["edf"])
    again = make_runs(cache=cache, tell=told.append).all(cases, ["edf"])
    assert again == first
    assert "kept" not in told[0]
    assert "kept from an earlier run" in told[1]
    assert told[0].startswith("[1/1] 195job on 16x8, edf: 6 of 6 deadlines met, ")
    make_runs(cache=cache, tell=told.append, seed=1).all(cases, ["edf"])
    write_trace(folder / "traces", "195job", 5)
    make_runs(cache=cache, tell=told.append).all(cases, ["edf"])
    assert not any("kept" in line for line in told[2:]), "another seed, another trace: another result"


def test_a_policy_that_breaks_costs_only_its_own_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path)
    real = bench_runs.figures.simulate

    def simulate(trace: str, cluster: str, policies: list[str], **options: Any) -> dict[str, Any]:
        assert policies != ["fifo"], "broken today"
        return real(trace, cluster, policies, **options)

    monkeypatch.setattr(bench_runs.figures, "simulate", simulate)
    runs = make_runs(cache=tmp_path / "cache")
    report = run_bench([folder], runs, policies=["fifo", "edf"], only=["195job"])
    broken, whole = report["table"]
    assert broken["error"].startswith("AssertionError: broken today")
    assert whole["deadlines_met"] == 6
    assert len(list((tmp_path / "cache").iterdir())) == 1, "what failed is not kept"
    assert "failed" in markdown(report)


@pytest.mark.slow
def test_several_processes_find_the_same(tmp_path: Path) -> None:
    """Processes are started by entry point, which takes a second each."""
    cases = find_cases(trace_files([write_folder(tmp_path)]), ["195job"])
    alone, together = (make_runs(num_processes=count).all(cases, ["edf", "fifo"]) for count in (1, 2))
    for key, figures in alone.items():
        assert figures["series"] == together[key]["series"]
        assert figures["deadlines_met"] == together[key]["deadlines_met"]


def test_the_aim_is_the_bound_without_a_broken_promise_in_time() -> None:
    entry = {"admitted_and_broken": 0, "share_of_bound": 0.98, "cpu_s": 4.0}
    assert is_good(entry)
    assert is_good(entry | {"share_of_bound": None})
    assert not is_good(entry | {"share_of_bound": 0.96})
    assert not is_good(entry | {"admitted_and_broken": 1})
    assert not is_good(entry | {"cpu_s": 301.0})
    assert not is_good({"error": "it broke"})


def test_source_digest_names_the_source_and_not_its_showing() -> None:
    assert source_digest() == source_digest()
    assert len(source_digest()) == 16
