"""The meeting place of a group: a key is there whole or not at all, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch

from springtide.runtime.elastic.group import form_group
from springtide.runtime.elastic.meeting import MeetingPlace


def test_what_one_sets_all_find(tmp_path):
    one, other = MeetingPlace(tmp_path / "g1", 5.0), MeetingPlace(tmp_path / "g1", 5.0)
    assert not other.check(["here/0"])
    one.set("here/0", "1")
    one.set("a key / with \x00 anything", b"\xff\x00")
    assert other.check(["here/0", "a key / with \x00 anything"])
    assert other.get("a key / with \x00 anything") == b"\xff\x00"
    one.set("here/0", "two")
    assert other.get("here/0") == b"two"
    assert other.delete_key("here/0")
    assert not other.delete_key("here/0")
    assert not one.check(["here/0"])


def test_waiting_ends_when_the_key_comes_when_the_time_is_over_and_when_the_place_is_gone(tmp_path):
    place = MeetingPlace(tmp_path / "g1", 30.0)
    threading.Timer(0.02, place.set, ("late", "1")).start()
    assert place.get("late") == b"1"
    with pytest.raises(RuntimeError, match="no member has set never in time"):
        place.wait(["never"], timedelta(seconds=0.01))
    place.set_timeout(timedelta(seconds=0.01))
    with pytest.raises(RuntimeError, match="no member has set never"):
        place.get("never")
    for path in (tmp_path / "g1").iterdir():
        path.unlink()
    (tmp_path / "g1").rmdir()
    with pytest.raises(RuntimeError, match="is gone"):
        place.wait(["never"], timedelta(seconds=30))
    with pytest.raises(RuntimeError, match="is gone"):
        place.set("a", "1")


def test_sums_of_many_threads_lose_nothing(tmp_path):
    places = [MeetingPlace(tmp_path / "g1", 30.0) for _ in range(4)]
    threads = [threading.Thread(target=lambda p=p: [p.add("total", 1) for _ in range(20)]) for p in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert places[0].add("total", 0) == 80


KILLED = """
import os, sys
from pathlib import Path
from springtide.runtime.elastic.meeting import MeetingPlace
place = MeetingPlace(Path(sys.argv[1]), 5.0)
place.set("whole", b"x" * 1000)
os.replace = lambda *_: os.kill(os.getpid(), 9)
place.set("half", b"x" * 1000)
"""


@pytest.mark.slow
def test_a_member_killed_while_it_sets_a_key_leaves_nothing_that_others_read(tmp_path):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "g1")], env=dict(os.environ))
    assert ended.returncode == -signal.SIGKILL
    place = MeetingPlace(tmp_path / "g1", 5.0)
    assert len(place.get("whole")) == 1000
    assert not place.check(["half"])


def test_a_group_forms_and_exchanges_through_it(tmp_path):
    found: dict[int, torch.Tensor] = {}

    def member(rank: int) -> None:
        group = form_group(f"file://{tmp_path}", 7, rank, 2, torch.device("cpu"), is_wanted=lambda: True)
        output = torch.zeros(2)
        group.all_gather(output, torch.tensor([float(rank + 1)]))
        found[rank] = output
        group.close()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert {rank: output.tolist() for rank, output in found.items()} == {0: [1.0, 2.0], 1: [1.0, 2.0]}
