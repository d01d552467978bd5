"""What of a folder travels, what does not, and what is said of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from springtide.client.folders import scan as scanning
from springtide.client.folders.scan import scan


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path.resolve() / "folder"
    write(root / "train.py")
    return root


def paths(folder: Path) -> list[str]:
    return [file.path for file in scan(folder, "train.py").files]


def test_what_is_usual_is_left_out_without_a_word(folder: Path) -> None:
    for name in (
        *(".git/HEAD", "__pycache__/a.pyc", "pkg/__pycache__/b.pyc", "c.pyc", ".venv/lib/x.py", "node_modules/x.js"),
        *(".mypy_cache/x", "springtide-out/fit/model.safetensors", "env/pyvenv.cfg", "env/lib/y.py"),
        *("state/journal.db", "state/workloads/fit-1/folder/train.py", "new/journal.db", "new/token", "new/lock"),
    ):
        write(folder / name)
    write(folder / "pkg" / "model.py")
    write(folder / "data" / "table.csv")
    write(folder / ".hidden.toml")
    found = scan(folder, "train.py")
    assert [file.path for file in found.files] == [".hidden.toml", "data/table.csv", "pkg/model.py", "train.py"]
    assert found.notes() == []


def test_ignore_files_leave_out_and_springtides_own_decides(folder: Path) -> None:
    write(folder / ".gitignore", "runs/\n*.csv\n/only_here.txt\n")
    write(folder / "runs" / "a.txt")
    write(folder / "data" / "a.csv")
    write(folder / "data" / "only_here.txt")
    write(folder / "only_here.txt")
    assert paths(folder) == [".gitignore", "data/only_here.txt", "train.py"]
    notes = scan(folder, "train.py").notes()
    assert notes == ["not sent, by .gitignore: data/a.csv, only_here.txt, runs/"]
    write(folder / ".springtideignore", "!data/\nonly_here.txt\n")
    assert paths(folder) == [".gitignore", ".springtideignore", "data/a.csv", "train.py"]


def test_an_ignore_file_in_a_folder_is_for_that_folder_and_one_of_the_repository_for_all(folder: Path) -> None:
    write(folder.parent / ".gitignore", "*.log\n/folder/secret.txt\n")
    write(folder / "a.log")
    write(folder / "secret.txt")
    write(folder / "sub" / ".gitignore", "/b.txt\n!c.log\n")
    for name in ("b.txt", "c.log", "sub/b.txt", "sub/c.log"):
        write(folder / name)
    assert "a.log" in paths(folder), "outside of a repository the folders above say nothing"
    (folder.parent / ".git").mkdir()
    assert paths(folder) == ["b.txt", "sub/.gitignore", "sub/c.log", "train.py"]
    write(folder.parent / ".gitignore", "folder/\n")
    assert "b.txt" in paths(folder), "it was named in spite of that"


def test_the_file_itself_travels_in_any_case(folder: Path) -> None:
    write(folder / ".gitignore", "*\n")
    write(folder / "other.py")
    assert paths(folder) == ["train.py"]
    write(folder / "sub" / "deep" / "run.py")
    assert [file.path for file in scan(folder, "sub/deep/run.py").files] == ["sub/deep/run.py"]


def test_folders_without_files_are_kept(folder: Path) -> None:
    (folder / "logs" / "inner").mkdir(parents=True)
    write(folder / "out" / "a.pyc")
    assert scan(folder, "train.py").folders == ["logs", "logs/inner", "out"]


def test_links_within_the_folder_are_followed_and_others_named(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "outside" / "large.bin")
    write(folder / "sub" / "real.txt", "text")
    (folder / "data").symlink_to(tmp_path / "outside")
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    (folder / "link.txt").symlink_to("sub/real.txt")
    (folder / "again").symlink_to("sub")
    (folder / "sub" / "up").symlink_to("..")
    found = scan(folder, "train.py")
    assert [file.path for file in found.files] == ["again/real.txt", "link.txt", "sub/real.txt", "train.py"]
    assert found.notes() == [
        "not sent, as the link leads to a folder around it: again/up, sub/up",
        "not sent, as the link leaves the folder: data, gone",
    ]


def test_two_folders_that_link_to_each_other_come_to_an_end(folder: Path) -> None:
    write(folder / "a" / "x.txt")
    write(folder / "b" / "y.txt")
    (folder / "a" / "to_b").symlink_to("../b")
    (folder / "b" / "to_a").symlink_to("../a")
    assert paths(folder) == ["a/to_b/y.txt", "a/x.txt", "b/to_a/x.txt", "b/y.txt", "train.py"]


def test_what_cannot_be_sent_is_named(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    write(folder / "line\nbreak.txt")
    write(folder / ".env", "TOKEN=1")
    os.mkdir(os.fsencode(folder) + b"/\xff\xfe")
    notes = scan(folder, "train.py").notes()
    assert any("it is no file that can be read: pipe" in note for note in notes)
    assert any("cannot be" in note and r"line\nbreak.txt" in note for note in notes)
    assert any(note.endswith(".env") and "secrets" in note for note in notes)
    assert paths(folder) == ["train.py"]
    write(folder / ".springtideignore", "!.env\n")
    assert ".env" in paths(folder)


def test_large_weights_stay_unless_they_are_taken_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "MAX_MODEL_BYTES", 10)
    write(folder / "runs" / "last.ckpt", "x" * 11)
    write(folder / "small.pt", "x")
    write(folder / "table.csv", "x" * 11)
    found = scan(folder, "train.py")
    assert [file.path for file in found.files] == ["small.pt", "table.csv", "train.py"]
    assert "runs/last.ckpt (11 B)" in found.notes()[0]
    write(folder / ".springtideignore", "!*.ckpt\n")
    assert "runs/last.ckpt" in paths(folder)
