"""A goal on real emulated functions: the platform learns what steps take and moves; the result shows none of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kits.end_to_end.goals_platform import (
    GoalsPlatform,
    check_losses,
    load_file,
    reference,
    seed_that_kills,
    write_profile,
    write_softmax,
)
from kits.servers import missing_redis

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_redis()), reason=missing_redis()),
]
BATCH, EPOCHS, NUM_SAMPLES = 48, 2, 2400


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[GoalsPlatform]:
    found = GoalsPlatform(
        tmp_path,
        faults={"kill": 0.05},
        seed=seed_that_kills(),
        parameter_store="redis?linger=1s",
    )
    found.start()
    try:
        yield found
    finally:
        found.stop()


def test_cheapest_within_a_deadline_that_the_first_guess_would_miss(platform: GoalsPlatform, tmp_path: Path) -> None:
    """A sample takes 50 ms in a function, twice what its profile says: one worker would need 240 s."""
    source = write_softmax(tmp_path, num_samples=NUM_SAMPLES, sample_s=0.05)
    profile = write_profile(tmp_path, source, num_samples=NUM_SAMPLES, sample_s=0.025)
    module = load_file(source)
    handle = module.softmax.submit(
        platform.client,
        on="functions",
        global_batch=BATCH,
        epochs=EPOCHS,
        deadline="200s",
        workers=(1, 6),
        profile=profile,
    )
    platform.wait(handle.id, lambda job: job.step >= 4, "its first steps")
    platform.wait(handle.id, lambda job: bool(job.functions and job.functions.plan.num_replicas > 1), "a second worker")
    platform.kill_redis()
    platform.kill_one()
    job = platform.wait_over(handle.id)
    losses, digest = reference(module, global_batch=BATCH, epochs=EPOCHS)
    check_losses(platform.losses(handle.id), losses, NUM_SAMPLES * EPOCHS)
    assert platform.notes(handle.id).ids_digest == digest
    assert job.deadline_at_s is not None
    assert job.ended_at_s is not None
    assert job.ended_at_s <= job.deadline_at_s, f"late by {job.ended_at_s - job.deadline_at_s} s"
    assert job.functions is not None
    check_stayers(job.functions.changes)
    assert job.functions.num_replaced >= 1


def check_stayers(changes: Sequence[Any]) -> None:
    """Where the memory stayed the same, as many functions stayed as both plans have."""
    for before, after in pairwise(changes):
        if before.plan.stages == after.plan.stages:
            assert after.num_stayed == min(before.plan.num_replicas, after.plan.num_replicas)
