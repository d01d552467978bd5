"""A study on real emulated functions: trials of changing size under one budget, with functions killed meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.end_to_end.goals_platform import (
    GoalsPlatform,
    check_losses,
    load_file,
    reference,
    seed_that_kills,
    write_softmax,
)
from kits.servers import missing_redis
from springtide.client.api import connect
from springtide.client.studies import Study
from springtide.client.tuning import tune

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_redis()), reason=missing_redis()),
]
# More than it takes: a slow machine bills more seconds.
NUM_SAMPLES, BATCH, EPOCHS, BUDGET_USD = 600, 30, 2, 0.04


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[GoalsPlatform]:
    found = GoalsPlatform(
        tmp_path, faults={"kill": 0.05}, seed=seed_that_kills(), parameter_store="redis?linger=1s", places=2
    )
    found.start()
    try:
        yield found
    finally:
        found.stop()


def test_trials_share_one_budget_and_come_out_as_undisturbed(platform: GoalsPlatform, tmp_path: Path) -> None:
    module = load_file(write_softmax(tmp_path, num_samples=NUM_SAMPLES, sample_s=0.01))
    seen: list[Study] = []
    found: list[Study] = []
    client = connect(state_dir=platform.live.state_dir)

    def run() -> None:
        found.append(
            tune(
                module.softmax,
                trials=4,
                budget=BUDGET_USD,
                parallel=2,
                prunes=False,
                client=client,
                folder=tmp_path / "studies",
                on_change=seen.append,
                epochs=EPOCHS,
                global_batch=BATCH,
                workers=(2, 3),
            )
        )

    thread = threading.Thread(target=run)
    thread.start()
    platform.live_until(lambda: bool(seen) and any(trial.progress_fraction > 0 for trial in seen[-1].trials), thread)
    platform.kill_redis()
    platform.kill_one()
    thread.join(800.0)
    client.close()
    assert found, platform.live.log()[-4000:]
    study = found[0]
    assert [trial.state for trial in study.trials] == ["succeeded"] * 4, study
    assert len({trial.params["width"] for trial in study.trials}) > 1
    assert all(one.spent_usd <= BUDGET_USD for one in seen)
    jobs = platform.client.jobs()
    assert len(jobs) == 4
    assert sum(job.cost_usd or 0.0 for job in jobs) <= BUDGET_USD
    for trial in study.trials:
        losses, digest = reference(module, global_batch=BATCH, epochs=EPOCHS, params=trial.params)
        check_losses(platform.losses(trial.job_id), losses, NUM_SAMPLES * EPOCHS)
        assert platform.notes(trial.job_id).ids_digest == digest
    assert any(job.functions and job.functions.num_replaced for job in jobs)
