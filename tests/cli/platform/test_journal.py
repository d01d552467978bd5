"""`springtide journal export --schema 1`: a journal for the version before this one, or why there is none."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from springtide.cli.main import cli
from springtide.control.journal.sqlite import SqliteJournal
from springtide.core.events import DecisionsResumed, JobSubmitted
from springtide.core.ports import Step
from springtide.core.workload import Entrypoint, TrainingJob

JOB = TrainingJob(job_id="job", name="job", entrypoint=Entrypoint(source_path="job.py", object_name="fit"))


@pytest.fixture
def state(tmp_path: Path) -> list[str]:
    with contextlib.closing(SqliteJournal(tmp_path / "journal.db")) as journal:
        journal.append(Step(now_s=1.0, events=(DecisionsResumed(), JobSubmitted(job=JOB))))
    return ["--state", str(tmp_path)]


def test_it_says_what_it_wrote_and_what_it_left_out(state: list[str], tmp_path: Path) -> None:
    file = tmp_path / "older.db"
    done = CliRunner().invoke(cli, ["journal", "export", "--schema", "1", str(file), *state])
    assert done.exit_code == 0, done.output
    assert f"1 step written to {file}, a journal of schema 1" in done.output
    assert "left out, without a change of the state: 1 DecisionsResumed" in done.output
    assert "put it there as journal.db" in done.output
    other = tmp_path / "other.db"
    told = CliRunner().invoke(cli, ["journal", "export", "--schema", "1", str(other), "--json", *state])
    assert json.loads(told.output) == {
        "file": str(other),
        "schema": 1,
        "num_steps": 1,
        "left_out": {"DecisionsResumed": 1},
    }
    lines = CliRunner().invoke(cli, ["journal", "export", str(tmp_path / "lines"), "--json", *state])
    assert json.loads(lines.output) == {"num_steps": 1, "file": str(tmp_path / "lines")}


@pytest.mark.parametrize("schema", [[], ["--schema", "1"]])
def test_a_file_that_is_there_is_refused(state: list[str], tmp_path: Path, schema: list[str]) -> None:
    (tmp_path / "mine").write_text("mine")
    refused = CliRunner().invoke(cli, ["journal", "export", *schema, str(tmp_path / "mine"), *state])
    assert refused.exit_code == 2
    assert "is there already" in refused.output
    assert (tmp_path / "mine").read_text() == "mine"


def test_what_the_older_version_could_not_know_is_named(state: list[str], tmp_path: Path) -> None:
    with contextlib.closing(SqliteJournal(tmp_path / "journal.db")) as journal:
        wish = TrainingJob(job_id="wish", name="wish", entrypoint=JOB.entrypoint, on_stall="restart")
        journal.append(Step(now_s=2.0, events=(JobSubmitted(job=wish),)))
    refused = CliRunner().invoke(cli, ["journal", "export", "--schema", "1", str(tmp_path / "older.db"), *state])
    assert refused.exit_code == 2
    assert "wish: on_stall 'restart' (step 2)" in refused.output
    assert not (tmp_path / "older.db").exists()
