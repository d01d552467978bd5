"""`springtide simulate --study loaning`: the table, the JSON, which rows and sizes, and what does not belong to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from springtide_studies.commands.study import study_text
from springtide_studies.loans import study as loaning

Run = Callable[..., Result]
ASKED = ("simulate", "--study", "loaning", "--n-r-max", "2,3", "--processes", "1")


def stand_in(setting: Any, *, timer: Any, on_progress: Any) -> dict[str, Any]:
    """Figures as a run of the study gives them; each names its size by its wait."""
    on_progress(1, 1)
    return {
        "jobs": 4,
        "queueing_mean_s": 60.0 * setting.n_r_max,
        "jct_mean_s": 600.0,
        "utilisation": 0.5,
        "training_utilisation": None,
        "minimums": 10,
        "minimums_broken": int(setting.policy.startswith("one-way")),
        "reclaims": setting.seed,
        "reclaim_cost_device_s": 12.34,
    }


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaning, "play_loans", stand_in)


def test_a_table_for_people(springtide: Run) -> None:
    done = springtide(*ASKED, "--seed", "7")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("N_R MAX  POLICY")
    assert "MEAN WAIT" in lines[0]
    assert lines[1].split()[:3] == ["2", "dedicated", "2m00"]
    assert any(line.split()[:3] == ["queueing", "two-way", "dedicated"] and "x0.85" in line for line in lines)
    assert "one-way broke 2 guaranteed minimums of 20" in done.stderr
    assert "all numbers: --json OUT" in done.stdout


def test_json_alone_on_standard_output_and_in_a_file(springtide: Run, tmp_path: Path) -> None:
    answer = json.loads(springtide(*ASKED, "--days", "2", "--seed", "7", "--json", "-").stdout)
    assert (answer["study"], answer["days"], answer["seed"], answer["training"]) == ("loaning", 2, 7, "fifo")
    assert set(answer["policies"]) == {"dedicated", "one-way", "two-way", "tide", "springtide"}
    assert set(answer["policies"]["springtide"]["n_r_max"]) == {"2", "3"}
    assert answer["policies"]["springtide"]["reclaims"] == 14
    output, report = tmp_path / "out.json", tmp_path / "report.html"
    done = springtide(*ASKED, "--policy", "two-way,dedicated", "--json", str(output), "--html", str(report))
    assert list(json.loads(output.read_bytes())["policies"]) == ["two-way", "dedicated"]
    assert done.stdout.startswith("N_R MAX")
    assert "<html" in report.read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--trace", "generated:5"), "leave --trace out"),
        (("--error", "0.2"), "leave --error out"),
        (("--policy", "fifo"), "choose among dedicated"),
        (("--n-r-max", "many"), "write 2,4,6,8"),
        (("--n-r-max", "16"), "give 1 to 15"),
        (("--training", "best"), "there is no policy"),
        (("--json", "no/folder/out.json"), "there is no folder no/folder"),
    ],
)
def test_what_cannot_be_is_one_sentence(springtide: Run, arguments: tuple[str, ...], sentence: str) -> None:
    done = springtide(*ASKED, *arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_options_of_the_study_need_it(springtide: Run) -> None:
    asked = ("simulate", "--trace", "generated:5", "--cluster", "1x4", "--policy", "fifo")
    for option in (("--days", "2"), ("--n-r-max", "2"), ("--ablations",)):
        done = springtide(*asked, *option)
        assert done.exit_code == 2
        assert "add --study loaning" in done.stderr
    assert "--policy springtide,fifo" in springtide("simulate", "--trace", "generated:5").stderr


def test_a_row_that_failed_is_named(springtide: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = loaning.study_loaning(
        n_r_max=[2],
        only=["one-way"],
        play=lambda setting, **_: stand_in(setting, timer=None, on_progress=lambda *_: None),
    )
    monkeypatch.setattr(loaning, "study_loaning", lambda **_: answer | {"errors": {"two-way@2": "PolicyError: no"}})
    done = springtide(*ASKED)
    assert done.exit_code == 1
    assert "two-way@2 failed: PolicyError: no" in done.stderr


def test_the_table_holds_what_there_is() -> None:
    figures = {"n_r_max": {"2": {"queueing_mean_s": 0.0}}}
    answer = {"policies": {"dedicated": figures, "two-way": figures}}
    ratios = loaning.ratios_of(answer["policies"])
    text = study_text(answer | {"ratios": ratios})
    assert "two-way" in text.splitlines()[2]
    assert text.splitlines()[-1].split() == ["utilisation", "two-way", "dedicated", "-", "x1.09", "to", "x1.67"]
