"""The list of a folder's files: what it may name, and how much."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.workload import JobFolder
from springtide.storage.folders.tree import (
    MAX_BYTES,
    MAX_FILE_BYTES,
    MAX_FILES,
    FolderFile,
    FolderTree,
    check_amount,
    check_tree,
    decode_tree,
    encode_tree,
    folder_name,
    import_roots,
)

SHA = "0" * 64


def tree(*paths: str, folders: tuple[str, ...] = ()) -> FolderTree:
    return FolderTree(tuple(FolderFile(path, SHA, 3) for path in paths), folders)


def test_the_same_files_have_the_same_digest_and_are_read_back() -> None:
    digest, data = encode_tree(tree("a.py", "pkg/b.py", folders=("out",)))
    assert decode_tree(data) == tree("a.py", "pkg/b.py", folders=("out",))
    assert encode_tree(decode_tree(data)) == (digest, data)
    assert encode_tree(tree("a.py"))[0] != digest
    assert tree("a.py", "b.py").num_bytes == 6


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (tree("../a.py"), "leads outside"),
        (tree("/etc/passwd"), "must be relative"),
        (tree("a//b.py"), "empty part"),
        (tree("a/./b.py"), "empty part"),
        (tree("a\nb.py"), "cannot be printed"),
        (tree("x" * 256), "more than 255 bytes"),
        (tree("/".join("d" * 65)), "64 folders deep"),
        (tree("a.py", "a.py"), "twice"),
        (tree("a", "a/b.py"), "twice: 'a'"),
        (tree("a.py", folders=("a.py",)), "twice"),
        (tree("a.py", folders=("../out",)), "leads outside"),
        (FolderTree((FolderFile("a.py", "0" * 63, 3),)), "no digest"),
        (FolderTree((FolderFile("a.py", "G" * 64, 3),)), "no digest"),
        (FolderTree((FolderFile("a.py", SHA, -1),)), "at most"),
    ],
)
def test_what_no_folder_can_hold_is_refused(found: FolderTree, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        check_tree(found)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"files": [["a.py"]]}', b"[" * 5000])
def test_bytes_that_are_no_list_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        decode_tree(data)


def test_too_much_is_refused_with_the_largest() -> None:
    check_amount([("a", MAX_FILE_BYTES), ("b", MAX_FILE_BYTES)])
    with pytest.raises(InvalidRequest, match=r"at most 268 MB, but: big\.bin \(268 MB\); leave it out"):
        check_amount([("a", 1), ("big.bin", MAX_FILE_BYTES + 1)], advice="; leave it out")
    sizes = [(f"f{number}", MAX_BYTES // 4) for number in range(4)]
    with pytest.raises(InvalidRequest, match=r"537 MB in 5 files.*the largest: f0 \(134 MB\)"):
        check_amount([*sizes, ("small", 1)])
    with pytest.raises(InvalidRequest, match=r"20,001 files.*most are in: many/ \(20,000\), \./ \(1\)"):
        check_amount([*((f"many/{number}", 1) for number in range(MAX_FILES)), ("one", 1)])


def test_a_file_imports_from_its_folder_then_from_the_one_that_travels(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "src").mkdir()
    file = tmp_path / "scripts" / "train.py"
    assert import_roots(file, tmp_path) == [tmp_path / "scripts", tmp_path, tmp_path / "src"]
    assert import_roots(file, tmp_path / "scripts") == [tmp_path / "scripts"]


def test_an_archive_is_called_by_the_folders_digest() -> None:
    assert folder_name(JobFolder(sha256="a" * 64, path="train.py")) == f"folder-{'a' * 16}.zip"
