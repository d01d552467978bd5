"""A writer of the past is refused, also between processes."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from springtide.core.errors import Fenced, StorageError
from springtide.storage.fence import Fence


def test_a_lower_generation_is_refused_and_an_equal_or_higher_one_writes(tmp_path):
    fence = Fence(tmp_path)
    with fence.writing(2):
        pass
    with fence.writing(2):
        pass
    with pytest.raises(Fenced, match="generation 1 may not write: generation 2 owns"), fence.writing(1):
        raise AssertionError("the body must not run")
    with fence.writing(3):
        pass
    assert fence.generation() == 3


def test_raising_never_lowers(tmp_path):
    Fence(tmp_path).raise_to(5)
    Fence(tmp_path).raise_to(4)
    assert Fence(tmp_path).generation() == 5


def test_another_process_waits_for_the_writer_and_then_sees_its_fence(tmp_path):
    fence = Fence(tmp_path)
    code = (
        "import sys; from pathlib import Path; from springtide.storage.fence import Fence\n"
        "print('up', flush=True)\n"
        "with Fence(Path(sys.argv[1])).writing(1): print('wrote', flush=True)"
    )
    with fence.writing(2):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
    out, err = child.communicate(timeout=20)
    assert out == ""
    assert "Fenced" in err


def test_two_threads_never_write_at_once(tmp_path):
    inside: list[int] = []
    most: list[int] = []

    def write(generation: int) -> None:
        for _ in range(20):
            with Fence(tmp_path).writing(7):
                inside.append(generation)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=write, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1


def test_an_unreadable_fence_lets_no_generation_write(tmp_path):
    (tmp_path / "fence").write_text("what?")
    with pytest.raises(StorageError, match="unreadable"), Fence(tmp_path).writing(9):
        raise AssertionError("the body must not run")
