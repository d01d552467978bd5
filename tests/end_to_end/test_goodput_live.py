"""Batches that change on real training: four jobs on four slots, the noise is seen, no sample is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

import pytest

from kits.end_to_end.live_platform import wait_for
from kits.simulation.sweeps import only_in_full
from springtide.control.controller import Controller
from springtide.control.journal.sqlite import SqliteJournal
from springtide.control.loop import verify
from springtide.control.quotes.budget import WithinBudget
from springtide.core.actions import ResizeJob
from springtide.core.events import ProgressReported
from springtide.runtime.data.shards import SampleSchedule
from springtide.scheduling.registry import make_policy
from springtide.service.platform import LOCAL_OVERHEADS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("measures"),
    pytest.mark.parametrize(
        "policy", ["springtide:revisit_s=3", pytest.param("goodput:revisit_s=3", marks=only_in_full)]
    ),
]
NUM_SAMPLES = 768
# A noisy regression whose steps take a fixed time and one for every sample, as on a device that is well used.
NOISY = f"""
import time
import torch

def fit(ctx):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn({NUM_SAMPLES}, 16, generator=generator)
    y = x @ torch.randn(16, 1, generator=generator) + 2.0 * torch.randn({NUM_SAMPLES}, 1, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model, optimizer = ctx.prepare(model, lambda p: torch.optim.SGD(p, lr=0.005))
    for batch in ctx.batches((x, y)):
        time.sleep(0.004 + 0.0004 * len(batch.ids))
        ctx.step(torch.nn.functional.mse_loss(model(batch.x), batch.y))
"""


def submit(platform, name, num_epochs, seed, checkpoint_interval_s=5.0):
    return platform.submit(
        name,
        text=NOISY,
        num_epochs=num_epochs,
        seed=seed,
        global_batch_size=16,
        num_samples=NUM_SAMPLES,
        checkpoint_interval_s=checkpoint_interval_s,
        batch={"min_size": 16, "max_size": 256, "learning_rate": "adascale"},
    )


def steps_of(platform, job_id):
    text = (platform.workload(job_id) / "steps.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def lineage_of(platform, job_id):
    """The steps that count: after a return to a checkpoint those of the newer generation replace what they do again."""
    newest = {}
    for record in steps_of(platform, job_id):
        for step in [step for step in newest if step >= record["step"]]:
            del newest[step]
        newest[record["step"]] = record
    return list(newest.values())


def batches_of(platform):
    """What the batch of each job was ordered to be in each generation, from the journal."""
    journal = SqliteJournal(platform.state_dir / "journal.db", read_only=True)
    batches = {}
    for _, step in journal.read():
        for action in step.actions:
            if isinstance(action, ResizeJob):
                batches.setdefault(action.job_id, {})[action.generation] = action.global_batch_size
    journal.close()
    return batches


def assert_every_sample_once(platform, job_id, batch_of, num_epochs, seed):
    """Replay the sample cursor over the logged steps with the batch that each generation was ordered to have."""
    schedule = SampleSchedule(num_samples=NUM_SAMPLES, global_batch_size=1, num_epochs=num_epochs, seed=seed)
    num_seen = 0
    for number, record in enumerate(lineage_of(platform, job_id), start=1):
        assert record["step"] == number
        expected = schedule.batch_at(number - 1, num_seen, batch_of[record["generation"]])
        assert record["ids_digest"] == expected.ids_digest
        num_seen += record["num_samples"]
    assert num_seen == NUM_SAMPLES * num_epochs


@pytest.mark.timeout(400)
def test_four_jobs_share_four_slots_and_their_batches_follow_the_noise(platform, policy):
    platform.start(policy=policy)
    jobs = {}
    for number, num_epochs in enumerate((14, 8, 6, 10)):
        jobs[submit(platform, f"job{number}", num_epochs, seed=number)] = (num_epochs, number)
        time.sleep(4.0)
    shown = {}

    def look():
        for job in platform.request("GET", "/v1/status")["jobs"]:
            if job["noise_scale"] is not None:
                shown[job["job_id"]] = job
        return set(shown) == set(jobs)

    wait_for(look, 120.0, "every job's noise")
    assert all(0 < job["efficiency_fraction"] <= 1.0 for job in shown.values())
    ended = [platform.wait_job(job_id, timeout_s=240.0) for job_id in jobs]
    assert all(job["state"] == "SUCCEEDED" for job in ended), [job["reason"] for job in ended]
    assert all(job["progress_fraction"] == 1.0 for job in ended)
    stories = {job_id: platform.request("GET", f"/v1/workloads/{job_id}/history") for job_id in jobs}
    platform.stop()

    journal = SqliteJournal(platform.state_dir / "journal.db", read_only=True)
    steps = [step for _, step in journal.read()]
    batches = batches_of(platform)
    for job_id, (num_epochs, seed) in jobs.items():
        assert_every_sample_once(platform, job_id, batches[job_id], num_epochs, seed)
    changed = [job_id for job_id, sizes in batches.items() if len(set(sizes.values())) > 1]
    assert changed, batches
    for job_id in changed:
        told = [entry["text"] for entry in stories[job_id] if entry["kind"] == "batch"]
        assert told, stories[job_id]
        assert all("noise scale" in text for text in told)
    reports = [event for step in steps for event in step.events if isinstance(event, ProgressReported)]
    assert any(event.step_s and event.sync_s is not None and event.grad_var for event in reports)
    fresh = Controller(WithinBudget(make_policy(policy), 0.0), overheads=LOCAL_OVERHEADS)
    assert verify(fresh, journal) > 10
    journal.close()


@pytest.mark.timeout(300)
def test_killed_workers_cost_no_sample_though_the_batch_changes(platform, policy):
    platform.start(policy=policy)
    job_id = submit(platform, "hard", num_epochs=90, seed=5, checkpoint_interval_s=1.0)
    wait_for(lambda: platform.job(job_id)["global_batch_size"] != 16, 120.0, "a first change of the batch")
    wait_for(lambda: platform.job(job_id)["num_workers"] > 1, 60.0, "a second worker")
    first = sorted(platform.worker_pids().items())[0][1]
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: platform.job(job_id)["checkpoint_step"] is not None, 60.0, "a checkpoint")
    for pid in platform.worker_pids().values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    ended = platform.wait_job(job_id, timeout_s=200.0)
    assert ended["state"] == "SUCCEEDED", ended["reason"]
    assert ended["num_restarts"] >= 1
    platform.stop()
    assert_every_sample_once(platform, job_id, batches_of(platform)[job_id], 90, 5)
    journal = SqliteJournal(platform.state_dir / "journal.db", read_only=True)
    assert verify(Controller(WithinBudget(make_policy(policy), 0.0), overheads=LOCAL_OVERHEADS), journal) > 10
    journal.close()
