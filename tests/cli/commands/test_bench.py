"""`springtide bench`: what can be measured, which option belongs where, and the three ways to answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from springtide.cli.commands.bench import BENCHES

Run = Callable[..., Result]
TRACE = """job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration
0,0,6000,toy,900,32,1,600
1,60,6000,toy,700,32,2,600
"""


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    (tmp_path / "195job.csv").write_text(TRACE)
    (tmp_path / "throughputs_A100").mkdir()
    (tmp_path / "throughputs_A100" / "toy.csv").write_text("global_batch_size,1,2,4\n32,10,19,35\n")
    (tmp_path / "upper_bounds.csv").write_text("trace,gpus,offline_LP_upper_bound_jobs\n195job,128,2\n")
    return tmp_path


def test_benches_are_listed_and_named(springtide: Run) -> None:
    assert [known["name"] for known in json.loads(springtide("bench", "--list", "--json").stdout)] == list(BENCHES)
    for arguments in (["bench"], ["bench", "speed"]):
        result = springtide(*arguments)
        assert result.exit_code == 2
        assert f"known are {', '.join(BENCHES)}" in result.stderr


def test_options_belong_to_benches(springtide: Run) -> None:
    refused = springtide("bench", "gateway", "--small")
    assert refused.exit_code == 2
    assert "No such option '--small'" in refused.stderr
    assert "No such option '--traces'" in springtide("bench", "decision", "--traces", ".").stderr
    assert "give multiples of 8" in springtide("bench", "decision", "--sizes", "64,100").stderr
    assert "no number of layers" in springtide("bench", "pipeline-plan", "--sizes", "8,900").stderr


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("calibration", "jobs seed"),
        ("communication", "markdown samples seed"),
        ("deadlines", "cache cluster html markdown only overhead policies processes profiles seed traces"),
        ("decision", "cases events markdown policies seed sizes"),
        ("fapes", "markdown only seed"),
        ("figures", "cache html markdown only overhead processes profiles seed traces"),
        ("funcpipe", "markdown only seed"),
        ("gateway", ""),
        ("goals", "markdown only scenario seed seeds"),
        ("heterogeneous", "data jobs markdown rate seed seeds"),
        ("interpose", "launches seed"),
        (
            "jct",
            "cache data length load markdown overhead policies processes rounds tables traces without-bound workloads",
        ),
        ("kubernetes", "policies small"),
        ("one-plan", "best cache cpu-limit data day-hours days mixed nodes policies screen seed"),
        ("packing", "data markdown seed sizes"),
        ("pipeline-plan", "markdown seed sizes"),
        ("prefixes", "half seed stretch trace"),
        ("promised-batches", "data policies seed workloads"),
        ("resize", "small"),
        ("serving", "markdown only peer rounds seconds small"),
        ("sharing", "seed small"),
        ("smlt", "html markdown only seed seeds"),
        ("smlt-sync", "seed small"),
        ("sync", "seed small"),
        ("training", "markdown only rounds small"),
    ],
)
def test_each_bench_shows_its_own_options(springtide: Run, name: str, options: str) -> None:
    shown = springtide("bench", name, "--help")
    assert shown.exit_code == 0
    found = set(re.findall(r"^  (?:-h, )?--([a-z-]+)", shown.stdout, re.MULTILINE)) - {"help", "json", "state"}
    assert sorted(found) == options.split()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["bench", "jct"], "bench jct"),
        (["simulate", "--study", "loaning"], "study loaning"),
        (["simulate", "--trace", __file__, "--cluster", "4x4", "--policy", "fifo", "--adaptive"], "--adaptive"),
        (["profile", "--surface", "some.csv", "--slo", "1s"], "profile --surface"),
    ],
)
def test_without_the_studies_it_is_said_how_to_get_them(
    springtide: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], what: str
) -> None:
    for module in ("springtide.core.plugins", "springtide.cli.commands.simulate"):
        monkeypatch.setattr(f"{module}.offered", lambda group: {})
    refused = springtide(*arguments)
    assert refused.exit_code == 2
    assert f"{what} comes with springtide[studies]: pip install 'springtide[studies]'" in refused.stderr
    assert json.loads(springtide("bench", "--list", "--json").stdout)[0]["name"] == "calibration"


def test_deadlines_need_a_folder_of_traces(springtide: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPRINGTIDE_TRACES", raising=False)
    refused = springtide("bench", "deadlines")
    assert refused.exit_code == 2
    assert "--traces DIR or in SPRINGTIDE_TRACES" in refused.stderr
    assert "there is no folder 'nowhere'" in springtide("bench", "deadlines", "--traces", "nowhere").stderr


def test_deadlines_answer_in_three_ways(springtide: Run, traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("bench", "deadlines", "--policies", "edf,fifo", "--cache", str(traces / "cache"))
    answer = springtide(*asked, "--traces", str(traces), "--json")
    report = json.loads(answer.stdout)
    assert report["bench"] == "deadlines"
    assert [entry["policy"] for entry in report["table"]] == ["edf", "fifo"]
    assert report["table"][0]["share_of_bound"] == 1.0
    assert answer.exit_code == 1, "without our own policy nothing has passed"
    assert "[2/2] 195job on 16x8, fifo" in answer.stderr
    monkeypatch.setenv("SPRINGTIDE_TRACES", str(traces))
    tables = springtide(*asked, "--markdown")
    assert tables.exit_code == 0
    assert "| 195job | 16x8 |" in tables.stdout
    assert "kept from an earlier run" in tables.stderr or "kept from an earlier run" in tables.stdout
    page = traces / "deadlines.html"
    assert "NOT PASSED" in springtide(*asked, "--html", str(page)).stdout
    assert "195job on 16x8" in page.read_text(encoding="utf-8")
    assert "there is no folder" in springtide(*asked, "--html", str(traces / "none" / "page.html")).stderr


def test_figures_are_drawn_into_a_file(springtide: Run, traces: Path) -> None:
    page = traces / "figures.html"
    asked = ("bench", "figures", "--traces", str(traces), "--only", "6b", "--overhead", "none", "--html", str(page))
    report = json.loads(springtide(*asked, "--json").stdout)
    assert set(report["ordering"]) == {"6b"}
    assert report["machine"]["overhead"] == "none"
    assert "Figure 6b" in page.read_text(encoding="utf-8")


def test_decisions_are_measured(springtide: Run) -> None:
    asked = ("bench", "decision", "--policies", "fifo,edf", "--sizes", "64", "--events", "10", "--cases", "plain")
    report = json.loads(springtide(*asked, "--json").stdout)
    assert [entry["policy"] for entry in report["table"]] == ["fifo", "edf"]
    assert report["machine"]["events"] == 10
    assert "| fifo | 64 |" in springtide(*asked, "--markdown").stdout
