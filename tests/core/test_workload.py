"""The number of virtual shards: enough for the workers, and for batches in parts that fit."""

from __future__ import annotations

import pytest

from springtide.core.workload import AdaptiveBatch, shards_for


@pytest.mark.parametrize(("max_workers", "shards"), [(1, 4), (4, 4), (5, 8), (8, 8), (200, 256)])
def test_a_power_of_two_that_every_worker_gets_one_of(max_workers, shards):
    assert shards_for(max_workers) == shards


def test_the_largest_batch_is_cut_into_parts_that_a_worker_holds():
    batch = AdaptiveBatch(min_size=32, max_size=500, max_local_size=64)
    shards = shards_for(2, batch)
    assert shards == 8
    assert -(-batch.max_size // shards) <= 64
    assert shards_for(2, AdaptiveBatch(min_size=32, max_size=500)) == 4
