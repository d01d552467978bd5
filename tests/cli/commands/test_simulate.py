"""`springtide simulate`: the answer, the report, the warnings, and sentences for what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import Result

from springtide.cli.commands import simulate as command

Run = Callable[..., Result]
ASKED = ("simulate", "--trace", "generated:20", "--cluster", "1x4", "--seed", "3")


@pytest.mark.slow
def test_answer_report_and_series(springtide: Run, tmp_path: Path) -> None:
    output, report = tmp_path / "out.json", tmp_path / "report.html"
    done = springtide(*ASKED, "--policy", "fifo,elastic", "--json", str(output), "--html", str(report), "--jobs", "9")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("POLICY ")
    answer = json.loads(output.read_bytes())
    assert answer["num_jobs"] == 9
    assert all("series" not in figures for figures in answer["policies"].values())
    assert "<html" in report.read_text()
    answer = json.loads(springtide(*ASKED, "--policy", "fifo", "--series", "--json", "-").stdout)
    assert answer["policies"]["fifo"]["series"]["jct_s"]


def test_every_setting_reaches_the_run(springtide: Run) -> None:
    settings = ("--overhead", "none", "--error", "0.2", "--mtbf", "5", "--repair", "0.5", "--no-placement")
    answer = json.loads(springtide(*ASKED, "--policy", "edf", *settings, "--json", "-").stdout)
    assert (answer["overhead"], answer["error_fraction"], answer["mtbf_hours"], answer["repair_hours"]) == (
        *("none", 0.2),
        *(5.0, 0.5),
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--policy", "best"), "there is no policy 'best'"),
        (("--policy", ","), "no policy is named"),
        (("--policy", "fifo", "--trace", "nothing.csv"), "there is no trace 'nothing.csv'"),
        (("--policy", "fifo", "--trace", "generated:x"), "generated:200"),
        (("--policy", "fifo", "--cluster", "4"), "16x8"),
        (("--policy", "fifo", "--mtbf", "0"), "above 0"),
        (("--policy", "fifo", "--overhead", "free"), "elasticflow"),
        (("--policy", "fifo", "--json", "no/folder/out.json"), "there is no folder no/folder"),
        (("--policy", "fifo", "--json", "."), "it is a folder"),
        (("--policy", "fifo", "--html", "no/folder/out.html"), "there is no folder no/folder"),
    ],
)
def test_what_cannot_be_is_one_sentence(springtide: Run, arguments: tuple[str, ...], sentence: str) -> None:
    done = springtide(*ASKED, *arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.output


def test_without_a_trace_the_running_platform_may_be_meant(springtide: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = springtide("simulate", "--policy", "fifo")
    assert done.exit_code == 2
    assert "--from-live" in done.stderr
    asked: list[object] = []
    monkeypatch.setattr(
        "springtide.cli.commands.simulate_live.play_live", lambda session, names, output: asked.append((names, output))
    )
    assert springtide("simulate", "--from-live", "--policy", "fifo,edf", "--json", "-").exit_code == 0
    assert asked == [(["fifo", "edf"], "-")]


def test_a_broken_trace_names_line_and_column(springtide: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration\n0,0,nan,net,5,1,1,1\n")
    done = springtide(*ASKED, "--trace", str(path), "--policy", "fifo")
    assert done.exit_code == 2
    assert "line 2" in done.stderr
    assert "iteration" in done.stderr


def test_failures_and_broken_promises_are_said_after_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"admitted_and_broken": 2, "promised": 5, "latest_s": 61.0}
    command._warn({"policies": {"p": figures}})
    assert "p broke 2 of its 5 promises" in capsys.readouterr().err
    command._warn({"policies": {"p": figures}, "error_fraction": 0.2})
    assert capsys.readouterr().err == ""
    with pytest.raises(click.exceptions.Exit) as ended:
        command._warn({"policies": {}, "errors": {"q": "PolicyError: no"}})
    assert ended.value.exit_code == 1
    assert "q failed: PolicyError: no" in capsys.readouterr().err


def test_plain_progress_says_nothing_in_short_runs_and_little_in_long_ones() -> None:
    now_s, lines = [0.0], []
    shown = command.PlainProgress(lines.append, lambda: now_s[0])
    for second in range(31):
        now_s[0] = float(second)
        shown.tell("fifo", second, 100)
        shown.tell("edf", second, 100)
    assert lines == [f"{name}: {count} of 100 jobs have ended" for count in (10, 20, 30) for name in ("fifo", "edf")]


def test_bars_on_a_terminal() -> None:
    with command.shown_progress(["fifo"], live=True) as tell:
        tell("fifo", 3, 10)
