"""The one order in which gradients are added: a binary tree over the virtual shards, however the ranks hold them.

A rank adds its own shards into maximal aligned subtrees; the owner of each chunk of the flat vector adds the subtrees
of all ranks in tree order and hands the sums out. So the result is bit-identical for every number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from springtide.core.errors import CollectiveError


@dataclass(frozen=True, slots=True)
class Block:
    """The aligned run of virtual shards [start, start + size); `size` is a power of two that divides `start`."""

    start: int
    size: int

    def is_left_of(self, other: Block) -> bool:
        """Whether both are the halves of one larger aligned block, this one the left."""
        return self.size == other.size and self.start % (2 * self.size) == 0 and other.start == self.start + self.size


def aligned_blocks(start: int, stop: int) -> list[Block]:
    """Cut [start, stop) into the fewest aligned blocks, in order: what a rank is left with after its own additions."""
    blocks: list[Block] = []
    for shard in range(start, stop):
        block = Block(shard, 1)
        while blocks and blocks[-1].is_left_of(block):
            left = blocks.pop()
            block = Block(left.start, left.size * 2)
        blocks.append(block)
    return blocks


def add_into(left: torch.Tensor, right: torch.Tensor, num_summed: int) -> None:
    """left += right for the first `num_summed` elements; the rest takes the elementwise maximum."""
    left[:num_summed] += right[:num_summed]
    if num_summed < left.numel():
        torch.maximum(left[num_summed:], right[num_summed:], out=left[num_summed:])


def reduce_blocks(blocks: Sequence[Block], vectors: Iterable[torch.Tensor], num_summed: int) -> torch.Tensor:
    """Add the vectors of consecutive blocks that make up the whole tree, in place, in tree order."""
    stack: list[tuple[Block, torch.Tensor]] = []
    for block, vector in zip(blocks, vectors, strict=True):
        whole = (block, vector)
        while stack and stack[-1][0].is_left_of(whole[0]):
            left_block, left = stack.pop()
            add_into(left, whole[1], num_summed)
            whole = (Block(left_block.start, left_block.size * 2), left)
        stack.append(whole)
    assert len(stack) == 1, "the blocks do not make up a whole tree"
    return stack[0][1]


def num_vectors(start: int, stop: int) -> int:
    """How many vectors a rank has in use at most in a step on the virtual shards [start, stop), at least two.

    That is all blocks so far and the next shard's vector, or the blocks and what is received for the reduction.
    """
    return max(len(aligned_blocks(start, shard)) for shard in range(start, stop + 1)) + 1


class BufferPool:
    """Flat vectors that are used again and again, so that no step pays for fresh pages."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_elements, self._dtype, self._device = num_elements, dtype, device
        self._free: list[torch.Tensor] = []
        # How many vectors there are, in use or free.
        self.num_made = 0

    def take(self) -> torch.Tensor:
        """A vector with arbitrary content."""
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def warm(self, num_vectors: int) -> None:
        """See to it that there are so many vectors, in use or free, with all their pages. Safe from any thread."""
        while self.num_made < num_vectors:
            self.give(self._make())

    def take_at_least(self, num_elements: int) -> torch.Tensor:
        """A vector with arbitrary content and at least so many elements; `give` takes back what is the pool's."""
        if num_elements <= self._num_elements:
            return self.take()
        return torch.empty(num_elements, dtype=self._dtype, device=self._device)

    def forget(self, vectors: Iterable[torch.Tensor]) -> None:
        """These vectors will not come back."""
        self.num_made -= sum(vector.numel() == self._num_elements for vector in vectors)

    def _make(self) -> torch.Tensor:
        self.num_made += 1
        return torch.zeros(self._num_elements, dtype=self._dtype, device=self._device)

    def give(self, vector: torch.Tensor) -> None:
        """Hand a vector back; the caller forgets it. Safe from any thread: a list append is atomic."""
        if vector.numel() == self._num_elements:
            self._free.append(vector)


class Accumulator:
    """Adds a rank's shards into aligned blocks as they come, with at most log2(shards) + 1 vectors alive."""

    def __init__(self, pool: BufferPool, num_summed: int) -> None:
        self._pool = pool
        self._num_summed = num_summed
        self.blocks: list[tuple[Block, torch.Tensor]] = []

    def add(self, shard: int, vector: torch.Tensor) -> None:
        """Take over the vector of the next shard of this rank's run."""
        whole = (Block(shard, 1), vector)
        while self.blocks and self.blocks[-1][0].is_left_of(whole[0]):
            left_block, left = self.blocks.pop()
            add_into(left, whole[1], self._num_summed)
            self._pool.give(whole[1])
            whole = (Block(left_block.start, left_block.size * 2), left)
        self.blocks.append(whole)

    def clear(self) -> None:
        for _, vector in self.blocks:
            self._pool.give(vector)
        self.blocks.clear()


class ReductionExchange(Protocol):
    """The two collectives that the reduction needs."""

    rank: int
    world_size: int

    def all_to_all(
        self, output: torch.Tensor, source: torch.Tensor, output_splits: list[int], source_splits: list[int]
    ) -> None:
        """Send split i of `source` to rank i and receive split i of `output` from it."""
        ...

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Concatenate every rank's `source` into `output`."""
        ...


def exchange(
    group: ReductionExchange,
    parts: list[list[Block]],
    own: Sequence[torch.Tensor],
    num_elements: int,
    num_summed: int,
    pool: BufferPool,
) -> torch.Tensor:
    """Reduce the block vectors of all ranks into one vector from the pool, identical on every rank.

    `parts` names the blocks of every rank, `own` holds this rank's vectors from the pool, which are used up. Vectors
    of the pool must be at least `world_size` elements longer than `num_elements`. Where a collective fails, the
    vectors in use are left to it and never used again: it may still be writing.
    """
    world_size, rank = group.world_size, group.rank
    chunk = -(-num_elements // world_size)
    padded = chunk * world_size
    if len(own) == 1:
        source = own[0][:padded]
    else:
        source = torch.stack([vector[:padded].view(world_size, chunk) for vector in own], dim=1).view(-1)
    counts = [len(blocks) for blocks in parts]
    buffer = pool.take_at_least(sum(counts) * chunk)
    received = buffer[: sum(counts) * chunk]
    result, *others = own
    try:
        group.all_to_all(received, source, [count * chunk for count in counts], [len(own) * chunk] * world_size)
        summed_here = min(max(num_summed - rank * chunk, 0), chunk)
        blocks = [block for rank_blocks in parts for block in rank_blocks]
        mine = reduce_blocks(blocks, torch.unbind(received.view(-1, chunk)), summed_here)
        group.all_gather(result[:padded], mine)
    except CollectiveError:
        pool.forget([*own, buffer])
        raise
    for vector in (*others, buffer):
        pool.give(vector)
    return result
