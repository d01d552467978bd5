"""A job's own copy of a folder: fresh files, whole or not there, and later only what the job wrote."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from springtide.storage.folders.contents import ContentDirectory
from springtide.storage.folders.copies import ContentDamaged, make_copy, prune_copy
from springtide.storage.folders.tree import FolderFile, FolderTree


def kept(contents: ContentDirectory, path: str, data: bytes, *, is_executable: bool = False) -> FolderFile:
    digest = hashlib.sha256(data).hexdigest()
    contents.put(digest, data)
    return FolderFile(path, digest, len(data), is_executable)


@pytest.fixture
def contents(tmp_path: Path) -> ContentDirectory:
    return ContentDirectory(tmp_path / "contents")


def test_a_copy_has_all_files_and_shares_none_with_the_contents(contents: ContentDirectory, tmp_path: Path) -> None:
    files = (kept(contents, "pkg/run.sh", b"echo", is_executable=True), kept(contents, "train.py", b"x = 1\n"))
    copy = tmp_path / "job" / "folder"
    make_copy(FolderTree(files, ("logs",)), contents.open, copy, directory="work/here")
    assert (copy / "train.py").read_bytes() == b"x = 1\n"
    assert (copy / "logs").is_dir()
    assert (copy / "work/here").is_dir()
    assert stat.S_IMODE((copy / "pkg/run.sh").stat().st_mode) == 0o700
    assert stat.S_IMODE((copy / "train.py").stat().st_mode) == 0o600
    assert stat.S_IMODE((copy / "pkg").stat().st_mode) == 0o700
    (copy / "train.py").write_bytes(b"changed by the job")
    with contents.open(files[1].sha256) as file:
        assert file.read() == b"x = 1\n"


def test_a_copy_that_is_there_stays_as_the_job_left_it(contents: ContentDirectory, tmp_path: Path) -> None:
    tree = FolderTree((kept(contents, "train.py", b"x = 1\n"),))
    make_copy(tree, contents.open, tmp_path / "folder")
    (tmp_path / "folder/train.py").write_bytes(b"changed")
    make_copy(tree, contents.open, tmp_path / "folder")
    assert (tmp_path / "folder/train.py").read_bytes() == b"changed"


@pytest.mark.parametrize("data", [b"x = 2\n", b"x = 1", b"x = 1\n and more"])
def test_a_damaged_content_leaves_no_copy(contents: ContentDirectory, tmp_path: Path, data: bytes) -> None:
    first, second = kept(contents, "a.py", b"a"), kept(contents, "train.py", b"x = 1\n")
    contents.path(second.sha256).write_bytes(data)
    with pytest.raises(ContentDamaged, match=r"train\.py was damaged") as caught:
        make_copy(FolderTree((first, second)), contents.open, tmp_path / "folder")
    assert caught.value.sha256 == second.sha256
    assert [path.name for path in tmp_path.iterdir()] == ["contents"]


def test_pruning_leaves_what_the_job_wrote(contents: ContentDirectory, tmp_path: Path) -> None:
    files = tuple(kept(contents, name, name.encode()) for name in ("a.py", "notes.txt", "pkg/b.py"))
    copy = tmp_path / "folder"
    make_copy(FolderTree(files, ("empty",)), contents.open, copy)
    copied_ns = max(path.stat().st_mtime_ns for path in copy.rglob("*.*"))
    (copy / "out.txt").write_text("new")
    (copy / "notes.txt").write_text("longer notes")
    assert (copy / "notes.txt").stat().st_mtime_ns > copied_ns
    prune_copy(FolderTree(files, ("empty",)), copy, copied_ns)
    assert sorted(path.name for path in copy.rglob("*")) == ["notes.txt", "out.txt"]
