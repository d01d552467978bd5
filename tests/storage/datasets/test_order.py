"""An epoch visits every sample once, by shards, and the same arguments always give the same order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.storage.datasets.order import by_shard, shard_order

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def shards_of(ids, sizes):
    return np.searchsorted(np.cumsum(sizes), ids, side="right")


@settings(max_examples=50)
@given(SIZES, st.integers(1, 15), st.integers(-(2**40), 2**70), st.integers(0, 100))
def test_every_sample_once_and_no_more_shards_at_a_time_than_asked(sizes, num_mixed, seed, epoch):
    order = shard_order(seed, epoch, sizes, num_mixed)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(sum(sizes)))
    assert np.array_equal(order, shard_order(seed, epoch, sizes, num_mixed))
    found, seen = shards_of(order, sizes), set()
    remaining = dict.fromkeys(range(len(sizes)), 0)
    for shard in found.tolist():
        remaining[shard] += 1
        seen.add(shard)
        open_now = {shard for shard in seen if remaining[shard] < sizes[shard]}
        assert len(open_now) <= num_mixed


def test_with_all_shards_mixed_it_is_the_order_of_an_unsharded_dataset():
    draws = np.random.Generator(np.random.PCG64([7, 3]))
    assert np.array_equal(shard_order(7, 3, [4, 9, 2], 3), draws.permutation(15))
    assert np.array_equal(shard_order(7, 3, [15], 1), shard_order(7, 3, [4, 9, 2], 8))


def test_epochs_and_seeds_differ_and_shards_are_shuffled():
    sizes = [5] * 20
    orders = [shard_order(seed, epoch, sizes) for seed in (1, 2) for epoch in (0, 1)]
    assert len({order.tobytes() for order in orders}) == 4
    firsts = shards_of(orders[0][::5], sizes)
    assert sorted(firsts.tolist()) == list(range(20))
    assert firsts.tolist() != list(range(20))


@settings(max_examples=50)
@given(SIZES, st.randoms(use_true_random=False))
def test_a_batch_by_shard_is_the_same_set_in_the_same_order_within_shards(sizes, chance):
    ids = [chance.randrange(sum(sizes)) for _ in range(20)]
    arranged = by_shard(ids, sizes)
    assert sorted(arranged.tolist()) == sorted(ids)
    shards = shards_of(arranged, sizes)
    assert np.all(np.diff(shards) >= 0)
    for shard in set(shards.tolist()):
        assert arranged[shards == shard].tolist() == [each for each in ids if shards_of(each, sizes) == shard]


def test_replicas_come_back_to_the_same_shards_where_batches_are_arranged():
    sizes, num_replicas, batch = [50] * 40, 4, 200
    order = shard_order(0, 0, sizes, 40)

    def shards_read(arrange):
        read = [set() for _ in range(num_replicas)]
        for first in range(0, len(order), batch):
            ids = arrange(order[first : first + batch])
            for replica, part in enumerate(np.array_split(ids, num_replicas)):
                read[replica] |= set(shards_of(part, sizes).tolist())
        return [len(each) for each in read]

    assert shards_read(lambda ids: ids) == [40] * 4
    assert max(shards_read(lambda ids: by_shard(ids, sizes))) <= 20


def test_it_needs_at_least_one_shard_at_a_time():
    with pytest.raises(AssertionError):
        shard_order(0, 0, [3], 0)
