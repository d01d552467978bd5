"""A submitted folder on a real platform: edits afterwards reach no job, also none that starts again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kits.end_to_end.live_platform import LivePlatform, wait_for
from springtide.client.api import connect
from springtide.client.folders.send import submit_with_folder
from springtide.client.sources.source import read_source

pytestmark = pytest.mark.slow
SCRIPT = """
import os, time
import helper
from pkg import deep

out = os.environ["SPRINGTIDE_OUT"]
with open(os.path.join(out, "seen.txt"), "a") as seen:
    seen.write(f"{helper.VALUE} {deep.VALUE} {open('data/x.txt').read()} {os.path.basename(os.getcwd())}\\n")
with open("relative.txt", "a") as relative:
    relative.write("x")
with open("data/x.txt", "w") as own:
    own.write("changed")
while not os.path.exists(os.path.join(out, "go")):
    time.sleep(0.02)
"""


def test_a_job_that_starts_again_runs_what_was_submitted(
    platform: LivePlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "project"
    (folder / "pkg").mkdir(parents=True)
    (folder / "data").mkdir()
    files = {"run.py": SCRIPT, "helper.py": "VALUE = 1\n", "pkg/deep.py": "VALUE = 2\n", "data/x.txt": "data"}
    for name, text in files.items():
        (folder / name).write_text(text)
    platform.start()
    source = read_source(folder / "run.py", "", "script")
    with connect(state_dir=platform.state_dir) as client:
        asked = {"name": "run", "source": source, "options": {"max_restarts": 3}}
        job_id = submit_with_folder(client, asked).job_id
    seen = platform.workload(job_id) / "artifacts" / "seen.txt"
    wait_for(lambda: seen.exists() and seen.read_text() == "1 2 data folder\n", 60.0, "the job to begin")
    for name in files:
        (folder / name).write_text("VALUE = 99\n")
    [pid] = platform.worker_pids().values()
    os.kill(pid, signal.SIGKILL)
    # It has the copy that it had, with what it has written there itself, and the results of before.
    wait_for(lambda: seen.read_text() == "1 2 data folder\n1 2 changed folder\n", 60.0, "the job to begin again")
    seen.with_name("go").touch()
    assert platform.wait_job(job_id)["state"] == "SUCCEEDED"
    copy = platform.workload(job_id) / "folder"
    assert (copy / "relative.txt").read_text() == "xx"
    assert (copy / "helper.py").read_text() == "VALUE = 1\n"
    assert not (folder / "relative.txt").exists()
