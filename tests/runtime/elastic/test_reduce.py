"""The reduction tree: the same bits for every split over ranks."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.core.errors import PeerLost
from springtide.runtime.data.shards import shards_of_rank
from springtide.runtime.elastic.reduce import (
    Accumulator,
    Block,
    BufferPool,
    aligned_blocks,
    exchange,
    num_vectors,
    reduce_blocks,
)


@given(st.sampled_from([1, 2, 4, 8, 16, 32]), st.data())
def test_aligned_blocks_cover_the_run_and_cannot_be_merged(num_shards, data):
    stop = data.draw(st.integers(1, num_shards))
    start = data.draw(st.integers(0, stop - 1))
    blocks = aligned_blocks(start, stop)
    assert [shard for block in blocks for shard in range(block.start, block.start + block.size)] == list(
        range(start, stop)
    )
    assert all(block.start % block.size == 0 for block in blocks)
    assert not any(left.is_left_of(right) for left, right in pairwise(blocks))


class Ring:
    """The two collectives among threads."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size)
        self.slots = [None] * world_size

    def member(self, rank):
        return Member(self, rank)


class Member:
    def __init__(self, ring, rank):
        self.ring, self.rank, self.world_size = ring, rank, ring.world_size

    def _everyone(self, value):
        self.ring.barrier.wait()
        self.ring.slots[self.rank] = value
        self.ring.barrier.wait()
        return list(self.ring.slots)

    def all_to_all(self, output, source, output_splits, source_splits):
        columns = self._everyone(source.clone().split(source_splits))
        output.copy_(torch.cat([column[self.rank] for column in columns]))

    def all_gather(self, output, source):
        output.copy_(torch.cat(self._everyone(source.clone())))


def reduce_over(world_size, vectors, num_summed):
    num_shards, num_elements = len(vectors), vectors[0].numel()
    runs = [shards_of_rank(num_shards, rank, world_size) for rank in range(world_size)]
    parts = [aligned_blocks(run.start, run.stop) for run in runs]
    ring, results = Ring(world_size), [None] * world_size

    def work(rank):
        pool = BufferPool(num_elements + num_shards, torch.float32, torch.device("cpu"))
        accumulator = Accumulator(pool, num_summed)
        for shard in runs[rank]:
            vector = pool.take()
            vector[:num_elements] = vectors[shard]
            accumulator.add(shard, vector)
        own = [vector for _, vector in accumulator.blocks]
        result = exchange(ring.member(rank), parts, own, num_elements, num_summed, pool)
        results[rank] = result[:num_elements].clone()

        assert pool.num_made <= num_vectors(runs[rank].start, runs[rank].stop)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.sampled_from([4, 8]), st.integers(1, 40), st.integers(0, 2**31), st.data())
def test_every_world_size_gives_the_same_bits(num_shards, num_elements, seed, data):
    generator = torch.Generator().manual_seed(seed)
    num_summed = data.draw(st.integers(0, num_elements))
    vectors = [
        torch.randn(num_elements, generator=generator) * 10 ** float(torch.randint(-6, 6, (1,), generator=generator))
        for _ in range(num_shards)
    ]
    expected = reduce_blocks(aligned_and_single(num_shards), [vector.clone() for vector in vectors], num_summed)
    for world_size in range(1, 5):
        for result in reduce_over(world_size, vectors, num_summed):
            assert torch.equal(result, expected)


def aligned_and_single(num_shards):
    return [Block(shard, 1) for shard in range(num_shards)]


class Failing:
    """A group whose last collective breaks."""

    rank, world_size = 0, 2

    def all_to_all(self, output, source, output_splits, source_splits):
        output.fill_(1.0)

    def all_gather(self, output, source):
        raise PeerLost("gone")


def test_vectors_of_a_broken_exchange_are_never_used_again():
    pool = BufferPool(6, torch.float32, torch.device("cpu"))
    pool.warm(3)
    own = [pool.take()]
    taken = {own[0].data_ptr()}
    with pytest.raises(PeerLost):
        exchange(Failing(), [[Block(0, 1)], [Block(1, 1)]], own, 4, 4, pool)
    assert pool.num_made == 1
    pool.warm(2)
    assert pool.num_made == 2
    assert taken.isdisjoint({pool.take().data_ptr(), pool.take().data_ptr()})


def test_the_tail_takes_the_maximum():
    result = reduce_blocks(aligned_and_single(2), [torch.tensor([1.0, 5.0]), torch.tensor([2.0, 3.0])], 1)
    assert result.tolist() == [3.0, 5.0]


def test_the_tree_is_not_a_plain_sum_from_left_to_right():
    vectors = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]
    tree = reduce_blocks(aligned_and_single(4), [vector.clone() for vector in vectors], 1)
    plain = ((vectors[0] + vectors[1]) + vectors[2]) + vectors[3]
    assert not torch.equal(tree, plain)
