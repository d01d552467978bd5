"""Pods of a running job are killed one after the other: the others train on, and the job is never started again."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import numpy as np
import pytest

from kits.kubernetes.kube_http import wait_for
from kits.kubernetes.live_cluster import CREDENTIALS, platform_on
from kits.kubernetes.paced_job import Pace, apply, each_step_once, paced_function
from springtide.control.journal.sqlite import SqliteJournal
from springtide.core.actions import PreemptJob
from springtide.core.events import ReplicaLost

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1200)]
NUM_ROUNDS = max(1, int(os.environ.get("SPRINGTIDE_KILLS", "50")) // 16)
SEED = int(os.environ.get("SPRINGTIDE_KILL_SEED", "20261126"))
NUM_WORKERS, NUM_EPOCHS, SHARD_S, LONG_S = 4, 120, 0.1, 300.0


@pytest.fixture
def pace(node_lab):
    pace = Pace(node_lab.host, SHARD_S)
    yield pace
    pace.close()


@pytest.fixture
def platform(node_lab, tmp_path, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with platform_on(node_lab, tmp_path / "platform", "kills", policy="springtide") as live:
        live.start()
        yield live


def test_killed_pods_leave_the_others_alone(platform, pace):
    """Each round kills one pod while nothing is under way, and one while another takes its place."""
    rng = np.random.default_rng(SEED)
    given = paced_function("victim", platform.namespace, pace.url, NUM_EPOCHS)
    given["spec"]["workers"] = f"1..{NUM_WORKERS}"
    apply(platform.lab.kubeconfig, given)
    job_id = platform.workload_id("victim")

    def job():
        return platform.view(f"/v1/jobs/{job_id}")

    def is_at_rest():
        return job()["num_workers"] == NUM_WORKERS == len(platform.running(job_id))

    def kill(replica):
        for pid in platform.pids_of(platform.running(job_id)[replica]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(f"the loss of {replica}", lambda: replica not in platform.running(job_id), LONG_S)

    killed = []
    for _ in range(NUM_ROUNDS):
        wait_for("all workers", is_at_rest, LONG_S)
        step = job()["step"]
        wait_for("a step of theirs", lambda step=step: job()["step"] >= step + 2, LONG_S)
        members = sorted(platform.running(job_id))
        first, second = (members[index] for index in rng.permutation(NUM_WORKERS)[:2])
        kill(first)
        time.sleep(float(rng.uniform(0.0, 6.0)))
        kill(second)
        killed += [first, second]
        told = platform.view(f"/v1/workloads/{job_id}/why")["history"]
        assert sum("killed" in entry["text"] for entry in told) >= 2, told
    wait_for("all workers", is_at_rest, LONG_S)
    pace.pause_s = 0.0
    wait_for("its end", lambda: job()["state"] not in ("STARTING", "RUNNING"), LONG_S)
    status = job()
    assert (status["state"], status["num_restarts"], status["num_preemptions"]) == ("SUCCEEDED", 0, 0), status["reason"]
    each_step_once(platform.store_url, job_id, NUM_EPOCHS)
    platform.stop()
    journal = SqliteJournal(platform.state_dir / "journal.db", read_only=True)
    steps = [step for _, step in journal.read()]
    journal.close()
    lost = {event.replica_id for step in steps for event in step.events if isinstance(event, ReplicaLost)}
    assert lost == set(killed)
    assert not [action for step in steps for action in step.actions if isinstance(action, PreemptJob)]
