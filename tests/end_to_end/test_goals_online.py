"""Online learning on real emulated functions: samples arrive in bursts, idle time costs nothing, each is used once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.end_to_end.goals_platform import (
    LIMIT_S,
    GoalsPlatform,
    check_losses,
    load_file,
    redis_pids,
    seed_that_kills,
    settle,
    stream_reference,
    write_softmax,
)
from kits.end_to_end.live_platform import wait_for
from kits.servers import missing_redis

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_redis()), reason=missing_redis()),
]
BATCH = 20


@pytest.fixture
def platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoalsPlatform]:
    monkeypatch.setenv("SPRINGTIDE_STATE", str(tmp_path / "state"))
    found = GoalsPlatform(tmp_path, faults={"kill": 0.05}, seed=seed_that_kills(), parameter_store="redis?linger=1s")
    found.start()
    try:
        yield found
    finally:
        found.stop()


def test_each_sample_once_and_idle_time_costs_nothing(platform: GoalsPlatform, tmp_path: Path) -> None:
    from springtide.client.datasets import append_dataset, close_dataset

    module = load_file(write_softmax(tmp_path, sample_s=0.05, stream="clicks"))
    x, y = module.samples(num_samples=1210)

    def append(low: int, high: int) -> None:
        append_dataset("clicks", {"x": x[low:high], "y": y[low:high]}, client=platform.client)

    append(0, 410)
    handle = module.softmax.submit(platform.client, on="functions", global_batch=BATCH, workers=(2, 3))
    platform.wait(handle.id, lambda job: job.step >= 1, "its first step")
    platform.kill_redis()
    # Ten samples are less than a batch: they wait.
    idle = platform.wait(handle.id, lambda job: bool(job.functions and job.functions.idle_reason), "its idle time")
    assert idle.step == 20
    wait_for(lambda: platform.num_running() == 0, LIMIT_S, "the functions to end")
    wait_for(lambda: redis_pids(platform.live.state_dir) == [], LIMIT_S, "the parameter store to end")
    # The last seconds of what has just ended come onto the bill a moment later.
    settle(4.0)
    before = platform.bill(handle.id)
    settle(8.0)
    after = platform.bill(handle.id)
    assert platform.num_running() == 0
    assert after.function_usd == before.function_usd
    assert after.invocation_usd == before.invocation_usd
    assert after.parameter_store_usd == before.parameter_store_usd
    # Looking whether something has come is a request a second at most.
    assert after.total_usd - before.total_usd < 1e-6 * 30
    append(410, 800)
    platform.wait(handle.id, lambda job: job.step >= 25, "steps of the second burst")
    platform.kill_one()
    append(800, 1210)
    close_dataset("clicks", client=platform.client)
    job = platform.wait_over(handle.id)
    expected = stream_reference(module, x, y, global_batch=BATCH)
    check_losses(platform.losses(handle.id), expected, 1210)
    assert job.step == 61
    assert job.functions is not None
    assert job.functions.num_replaced >= 1
