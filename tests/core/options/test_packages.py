"""Requirements that a workload may have: what pip can be given on the platform's machine."""

from __future__ import annotations

import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.options.packages import check_interpreter, check_requirements, num_packages


def test_packages_and_where_they_come_from() -> None:
    lines = [
        "einops==0.8.1",
        " tqdm ; python_version > '3.8'",
        "--find-links /wheels",
        "--no-index",
        "x @ file:///a.whl",
    ]
    checked = check_requirements(lines, "requirements")
    assert checked[1] == "tqdm ; python_version > '3.8'"
    assert num_packages(checked) == 3


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("tqdm", "requirements must list requirements, like"),
        (["tqdm\nother"], "which is no requirement"),
        ([""], "which is no requirement"),
        ([3], "which is no requirement"),
        (["-r other.txt"], "has the option '-r'"),
        (["-e ."], "has the option '-e'"),
        (["--trusted-host evil"], "has the option '--trusted-host'"),
        (["--index-url=https://me:private@index/simple"], "has an address with a password in it"),
        (["a"] * 257, "has 257 lines; at most 256 are possible"),
        (["a" * 1025], "which is no requirement"),
    ],
)
def test_what_is_refused(lines: object, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_requirements(lines, "requirements")
    assert sentence in str(refusal.value)
    assert "private" not in str(refusal.value)


def test_an_interpreter_is_an_absolute_path() -> None:
    assert check_interpreter("/opt/py/bin/python", "python") == "/opt/py/bin/python"
    assert check_interpreter("", "python") == ""
    for path in ("python3", "bin/python", "/a\nb", 3):
        with pytest.raises(InvalidRequest, match="must be the absolute path of Python"):
            check_interpreter(path, "python")
