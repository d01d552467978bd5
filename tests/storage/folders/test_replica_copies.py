"""A replica's copy of a folder: its own, gone with it, and removed by the next one if it was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kits.service.sent_folders import sent_tree
from springtide.storage.folders.contents import ContentDirectory
from springtide.storage.folders.copies import ContentDamaged
from springtide.storage.folders.replica_copies import remove_left_copies, replica_copy
from springtide.storage.folders.tree import FolderTree, encode_tree

KILLED = """
import os, signal, sys
from pathlib import Path
from springtide.storage.folders.contents import ContentDirectory
from springtide.storage.folders.replica_copies import replica_copy
contents = ContentDirectory(Path(sys.argv[1]))
with replica_copy(contents.read_tree(sys.argv[2]), contents.open, Path(sys.argv[3]), "echo.0") as copy:
    (copy / "own.txt").write_text("x")
    (copy.parent / ".echo.0.half").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def contents(tmp_path: Path) -> ContentDirectory:
    return ContentDirectory(tmp_path / "contents")


@pytest.fixture
def tree(contents: ContentDirectory) -> FolderTree:
    return sent_tree(contents, {"serve.py": b"x = 1\n", "uv.lock": b"locked"})


def test_no_replica_sees_what_another_one_writes_and_its_copy_goes_with_it(
    contents: ContentDirectory, tree: FolderTree, tmp_path: Path
) -> None:
    copies = tmp_path / "folders"
    with replica_copy(tree, contents.open, copies, "echo.0", directory="work") as first:
        (first / "serve.py").write_text("changed")
        with replica_copy(tree, contents.open, copies, "echo.1") as second:
            assert (second / "serve.py").read_text() == "x = 1\n"
            remove_left_copies(copies)
            assert sorted(path.name for path in first.iterdir()) == ["serve.py", "uv.lock", "work"]
        assert not second.exists()
    assert list(copies.iterdir()) == []


def test_what_a_killed_replica_left_goes_when_the_next_one_starts(
    contents: ContentDirectory, tree: FolderTree, tmp_path: Path
) -> None:
    copies = tmp_path / "folders"
    places = [str(tmp_path / "contents"), encode_tree(tree)[0], str(copies)]
    done = subprocess.run([sys.executable, "-c", KILLED, *places], check=False)
    assert done.returncode == -9
    assert (copies / "echo.0/own.txt").exists()
    with replica_copy(tree, contents.open, copies, "echo.1"):
        assert sorted(path.name for path in copies.iterdir()) == ["echo.1", "echo.1.lock"]


def test_a_damaged_content_leaves_nothing(contents: ContentDirectory, tree: FolderTree, tmp_path: Path) -> None:
    contents.path(tree.files[0].sha256).write_bytes(b"other")
    with (
        pytest.raises(ContentDamaged, match=r"serve\.py was damaged"),
        replica_copy(tree, contents.open, tmp_path / "folders", "echo.0"),
    ):
        pass
    assert list((tmp_path / "folders").iterdir()) == []
