"""`springtide tune`: what it asks the study for, and how a study looks as it goes and at its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from springtide.cli.commands import tune as command
from springtide.cli.commands.tune import shown_study, study_table, study_text, trial_line
from springtide.client.studies import Study, Trial
from springtide.core.errors import InvalidRequest

Run = Callable[..., Result]
FILE = """
import springtide as st

def search_space(trial):
    return {"width": trial.suggest_int("width", 8, 64)}

def accuracy(job):
    return 0.5

task = st.Task(model=dict, dataset=[1], loss=max, optimizer=list, name="digits")
"""


def trial_of(number: int, state: str, **fields: Any) -> Trial:
    given = {"params": {"width": str(8 + number)}, "submit_key": "k", "cap_usd": 0.05, "job_id": f"digits-{number}-aa"}
    return Trial(**{"number": number, "state": state, **given, **fields})


STUDY = Study(
    name="digits",
    num_trials=8,
    budget_usd=0.4,
    trials=(
        trial_of(0, "succeeded", value=0.31, spent_usd=0.02, progress_fraction=1.0, artifact_path="/s/model"),
        trial_of(1, "pruned", spent_usd=0.01, progress_fraction=0.3, losses=(2.0, 1.9), reason="worse than the median"),
        trial_of(2, "failed", reason="its code raised ValueError"),
        trial_of(3, "running", spent_usd=0.004, progress_fraction=0.1, losses=(1.2,)),
    ),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def run_study(task: Any, **given: Any) -> Study:
        found.update(given, task=task)
        for count in range(len(STUDY.trials) + 1):
            given["on_change"](Study(**{**_fields(STUDY), "trials": STUDY.trials[:count]}))
        return Study(**{**_fields(STUDY), "reason": "all 8 trials are over"})

    monkeypatch.setattr(command, "run_study", run_study)
    return found


def _fields(study: Study) -> dict[str, Any]:
    return {name: getattr(study, name) for name in study.__struct_fields__}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "nas.py"
    file.write_text(FILE)
    return file


def test_flags_become_the_studys_keywords(springtide: Run, asked: dict[str, Any], path: Path, tmp_path: Path) -> None:
    changes = ["--epochs", "3", "--batch", "60", "--param", "lr=0.1", "--no-prune", "--study", "s"]
    result = springtide("tune", str(path), "--trials", "8", "--budget", "$0.4", "--parallel", "2", *changes)
    assert result.exit_code == 0, result.output
    assert (asked["trials"], asked["budget"], asked["parallel"], asked["study"]) == (8, "$0.4", 2, "s")
    assert (asked["epochs"], asked["global_batch"], asked["params"], asked["prunes"]) == (3, 60, {"lr": "0.1"}, False)
    assert asked["metric"] == "loss"
    assert asked["folder"] == tmp_path / "studies"
    assert asked["task"].name == "digits"
    assert "deadline" not in asked
    assert "trial 3  width=11  runs as digits-3-aa, may cost $0.05" in result.output
    assert "best loss 0.31: trial 0, width=8" in result.output
    assert "1 succeeded, 1 pruned, 1 failed; $0.034 of $0.40 spent" in result.output
    assert "--trials 16 --budget 0.8 --study digits" in result.output


def test_json_is_the_study(springtide: Run, asked: dict[str, Any], path: Path) -> None:
    result = springtide("tune", f"{path}:task", "--trials", "8", "--budget", "1", "--metric", "accuracy", "--json")
    told = json.loads(result.stdout)
    assert told["trials"][1]["state"] == "pruned"
    assert told["reason"] == "all 8 trials are over"
    assert asked["metric"](None) == 0.5
    assert asked["prunes"] is None


def test_what_cannot_be_tuned_is_said(springtide: Run, tmp_path: Path, path: Path) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text("import springtide as st\n@st.train\ndef fit(ctx): ...\n")
    result = springtide("tune", str(plain), "--trials", "1", "--budget", "1")
    assert result.exit_code == 2
    assert "st.Task(model=" in result.stderr
    result = springtide("tune", str(path), "--trials", "1", "--budget", "1", "--metric", "a b")
    assert "no metric" in result.stderr
    assert springtide("tune", str(path), "--budget", "1").exit_code == 2


def test_a_study_without_a_best_is_a_failure(springtide: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Study(name="digits", num_trials=3, budget_usd=1.0, trials=STUDY.trials[2:3], reason="came to nothing")
    monkeypatch.setattr(command, "run_study", lambda task, **_: nothing)
    result = springtide("tune", str(path), "--trials", "3", "--budget", "1")
    assert result.exit_code == 1
    assert "no trial has come through" in result.output
    assert "springtide why digits-2-aa" in result.output


def test_ctrl_c_detaches(springtide: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(task: Any, **_: Any) -> Study:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_study", interrupted)
    result = springtide("tune", str(path), "--trials", "3", "--budget", "1")
    assert result.exit_code == 0
    assert "the same command takes them up" in result.output


def test_a_problem_is_one_sentence(springtide: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(task: Any, **_: Any) -> Study:
        raise InvalidRequest("studies need optuna")

    monkeypatch.setattr(command, "run_study", refused)
    result = springtide("tune", str(path), "--trials", "3", "--budget", "1")
    assert result.exit_code == 2
    assert result.stderr.strip() == "studies need optuna"


def test_the_table() -> None:
    lines = study_table(STUDY).splitlines()
    assert lines[0].split() == ["TRIAL", "STATE", "PROGRESS", "LOSS", "COST", "CAP", "PARAMETERS"]
    assert lines[1].split()[:2] == ["0", "*"]
    assert "1.9" in lines[2]
    assert lines[2].endswith("worse than the median")
    assert lines[-1] == "3 of 8 trials are over; $0.034 of $0.40 spent; best loss 0.31 (trial 0)"
    assert max(map(len, study_table(STUDY, 60).splitlines()[:-1])) <= 76
    assert trial_line(STUDY.trials[1], STUDY) == "trial 1  width=9  pruned  worse than the median  $0.01"
    assert "its model  /s/model" in study_text(STUDY)
    drawn = trial_of(4, "failed", params={"lr": "0.00986664134", "kind": "one", "width": "64"}, reason="no")
    assert trial_line(drawn, STUDY) == "trial 4  lr=0.00987 kind=one width=64  failed  no  $0.00"


def test_a_live_table_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_study(live=True, note=print) as show:
        show(STUDY)
