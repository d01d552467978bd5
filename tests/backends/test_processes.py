from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from springtide.backends import processes


def test_an_identity_is_of_one_process_only() -> None:
    own = processes.identify(os.getpid())
    assert own is not None
    assert processes.live_stat(own) is not None
    for other in (
        processes.ProcessIdentity(own.pid, own.start_ticks + 1, own.boot_id),
        processes.ProcessIdentity(own.pid, own.start_ticks, "another boot"),
    ):
        assert processes.live_stat(other) is None
        assert processes.open_pidfd(other) is None
        assert not processes.signal_group(other, signal.SIGKILL)


def test_a_zombie_does_not_live() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    stat = processes.read_stat(child.pid)
    while stat is not None and stat.state != "Z":
        time.sleep(0.01)
        stat = processes.read_stat(child.pid)
    assert processes.identify(child.pid) is None
    assert processes.reap(child.pid) == 0
    child.returncode = 0


def test_what_a_worker_started_is_killed_with_it(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "log"
    pid = processes.spawn_detached(["sh", "-c", "sleep 60 & echo $!; exec sleep 60"], dict(os.environ), log)
    identity = processes.identify(pid)
    assert identity is not None
    while not processes.last_line(log):
        time.sleep(0.01)
    grandchild = processes.identify(int(processes.last_line(log)))
    assert grandchild is not None
    assert processes.signal_group(identity, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    end_s = time.monotonic() + 10
    while processes.live_stat(grandchild) is not None and time.monotonic() < end_s:
        time.sleep(0.01)
    assert processes.live_stat(grandchild) is None


def test_leftovers_of_a_dead_leader_are_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pid = processes.spawn_detached(["sh", "-c", "sleep 60 & echo $!"], dict(os.environ), log)
    started = processes.read_stat(pid)
    assert started is not None
    os.waitpid(pid, 0)
    grandchild = processes.identify(int(processes.last_line(log)))
    assert grandchild is not None
    leader = processes.ProcessIdentity(pid, started.start_ticks, processes.boot_id())
    assert processes.signal_group(leader, signal.SIGKILL)
    end_s = time.monotonic() + 10
    while processes.live_stat(grandchild) is not None and time.monotonic() < end_s:
        time.sleep(0.01)
    assert processes.live_stat(grandchild) is None


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [
        (None, "the worker process ended"),
        (3, "the worker exited with code 3"),
        (-signal.SIGSEGV, "the worker was killed by signal SIGSEGV"),
        (-signal.SIGKILL, "memory"),
        (137, "memory"),
    ],
)
def test_an_exit_is_told_in_a_sentence(tmp_path: Path, exit_code: int | None, text: str) -> None:
    assert text in processes.describe_exit(exit_code, tmp_path / "no log")
    log = tmp_path / "log"
    log.write_bytes(b"first\n\x1b[31mlast \xff words\n\n")
    sentence = processes.describe_exit(exit_code, log)
    assert sentence.endswith("the last line of its log:  [31mlast \ufffd words")


def test_a_thread_that_wants_the_processor_is_seen(tmp_path: Path) -> None:
    spin = "import threading, time\ndef spin():\n    while True: pass\nthreading.Thread(target=spin).start()"
    pid = processes.spawn_detached([sys.executable, "-c", spin], dict(os.environ), tmp_path / "log")
    identity = processes.identify(pid)
    assert identity is not None
    end_s = time.monotonic() + 10
    while not processes.is_starved(identity) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert processes.is_starved(identity)
    os.kill(pid, signal.SIGSTOP)
    while processes.is_starved(identity) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not processes.is_starved(identity)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not processes.is_starved(identity)


def test_a_log_is_cut_only_over_its_limit(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert not processes.bound_log(log, 10, 4)
    log.write_text("0123456789")
    assert not processes.bound_log(log, 10, 4)
    with log.open("a") as file:
        file.write("a")
        file.flush()
        assert processes.bound_log(log, 10, 4)
        file.write("next")
    assert log.read_text() == "next"
    assert (tmp_path / "log.1").read_text() == "789a"
