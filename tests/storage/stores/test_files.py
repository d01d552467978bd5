"""Objects as files: nothing half-written is ever seen, and a directory in trouble is one sentence."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from springtide.core.errors import ObjectMissing, StorageError
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.directory import ObjectDirectory
from springtide.storage.stores.files import FileStore


def files_under(root):
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_a_writer_that_is_killed_leaves_neither_object_nor_litter(tmp_path):
    code = (
        "import os, sys; import springtide.storage.stores.directory as d\n"
        "from pathlib import Path\n"
        "from springtide.storage.stores.checked import CheckedStore\n"
        "from springtide.storage.stores.files import FileStore\n"
        "store = CheckedStore(FileStore(Path(sys.argv[1]))); store.put('a/old', b'old')\n"
        "write = d._write_all\n"
        "def half(descriptor, data):\n"
        "    write(descriptor, data[:len(data) // 2]); print('half', flush=True); sys.stdin.read()\n"
        "d._write_all = half\n"
        "store.put('a/old' if sys.argv[2] == 'again' else 'a/new', bytes(1000000))"
    )
    for which in ("new", "again"):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), which], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        store = CheckedStore(FileStore(tmp_path))
        assert store.keys("") == ["a/old"]
        assert store.get("a/old") == b"old"
        assert files_under(tmp_path) == ["a+/old"]


def test_a_file_system_without_nameless_files_is_as_good(tmp_path, monkeypatch):
    real_open = os.open

    def without(path, flags, *more, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real_open(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", without)
    store = CheckedStore(FileStore(tmp_path))
    store.put("a/b", b"1")
    store.put("a/b", b"2")
    assert store.put_if_absent("a/b", b"3") is False
    assert store.put_if_absent("a/c", b"4") is True
    assert (store.get("a/b"), store.get("a/c")) == (b"2", b"4")
    assert files_under(tmp_path) == ["a+/b", "a+/c"]


def test_a_full_disk_is_a_sentence_and_the_old_object_stands(tmp_path, monkeypatch):
    store = CheckedStore(FileStore(tmp_path))
    store.put("a", b"old")

    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageError, match=r"cannot write a in .*: No space left on device; free some space"):
        store.put("a", b"new")
    monkeypatch.undo()
    assert store.get("a") == b"old"
    assert files_under(tmp_path) == ["a"]


def test_a_directory_that_vanishes_is_trouble_not_an_empty_store(tmp_path):
    store = CheckedStore(FileStore(tmp_path / "objects"))
    store.put("a/b", b"1")
    os.rename(tmp_path / "objects", tmp_path / "elsewhere")
    for ask in (
        lambda: store.get("a/b"),
        lambda: store.wait("a/b", 10.0),
        lambda: store.put("a/b", b"2"),
        lambda: store.keys(""),
    ):
        with pytest.raises(StorageError, match="is gone; make it again or name another") as caught:
            ask()
        assert not isinstance(caught.value, ObjectMissing)
    os.rename(tmp_path / "elsewhere", tmp_path / "objects")
    assert store.get("a/b") == b"1"


def test_folders_go_with_their_last_object_and_never_under_a_writer(tmp_path):
    directory = ObjectDirectory(tmp_path)
    for number in range(200):
        directory.write("a/b/c", memoryview(b"%d" % number), only_if_absent=False)
        directory.remove(["a/b/c"])
        assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("is_durable", [False, True])
def test_writers_and_deleters_of_one_folder_never_trip_each_other(tmp_path, is_durable):
    """Each delete takes the empty folders away, all the way up, while others are about to write into them."""

    def write_and_delete(number):
        directory = ObjectDirectory(tmp_path, is_durable=is_durable)
        for turn in range(20 if is_durable else 200):
            key = f"a/b/c/d/e/{number}.{turn % 2}"
            directory.write(key, memoryview(b"%d" % turn), only_if_absent=turn % 3 == 0)
            assert directory.read(key) == b"%d" % turn
            directory.remove([key])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write_and_delete, range(4)))
    assert os.listdir(tmp_path) == []


def test_folders_taken_away_while_they_are_made_are_made_again(tmp_path, monkeypatch):
    real = os.makedirs
    failures = [FileNotFoundError(errno.ENOENT, "No such file"), FileExistsError(errno.EEXIST, "File exists")]

    def interrupted(path, *arguments, **named):
        if failures:
            raise failures.pop()
        real(path, *arguments, **named)

    monkeypatch.setattr(os, "makedirs", interrupted)
    store = CheckedStore(FileStore(tmp_path))
    store.put("a/b/c", b"1")
    assert failures == []
    assert store.get("a/b/c") == b"1"


def test_a_root_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot make the store's directory"):
        CheckedStore(FileStore(tmp_path / "file" / "objects"))


def test_objects_are_private(tmp_path):
    CheckedStore(FileStore(tmp_path / "objects")).put("a/b", b"1")
    for path in (tmp_path / "objects").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0
