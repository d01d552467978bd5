"""The sample schedule: every sample once an epoch, whatever the batch, the shards and the ranks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from springtide.core.errors import StorageError
from springtide.core.function_search import BatchPhase, batch_at, steps_of
from springtide.runtime.data.shards import (
    SampleSchedule,
    StreamSchedule,
    permutation,
    rank_bounds,
    seed_everything,
    shard_bounds,
    shards_of_rank,
)

shard_counts = st.sampled_from([1, 2, 4, 8, 16])


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 3), st.integers(-(2**63), 2**63), shard_counts)
def test_every_sample_is_used_once_in_every_epoch(num_samples, batch_size, num_epochs, seed, num_shards):
    schedule = SampleSchedule(num_samples=num_samples, global_batch_size=batch_size, num_epochs=num_epochs, seed=seed)
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


@given(st.integers(1, 64), st.integers(1, 9), st.data())
def test_a_short_batch_is_divided_between_all_ranks_that_can_have_two_samples(batch_size, world_size, data):
    num_samples = data.draw(st.integers(1, batch_size))
    parts = [rank_bounds(num_samples, rank, world_size, batch_size) for rank in range(world_size)]
    assert [i for low, high in parts for i in range(low, high)] == list(range(num_samples))
    sizes = [high - low for low, high in parts]
    assert sizes[0], "the first rank always has a part"
    if num_samples >= 2 * world_size:
        assert max(sizes) - min(sizes) <= 1
    elif batch_size >= 2 * world_size:
        assert all(size != 1 for size in sizes) or num_samples == 1


def test_the_last_batch_of_an_epoch_knows_it():
    schedule = SampleSchedule(num_samples=10, global_batch_size=4, num_epochs=2, seed=0)
    assert [schedule.batch(step).is_last for step in range(6)] == [False, False, True] * 2
    assert not schedule.batch_at(1, 4, 5).is_last
    assert schedule.batch_at(1, 4, 6).is_last
    assert schedule.batch_at(1, 4, 100).is_last


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


PHASES = (BatchPhase(from_epoch=1, global_batch_size=3), BatchPhase(from_epoch=3, global_batch_size=7))


@given(
    num_samples=st.integers(1, 40),
    num_epochs=st.integers(1, 6),
    first=st.integers(1, 50),
    changes=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 50)), max_size=4, unique_by=lambda change: change[0]),
)
def test_a_batch_schedule_uses_each_sample_of_each_epoch_once(num_samples, num_epochs, first, changes):
    phases = tuple(BatchPhase(from_epoch=epoch, global_batch_size=size) for epoch, size in changes)
    schedule = SampleSchedule(
        num_samples=num_samples, global_batch_size=first, num_epochs=num_epochs, seed=1, phases=phases
    )
    ordered = tuple(sorted(phases, key=lambda phase: phase.from_epoch))
    assert schedule.total_steps == steps_of(ordered, num_samples, num_epochs, first)
    seen: dict[int, list[int]] = {}
    for step in range(schedule.total_steps):
        batch = schedule.batch(step)
        assert batch.epoch == schedule.epoch_of(step)
        assert schedule.num_seen(step) == sum(map(len, seen.values()))
        assert batch.global_batch_size == batch_at(ordered, batch.epoch, first) == schedule.global_batch_size_at(step)
        assert 0 < len(batch.ids) <= batch.global_batch_size
        seen.setdefault(batch.epoch, []).extend(batch.ids.tolist())
    assert sorted(seen) == list(range(num_epochs))
    assert all(sorted(ids) == list(range(num_samples)) for ids in seen.values())
    assert schedule.num_seen(schedule.total_steps) == num_samples * num_epochs


def test_without_phases_the_schedule_is_as_ever_and_the_last_epoch_stays_the_last():
    plain, changing = (
        SampleSchedule(num_samples=10, global_batch_size=4, num_epochs=5, seed=1, phases=phases)
        for phases in ((), PHASES)
    )
    assert (plain.total_steps, changing.total_steps) == (15, 3 + 2 * 4 + 2 * 2)
    assert np.array_equal(plain.batch(2).ids, changing.batch(2).ids)
    assert changing.epoch_of(changing.total_steps) == 4
    assert changing.samples_needed(3) is None


def test_an_order_of_the_datasets_own_is_followed():
    schedule = SampleSchedule(
        num_samples=6,
        global_batch_size=4,
        num_epochs=2,
        seed=9,
        order=lambda seed, epoch: np.roll(np.arange(6), epoch + seed),
        arrange=np.sort,
    )
    assert [schedule.batch(step).ids.tolist() for step in range(4)] == [[0, 3, 4, 5], [1, 2], [2, 3, 4, 5], [0, 1]]


def test_a_stream_never_loses_samples():
    schedule = StreamSchedule(global_batch_size=4)
    schedule.set_available(6, is_closed=False)
    assert schedule.batch(0).ids.tolist() == [0, 1, 2, 3]
    with pytest.raises(StorageError, match="now has 5"):
        schedule.set_available(5, is_closed=False)
    schedule.set_available(6, is_closed=True)
    assert (schedule.total_steps, schedule.batch(1).ids.tolist()) == (2, [4, 5])
    assert schedule.num_seen(2) == 6
    with pytest.raises(StorageError, match="and was closed"):
        schedule.set_available(7, is_closed=True)
    with pytest.raises(StorageError, match="step 3 needs"):
        schedule.batch(2)
    empty = StreamSchedule(global_batch_size=4)
    empty.set_available(0, is_closed=True)
    assert (empty.total_steps, empty.epoch_of(3), empty.global_batch_size_at(2)) == (0, 0, 4)


def test_the_order_of_an_epoch_is_made_once_also_if_the_next_one_is_looked_at_before_it_ends():
    asked = []

    def order(seed, epoch):
        asked.append(epoch)
        return np.arange(8)

    schedule = SampleSchedule(num_samples=8, global_batch_size=4, num_epochs=4, seed=7, order=order)
    for num_seen in (0, 8, 4, 12, 8, 16, 12, 20, 16):
        schedule.batch_at(num_seen // 4, num_seen, 4)
    assert asked == [0, 1, 2]
