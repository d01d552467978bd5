"""Digests are remembered: a second run reads only what has changed since."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from pathlib import Path

import pytest

from springtide.client.folders.hashing import cache_directory, hash_files
from springtide.client.folders.scan import scan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "folder"
    root.mkdir()
    for name in ("a.py", "b.py"):
        (root / name).write_text(name)
    settle(monkeypatch)
    return root


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files have been written a while ago."""
    later_s = time.time() + 10.0
    monkeypatch.setattr("springtide.client.folders.hashing.time.time", lambda: later_s)


def read(folder: Path) -> tuple[list[str], list[int]]:
    sizes: list[int] = []
    files = hash_files(folder, scan(folder, "a.py").files, sizes.append)
    return [file.sha256 for file in files], sizes


def test_a_second_run_reads_what_changed(folder: Path) -> None:
    first, sizes = read(folder)
    assert first == [hashlib.sha256(name.encode()).hexdigest() for name in ("a.py", "b.py")]
    assert len(sizes) == 2
    assert read(folder) == (first, [])
    before = (folder / "b.py").stat()
    (folder / "b.py").write_text("B.py")
    os.utime(folder / "b.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    changed, sizes = read(folder)
    assert (changed[0], len(sizes)) == (first[0], 1), "the size and the time of modification are the same"
    assert changed[1] == hashlib.sha256(b"B.py").hexdigest()


def test_a_file_that_was_just_written_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = (folder / "a.py").stat().st_mtime + 0.5
    monkeypatch.setattr("springtide.client.folders.hashing.time.time", lambda: now_s)
    assert len(read(folder)[1]) == 2
    assert len(read(folder)[1]) == 2


def test_a_file_that_may_be_executed_is_one(folder: Path) -> None:
    (folder / "a.py").chmod(0o755)
    assert [file.is_executable for file in hash_files(folder, scan(folder, "a.py").files)] == [True, False]


@pytest.mark.parametrize("content", ["", "[]", '{"a.py": 1}', "[" * 5000])
def test_a_record_that_cannot_be_read_costs_only_time(folder: Path, content: str) -> None:
    read(folder)
    [record] = (cache_directory() / "folders").iterdir()
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    record.write_text(content)
    assert len(read(folder)[1]) == 2
    assert len(read(folder)[1]) == 0


def test_without_a_place_for_it_the_files_are_read_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert len(read(folder)[1]) == 2
    assert len(read(folder)[1]) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == Path.home() / ".cache" / "springtide"
