"""Readers see all of the old or all of the new."""

from __future__ import annotations

import os

import pytest

from springtide.core.errors import BackendError, StorageError
from springtide.storage.files import lock_file, make_private, open_private, write_directory_durable, write_durable


def test_a_failed_write_leaves_the_old_content_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "state"
    write_durable(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StorageError, match="No space left"):
        write_durable(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize(
    "write", [lambda path: write_durable(path, b"new"), lambda path: write_directory_durable(path, make_private)]
)
def test_a_disk_that_turns_read_only_raises_nothing_else(tmp_path, monkeypatch, write):
    """Then what is left of an attempt cannot be removed either."""

    def refuse(*arguments, **options):
        raise OSError(30, "Read-only file system")

    for name in ("open", "mkdir", "unlink", "rmdir", "rename", "replace"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(StorageError, match="Read-only file system"):
        write(tmp_path / "state")


def test_a_private_file_by_default(tmp_path):
    write_durable(tmp_path / "token", b"secret")
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0


def test_a_directory_appears_whole_or_not_at_all(tmp_path):
    def fill(directory):
        (directory / "a").write_bytes(b"1")
        assert not (tmp_path / "c").exists()
        (directory / "b").write_bytes(b"2")

    write_directory_durable(tmp_path / "c", fill)
    assert sorted(entry.name for entry in (tmp_path / "c").iterdir()) == ["a", "b"]

    def fail(directory):
        (directory / "a").write_bytes(b"1")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        write_directory_durable(tmp_path / "d", fail)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_every_file_of_a_directory_and_itself_are_on_disk_before_it_appears(tmp_path, monkeypatch):
    synced, on_disk = [], []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def note_rename(source, target):
        on_disk.extend(synced)
        rename(source, target)

    def fill(directory):
        (directory / "a").write_bytes(b"1")
        (directory / "b").write_bytes(b"2")

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    write_directory_durable(tmp_path / "c", fill)
    needed = {path.stat().st_ino for path in (tmp_path / "c", tmp_path / "c" / "a", tmp_path / "c" / "b")}
    assert needed <= set(on_disk)
    assert tmp_path.stat().st_ino in synced[len(on_disk) :], "the new name is on disk as well"


def test_a_symlink_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"safe")
    (tmp_path / f".state.{os.getpid()}.tmp").symlink_to(victim)
    with pytest.raises(StorageError):
        write_durable(tmp_path / "state", b"evil")
    assert victim.read_bytes() == b"safe"


def mode_of(path):
    return path.stat().st_mode & 0o777


def test_what_is_made_is_for_its_owner_alone(tmp_path):
    before = os.umask(0o022)
    try:
        folder = tmp_path / "a" / "b" / "c"
        make_private(folder)
        make_private(folder)
        for kind in ("wb", "ab"):
            with open_private(folder / kind, kind) as file:
                file.write(b"x")
        write_durable(folder / "durable", b"x")
        write_directory_durable(folder / "several" / "whole", lambda into: (into / "manifest").write_bytes(b"x"))
    finally:
        os.umask(before)
    made = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert len(made) == 9
    assert {mode_of(path) for path in made} == {0o700, 0o600}


def test_a_file_that_is_there_keeps_who_may_read_it(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"1")
    path.chmod(0o640)
    with open_private(path, "ab") as file:
        file.write(b"2")
    assert (path.read_bytes(), mode_of(path)) == (b"12", 0o640)


def test_a_lock_refuses_others_until_it_is_closed(tmp_path):
    held = lock_file(tmp_path / "lock", "in use")
    with pytest.raises(BackendError, match="in use"):
        lock_file(tmp_path / "lock", "in use")
    os.close(held)
    os.close(lock_file(tmp_path / "lock", "in use"))
