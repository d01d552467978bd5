"""The sample schedule: every sample once an epoch, whatever the batch, the shards and the ranks."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from springtide.runtime.shards import Schedule, permutation, seed_everything, shard_bounds, shards_of_rank

shard_counts = st.sampled_from([1, 2, 4, 8, 16])


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 3), st.integers(-(2**63), 2**63), shard_counts)
def test_every_sample_is_used_once_in_every_epoch(num_samples, batch_size, num_epochs, seed, num_shards):
    schedule = Schedule(num_samples=num_samples, global_batch_size=batch_size, num_epochs=num_epochs, seed=seed)
    seen = {epoch: [] for epoch in range(num_epochs)}
    for step in range(schedule.total_steps):
        batch = schedule.batch(step)
        assert batch.epoch == step // schedule.steps_per_epoch
        parts = [shard_bounds(len(batch.ids), shard, num_shards, batch_size) for shard in range(num_shards)]
        seen[batch.epoch] += [int(i) for low, high in parts for i in batch.ids[low:high]]
    assert all(sorted(ids) == list(range(num_samples)) for ids in seen.values())


@given(st.integers(1, 64), shard_counts, st.data())
def test_no_shard_of_a_short_batch_is_smaller_than_those_of_a_full_one(batch_size, num_shards, data):
    num_samples = data.draw(st.integers(1, batch_size))
    sizes = [
        high - low for low, high in (shard_bounds(num_samples, s, num_shards, batch_size) for s in range(num_shards))
    ]
    assert sum(sizes) == num_samples
    assert all(size == 0 or size >= min(num_samples, batch_size // num_shards) for size in sizes)


@given(st.sampled_from([4, 8, 16]), st.data())
def test_ranks_share_all_shards_in_order(num_shards, data):
    world_size = data.draw(st.integers(1, num_shards))
    runs = [shards_of_rank(num_shards, rank, world_size) for rank in range(world_size)]
    assert [shard for run in runs for shard in run] == list(range(num_shards))
    assert all(len(run) >= 1 for run in runs)


def test_epochs_and_seeds_have_permutations_of_their_own():
    assert not np.array_equal(permutation(100, 1, 0), permutation(100, 1, 1))
    assert not np.array_equal(permutation(100, 1, 0), permutation(100, 2, 0))
    assert np.array_equal(permutation(100, 1, 5), permutation(100, 1, 5))


def test_a_seeded_position_fixes_all_three_generators():
    def draw(*position):
        seed_everything(3, *position)
        legacy = np.random.rand()  # noqa: NPY002 - as user code does.
        return float(torch.rand(1)), float(legacy), random.random()

    assert draw(1, 2) == draw(1, 2)
    assert draw(1, 2) != draw(2, 1)
