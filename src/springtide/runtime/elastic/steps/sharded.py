"""Steps whose result does not depend on the number of workers: a pass for each virtual shard, added in one order."""

from __future__ import annotations

import torch

from springtide.runtime.data.shards import GlobalBatch, shards_of_rank
from springtide.runtime.elastic.catchup import Lease
from springtide.runtime.elastic.group import Group
from springtide.runtime.elastic.reduce import Accumulator, aligned_blocks, exchange
from springtide.runtime.elastic.step_vector import StepVector
from springtide.runtime.elastic.steps.method import Feed, Flags, Reduced
from springtide.runtime.models.named_tensors import TrainingState


class ShardedSteps:
    """A StepMethod that runs its member's virtual shards one after another."""

    def __init__(self, state: TrainingState, num_shards: int, *, measures_noise: bool) -> None:
        """`num_shards` is a power of two, and at least the number of members."""
        assert num_shards.bit_count() == 1, "the number of virtual shards must be a power of two"
        self._state = state
        self._num_shards = num_shards
        self.payload = StepVector(state, num_shards, measures_noise=measures_noise)
        self._accumulator = Accumulator(self.payload.pool, self.payload.num_summed)
        self._batch: GlobalBatch | None = None
        self._group: Group | None = None
        self._is_measured = False
        self._shards: list[int] = []
        # Whether none of the shards has samples: user code then runs on those of the first one, for nothing.
        self._is_spare = False
        self._has_gradient: list[bool] = []
        self._lease: Lease | None = None

    @property
    def can_discard(self) -> bool:
        return True

    def warm(self, rank: int, world_size: int, feeds_joiners: bool) -> None:
        self.payload.warm(rank, world_size, feeds_joiners)

    def begin(self, batch: GlobalBatch, group: Group | None, *, is_measured: bool) -> None:
        self._batch, self._group, self._is_measured = batch, group, is_measured
        rank, world_size = (0, 1) if group is None else (group.rank, group.world_size)
        self._shards = list(shards_of_rank(self._num_shards, rank, world_size))
        self._is_spare = not any(high > low for low, high in map(self._bounds, self._shards))
        self._accumulator.clear()
        self.payload.begin_step()

    def parts(self, batch: GlobalBatch, group: Group | None) -> list[tuple[int, tuple[int, int]]]:
        rank, world_size = (0, 1) if group is None else (group.rank, group.world_size)
        run = shards_of_rank(self._num_shards, rank, world_size)
        bounds = [(shard, batch.shard_bounds(shard, self._num_shards)) for shard in run]
        filled = [(shard, (low, high)) for shard, (low, high) in bounds if high > low]
        return filled or [(run.start, batch.shard_bounds(0, self._num_shards))]

    def has_part(self) -> bool:
        """Whether a shard with samples is left; shards without samples before it contribute zeros."""
        if self._is_spare:
            return True
        while self._shards:
            low, high = self._bounds(self._shards[0])
            if high > low:
                return True
            self._accumulator.add(self._shards.pop(0), self.payload.zeros())
        return False

    def begin_part(self) -> tuple[int, tuple[int, int]]:
        # Empty shards before the next filled one keep their place in the order of additions.
        self.has_part()
        self.payload.begin_shard()
        return self._shards[0], self._bounds(0 if self._is_spare else self._shards[0])

    def backward(
        self, loss: torch.Tensor, root: torch.Tensor | None = None, place: int = 0, weight: float = 0.0
    ) -> None:
        assert self._batch is not None
        if self._is_spare:
            self._is_spare = False
            self.payload.begin_shard()
            return
        shard = self._shards[0]
        low, high = self._bounds(shard)
        part = (high - low) / len(self._batch.ids)
        torch.autograd.backward((loss if root is None else root) * part)
        vector = self.payload.capture(float(loss.detach()), part, weight, is_measured=self._is_measured)
        self._accumulator.add(shard, vector)
        self._shards.pop(0)

    def exchange(self, step: float, flags: Flags, last_square: float) -> Reduced:
        payload, group = self.payload, self._group
        first = self._accumulator.blocks[0][1]
        if group is None or group.rank == 0:
            payload.set_numbers(first, last_square)
        payload.set_flags(first, ready=flags.ready, needs_sync=flags.needs_sync, preempt=flags.preempt)
        vector = self._reduce()
        self._lease = Lease(vector, payload.pool)
        self._has_gradient = payload.has_gradient(vector)
        payload.apply_buffers(vector)
        payload.attach(vector, self._has_gradient)
        return Reduced(
            loss=payload.loss(vector),
            flags=Flags(*payload.flags(vector), payload.given_weight(vector)),
            has_gradient=self._has_gradient,
            squares=payload.squares(vector) if self._is_measured else None,
            rank0_square=payload.apply_numbers(vector),
        )

    def update(self, factor: float, feed: Feed | None, *, is_skipped: bool = False) -> None:
        lease = self._lease
        assert lease is not None
        if feed is not None:
            self.payload.write_back(lease.vector)
            # Without gradients the optimizers of joiners change nothing.
            feed(lease, [has and not is_skipped for has in self._has_gradient])
        if not is_skipped:
            self._state.update(factor)
        self.payload.detach()
        lease.release()
        self._batch = self._lease = None

    def rewind(self) -> None:
        raise AssertionError("a step in fixed parts has one update")

    def discard(self) -> None:
        self._accumulator.clear()
        self.payload.forget_views()
        # Between two steps the buffers are as the last one left them.
        if self._batch is not None:
            self.payload.begin_shard()
        if self._lease is not None:
            self._lease.release()
        self._batch = self._lease = None

    def _bounds(self, shard: int) -> tuple[int, int]:
        assert self._batch is not None
        return self._batch.shard_bounds(shard, self._num_shards)

    def _reduce(self) -> torch.Tensor:
        group, blocks, payload = self._group, self._accumulator.blocks, self.payload
        own = [vector for _, vector in blocks]
        # The exchange owns the vectors from here on: after a failure it may still be writing to them.
        blocks.clear()
        if group is None or group.world_size == 1:
            (vector,) = own
            return vector
        runs = [shards_of_rank(self._num_shards, rank, group.world_size) for rank in range(group.world_size)]
        parts = [aligned_blocks(run.start, run.stop) for run in runs]
        return exchange(group, parts, own, payload.num_elements, payload.num_summed, payload.pool)
