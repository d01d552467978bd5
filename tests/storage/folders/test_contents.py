"""Contents by their digests: checked as they come, removed when nothing uses them, and together in an archive."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
import zipfile
from pathlib import Path

import pytest

from springtide.core.errors import Conflict, InvalidRequest, StorageError
from springtide.storage.folders.contents import ContentDirectory, open_archive, take_archive, write_archive
from springtide.storage.folders.tree import FolderFile, FolderTree, encode_tree


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def contents(tmp_path: Path) -> ContentDirectory:
    return ContentDirectory(tmp_path / "contents")


def test_a_content_is_kept_under_its_digest_for_its_owner_alone(contents: ContentDirectory) -> None:
    digest = sha256(b"text")
    assert contents.missing([digest, digest]) == [digest]
    contents.put(digest, b"text")
    assert contents.missing([digest]) == []
    with contents.open(digest) as file:
        assert file.read() == b"text"
    path = contents.path(digest)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == stat.S_IMODE(path.parents[1].stat().st_mode) == 0o700


def test_bytes_of_another_digest_are_refused_and_leave_nothing(contents: ContentDirectory) -> None:
    digest = sha256(b"text")
    with pytest.raises(Conflict, match="do not have the digest"):
        contents.put(digest, b"another")
    assert contents.missing([digest]) == [digest]
    assert list(contents.path(digest).parent.iterdir()) == []
    with pytest.raises(Conflict, match="not here; send it"):
        contents.open(digest)
    with pytest.raises(StorageError, match="no digest"):
        contents.path("../../etc/passwd")


def test_a_body_that_ends_early_leaves_nothing(contents: ContentDirectory) -> None:
    digest = sha256(b"text")
    with contextlib.suppress(RuntimeError), contents.receiving(digest) as file:
        file.write(b"te")
        raise RuntimeError("the client left")
    assert list(contents.path(digest).parent.iterdir()) == []


def test_what_nothing_uses_goes_after_a_while(contents: ContentDirectory) -> None:
    old, kept, new = sha256(b"old"), sha256(b"kept"), sha256(b"new")
    for data in (b"old", b"kept", b"new"):
        contents.put(sha256(data), data)
    long_ago_s = time.time() - 1000
    for digest in (old, kept):
        os.utime(contents.path(digest), (long_ago_s, long_ago_s))
    assert contents.sweep({kept}, time.time() - 500) == 1
    assert contents.missing([old, kept, new]) == [old]


def test_to_ask_for_a_content_is_to_use_it(contents: ContentDirectory) -> None:
    digest = sha256(b"text")
    contents.put(digest, b"text")
    os.utime(contents.path(digest), (1.0, 1.0))
    contents.missing([digest])
    assert contents.sweep(set(), time.time() - 500) == 0


def test_a_damaged_list_is_dropped_so_that_it_is_sent_again(contents: ContentDirectory) -> None:
    digest, data = encode_tree(FolderTree(()))
    contents.put(digest, data)
    assert contents.read_tree(digest) == FolderTree(())
    contents.path(digest).write_bytes(b"{}")
    with pytest.raises(Conflict, match="send it again"):
        contents.read_tree(digest)
    assert contents.missing([digest]) == [digest]


def test_an_archive_holds_each_content_once_and_is_the_one_that_was_submitted(
    contents: ContentDirectory, tmp_path: Path
) -> None:
    contents.put(sha256(b"same"), b"same")
    tree = FolderTree((FolderFile("a.py", sha256(b"same"), 4), FolderFile("b.py", sha256(b"same"), 4)))
    path = tmp_path / "folder.zip"
    write_archive(contents.open, tree, path)
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["tree.json", sha256(b"same")]
    with open_archive(path, encode_tree(tree)[0]) as (found, open_content):
        assert found == tree
        with open_content(sha256(b"same")) as file:
            assert file.read() == b"same"
    with pytest.raises(StorageError, match="another one than was submitted"), open_archive(path, "0" * 64):
        pass
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(StorageError, match="broken"), open_archive(path, encode_tree(tree)[0]):
        pass


@pytest.mark.parametrize(("num_bytes", "data"), [(5, b"wrong"), (5, b"righ"), (4, b"right")])
def test_what_an_archive_says_of_a_content_is_checked_before_it_is_kept(
    contents: ContentDirectory, tmp_path: Path, num_bytes: int, data: bytes
) -> None:
    path = tmp_path / "folder.zip"
    digest, listed = encode_tree(FolderTree((FolderFile("a.py", sha256(b"right"), num_bytes),)))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tree.json", listed)
        archive.writestr(sha256(b"right"), data)
    with pytest.raises(InvalidRequest, match="was not sent whole"):
        take_archive(contents, path, digest)
    assert contents.missing([sha256(b"right"), digest]) == [sha256(b"right"), digest]


def test_an_archive_is_taken_in_once(contents: ContentDirectory, tmp_path: Path) -> None:
    sender, path = ContentDirectory(tmp_path / "sender"), tmp_path / "folder.zip"
    sender.put(sha256(b"same"), b"same")
    tree = FolderTree((FolderFile("a.py", sha256(b"same"), 4), FolderFile("b.py", sha256(b"same"), 4)))
    digest = encode_tree(tree)[0]
    write_archive(sender.open, tree, path)
    assert not contents.has_folder(digest)
    take_archive(contents, path, digest)
    assert contents.has_folder(digest)
    contents.discard(sha256(b"same"))
    assert not contents.has_folder(digest)


def test_an_archive_of_too_many_bytes_is_not_written_to_its_end(contents: ContentDirectory, tmp_path: Path) -> None:
    data = os.urandom(5 << 20)
    contents.put(sha256(data), data)
    tree = FolderTree((FolderFile("a.bin", sha256(data), len(data)),))
    write_archive(contents.open, tree, tmp_path / "folder.zip", max_bytes=100_000)
    assert 100_000 < (tmp_path / "folder.zip").stat().st_size < 3 << 20
