"""Functions of a running job are killed one after the other: only they are replaced, and no step is lost or doubled."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from kits.end_to_end.functions_equal import check_equal
from kits.end_to_end.functions_run import Run, job_of, plan_of, service_of
from springtide.backends.functions.emulator.launch import emulator_status, kill_instance
from springtide.core import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_KILLS = max(2, int(os.environ.get("SPRINGTIDE_KILLS", "50")) // 8)
SEED = int(os.environ.get("SPRINGTIDE_KILL_SEED", "20261126"))
PLAN = plan_of((5, 10), num_micro_batches=3, micro_batch_size=20)


def test_killed_functions_are_replaced_and_nothing_else_happens(tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    run = Run(
        tmp_path,
        job_of("functions_digits", PLAN, global_batch_size=60, num_epochs=2 + NUM_KILLS // 3),
        service=service_of(60.0),
        cpu_fraction=0.4,
    )
    try:
        run.start()
        killed = 0
        while killed < NUM_KILLS and not run.of(events.JobFinished):
            told = step_of(run)
            run.follow(until=lambda told=told: step_of(run) >= told + 2 or bool(run.of(events.JobFinished)))
            time.sleep(float(rng.uniform(0.0, 0.5)))
            busy = [one["id"] for one in emulator_status(run.address)["instances"] if one["invocation"]]
            if busy and not run.of(events.JobFinished):
                kill_instance(run.address, busy[int(rng.integers(len(busy)))])
                killed += 1
                run.follow(until=lambda n=killed: run.status().num_replaced >= n or bool(run.of(events.JobFinished)))
        run.follow()
        assert killed == NUM_KILLS
        assert not run.of(events.ReplicaLost), "the job kept its place"
        assert not run.of(events.PauseRequested)
        check_equal(run, "functions_digits")
        print(f"{killed} functions killed, {run.status().num_redone_steps} steps redone, each told once")
    finally:
        run.close()


def step_of(run: Run) -> int:
    told = run.of(events.ProgressReported)
    return told[-1].step if told else 0
