"""A job goes all the way on real processes; a live journal decides the same again."""

from __future__ import annotations

import os
import signal
import time
from itertools import chain
from pathlib import Path

import httpx2
import pytest

from kits.end_to_end.live_platform import ECHO, artifact_digest, assert_exactly_once, wait_for
from springtide.control.controller import Controller
from springtide.control.journal.sqlite import SqliteJournal
from springtide.control.loop import verify
from springtide.scheduling.registry import make_policy

pytestmark = pytest.mark.slow


def test_two_jobs_and_a_service_share_four_devices_and_the_journal_decides_the_same_again(platform):
    platform.start()
    first = platform.submit("first", num_epochs=20, shard_s=0.02)
    wait_for(lambda: platform.job(first)["num_workers"] == 4, 60.0, "the first job to have all devices")
    second = platform.submit("second", num_epochs=20, shard_s=0.02)
    wait_for(lambda: platform.job(second)["state"] == "RUNNING", 60.0, "the second job to get its share")
    body = {
        "source": {"filename": "echo.py", "text": ECHO, "object_name": "Echo", "kind": "class"},
        "options": {"max_replicas": 2, "idle_s": 1.0},
    }
    platform.request("PUT", "/v1/services/echo", body)
    assert platform.request("POST", "/f/echo", {"numbers": [1.0, 2.5]})["outputs"] == [2.0, 5.0]
    pids = platform.worker_pids()
    wait_for(lambda: platform.request("GET", "/v1/services/echo")["state"] == "IDLE", 60.0, "scale to zero")
    for job_id in (first, second):
        status = platform.wait_job(job_id)
        assert status["state"] == "SUCCEEDED", status
        assert_exactly_once(platform.workload(job_id), num_samples=96, batch=16, num_epochs=20)
    assert platform.job(first)["num_resizes"] >= 2
    assert artifact_digest(platform.workload(first)) == artifact_digest(platform.workload(second)), (
        "the same job resized differently must end in the same bits"
    )
    assert pids
    # os.walk, unlike rglob, passes over what is removed meanwhile.
    found = [Path(folder, name) for folder, *names in os.walk(platform.state_dir) for name in chain(*names)]
    readable = [path for path in found if path.exists() and path.lstat().st_mode & 0o077]
    assert not readable, "others may read or enter these"
    platform.stop()
    journal = SqliteJournal(platform.state_dir / "journal.db", read_only=True)
    assert verify(Controller(make_policy("elastic")), journal) > 10
    journal.close()
    wait_for(lambda: not platform.worker_pids(), 10.0, "no worker to outlive its platform")


@pytest.mark.xdist_group("standing platform")
def test_a_worker_killed_mid_training_costs_at_most_its_step_and_survivors_go_on(standing):
    platform = standing
    job_id = platform.submit("victim", num_epochs=40, shard_s=0.02, num_virtual_shards=None)
    wait_for(lambda: platform.job(job_id)["num_workers"] == 4, 60.0, "four workers")
    before = platform.worker_pids()
    victim = platform.job(job_id)["replicas"][2]["replica_id"]
    step_before = platform.job(job_id)["step"]
    os.kill(before[victim], signal.SIGKILL)
    killed_at = time.monotonic()
    wait_for(lambda: platform.job(job_id)["num_workers"] == 3, 10.0, "the survivors to re-form")
    wait_for(lambda: platform.job(job_id)["step"] > step_before, 10.0, "the survivors to go on")
    assert time.monotonic() - killed_at < 20.0
    survivors = {name: pid for name, pid in before.items() if name != victim}
    assert survivors.items() <= platform.worker_pids().items(), "survivors are never restarted"
    status = platform.wait_job(job_id)
    assert (status["state"], status["num_restarts"]) == ("SUCCEEDED", 0)
    assert_exactly_once(platform.workload(job_id), num_samples=96, batch=16, num_epochs=40)


@pytest.mark.xdist_group("standing platform")
def test_pause_resume_on_another_number_of_workers_and_scale(standing):
    platform = standing
    job_id = platform.submit("rest", num_epochs=40, shard_s=0.02, max_workers=3, num_virtual_shards=None)
    wait_for(lambda: platform.job(job_id)["step"] >= 5, 60.0, "some steps")
    platform.request("POST", f"/v1/jobs/{job_id}/pause")
    paused = platform.wait_job(job_id, states=("PAUSED",))
    assert paused["checkpoint_step"] == paused["step"]
    assert paused["replicas"] == []
    platform.request("POST", f"/v1/workloads/{job_id}/scale", {"minimum": 2, "maximum": 2})
    platform.request("POST", f"/v1/jobs/{job_id}/resume")
    wait_for(lambda: platform.job(job_id)["num_workers"] == 2, 60.0, "two workers")
    assert platform.wait_job(job_id)["state"] == "SUCCEEDED"
    assert_exactly_once(platform.workload(job_id), num_samples=96, batch=16, num_epochs=40)


def test_down_and_up_again_goes_on_from_the_very_step(platform):
    platform.start()
    job_id = platform.submit("sleeper", num_epochs=40, shard_s=0.02)
    wait_for(lambda: platform.job(job_id)["step"] >= 5, 60.0, "some steps")
    platform.stop()
    assert not platform.worker_pids()
    platform.start()
    status = platform.wait_job(job_id)
    assert (status["state"], status["num_restarts"]) == ("SUCCEEDED", 0)
    assert_exactly_once(platform.workload(job_id), num_samples=96, batch=16, num_epochs=40)


@pytest.mark.xdist_group("standing platform")
def test_user_errors_fail_at_once_with_their_sentence(standing):
    platform = standing
    broken = platform.submit("broken", text="def fit(ctx):\n    raise ValueError('no such column: price')\n")
    status = platform.wait_job(broken)
    assert status["state"] == "FAILED"
    assert "no such column: price" in status["reason"]
    assert status["num_restarts"] == 0
    poison = platform.submit("poison", text="import os\ndef fit(ctx):\n    os._exit(3)\n", max_restarts=1)
    status = platform.wait_job(poison)
    assert status["state"] == "FAILED"
    assert "crashed 2 times" in status["reason"]


def test_a_plain_torchrun_script_runs_unchanged_and_again_when_a_rank_was_killed(platform):
    text = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
seen = os.path.join(os.environ["SPRINGTIDE_OUT"], "seen")
if not os.path.exists(seen):
    dist.barrier()
    if dist.get_rank() == 1:
        open(seen, "w").close()
        os.kill(os.getpid(), 9)
    # What it raises here is not what went wrong.
    dist.barrier()
t = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(t)
assert t.item() == 3.0 and os.environ["LOCAL_RANK"] == os.environ["RANK"] and "TORCHELASTIC_RUN_ID" in os.environ
print("sum", t.item(), flush=True)
dist.destroy_process_group()
"""
    platform.start()
    body = {
        "name": "plain",
        "source": {"filename": "plain.py", "text": text, "object_name": "", "kind": "script"},
        "options": {"min_workers": 2, "max_workers": 2},
    }
    job_id = platform.request("POST", "/v1/jobs", body)["job_id"]
    status = platform.wait_job(job_id)
    assert (status["state"], status["num_restarts"]) == ("SUCCEEDED", 1)
    logs = platform.http.get(f"/v1/workloads/{job_id}/logs").text
    assert logs.count("sum 3.0") == 2


def test_a_second_platform_on_the_same_state_is_refused(platform):
    platform.start()
    first = platform.process
    platform.http.close()
    platform.http = None
    second = type(platform)(platform.state_dir)
    second.num_starts = 5
    (platform.state_dir / "keep.json").write_text("")
    address = (platform.state_dir / "platform.json").read_text()
    second.start()
    assert second.process.wait(30.0) == 1
    assert f"another platform (pid {first.pid})" in second.log()
    (platform.state_dir / "platform.json").write_text(address)
    assert first.poll() is None


@pytest.mark.xdist_group("standing platform")
def test_requests_without_a_token_are_turned_away(standing):
    platform = standing
    url = str(platform.http.base_url)
    assert httpx2.get(f"{url}/v1/status").status_code == 401
    assert httpx2.get(f"{url}/healthz").status_code == 200
    assert (platform.state_dir / "token").stat().st_mode & 0o077 == 0
