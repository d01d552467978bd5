"""Where the values of secrets come from, and that no sentence has one."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from springtide.client.goals import TrainOptions
from springtide.client.secret_values import secret_values
from springtide.client.serving_goals import ServeOptions
from springtide.core.errors import InvalidRequest


def test_values_come_from_the_environment_a_file_or_are_given(tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_text("in a file\n", encoding="utf-8")
    assert secret_values(["A", f"B=@{tmp_path / 'key.txt'}"], {"A": "of the shell"}) == {
        "A": "of the shell",
        "B": "in a file",
    }
    assert secret_values({"A": "given", "B": tmp_path / "key.txt", "C": None}, {"C": "c"}) == {
        "A": "given",
        "B": "in a file",
        "C": "c",
    }


@pytest.mark.parametrize(
    ("secrets", "sentence"),
    [
        (["A"], "the secret A has no value here: set the variable A, or name a file: A=@FILE"),
        (["A=private"], "secrets takes no value of 'A'"),
        (["A=@"], "secrets takes no value of 'A'"),
        ("A", "secrets must list names of variables"),
        (["RANK"], "secrets cannot set RANK: the platform sets it"),
        ({"A": 3}, "the value of 'A' must be a string, not a int"),
        ({"A": ""}, "the secret A is empty"),
        (["A=@/none/private.txt"], "the secret A cannot be read from /none/private.txt: No such file"),
    ],
)
def test_what_is_wrong_is_told_without_a_value(secrets: object, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        secret_values(secrets, {})  # type: ignore[arg-type]
    assert sentence in str(refusal.value)
    assert "=private" not in str(refusal.value)


def test_a_file_has_to_be_text_of_some_size(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "large").write_bytes(b"a" * 40_000)
    for name, sentence in (("binary", "is not UTF-8 text"), ("large", "is larger than 32,768 bytes")):
        with pytest.raises(InvalidRequest, match=sentence):
            secret_values([f"A=@{tmp_path / name}"], {})


def test_values_are_looked_for_when_a_workload_is_submitted_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_TOKEN", raising=False)
    options = TrainOptions(secrets=["A_TOKEN"]).override({"secrets": ["B_TOKEN"]})
    monkeypatch.setenv("A_TOKEN", "a")
    monkeypatch.setenv("B_TOKEN", "b")
    request = options.as_request(1, datetime.now())
    assert request["secrets"] == {"A_TOKEN": "a", "B_TOKEN": "b"}
    assert "secrets" not in TrainOptions().as_request(1, datetime.now())
    assert ServeOptions(secrets=["A_TOKEN"]).as_request()["secrets"] == {"A_TOKEN": "a"}
    assert options.as_local_job("x").env == {"A_TOKEN": "a", "B_TOKEN": "b"}
