"""Trouble with real things: a Redis that dies, a bucket that vanishes, refusals, budgets, no control plane."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kits.end_to_end.functions_equal import check_equal
from kits.end_to_end.functions_run import Run, job_of, plan_of, service_of
from kits.servers import missing_redis, running_redis, running_s3
from kits.simulation.sweeps import only_in_full
from springtide.backends.functions.emulator.config import EmulatorFaults
from springtide.backends.functions.emulator.launch import inject, set_faults
from springtide.core import events
from springtide.core.actions import EndJob, StopReplica
from springtide.core.ports import Standing
from springtide.core.workload import JobState
from springtide.storage.stores.open import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PLAN = plan_of((5, 10), num_micro_batches=3, micro_batch_size=20)


@pytest.fixture
def run_of(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def build(**fields: Any) -> Run:
        job_fields = {"global_batch_size": 60, "num_epochs": 2, **fields.pop("job", {})}
        given = {"service": service_of(60.0), "cpu_fraction": 0.4, **fields}
        run = Run(tmp_path, job_of("functions_digits", PLAN, **job_fields), **given)
        runs.append(run)
        return run

    yield build
    for run in runs:
        run.close()


def step_of(run: Run) -> int:
    told = run.of(events.ProgressReported)
    return told[-1].step if told else 0


@pytest.mark.skipif(bool(missing_redis()), reason=missing_redis())
def test_a_redis_that_dies_in_the_middle_of_a_step_costs_a_restart_and_nothing_else(run_of: Callable[..., Run]) -> None:
    with running_redis() as redis:
        run = run_of(parameter_url=redis.redis_url)
        run.start()
        run.follow(until=lambda: step_of(run) >= 8)
        redis.kill()
        run.follow(until=lambda: bool(run.of(events.ReplicaLost)))
        reason = run.of(events.ReplicaLost)[0].reason
        assert "parameter store" in reason
        assert redis.password not in reason
        with running_redis(port=redis.port, password=redis.password):
            run.start()
            run.follow()
    check_equal(run, "functions_digits")
    assert run.of(events.JobResized)[-1].direction == "resume"


def test_a_bucket_that_vanishes_is_named_and_its_return_is_enough(
    run_of: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    for name, value in credentials.items():
        monkeypatch.setenv(name, value)
    with running_s3(buckets=("jobs",)) as server:
        import boto3

        run = run_of(store_url=server.s3_url("jobs", "here"), environment=credentials)
        run.start()
        run.follow(until=lambda: step_of(run) >= 5)
        # The server forgets all its buckets at once.
        request = urllib.request.Request(f"{server.s3_endpoint}/moto-api/reset", method="POST")
        urllib.request.urlopen(request).close()
        run.follow(until=lambda: bool(run.of(events.ReplicaLost)))
        reason = run.of(events.ReplicaLost)[0].reason
        assert "jobs" in reason
        assert "bucket" in reason
        client = boto3.client("s3", endpoint_url=server.s3_endpoint, region_name="us-east-1")
        client.create_bucket(Bucket="jobs")
        run.start()
        run.follow()
    # All that was saved is gone with the bucket: it began anew, and came to the same end.
    assert run.of(events.JobFinished)


def test_refusals_lost_invocations_and_late_ones(run_of: Callable[..., Run]) -> None:
    run = run_of()
    inject(run.address, "throttled", num_times=3)
    run.start()
    run.follow(until=lambda: step_of(run) >= 5)
    assert run.status().num_throttled == 3
    inject(run.address, "late", num_times=1, seconds=8.0)
    inject(run.address, "kill", num_times=1, seconds=1.0)
    set_faults(run.address, EmulatorFaults(answer_lost_fraction=1.0))
    run.follow()
    check_equal(run, "functions_digits")


def test_a_budget_is_kept_and_a_larger_one_goes_on(run_of: Callable[..., Run]) -> None:
    run = run_of(job={"budget_usd": 0.0025, "num_epochs": 4})
    run.start()
    run.follow(until=lambda: bool(run.of(events.ReplicaStopped)))
    [paused] = run.of(events.PauseRequested)
    assert "its budget of $0.0025 is nearly spent" in paused.reason
    spent = run.of(events.UsageReported)[-1].bill.total_usd
    assert spent <= 0.0025
    kept = run.of(events.CheckpointCommitted)[-1].step
    assert f"a checkpoint of step {kept} is kept" in paused.reason
    run.job = msgspec.structs.replace(run.job, goal=msgspec.structs.replace(run.job.goal, budget_usd=1.0))
    run.events.clear()
    run.start()
    run.follow()
    resized = run.of(events.JobResized)[0]
    assert (resized.direction, resized.step) == ("resume", kept)
    check_equal(run, "functions_digits")


@only_in_full
def test_paused_and_resumed_with_another_plan(run_of: Callable[..., Run]) -> None:
    run = run_of(job={"num_epochs": 4})
    run.start()
    run.follow(until=lambda: step_of(run) >= 8)
    run.preempt()
    run.follow(until=lambda: bool(run.of(events.ReplicaStopped)))
    kept = run.of(events.CheckpointCommitted)[-1].step
    assert kept >= 8
    run.events.clear()
    other = plan_of((3, 7, 10), num_micro_batches=2, micro_batch_size=30)
    menu = run.job.menu
    assert menu is not None
    option = msgspec.structs.replace(menu.options[0], plan=other)
    run.job = msgspec.structs.replace(run.job, menu=msgspec.structs.replace(menu, options=(option,)))
    run.start()
    run.follow()
    assert run.of(events.JobResized)[0].step == kept
    check_equal(run, "functions_digits")


@only_in_full
def test_cancelled_it_is_over_at_once_and_its_states_stay(run_of: Callable[..., Run]) -> None:
    run = run_of()
    run.start()
    run.follow(until=lambda: step_of(run) >= 5)
    asked_s = time.monotonic()
    run.do(EndJob(job_id=run.job.job_id, state=JobState.CANCELLED))
    run.do(StopReplica(workload_id=run.job.job_id, replica_id=run.replica_id, grace_s=2.0))
    run.follow(until=lambda: bool(run.of(events.ReplicaStopped)))
    assert time.monotonic() - asked_s < 10.0
    run.executor.close()
    assert any("/state/" in key for key in open_store(run.store_url).keys("jobs/job/"))


CONTROL = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from kits.end_to_end.functions_run import Run, job_of, plan_of, service_of
from springtide.core import events
plan = plan_of((5, 10), num_micro_batches=3, micro_batch_size=20)
run = Run(Path(sys.argv[2]), job_of("functions_digits", plan, global_batch_size=60, num_epochs=4),
          service=service_of(60.0), cpu_fraction=0.4)
run.start()
run.follow(until=lambda: any(event.step >= 10 for event in run.of(events.ProgressReported)))
print("ten steps", flush=True)
time.sleep(600)
"""


def test_a_control_plane_that_is_killed_takes_the_functions_over_again(
    run_of: Callable[..., Run], tmp_path: Path
) -> None:
    tests = Path(__file__).parents[1]
    first = subprocess.Popen(
        [sys.executable, "-c", CONTROL, str(tests), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "ten steps\n"
    first.kill()
    first.wait()
    first.stdout.close()
    run = run_of(job={"num_epochs": 4})
    run.generation = run.num_replicas = 1
    run.executor.recover(Standing(replicas=(run.start_action,), generations={run.job.job_id: 1}))
    run.follow()
    check_equal(run, "functions_digits")
    status = run.status()
    assert status.num_redone_steps <= 8
    assert "took over after a restart" in (run.work_dir / "logs" / "job.coordinator.log").read_text()
