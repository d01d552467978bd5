"""Dynamic batching on real emulated functions: the batch grows with the epochs, functions follow, nothing shows."""

from __future__ import annotations

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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_redis()), reason=missing_redis()),
]
NUM_SAMPLES, EPOCHS = 1000, 4
SCHEDULE = [(0, 16), (1, 48), (3, 200)]


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[GoalsPlatform]:
    found = GoalsPlatform(tmp_path, faults={"kill": 0.05}, seed=seed_that_kills(), parameter_store="redis?linger=1s")
    found.start()
    try:
        yield found
    finally:
        found.stop()


def test_every_sample_of_every_epoch_once_whatever_the_batch(platform: GoalsPlatform, tmp_path: Path) -> None:
    module = load_file(write_softmax(tmp_path, num_samples=NUM_SAMPLES, sample_s=0.01))
    handle = module.softmax.submit(
        platform.client,
        on="functions",
        global_batch=16,
        batch_schedule=SCHEDULE,
        epochs=EPOCHS,
        deadline="10m",
        workers=(2, 4),
    )
    platform.wait(handle.id, lambda job: job.step >= 2, "its first steps")
    platform.kill_redis()
    platform.wait(handle.id, lambda job: job.global_batch_size == 48, "the second batch size")
    platform.kill_one()
    platform.wait(handle.id, lambda job: job.global_batch_size == 200, "the third batch size")
    job = platform.wait_over(handle.id)
    losses, digest = reference(module, global_batch=16, epochs=EPOCHS, schedule=SCHEDULE)
    told = platform.losses(handle.id)
    check_losses(told, losses, NUM_SAMPLES * EPOCHS)
    assert platform.notes(handle.id).ids_digest == digest
    assert {samples for _, _, samples in told} == {16, 48, 200, NUM_SAMPLES % 16, NUM_SAMPLES % 48}
    assert job.total_steps == len(losses) == 63 + 2 * 21 + 5
    assert job.functions is not None
    assert job.functions.num_replaced >= 1
