"""--env and --env-file: what a shell and a dotenv file say, and what is wrong with a line without its value."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from springtide.cli.jobs.flags import given_keywords, option_flags
from springtide.cli.jobs.variables import ask_secrets, read_env_file, read_variables
from springtide.core.errors import InvalidRequest
from springtide.core.options.environment import ENVIRONMENT_OPTIONS

FILE = """
# A comment
export HF_HOME=/data/hf   # and one behind a value
QUOTED="two words $HOME"
SINGLE='it is \\n as written'
LINES="first
second"
EMPTY=
INHERITED
"""


def test_a_dotenv_file_is_read_and_nothing_is_replaced_in_it(tmp_path: Path) -> None:
    path = tmp_path / "my.env"
    path.write_text(FILE, encoding="utf-8")
    assert read_env_file(path, {"INHERITED": "here"}) == {
        "HF_HOME": "/data/hf",
        "QUOTED": "two words $HOME",
        "SINGLE": "it is \\n as written",
        "LINES": "first\nsecond",
        "EMPTY": "",
        "INHERITED": "here",
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("A=1\nB='private", "line 2 is not NAME=VALUE; quote a value of several words or lines"),
        ("A=1\n\nRANK=private", "line 3 cannot set RANK: the platform sets it"),
        ("a-b=private", "has 'a-b', which is no name of a variable"),
        ("NOWHERE", "line 1 NOWHERE takes its value from this shell, which has none: write NOWHERE=VALUE"),
    ],
)
def test_a_bad_line_is_named_without_its_value(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "my.env"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidRequest) as refusal:
        read_env_file(path, {})
    assert sentence in str(refusal.value)
    assert "private" not in str(refusal.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        read_env_file(tmp_path / "none.env")
    (tmp_path / "binary.env").write_bytes(b"A=\xff\xfe")
    with pytest.raises(InvalidRequest, match="is not UTF-8 text"):
        read_env_file(tmp_path / "binary.env")


def test_a_flag_replaces_what_a_file_says_and_a_bare_name_is_inherited(tmp_path: Path) -> None:
    first, second = tmp_path / "a.env", tmp_path / "b.env"
    first.write_text("A=1\nB=1\nC=1\n", encoding="utf-8")
    second.write_text("B=2\nC=2\n", encoding="utf-8")
    found = read_variables(["C=3=3", "D"], [str(first), str(second)], {"D": "4"})
    assert found == {"A": "1", "B": "2", "C": "3=3", "D": "4"}
    with pytest.raises(InvalidRequest, match="--env E takes its value from this shell"):
        read_variables(["E"], [], {})


def test_a_secret_without_a_value_is_asked_for_and_not_shown(tmp_path: Path) -> None:
    found: dict[str, object] = {}

    @click.command()
    @click.option("--ask/--no-ask")
    def command(ask: bool) -> None:
        found.update(secrets=ask_secrets(["A", "B", "C=@c.txt"], {"B": "here"}, may_ask=ask))

    result = CliRunner().invoke(command, ["--ask"], input="typed\n")
    assert found["secrets"] == {"A": "typed", "B": None, "C": Path("c.txt")}
    assert "typed" not in result.output
    CliRunner().invoke(command, ["--no-ask"])
    assert found["secrets"] == ["A", "B", "C=@c.txt"]


def test_a_value_of_a_secret_is_refused_on_the_command_line() -> None:
    @click.command()
    @option_flags(ENVIRONMENT_OPTIONS, "run")
    def command(**given: object) -> None:
        with pytest.raises(
            InvalidRequest, match=r"--secret takes no value of 'A', .* name the variable alone"
        ) as refusal:
            given_keywords(ENVIRONMENT_OPTIONS, "run", given)
        assert "private" not in str(refusal.value)

    assert CliRunner().invoke(command, ["--secret", "A=private"]).exit_code == 0


def test_both_flags_come_with_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my.env"
    path.write_text("A=1\n", encoding="utf-8")
    monkeypatch.setenv("B", "2")
    found: dict[str, object] = {}

    @click.command()
    @option_flags(ENVIRONMENT_OPTIONS, "run")
    def command(**given: object) -> None:
        found.update(given_keywords(ENVIRONMENT_OPTIONS, "run", given))

    assert CliRunner().invoke(command, ["--env", "B", "--env-file", str(path)]).exit_code == 0
    assert found == {"env": {"A": "1", "B": "2"}}
    found.clear()
    assert CliRunner().invoke(command, []).exit_code == 0
    assert found == {}
