"""Reading the user's file: what it declares, and one sentence for whatever is wrong with it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from springtide.cli.loading import find_service, find_training, import_file, split_target, uses_springtide
from springtide.client.sources.source import IMPORTING_VARIABLE
from springtide.core.errors import InvalidRequest

BOTH = """
import springtide as st

@st.train(epochs=2)
def fit(ctx): ...

@st.serve
class Score:
    def predict(self, texts: list[str]) -> list[str]:
        return texts
"""


def _write(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_target(tmp_path: Path) -> None:
    path = _write(tmp_path, "")
    assert split_target(str(path)) == (path, "")
    assert split_target(f"{path}:fit") == (path, "fit")
    for wrong in (str(tmp_path / "no.py"), str(tmp_path), f"{tmp_path}/no.py:fit"):
        with pytest.raises(InvalidRequest, match="no file"):
            split_target(wrong)
    with pytest.raises(InvalidRequest, match="not a Python file"):
        split_target(str(_write(tmp_path, "", "notes.txt")))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import springtide", True),
        ("import springtide as st", True),
        ("from springtide import train", True),
        ("def f():\n    import springtide.core", True),
        ("import springtides\nprint('springtide')", False),
        ("import springtide\nspringtide.report(1, 2)", False),
        ("from springtide import report\nreport(1)", False),
        ("import springtide as st\nst.report(1)\nst.train", True),
        ("from springtide import report, train", True),
        ("", False),
    ],
)
def test_whether_the_file_is_ours_is_seen_without_running_it(tmp_path: Path, text: str, expected: bool) -> None:
    assert uses_springtide(_write(tmp_path, text)) is expected


def test_a_syntax_error_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"mine\.py is not valid Python in line 2"):
        uses_springtide(_write(tmp_path, "x = 1\ndef (:\n"))


def test_what_the_file_declares(tmp_path: Path) -> None:
    path = _write(tmp_path, BOTH)
    module = import_file(path)
    training = find_training(module, path, "")
    assert training is not None
    assert training.options.values["epochs"] == 2
    assert find_service(module, path, "").cls.__name__ == "Score"
    with pytest.raises(InvalidRequest, match="no training function 'fitt'; it has fit"):
        find_training(module, path, "fitt")


def test_several_to_choose_from(tmp_path: Path) -> None:
    path = _write(tmp_path, BOTH + "\ntask = st.Task(dict, [], max, list)\n")
    with pytest.raises(InvalidRequest, match=r"mine\.py:fit` or `springtide run .*mine\.py:task"):
        find_training(import_file(path), path, "")


def test_what_is_imported_from_elsewhere_is_not_the_files_own(tmp_path: Path) -> None:
    _write(tmp_path, BOTH, "neighbour.py")
    path = _write(tmp_path, "import springtide as st\nfrom neighbour import fit, Score\n")
    try:
        module = import_file(path)
    finally:
        sys.modules.pop("neighbour", None)
    assert find_training(module, path, "") is None


def test_a_service_in_place_of_a_job(tmp_path: Path) -> None:
    path = _write(tmp_path, BOTH.replace("@st.train(epochs=2)", ""))
    with pytest.raises(InvalidRequest, match="springtide deploy"):
        find_training(import_file(path), path, "")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import springtide\n1 / 0", r"mine\.py line 2 cannot be imported: ZeroDivisionError: division by zero"),
        (
            "import springtide\nimport no_such_thing.x",
            "line 2 needs the module 'no_such_thing'.*pip install no_such_thing",
        ),
        ("import springtide as st\nst.train(epochs=0)", r"mine\.py line 2: epochs must be"),
        ("import springtide, sys\nsys.exit(3)", "SystemExit"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        import_file(_write(tmp_path, text))
    assert IMPORTING_VARIABLE not in os.environ


def test_a_relative_import_says_what_to_write_instead(tmp_path: Path) -> None:
    folder = tmp_path / "digits" / "jobs"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent):
        (each / "__init__.py").touch()
    path = _write(folder, "from .conf import N")
    with pytest.raises(InvalidRequest, match=r"mine.py line 1 imports relatively.*`from digits.jobs import \.\.\.`"):
        import_file(path)


def test_a_file_that_submits_when_imported(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="__main__"):
        import_file(_write(tmp_path, BOTH + "\nfit.submit()\n"))
