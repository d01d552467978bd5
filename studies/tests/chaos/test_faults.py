"""Faults do to a process what they say, and lift it again."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from springtide_studies.chaos import platform as chaos_platform
from springtide_studies.chaos.faults import FAULTS
from springtide_studies.chaos.platform import ChaosPlatform, descendants

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]
IN_NAMESPACES = """
import os, pathlib, socket, sys
from springtide_studies.chaos.platform import ReadOnlyMount, enter_namespaces, mount, set_loopback
why = enter_namespaces()
if why:
    print("skipped:", why)
    sys.exit()
disk = pathlib.Path(sys.argv[1])
mount("chaos", disk, "tmpfs", options="size=64k")
held = open(disk / "held", "w")
with ReadOnlyMount(disk):
    try:
        open(disk / "more", "w")
        print("writable")
    except OSError as error:
        print(error.strerror)
    held.write("goes on")
open(disk / "more", "w").write("again")
listener = socket.create_server(("127.0.0.1", 0))
set_loopback(is_up=False)
try:
    socket.create_connection(listener.getsockname(), timeout=1.0)
    print("connected")
except OSError as error:
    print(error.strerror or error)
set_loopback(is_up=True)
socket.create_connection(listener.getsockname(), timeout=5.0)
print("connected again")
"""


class OneProcess(ChaosPlatform):
    """A platform whose control plane, worker and zygote is one process that sleeps."""

    def __init__(self, state_dir, pid):
        super().__init__(state_dir, "springtide")
        self.pid = pid

    def control_plane(self):
        return self.pid

    def workers(self):
        return {"job-1.0": self.pid, "echo.0": self.pid}

    def helper(self, words, below=None):
        return self.pid


@pytest.fixture
def platform(tmp_path):
    with subprocess.Popen(SLEEPS) as process:
        yield OneProcess(tmp_path, process.pid)
        process.kill()


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def limits(pid):
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0], resource.prlimit(pid, resource.RLIMIT_AS)[0]


def while_injected(kind, platform, monkeypatch, look):
    """What `look` returns in the middle of a fault that lasts, and what the fault says that it did."""
    seen, mine, sleep = [], threading.get_ident(), time.sleep

    def look_instead(seconds):
        # Other tests of this process may have left threads that sleep.
        return seen.append(look()) if threading.get_ident() == mine else sleep(seconds)

    monkeypatch.setattr(time, "sleep", look_instead)
    return FAULTS[kind].inject(platform, random.Random(1)), seen


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind.endswith("killed") and not kind.startswith("parent")])
def test_what_is_killed_is_gone(kind, platform):
    assert FAULTS[kind].inject(platform, random.Random(1)) or kind == "worker and control plane killed"
    assert os.WTERMSIG(os.waitpid(platform.pid, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind.endswith("stopped")])
def test_what_is_stopped_goes_on(kind, platform, monkeypatch):
    hit, seen = while_injected(kind, platform, monkeypatch, lambda: os.waitpid(platform.pid, os.WUNTRACED)[1])
    assert hit
    assert os.WIFSTOPPED(seen[0])
    assert state_of(platform.pid) in "RS"


@pytest.mark.parametrize(("kind", "limit"), [("no descriptors", 0), ("no memory for the control plane", 1)])
def test_a_limit_is_lifted_again(kind, limit, platform, monkeypatch):
    before = limits(platform.pid)
    hit, seen = while_injected(kind, platform, monkeypatch, lambda: limits(platform.pid))
    assert hit
    assert seen[0][limit] != before[limit]
    assert limits(platform.pid) == before


@pytest.mark.parametrize("kind", list(FAULTS))
def test_where_nothing_lives_nothing_is_hit(kind, tmp_path, monkeypatch):
    # What other tests have left running in this process is no part of the platform.
    before = descendants(os.getpid()).keys()
    monkeypatch.setattr(
        chaos_platform, "descendants", lambda pid: {k: v for k, v in descendants(pid).items() if k not in before}
    )
    if FAULTS[kind].needs != "namespaces":
        assert FAULTS[kind].inject(ChaosPlatform(tmp_path, "springtide"), random.Random(1)) == ""


@pytest.mark.slow
def test_disks_and_networks_fail_in_namespaces_of_their_own(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", IN_NAMESPACES, str(tmp_path)], capture_output=True, text=True, check=True
    )
    if run.stdout.startswith("skipped:"):
        pytest.skip(run.stdout)
    assert run.stdout.splitlines() == ["Read-only file system", "timed out", "connected again"]
    assert not list(tmp_path.iterdir()), "what is mounted there is seen elsewhere"


def test_descendants_are_all_that_live(platform):
    assert platform.pid in descendants(os.getpid())
    assert platform.pid not in descendants(platform.pid)
    assert threading.main_thread().native_id not in descendants(os.getpid())


def test_a_worker_whose_zygote_is_gone_is_not_taken_for_one(tmp_path):
    """It is forked, so that its command line is the zygote's."""
    platform = ChaosPlatform(tmp_path, "springtide")
    # Of other tests, which ran in this process, zygotes may still be there.
    words = f"springtide.runtime zygote --socket {tmp_path}"
    with subprocess.Popen([*SLEEPS, words]) as process:
        try:
            assert platform.helper(words) == process.pid
            (tmp_path / "workers").mkdir()
            (tmp_path / "workers" / "job.0.json").write_text(json.dumps({"process": {"pid": process.pid}}))
            assert platform.helper(words) is None
        finally:
            process.kill()
