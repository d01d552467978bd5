"""Which files beside a source go along: what is imported, packages whole, nothing of anybody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.client.sources import neighbours as module
from springtide.client.sources.neighbours import neighbours
from springtide.core.errors import InvalidRequest


def write(root: Path, *names: str, text: str = "") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def found(root: Path, text: str) -> list[str]:
    return sorted(neighbours("train.py", text, root))


def test_of_a_package_all_text_goes_along_and_nothing_hidden_or_built(tmp_path: Path):
    write(tmp_path, "pkg/__init__.py", "pkg/model.py", "pkg/deep/__init__.py", "pkg/deep/cell.py", "pkg/sizes.json")
    write(tmp_path, "pkg/.secret.py", "pkg/__pycache__/model.py", "pkg/weights.bin", "pkg/.git/config.txt", "other.py")
    assert found(tmp_path, "from pkg.model import Net") == [
        "pkg/__init__.py",
        "pkg/deep/__init__.py",
        "pkg/deep/cell.py",
        "pkg/model.py",
        "pkg/sizes.json",
    ]


def test_what_a_package_imports_beside_it_goes_along_too(tmp_path: Path):
    write(tmp_path, "pkg/__init__.py", "helper.py", "lib/__init__.py", "lib/tool.py", "unused/__init__.py")
    write(tmp_path, "pkg/model.py", text="import helper\nfrom lib import tool\nfrom . import gone\n")
    assert found(tmp_path, "import pkg") == [
        "helper.py",
        "lib/__init__.py",
        "lib/tool.py",
        "pkg/__init__.py",
        "pkg/model.py",
    ]


def test_a_package_comes_before_a_file_of_its_name_as_in_python(tmp_path: Path):
    write(tmp_path, "pkg/__init__.py", "pkg.py", "plain.py", "plain/part.py")
    assert found(tmp_path, "import pkg\nimport plain") == ["pkg/__init__.py", "plain.py"]


def test_a_bare_folder_is_taken_where_something_in_it_is_meant(tmp_path: Path):
    write(tmp_path, "parts/one.py", "parts/two.py", "data/table.txt", "json/notes.txt")
    assert found(tmp_path, "import data\nimport json\nfrom json import dumps\n") == []
    assert found(tmp_path, "from parts import one\n") == ["parts/one.py", "parts/two.py"]
    assert found(tmp_path, "import parts.two as two\n") == ["parts/one.py", "parts/two.py"]


def test_links_lead_nowhere_outside(tmp_path: Path):
    root = tmp_path / "code"
    write(root, "pkg/__init__.py", "pkg/a.py")
    write(tmp_path, "outside.py", text="secret = 1\n")
    (root / "pkg" / "link.py").symlink_to(tmp_path / "outside.py")
    (root / "pkg" / "again").symlink_to(root / "pkg")
    assert found(root, "import pkg") == ["pkg/__init__.py", "pkg/a.py"]


def test_too_many_files_and_names_that_nobody_takes_are_refused_with_the_mend(tmp_path: Path, monkeypatch):
    write(tmp_path, "pkg/__init__.py", *(f"pkg/m{number}.py" for number in range(4)))
    monkeypatch.setattr(module, "MAX_FILES", 5)
    with pytest.raises(InvalidRequest, match="imports more than 5 files; put them into the image"):
        neighbours("train.py", "import pkg", tmp_path)
    write(tmp_path, "odd/__init__.py", "odd/my notes.txt")
    with pytest.raises(InvalidRequest, match=r"cannot be sent: .* rename it, or move it out"):
        neighbours("train.py", "import odd", tmp_path)
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "__init__.py").write_bytes("é".encode("latin-1"))
    with pytest.raises(InvalidRequest, match=r"latin/__init__\.py is not UTF-8 text"):
        neighbours("train.py", "import latin", tmp_path)


def test_a_file_that_cannot_be_read_as_python_imports_nothing(tmp_path: Path):
    write(tmp_path, "pkg/__init__.py")
    assert found(tmp_path, "import pkg\ndef (") == []
