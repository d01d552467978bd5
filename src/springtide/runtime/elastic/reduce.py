"""Gradients are always added in the same order: along a binary tree over the virtual shards, whichever rank holds them.

Each rank adds its own shards into maximal aligned subtrees. Each rank then owns one chunk of the flat vector, adds the
subtrees of all ranks for it in tree order, and sends the sum to all. So the result is bit-identical for every number of
workers.
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
    """Cut [start, stop) into the fewest aligned blocks, in order: what remains after a rank added its own shards."""
    blocks: list[Block] = []
    for shard in range(start, stop):
        block = Block(shard, 1)
        while blocks and blocks[-1].is_left_of(block):
            left = blocks.pop()
            block = Block(left.start, left.size * 2)
        blocks.append(block)
    return blocks


def add_into(left: torch.Tensor, right: torch.Tensor, num_summed: int) -> None:
    """Add `right` into `left` in the first `num_summed` elements; take the elementwise maximum in the rest."""
    left[:num_summed] += right[:num_summed]
    if num_summed < left.numel():
        torch.maximum(left[num_summed:], right[num_summed:], out=left[num_summed:])


def reduce_blocks(blocks: Sequence[Block], vectors: Iterable[torch.Tensor], num_summed: int) -> torch.Tensor:
    """Combine, in place and in tree order, the vectors of consecutive blocks that cover the whole tree."""
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
    """The most vectors that a rank uses at once in a step on the virtual shards [start, stop); at least two.

    These are the blocks so far and the next shard's vector, or the blocks and the buffer that the exchange receives
    into.
    """
    return max(len(aligned_blocks(start, shard)) for shard in range(start, stop + 1)) + 1


class BufferPool:
    """A pool of reused flat vectors: fresh memory would cost page faults in every step."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_elements, self._dtype, self._device = num_elements, dtype, device
        self._free: list[torch.Tensor] = []
        # Vectors made and not forgotten, in use or free.
        self.num_made = 0

    def take(self) -> torch.Tensor:
        """A vector with arbitrary content."""
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def warm(self, num_vectors: int) -> None:
        """Allocate until `num_vectors` exist, in use or free, with all pages touched. Safe from any thread."""
        while self.num_made < num_vectors:
            self.give(self._make())

    def take_at_least(self, num_elements: int) -> torch.Tensor:
        """A vector with arbitrary content and at least `num_elements`; one larger than the pool's is not pooled."""
        if num_elements <= self._num_elements:
            return self.take()
        return torch.empty(num_elements, dtype=self._dtype, device=self._device)

    def forget(self, vectors: Iterable[torch.Tensor]) -> None:
        """Stop counting these vectors: they will not be given back."""
        self.num_made -= sum(vector.numel() == self._num_elements for vector in vectors)

    def _make(self) -> torch.Tensor:
        self.num_made += 1
        return torch.zeros(self._num_elements, dtype=self._dtype, device=self._device)

    def give(self, vector: torch.Tensor) -> None:
        """Return a vector, which the caller must not use again. Safe from any thread: a list append is atomic."""
        if vector.numel() == self._num_elements:
            self._free.append(vector)


class Accumulator:
    """Adds a rank's shards into aligned blocks as they come, with at most log2(shards) + 1 vectors alive."""

    def __init__(self, pool: BufferPool, num_summed: int) -> None:
        self._pool = pool
        self._num_summed = num_summed
        self.blocks: list[tuple[Block, torch.Tensor]] = []

    def add(self, shard: int, vector: torch.Tensor) -> None:
        """Add the next shard of this rank's run; its vector then belongs to the accumulator."""
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

    `parts` holds the blocks of every rank, `own` this rank's vectors from the pool, which are consumed. Vectors of the
    pool must be at least `world_size` elements longer than `num_elements`. Raises CollectiveError; the vectors in use
    then never return to the pool, because the collective may still be writing to them.
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
