"""Where a workload's packages are named: a requirements file, else a script's header, else pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.client.requirements import requirements_of, with_packages
from springtide.client.sources.source import SourceFile, read_source
from springtide.core.errors import InvalidRequest

HEADER = """# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "einops==0.8.1",
#   "./wheels/mine-1.0-py3-none-any.whl",
# ]
# ///
import einops
"""


@pytest.fixture
def source(tmp_path: Path) -> SourceFile:
    (tmp_path / "train.py").write_text("import torch\n", encoding="utf-8")
    return read_source(tmp_path / "train.py", "", "script")


def with_text(tmp_path: Path, text: str) -> SourceFile:
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    return read_source(tmp_path / "train.py", "", "script")


def test_without_any_there_is_no_option(source: SourceFile) -> None:
    assert with_packages({"seed": 1}, (), source, has_pods=False) == {"seed": 1}
    assert with_packages({}, ["tqdm"], source, has_pods=False) == {"requirements": ["tqdm"]}


def test_functions_have_the_packages_of_their_image(tmp_path: Path) -> None:
    header, told = with_text(tmp_path, HEADER), list[str]()
    asked = {"on": "functions"}
    assert with_packages(asked, (), header, has_pods=False, on_progress=told.append) == asked
    wheel = tmp_path / "wheels/mine-1.0-py3-none-any.whl"
    assert told == [f"train.py asks for einops==0.8.1, {wheel}: nothing is installed there, its image has to have them"]
    assert with_packages(asked, (), with_text(tmp_path, ""), has_pods=False, on_progress=told.append) == asked
    assert len(told) == 1


def test_in_pods_paths_begin_in_the_folder_that_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = with_text(tmp_path, HEADER)
    sent = {"requirements": ["einops==0.8.1", "./wheels/mine-1.0-py3-none-any.whl"]}
    assert with_packages({}, (), header, has_pods=True) == sent
    monkeypatch.chdir(tmp_path)
    lines = ["-f wheels", "--find-links https://x/y", "c @ https://x/c.zip"]
    assert with_packages({}, lines, header, has_pods=True, folder=tmp_path.parent) == {
        "requirements": [f"--find-links ./{tmp_path.name}/wheels", "--find-links https://x/y", "c @ https://x/c.zip"]
    }
    for lines, folder in ((["/opt/x.whl"], None), (["./x.whl"], False)):
        with pytest.raises(InvalidRequest, match=r"x\.whl is a path of this machine, which pods do not see"):
            with_packages({}, lines, header, has_pods=True, folder=folder)


def test_a_requirements_file(tmp_path: Path, source: SourceFile, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "requirements.txt").write_text(
        "# for training\neinops==0.8.1  # pinned\n\ntqdm \\\n  >=4\n-f wheels\n--find-links https://x/y\n./a.whl\nb.whl\n"
        "c @ https://x/c.zip#sha256=1\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    assert requirements_of("requirements.txt", source) == (
        "einops==0.8.1",
        "tqdm >=4",
        f"--find-links {tmp_path / 'wheels'}",
        "--find-links https://x/y",
        str(tmp_path / "a.whl"),
        str(tmp_path / "b.whl"),
        "c @ https://x/c.zip#sha256=1",
    )


def test_a_header_comes_before_pyproject_and_a_list_before_both(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.springtide]\ndependencies = ['tqdm']\n", encoding="utf-8")
    assert requirements_of((), with_text(tmp_path, "import tqdm\n")) == ("tqdm",)
    header = with_text(tmp_path, HEADER)
    assert requirements_of((), header) == ("einops==0.8.1", str(tmp_path / "wheels/mine-1.0-py3-none-any.whl"))
    assert requirements_of(["other"], header) == ("other",)
    # A header that names none stands for itself.
    assert requirements_of((), with_text(tmp_path, "# /// script\n# dependencies = []\n# ///\n")) == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# /// script\n# dependencies = [\n# ///\n", "the header of train.py is not valid TOML"),
        ("# /// script\n# dependencies = 'tqdm'\n# ///\n", "the header of train.py must list requirements"),
        ("# /// script\n# dependencies = ['-e .']\n# ///\n", "the header of train.py has the option '-e'"),
        (HEADER + HEADER, "has 2 headers of the type script"),
    ],
)
def test_a_bad_header_is_told(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        requirements_of((), with_text(tmp_path, text))


def test_a_file_that_is_not_there(source: SourceFile, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        requirements_of("none.txt", source)
    (tmp_path / "pyproject.toml").write_text("[tool", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="is not valid TOML"):
        requirements_of((), source)
