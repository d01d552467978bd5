"""The folder of a job's results: files alone, by names that stay within it, with digests that are remembered."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from springtide.core.errors import NotFound
from springtide.storage.workloads import results
from springtide.storage.workloads.results import ResultDigests, list_results, open_result


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "artifacts"
    (folder / "plots").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "plots" / "loss.png").write_bytes(b"plot")
    return folder


def test_files_are_listed_by_name_without_links_and_what_is_half_written(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    (root / "around").symlink_to(tmp_path)
    (root / ".model.safetensors.17.tmp").write_bytes(b"wei")
    os.mkfifo(root / "pipe")
    (root / "a\nb").write_bytes(b"x")
    found = list_results(root)
    assert [(each.name, each.num_bytes, each.sha256) for each in found] == [
        ("model.safetensors", 7, ""),
        ("plots/loss.png", 4, ""),
    ]
    assert list_results(tmp_path / "nowhere") == []


def test_a_result_is_opened_by_its_name_alone(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    (root / "around").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    file, num_bytes = open_result(root, "plots/loss.png")
    with file:
        assert (file.read(), num_bytes) == (b"plot", 4)
    for name in ("link.txt", "around/secret.txt", "../secret.txt", "/etc/passwd", "plots", "pipe", "", "nowhere"):
        with pytest.raises(NotFound, match="there is no artifact"):
            open_result(root, name)


def test_a_digest_is_computed_once_for_each_content(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = ResultDigests()
    first = digests.of(root, "model.safetensors")
    assert first == hashlib.sha256(b"weights").hexdigest()
    read: list[str] = []
    file_digest = hashlib.file_digest
    monkeypatch.setattr(results.hashlib, "file_digest", lambda *asked: read.append("") or file_digest(*asked))
    assert digests.of(root, "model.safetensors") == first
    assert read == []
    (root / "model.safetensors").write_bytes(b"others")
    assert digests.of(root, "model.safetensors") == hashlib.sha256(b"others").hexdigest()
    assert len(read) == 1
    assert digests.of(root, "nowhere") == ""


def test_a_file_that_is_written_to_while_it_is_read_has_no_digest(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_digest = hashlib.file_digest

    def write_meanwhile(file: object, name: str) -> object:
        found = file_digest(file, name)  # type: ignore[arg-type]
        with (root / "model.safetensors").open("ab") as more:
            more.write(b"more")
        return found

    monkeypatch.setattr(results.hashlib, "file_digest", write_meanwhile)
    assert ResultDigests().of(root, "model.safetensors") == ""


def test_a_listing_is_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_RESULTS", 3)
    for number in range(9):
        (root / f"f{number}").write_bytes(b"")
    assert len(list_results(root)) == 3
