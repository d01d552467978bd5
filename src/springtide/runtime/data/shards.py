"""Which samples belong to which step, virtual shard and rank, and the random streams of the shards.

The sample cursor is the number of samples used so far; with a fixed batch size it follows from the step number.
"""

from __future__ import annotations

import hashlib
import random
import sys
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from springtide.core.errors import StorageError
from springtide.core.function_search import BatchPhase, batch_at

# Of how many epochs the order of samples is kept.
_NUM_ORDERS = 2


class SampleOrder(Protocol):
    """An order of its own in which a dataset is read."""

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The ids (int64) of an epoch's samples, the same on every worker."""

    def arranged(self, ids: np.ndarray) -> np.ndarray:
        """The ids of one batch, in the order in which they are read."""


def shards_of_rank(num_shards: int, rank: int, world_size: int) -> range:
    """The contiguous run of virtual shards that `rank` works on; no rank's run is empty."""
    assert 0 <= rank < world_size <= num_shards, (rank, world_size, num_shards)
    return range(rank * num_shards // world_size, (rank + 1) * num_shards // world_size)


def shard_bounds(num_samples: int, shard: int, num_shards: int, global_batch_size: int) -> tuple[int, int]:
    """The (first, end) samples of `shard` in a batch of `num_samples` (at most `global_batch_size`); may be empty.

    A smaller last batch fills fewer shards, not smaller ones, because batch normalisation rejects a shard of one
    sample. The filled shards are spread evenly over the ranks.
    """
    num_filled = min(num_shards, max(1, num_samples // max(1, global_batch_size // num_shards)))
    index = -(-shard * num_filled // num_shards)
    if index >= num_filled or index * num_shards // num_filled != shard:
        return 0, 0
    return index * num_samples // num_filled, (index + 1) * num_samples // num_filled


def rank_bounds(num_samples: int, rank: int, world_size: int, global_batch_size: int) -> tuple[int, int]:
    """The (first, end) samples of the part of `rank` in a batch of `num_samples`; may be empty.

    A smaller last batch is divided between as many ranks as can have two samples, which batch normalisation needs: so a
    rank without a part is rare. Virtual shards are not cut so, because their results are the same bits in all releases.
    """
    return shard_bounds(num_samples, rank, world_size, min(global_batch_size, 2 * world_size))


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """All samples of one optimizer step. An epoch's last batch may have fewer than `global_batch_size`."""

    step: int
    epoch: int
    ids: np.ndarray
    global_batch_size: int = 0
    # Whether no batch of its epoch comes after it.
    is_last: bool = False

    @property
    def ids_digest(self) -> str:
        """A short digest of the sample ids in their order."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()[:16]

    def shard_bounds(self, shard: int, num_shards: int) -> tuple[int, int]:
        """The (first, end) positions of virtual shard `shard` in `ids`; it may be empty."""
        return shard_bounds(len(self.ids), shard, num_shards, self.global_batch_size)

    def rank_bounds(self, rank: int, world_size: int) -> tuple[int, int]:
        """The (first, end) positions of the part of `rank` in `ids`, where each rank has one."""
        return rank_bounds(len(self.ids), rank, world_size, self.global_batch_size)

    def num_filled(self, num_shards: int) -> int:
        return sum(high > low for low, high in (self.shard_bounds(shard, num_shards) for shard in range(num_shards)))


@dataclass(frozen=True, slots=True)
class _Segment:
    """Epochs with one batch size."""

    first_epoch: int
    first_step: int
    global_batch_size: int
    steps_per_epoch: int


class SampleSchedule:
    """Cuts `num_epochs` seeded permutations of a dataset into global batches; the last one of an epoch may be smaller.

    No sample is dropped or used twice in an epoch, whatever the sizes of the batches: each batch begins where the
    previous one ended. `phases` change the batch size with the epoch (SMLT, section 5.3: dynamic batching); the samples
    of a step then still follow from its number alone. A dataset in shards passes its own `order(seed, epoch)`, and
    `arrange`, which reorders a batch so that each worker reads few shards.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        global_batch_size: int,
        num_epochs: int,
        seed: int,
        phases: tuple[BatchPhase, ...] = (),
        order: Callable[[int, int], np.ndarray] | None = None,
        arrange: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        assert num_samples > 0
        assert global_batch_size > 0
        self.num_samples = num_samples
        self.num_epochs = num_epochs
        self._seed = seed
        self._order = order
        self._arrange = arrange
        self._segments = _segments(phases, num_samples, num_epochs, global_batch_size)
        self._first_steps = [segment.first_step for segment in self._segments]
        last = self._segments[-1]
        self.steps_per_epoch = self._segments[0].steps_per_epoch
        self.total_steps = last.first_step + (num_epochs - last.first_epoch) * last.steps_per_epoch
        # Of the last epochs asked for: samples are fetched ahead across the end of one.
        self._orders: dict[int, np.ndarray] = {}

    def batch(self, step: int) -> GlobalBatch:
        """The samples of optimizer step `step` (from 0), if only the phases change the batch size."""
        assert 0 <= step < self.total_steps, (step, self.total_steps)
        return self.batch_at(step, self.num_seen(step), self._segment(step).global_batch_size)

    def num_seen(self, step: int) -> int:
        """The number of samples in the first `step` steps, if only the phases change the batch size."""
        segment = self._segment(step)
        epoch, index = divmod(step - segment.first_step, segment.steps_per_epoch)
        return (segment.first_epoch + epoch) * self.num_samples + min(
            index * segment.global_batch_size, self.num_samples
        )

    def epoch_of(self, step: int) -> int:
        """The epoch of step `step`, at most the last epoch."""
        segment = self._segment(step)
        epoch = segment.first_epoch + (step - segment.first_step) // segment.steps_per_epoch
        return min(epoch, self.num_epochs - 1)

    def global_batch_size_at(self, step: int) -> int:
        """The size of a full batch in the epoch of step `step`."""
        return self._segment(step).global_batch_size

    def samples_needed(self, step: int) -> int | None:
        """None: a dataset is complete, so no step waits for samples."""
        return None

    def set_available(self, num_samples: int, *, is_closed: bool) -> None:
        """Does nothing: a dataset is complete."""

    def _segment(self, step: int) -> _Segment:
        return self._segments[bisect_right(self._first_steps, step) - 1]

    def batch_at(self, step: int, num_seen: int, global_batch_size: int) -> GlobalBatch:
        """The samples of optimizer step `step` (from 0) that come after the first `num_seen`, within one epoch."""
        epoch, start = divmod(num_seen, self.num_samples)
        end = start + global_batch_size
        ids = self._order_of(epoch)[start:end]
        if self._arrange is not None:
            ids = self._arrange(ids)
        is_last = end >= self.num_samples
        return GlobalBatch(step=step, epoch=epoch, ids=ids, global_batch_size=global_batch_size, is_last=is_last)

    def _order_of(self, epoch: int) -> np.ndarray:
        found = self._orders.get(epoch)
        if found is None:
            make = self._order
            found = permutation(self.num_samples, self._seed, epoch) if make is None else make(self._seed, epoch)
            if len(self._orders) >= _NUM_ORDERS:
                del self._orders[min(self._orders)]
            self._orders[epoch] = found
        return found

    def num_steps_left(self, num_seen: int, global_batch_size: int) -> int:
        """How many steps are left after `num_seen` samples with global batches of this size."""
        epoch, start = divmod(num_seen, self.num_samples)
        if epoch >= self.num_epochs:
            return 0
        in_this_epoch = -(-(self.num_samples - start) // global_batch_size)
        return in_this_epoch + (self.num_epochs - epoch - 1) * -(-self.num_samples // global_batch_size)


def _segments(phases: tuple[BatchPhase, ...], num_samples: int, num_epochs: int, default: int) -> tuple[_Segment, ...]:
    """The runs of epochs with one batch size, each with its first step."""
    ordered = tuple(sorted(phases, key=lambda phase: phase.from_epoch))
    borders = sorted({0, num_epochs, *(phase.from_epoch for phase in ordered if 0 < phase.from_epoch < num_epochs)})
    found: list[_Segment] = []
    step = 0
    # A job of zero epochs also has one segment, without steps.
    for first_epoch, end_epoch in pairwise(borders if num_epochs > 0 else [0, 0]):
        size = batch_at(ordered, first_epoch, default)
        found.append(_Segment(first_epoch, step, size, -(-num_samples // size)))
        step += (end_epoch - first_epoch) * found[-1].steps_per_epoch
    return tuple(found)


class StreamSchedule:
    """The batches of a growing dataset: batch k holds the samples [kB, (k+1)B) in order of arrival.

    Each sample is used once. When the stream is closed the number of steps is known, and the remaining samples form a
    last, smaller batch.
    """

    def __init__(self, *, global_batch_size: int) -> None:
        assert global_batch_size > 0
        self._global_batch_size = global_batch_size
        self._num_available = 0
        self._is_closed = False

    @property
    def total_steps(self) -> int | None:
        """How many steps there are; None while the stream is open."""
        return -(-self._num_available // self._global_batch_size) if self._is_closed else None

    def set_available(self, num_samples: int, *, is_closed: bool) -> None:
        """Set how many samples may be used, and whether more will come. Raises StorageError if samples disappeared."""
        if num_samples < self._num_available or (self._is_closed and num_samples > self._num_available):
            raise StorageError(
                f"the stream had {self._num_available} samples{' and was closed' if self._is_closed else ''}, and now "
                f"has {num_samples}; samples only ever come, until it is closed"
            )
        self._num_available = num_samples
        self._is_closed = self._is_closed or is_closed

    def samples_needed(self, step: int) -> int | None:
        """How many samples the stream must have for step `step`."""
        end = (step + 1) * self._global_batch_size
        return min(end, self._num_available) if self._is_closed else end

    def num_seen(self, step: int) -> int:
        """How many samples the first `step` steps use."""
        return min(step * self._global_batch_size, self._num_available)

    def batch(self, step: int) -> GlobalBatch:
        """The samples of step `step` (from 0). Raises StorageError if they have not arrived yet."""
        begin, end = self.num_seen(step), self.samples_needed(step)
        assert end is not None
        if end > self._num_available or begin >= end:
            raise StorageError(f"step {step + 1} needs {end} samples of the stream, which has {self._num_available}")
        return GlobalBatch(step, 0, np.arange(begin, end, dtype=np.int64), self._global_batch_size)

    def epoch_of(self, step: int) -> int:
        """0: a stream is read only once."""
        return 0

    def global_batch_size_at(self, step: int) -> int:
        return self._global_batch_size


def permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits the samples of a dataset."""
    return np.random.Generator(np.random.PCG64([seed & (2**64 - 1), epoch])).permutation(num_samples)


def seeds_of(seed: int, *position: int) -> tuple[int, int, int]:
    """The seeds of torch, numpy and Python for a position such as (step, shard), from the job's seed."""
    words = np.random.SeedSequence([seed & (2**64 - 1), *position]).generate_state(3, np.uint64)
    of_torch, of_numpy, of_python = map(int, words)
    return of_torch, of_numpy, of_python


def seed_everything(seed: int, *position: int) -> None:
    """Seed torch (where it is loaded), numpy and Python from the job's seed and a position such as (step, shard)."""
    of_torch, of_numpy, of_python = seeds_of(seed, *position)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(of_torch)
    np.random.seed(of_numpy & 0xFFFFFFFF)  # noqa: NPY002 - user code draws from numpy's global generator.
    random.seed(of_python)
