"""Completion times on workloads: rows, ratios, the published ones beside them, the bound, and what is kept."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kits.simulation.sweeps import only_in_full, sampled
from kits.studies.goodput_data import write_application, write_workload
from springtide.cli.main import cli
from springtide.core.errors import InvalidRequest
from springtide_studies.jct import bench as bench_jct
from springtide_studies.jct import published as bench_jct_published
from springtide_studies.jct.bench import JctOptions, find_workloads, markdown, run_bench
from springtide_studies.jct.play import JctCase, play_cases
from springtide_studies.jct.published import compare, read_published

pytest.importorskip("scipy", reason="the bound is found by an extra")
DATA = Path(__file__).parents[4] / "shared" / "data" / "pollux"


def ticking() -> Callable[[], float]:
    """A timer that needs no clock."""
    ticks = itertools.count()
    return lambda: next(ticks) * 1e-3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_application(tmp_path)
    for number in (1, 2):
        write_workload(tmp_path, number, num_jobs=2 + number)
    published = {"workload-1": {f"toy-{index}": 200.0 for index in range(3)}}
    (tmp_path / "published-osdi21").mkdir()
    (tmp_path / "published-osdi21" / "jobload_tiresias-1.0.json").write_text(json.dumps({"jcts": published}))
    return tmp_path


def run(folder: Path, policies: tuple[str, ...], **options: Any) -> dict[str, Any]:
    return run_bench(JctOptions(data=folder, **options), policies, timer=ticking())


def test_one_row_a_workload_and_one_for_the_mean(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_jct, "OURS", "fifo")
    monkeypatch.setattr(bench_jct, "BASELINE", "tiresias")
    monkeypatch.setattr(bench_jct_published, "_AS_PUBLISHED", {"tiresias": "tiresias"})
    report = run(folder, ("fifo", "tiresias"))
    assert [row["case"] for row in report["rows"]] == ["workload-1", "workload-2", "mean"]
    first, _, mean = report["rows"]
    for row in report["rows"]:
        assert row["bound"] <= row["bound_tight"] + 1e-9
        assert row["bound"] < row["ours"]
        assert row["ratio"] == pytest.approx(row["policies"]["fifo"]["ratio"])
        assert row["policies"]["fifo"]["of_bound"] > 1.0
    assert mean["ours"] == pytest.approx(sum(row["ours"] for row in report["rows"][:2]) / 2)
    figures = first["policies"]["tiresias"]
    assert figures["batch"] == "tuned"
    assert set(figures["jobs"]) == {"toy-0", "toy-1", "toy-2"}
    assert figures["jct_p50_s"] <= figures["jct_p95_s"] <= figures["jct_p99_s"] <= figures["makespan_s"]
    assert figures["gpu_hours"] > figures["restart_gpu_hours"] > 0.0
    assert figures["decision_ms_p90"] > 0.0
    told = first["published"]["tiresias"]
    assert told["jct_mean_s"] == 200.0
    assert told["difference_percent"] == pytest.approx(100 * (figures["jct_mean_s"] / 200 - 1))
    assert told["difference_percent_by_application"]["toy"] == told["difference_percent"]
    assert report["passed"] is False, "first come first served is no better than what it is compared with"
    table = markdown(report)
    assert "| workload-1 |" in table
    assert "tiresias published" in table
    assert table.count("\n| mean | ") == 2


def test_what_is_not_compared_has_no_verdict_of_its_own(folder: Path) -> None:
    report = run(folder, ("fifo",), only=("2",), has_bound=False)
    assert [row["case"] for row in report["rows"]] == ["workload-2"]
    assert report["rows"][0]["bound"] is None
    assert report["rows"][0]["published"] == {}
    assert report["passed"] is True
    assert "nothing to judge" in report["criterion"]
    assert "workload-2" in markdown(report)


def test_workloads_are_found_by_number_load_and_folder(folder: Path) -> None:
    other = write_workload(folder, 7, load="workloads-2.0")
    assert find_workloads(JctOptions(data=folder, load="2")) == [other]
    assert find_workloads(JctOptions(data=folder, traces=other.parent, only=("workload-7",))) == [other]
    with pytest.raises(InvalidRequest, match="no workload 'workload-7'"):
        find_workloads(JctOptions(data=folder, only=("7",)))
    with pytest.raises(InvalidRequest, match=r"0\.5, 1, 1\.5, 2"):
        find_workloads(JctOptions(data=folder, load="3"))
    with pytest.raises(InvalidRequest, match="--traces"):
        find_workloads(JctOptions(data=folder / "profiles"))


def test_what_is_kept_is_not_played_again(folder: Path) -> None:
    told: list[str] = []
    options = JctOptions(data=folder, only=("1",), cache=folder / "kept")
    first = run_bench(options, ("fifo",), timer=ticking(), tell=told.append)
    again = run_bench(options, ("fifo",), timer=ticking(), tell=told.append)
    assert any("(kept from an earlier run)" in line for line in told)
    assert sum("finding the bound" in line for line in told) == 1
    assert [row["policies"]["fifo"]["jobs"] for row in first["rows"]] == [
        row["policies"]["fifo"]["jobs"] for row in again["rows"]
    ]


def test_rounds_reach_whoever_has_them(folder: Path) -> None:
    report = run(folder, ("fifo", "static:num_workers=2"), only=("1",), has_bound=False, round_s=120.0)
    assert report["played_as"] == {"fifo": "fifo", "static:num_workers=2": "static:num_workers=2"}
    played = bench_jct._played_as("goodput", JctOptions(data=folder))
    assert played == "goodput:round_s=60", "at the published cost in the published rounds"
    assert bench_jct._played_as("goodput", JctOptions(data=folder, overhead="measured")) == "goodput"
    assert bench_jct._played_as("goodput:round_s=0", JctOptions(data=folder, round_s=60)) == "goodput:round_s=0"


def test_a_policy_that_fails_costs_the_others_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def decide(self, snapshot: object) -> None:
            raise RuntimeError("it broke")

    make = bench_jct.make_policy
    monkeypatch.setattr(
        "springtide_studies.jct.play.make_policy", lambda name: Broken() if name == "sjf" else make(name)
    )
    report = run(folder, ("fifo", "sjf"), has_bound=False)
    assert "it broke" in report["rows"][0]["policies"]["sjf"]["error"]
    assert "error" in report["rows"][-1]["policies"]["sjf"]
    assert report["rows"][-1]["policies"]["fifo"]["jct_mean_s"] > 0
    assert report["passed"] is False
    assert "failed" in markdown(report)


@pytest.mark.slow
def test_processes_of_their_own_say_the_same(folder: Path) -> None:
    cases = [
        JctCase(
            workload=str(folder / "workloads-osdi21/workloads/workload-1.csv"),
            profiles=str(folder / "profiles"),
            policy=name,
        )
        for name in ("fifo", "sjf")
    ]
    alone, beside = (
        {case.policy: figures["jobs"] for case, figures in play_cases(cases, ticking(), size)} for size in (1, 2)
    )
    assert alone == beside
    wrong = JctCase(workload=cases[0].workload, profiles=str(folder), policy="fifo")
    for size in (1, 2):
        with pytest.raises(InvalidRequest, match="holds no application"):
            list(play_cases([wrong, wrong], ticking(), size))


def test_published_runs_are_of_the_same_jobs(folder: Path) -> None:
    published = read_published(folder, "1")
    assert read_published(folder, "2") == {}
    assert compare({"tiresias-tuned": {"jobs": {"toy-0": 1.0}}}, published, "workload-1") == {}, (
        "other jobs, no comparison"
    )
    (folder / "published-osdi21" / "jobload_pollux-1.0.json").write_text("{}")
    with pytest.raises(InvalidRequest, match=r"jobload_pollux-1\.0\.json is no summary"):
        read_published(folder, "1")


def test_the_command(folder: Path) -> None:
    said = CliRunner().invoke(
        cli,
        ["bench", "jct", "--data", str(folder), "--policies", "fifo", "--workloads", "1", "--without-bound", "--json"],
    )
    assert said.exit_code == 0, said.output
    report = json.loads(said.stdout)
    assert report["rows"][0]["policies"]["fifo"]["jct_mean_s"] > 0
    for wrong in (["--data", str(folder / "profiles")], ["--data", str(folder), "--length", "long"]):
        assert CliRunner().invoke(cli, ["bench", "jct", *wrong]).exit_code == 2


@pytest.mark.slow
@only_in_full
@pytest.mark.skipif(not DATA.is_dir(), reason="the published workloads are not here")
def test_the_bound_of_a_published_workload() -> None:
    from springtide_studies.jct.bound import find_bound

    workload = DATA / "workloads-osdi21" / "workloads" / "workload-6.csv"
    bound = find_bound(workload, JctOptions(data=DATA), lambda line: None)
    # An independent program of the same kind said 1353 s.
    assert bound["jct_mean_s"] == pytest.approx(1353, rel=0.03)
    assert bound["jct_mean_s"] < bound["jct_mean_tight_s"] < 2000


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the published workloads are not here")
@pytest.mark.parametrize("number", sampled([1, 2, 5, 6]))
def test_tiresias_is_the_published_run_to_the_second(number: int) -> None:
    name = f"workload-{number}"
    case = JctCase(
        workload=str(DATA / "workloads-osdi21" / "workloads" / f"{name}.csv"),
        profiles=str(DATA / "profiles"),
        policy="tiresias-tuned",
        whole_seconds=True,
    )
    (_, figures), *_ = play_cases([case], ticking())
    published = read_published(DATA, "1")["tiresias"][name]
    assert figures["jobs"] == pytest.approx(published, abs=0.01)
