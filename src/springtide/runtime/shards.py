"""Which samples belong to which step, virtual shard and rank, and the random streams of the shards. Pure functions.

The sample cursor is the number of samples behind it: with one batch size throughout it follows from the step number.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import torch


def shards_of_rank(num_shards: int, rank: int, world_size: int) -> range:
    """The contiguous run of virtual shards that `rank` works on. Every rank gets one where there are enough."""
    assert 0 <= rank < world_size <= num_shards, (rank, world_size, num_shards)
    return range(rank * num_shards // world_size, (rank + 1) * num_shards // world_size)


def shard_bounds(num_samples: int, shard: int, num_shards: int, global_batch_size: int) -> tuple[int, int]:
    """Where `shard` begins and ends in a batch of `num_samples` (at most `global_batch_size`); it may be empty.

    A smaller last batch fills fewer shards rather than smaller ones, because a shard of one sample has no variance
    and batch normalisation refuses it; the filled shards lie evenly among the ranks.
    """
    num_filled = min(num_shards, max(1, num_samples // max(1, global_batch_size // num_shards)))
    index = -(-shard * num_filled // num_shards)
    if index >= num_filled or index * num_shards // num_filled != shard:
        return 0, 0
    return index * num_samples // num_filled, (index + 1) * num_samples // num_filled


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """All samples of one optimizer step. `global_batch_size` is what a full one has; an epoch's last may have fewer."""

    step: int
    epoch: int
    ids: np.ndarray
    global_batch_size: int = 0

    @property
    def ids_digest(self) -> str:
        """A short digest of the sample ids in their order."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()[:16]

    def shard_bounds(self, shard: int, num_shards: int) -> tuple[int, int]:
        """Where virtual shard `shard` begins and ends in `ids`; it may be empty."""
        return shard_bounds(len(self.ids), shard, num_shards, self.global_batch_size)

    def num_filled(self, num_shards: int) -> int:
        """How many of the virtual shards have samples."""
        return sum(high > low for low, high in (self.shard_bounds(shard, num_shards) for shard in range(num_shards)))


class Schedule:
    """Cuts `num_epochs` seeded permutations of a dataset into global batches; the last one of an epoch may be smaller.

    Nothing is dropped and nothing is used twice, whatever the sizes of the batches: each begins where the one before
    it ended. With `global_batch_size` throughout, step k (from 0) is batch `k % steps_per_epoch` of its epoch.
    """

    def __init__(self, *, num_samples: int, global_batch_size: int, num_epochs: int, seed: int) -> None:
        assert num_samples > 0
        assert global_batch_size > 0
        self.num_samples = num_samples
        self.num_epochs = num_epochs
        self._global_batch_size = global_batch_size
        self._seed = seed
        self.steps_per_epoch = -(-num_samples // global_batch_size)
        self.total_steps = self.steps_per_epoch * num_epochs
        self._permuted_epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def batch(self, step: int) -> GlobalBatch:
        """The samples of optimizer step `step`, from 0, where the batch size never changed."""
        assert 0 <= step < self.total_steps, (step, self.total_steps)
        return self.batch_at(step, self.num_seen(step), self._global_batch_size)

    def num_seen(self, step: int) -> int:
        """How many samples lie behind the first `step` steps where the batch size never changed."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return epoch * self.num_samples + min(index * self._global_batch_size, self.num_samples)

    def batch_at(self, step: int, num_seen: int, global_batch_size: int) -> GlobalBatch:
        """The samples of optimizer step `step` (from 0) that come after the first `num_seen`, within one epoch."""
        epoch, start = divmod(num_seen, self.num_samples)
        if epoch != self._permuted_epoch:
            self._permutation = permutation(self.num_samples, self._seed, epoch)
            self._permuted_epoch = epoch
        ids = self._permutation[start : start + global_batch_size]
        return GlobalBatch(step=step, epoch=epoch, ids=ids, global_batch_size=global_batch_size)

    def num_steps_left(self, num_seen: int, global_batch_size: int) -> int:
        """How many steps are left after `num_seen` samples, were they all of this size."""
        epoch, start = divmod(num_seen, self.num_samples)
        if epoch >= self.num_epochs:
            return 0
        in_this_epoch = -(-(self.num_samples - start) // global_batch_size)
        return in_this_epoch + (self.num_epochs - epoch - 1) * -(-self.num_samples // global_batch_size)


def permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits the dataset."""
    return np.random.Generator(np.random.PCG64([seed & (2**64 - 1), epoch])).permutation(num_samples)


def seed_everything(seed: int, *position: int) -> None:
    """Seed torch, numpy and Python from the job's seed and a position such as (step, shard)."""
    torch_seed, numpy_seed, python_seed = np.random.SeedSequence([seed & (2**64 - 1), *position]).generate_state(
        3, np.uint64
    )
    torch.manual_seed(int(torch_seed))
    np.random.seed(int(numpy_seed) & 0xFFFFFFFF)  # noqa: NPY002 - user code draws from numpy's global generator.
    random.seed(int(python_seed))
