"""A platform whose journal was damaged or whose clock jumps: it says so, and loses and charges nothing."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kits.end_to_end.live_platform import LivePlatform, assert_exactly_once, wait_for
from kits.simulation.sweeps import only_in_full, sampled

FAKETIME = next(map(str, Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), "")
pytestmark = pytest.mark.slow


def command(live: LivePlatform, *arguments: str) -> subprocess.CompletedProcess[str]:
    call = [str(Path(sys.executable).with_name("springtide")), *arguments, "--state", str(live.state_dir)]
    return subprocess.run(call, capture_output=True, text=True, check=False, timeout=60)


def kill_workers(live: LivePlatform) -> None:
    for pid in live.worker_pids().values():
        os.kill(pid, signal.SIGKILL)


def test_a_journal_that_lost_steps_is_refused_repaired_and_goes_on(platform: LivePlatform) -> None:
    platform.start()
    job = platform.submit("job", num_epochs=60, shard_s=0.02, max_workers=2)
    wait_for(lambda: platform.job(job)["step"] >= 20, 60.0, "the job to train")
    seq = platform.request("GET", "/v1/status")["seq"]
    # It is resized twice in the steps that will be lost, so the storage fence is ahead of the journal.
    for workers in (1, 2):
        platform.request("POST", f"/v1/workloads/{job}/scale", {"minimum": workers, "maximum": workers})
        wait_for(lambda n=workers: platform.job(job)["num_workers"] == n, 60.0, "the job to be resized")
    wait_for(lambda: platform.job(job)["step"] >= 60, 60.0, "the job to train")
    platform.kill()
    kill_workers(platform)
    with sqlite3.connect(platform.state_dir / "journal.db") as journal:
        journal.execute("DELETE FROM steps WHERE seq > ?", (seq,))
    journal.close()

    platform.start()
    assert not platform.is_alive
    assert f"the journal ends at step {seq}, but step " in platform.log()
    checked = command(platform, "journal", "check", "--json")
    assert checked.returncode == 1
    assert json.loads(checked.stdout)["damaged_seq"] == seq + 1
    assert command(platform, "journal", "repair").returncode == 0
    platform.start()
    assert not platform.is_alive, "without --yes nothing is repaired"
    repaired = command(platform, "journal", "repair", "--yes")
    assert repaired.returncode == 0, repaired.stderr
    assert list(platform.state_dir.glob("journal.damaged-1.db"))

    platform.start()
    ended = platform.wait_job(job)
    assert ended["state"] == "SUCCEEDED", ended
    assert_exactly_once(platform.workload(job), num_samples=96, batch=16, num_epochs=60)
    assert command(platform, "journal", "check").returncode == 0


def test_an_empty_journal_beside_workloads_is_refused(platform: LivePlatform) -> None:
    platform.start()
    job = platform.submit("job", num_epochs=1)
    platform.wait_job(job)
    platform.stop()
    for path in platform.state_dir.glob("journal.*"):
        path.unlink()
    platform.start()
    assert not platform.is_alive
    assert "is empty, but the directory has 1 workloads (job-" in platform.log()


@pytest.mark.skipif(not FAKETIME, reason="faketime is not installed")
@pytest.mark.parametrize("jump", ["+30d", pytest.param("-7d", marks=only_in_full)])
def test_a_wall_clock_that_jumps_at_a_restart_charges_nothing(platform: LivePlatform, jump: str) -> None:
    # Without the last one faketime moves the other clocks with it.
    wrong = {"LD_PRELOAD": FAKETIME, "FAKETIME": jump, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    platform.start(policy="springtide", options=("--price", "36"))
    job = platform.submit("job", num_epochs=60, shard_s=0.03, max_workers=1, deadline_s=600.0)
    wait_for(lambda: platform.job(job)["step"] >= 20, 60.0, "the job to train")
    began_s = time.monotonic()
    before = platform.request("GET", "/v1/status")
    platform.kill()
    platform.start(policy="springtide", options=("--price", "36"), env=wrong)
    status = platform.request("GET", "/v1/status")
    assert "the wall clock jumped by" in status["clock"]
    assert status["now_s"] - before["now_s"] < time.monotonic() - began_s + 1.0
    assert abs(status["wall_clock_offset_s"] - before["wall_clock_offset_s"]) < 5.0
    assert platform.job(job)["cost_usd"] < 3.0
    platform.kill()
    platform.start(policy="springtide", options=("--price", "36"))
    assert not platform.request("GET", "/v1/status")["clock"]
    ended = platform.wait_job(job)
    assert ended["state"] == "SUCCEEDED", ended
    assert ended["ended_at_s"] <= 600.0
    assert_exactly_once(platform.workload(job), num_samples=96, batch=16, num_epochs=60)


def test_the_state_directory_of_a_platform_can_be_exported(platform: LivePlatform, tmp_path: Path) -> None:
    platform.start()
    platform.wait_job(platform.submit("job", num_epochs=1))
    written = command(platform, "journal", "export", str(tmp_path / "steps.jsonl"))
    assert written.returncode == 0, written.stderr
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [step["seq"] for step in steps] == list(range(1, len(steps) + 1))
    assert any(event["event"] == "JobFinished" for step in steps for event in step["step"].get("events", ()))


@pytest.mark.parametrize("point", sampled(["cut.snapshot.after", "cut.snapshot.before", "cut.ended.after", "cut.end"]))
def test_a_process_that_dies_within_a_cut_is_followed_by_one_that_knows_everything(
    platform: LivePlatform, point: str
) -> None:
    platform.start(crash_at=f"{point}:1")
    done = platform.submit("done", num_epochs=2)
    before = platform.wait_job(done)
    paused = platform.submit("paused", num_epochs=200, shard_s=0.02, max_workers=2)
    wait_for(lambda: platform.job(paused)["step"] >= 5, 60.0, "the job to train")
    platform.request("POST", f"/v1/jobs/{paused}/pause")
    platform.wait_job(paused, states=("PAUSED",))
    story = platform.request("GET", f"/v1/workloads/{done}/history")
    # The orderly end cuts the journal.
    platform.stop()
    assert platform.process is not None
    assert platform.process.returncode == 137
    for _ in range(2):
        platform.start()
        assert platform.is_alive, platform.log()
        assert platform.job(done)["state"] == before["state"] == "SUCCEEDED"
        assert platform.request("GET", f"/v1/workloads/{done}/history") == story
        assert platform.job(paused)["state"] == "PAUSED"
        platform.stop()
    checked = json.loads(command(platform, "journal", "check", "--json").stdout)
    assert (checked["damaged_seq"], checked["damaged_past"], checked["num_snapshots"]) == (None, "", 2)
    assert checked["starts_from"] > 0
