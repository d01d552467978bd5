"""kill -9 of the control plane and of workers: at every named crash point once, and at random moments.

What must hold each time: no job lost, none run twice, no sample skipped or doubled, one terminal state each.
"""

from __future__ import annotations

import os
import signal
import time

import httpx2
import numpy as np
import pytest

from kits.end_to_end.live_platform import ECHO, artifact_digest, assert_exactly_once, wait_for
from kits.service.crash_points import LOOP_CRASH_POINTS
from kits.simulation.sweeps import STRIDE
from springtide.backends.local import CRASH_POINTS
from springtide.control.journal.sqlite import SqliteJournal
from springtide.core.actions import EndJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

NUM_KILLS = int(os.environ.get("SPRINGTIDE_KILLS", "50"))
EPOCHS = 6


def assert_ended_once(platform, job_ids):
    journal = SqliteJournal(platform.state_dir / "journal.db", read_only=True)
    ends = [action.job_id for _, step in journal.read() for action in step.actions if isinstance(action, EndJob)]
    journal.close()
    assert sorted(ends) == sorted(job_ids)


def provoke(platform, name, key):
    """Walk through every kind of action; the platform may die anywhere on the way."""
    job_id = platform.submit(name, key=key, num_epochs=EPOCHS, shard_s=0.01)
    wait_for(lambda: platform.job(job_id)["num_workers"] >= 2, 30.0, "growth")
    other = platform.submit(f"{name}-b", key=key + "b", num_epochs=EPOCHS, shard_s=0.01)
    wait_for(lambda: platform.job(other)["state"] != "PENDING", 30.0, "a shrink")
    body = {
        "source": {"filename": "e.py", "text": ECHO, "object_name": "Echo", "kind": "class"},
        "options": {"idle_s": 0.5},
    }
    platform.request("PUT", "/v1/services/echo", body)
    platform.request("POST", "/f/echo", {"numbers": [1.0]})
    platform.request("POST", f"/v1/jobs/{job_id}/pause")
    platform.wait_job(job_id, 30.0, states=("PAUSED", "SUCCEEDED"))
    platform.request("POST", f"/v1/jobs/{job_id}/resume")
    platform.wait_job(job_id)
    platform.wait_job(other)
    platform.request("DELETE", "/v1/services/echo")


def see_through(platform, job_id):
    """Wait for the end; a pause that the crash cut off, before or after its checkpoint, is resumed."""
    while True:
        status = platform.wait_job(job_id, states=("SUCCEEDED", "FAILED", "CANCELLED", "REJECTED", "PAUSED"))
        if status["state"] != "PAUSED":
            return status
        platform.request("POST", f"/v1/jobs/{job_id}/resume")


def test_every_named_crash_point_once(platform):
    """One state directory lives through all of them: each start crashes at the next point, if it passes it."""
    reached, job_ids = [], []
    platform.start()
    reference = platform.submit("reference", num_epochs=EPOCHS, max_workers=1)
    platform.wait_job(reference)
    job_ids.append(reference)
    points = list(dict.fromkeys((*LOOP_CRASH_POINTS, *CRASH_POINTS)))[::STRIDE]
    for point in points:
        platform.stop()
        platform.start(crash_at=f"{point}:1")
        name = f"job{len(job_ids)}"
        try:
            if platform.http is not None:
                provoke(platform, name, key=name)
        except (httpx2.HTTPError, AssertionError):
            # The platform died under the request, which is what this test is for; a living one is a failure.
            if platform.is_alive:
                wait_for(lambda: not platform.is_alive, 5.0, f"{point}: an error although the platform lives")
        if not platform.is_alive:
            reached.append(point)
            platform.start()
        mine = [platform.submit(name, key=name, num_epochs=EPOCHS, shard_s=0.01)]
        mine.append(platform.submit(f"{name}-b", key=name + "b", num_epochs=EPOCHS, shard_s=0.01))
        for job_id in mine:
            status = see_through(platform, job_id)
            assert status["state"] == "SUCCEEDED", (point, status)
            assert_exactly_once(platform.workload(job_id), num_samples=96, batch=16, num_epochs=EPOCHS)
            assert artifact_digest(platform.workload(job_id)) == artifact_digest(platform.workload(reference))
        job_ids += mine
    platform.stop()
    assert_ended_once(platform, job_ids)
    missed = sorted(set(points) - set(reached))
    assert not missed, f"crash points that were never passed: {missed}"


def test_random_kills_of_control_plane_and_workers(platform):
    seed = int(os.environ.get("SPRINGTIDE_KILL_SEED", "20261121"))
    print(f"reproduce: SPRINGTIDE_KILL_SEED={seed} SPRINGTIDE_KILLS={NUM_KILLS} pytest -m slow {__file__}")
    rng = np.random.default_rng(seed)
    platform.start()
    reference = platform.submit("reference", num_epochs=EPOCHS, max_workers=1)
    platform.wait_job(reference)
    live: list[str] = []
    done: list[str] = [reference]
    num_control = num_workers = 0
    while num_control + num_workers < NUM_KILLS:
        while len(live) < 2:
            name = f"job{len(live) + len(done)}"
            live.append(platform.submit(name, key=name, num_epochs=EPOCHS, shard_s=0.02))
        time.sleep(float(rng.uniform(0.05, 1.0)))
        pids = platform.worker_pids()
        kinds = rng.random()
        if kinds < 0.45 or not pids:
            platform.kill()
            num_control += 1
            time.sleep(float(rng.choice([0.0, 0.5])))
        if kinds >= 0.40 and pids:
            # In a few cases the control plane and a worker go down together.
            victim = sorted(pids)[int(rng.integers(len(pids)))]
            try:
                os.kill(pids[victim], signal.SIGKILL)
                num_workers += 1
            except ProcessLookupError:
                pass
        if not platform.is_alive:
            platform.start()
        for job_id in list(live):
            if platform.job(job_id)["state"] in ("SUCCEEDED", "FAILED"):
                live.remove(job_id)
                done.append(job_id)
    for job_id in live:
        platform.wait_job(job_id, 180.0)
        done.append(job_id)
    for job_id in done:
        status = platform.job(job_id)
        assert status["state"] == "SUCCEEDED", status
        assert_exactly_once(platform.workload(job_id), num_samples=96, batch=16, num_epochs=EPOCHS)
        assert artifact_digest(platform.workload(job_id)) == artifact_digest(platform.workload(reference))
    platform.stop()
    assert_ended_once(platform, done)
    assert num_control >= NUM_KILLS // 4
    assert num_workers >= NUM_KILLS // 4
    print(f"{num_control} control planes and {num_workers} workers killed, {len(done)} jobs, each once and exactly")
