"""Which folder travels: the file's, the project's where its imports need that, or the one that was named."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.client.folders.choice import chosen_folder, code_files, with_code
from springtide.client.sources.source import read_source
from springtide.core.errors import InvalidRequest


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def chosen(file: Path, wish: object = None) -> Path | None:
    return chosen_folder(file, file.read_text(encoding="utf-8"), wish)  # type: ignore[arg-type]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path.resolve() / "project"
    write(root / "pyproject.toml")
    write(root / "lib" / "__init__.py")
    write(root / "src" / "other" / "deep.py")
    write(root / "scripts" / "helper.py", "x = 1\n")
    return root


@pytest.mark.parametrize(
    ("text", "is_project"),
    [
        ("import os, torch, springtide\n", False),
        ("import helper\n", False),
        ("import lib\n", True),
        ("from lib.model import Net\n", True),
        ("def late():\n    import other.deep\n", True),
        ("import nowhere\n", False),
        ("this is not Python", False),
    ],
)
def test_the_project_travels_where_the_files_imports_need_it(project: Path, text: str, is_project: bool) -> None:
    file = write(project / "scripts" / "train.py", text)
    assert chosen(file) == (project if is_project else project / "scripts")


def test_what_a_neighbour_imports_counts_too(project: Path) -> None:
    write(project / "scripts" / "helper.py", "import lib\n")
    assert chosen(write(project / "scripts" / "train.py", "import helper\n")) == project


@pytest.mark.parametrize(("text", "is_above"), [("from digits.conf import N\n", True), ("import conf\n", False)])
def test_without_a_project_the_folder_of_the_package_travels_where_the_imports_need_it(
    tmp_path: Path, text: str, is_above: bool
) -> None:
    root = tmp_path.resolve() / "work"
    for name in ("digits/__init__.py", "digits/conf.py", "digits/jobs/__init__.py"):
        write(root / name)
    file = write(root / "digits" / "jobs" / "train.py", text)
    assert chosen(file) == (root if is_above else file.parent)


def test_a_file_at_the_projects_root_and_one_outside_of_projects_travel_with_their_folder(
    project: Path, tmp_path: Path
) -> None:
    assert chosen(write(project / "train.py", "import lib\n")) == project
    assert chosen(write(tmp_path.resolve() / "alone" / "train.py", "import lib\n")) == tmp_path.resolve() / "alone"


def test_a_module_of_the_standard_library_is_not_the_projects(project: Path) -> None:
    write(project / "json" / "__init__.py")
    assert chosen(write(project / "scripts" / "train.py", "import json\n")) == project / "scripts"


def test_a_wish_takes_precedence_and_must_hold_the_file(project: Path) -> None:
    file = write(project / "scripts" / "train.py", "import lib\n")
    assert chosen(file, False) is None
    assert chosen(file, str(project.parent)) == project.parent
    with pytest.raises(InvalidRequest, match="is not in the folder"):
        chosen(file, project / "lib")
    with pytest.raises(InvalidRequest, match="not there"):
        chosen(file, project / "nowhere")


def test_the_code_that_tells_jobs_apart_is_what_the_file_imports(project: Path) -> None:
    write(project / "lib" / "__init__.py", "y = 2\n")
    write(project / "lib" / "data.json", "{}")
    write(project / "lib" / "broken.py", "def (:\n")
    file = write(project / "scripts" / "train.py", "import helper, lib\n")
    found = code_files(file, file.read_text(), project)
    assert found == {"helper.py": "x = 1\n", "lib/__init__.py": "y = 2\n"}
    assert code_files(file, "import os\n", project) == {}
    write(project / "lib" / "large.py", f"x = '{'a' * 600_000}'\n")
    assert code_files(file, file.read_text(), project) == {}


def test_a_source_has_the_code_of_its_folder_or_what_pods_need(project: Path) -> None:
    write(project / "scripts" / "table.json", "{}")
    source = read_source(write(project / "scripts" / "train.py", "import helper\n"))
    assert with_code(source, None, has_pods=False).files == {"helper.py": "x = 1\n"}
    assert with_code(source, False, has_pods=False) == source
    assert with_code(source, False, has_pods=True).import_root == ""


def test_a_file_in_the_home_directory_travels_alone_unless_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path.resolve() / "home"
    file = write(home / "train.py", "import lib\n")
    inner = write(home / "scripts" / "train.py", "import lib\n")
    write(home / "lib.py")
    write(home / ".git")
    monkeypatch.setattr(Path, "home", lambda: home)
    assert chosen(file) is None
    assert chosen(file, home) == home
    assert chosen(inner) == home / "scripts", "the home directory is no project, even with a .git"
