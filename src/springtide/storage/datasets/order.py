"""The order in which an epoch visits sharded samples, and the order within a batch: pure functions of a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


def shard_order(seed: int, epoch: int, shard_sizes: Sequence[int], num_mixed: int = 1) -> Ids:
    """Every sample id (from 0, by shard) once: shards shuffled, then the samples of `num_mixed` shards at a time.

    If `num_mixed` is at least the number of shards, it is the permutation of an unsharded dataset; with 1 a shard is
    finished before the next one begins (like the data iterator of SMLT, section 4.2, which fetches a subset at a time).
    Workers together have to hold `num_mixed` shards at a time. Deterministic.
    """
    assert num_mixed >= 1
    sizes = np.asarray(shard_sizes, dtype=np.int64)
    draws = np.random.Generator(np.random.PCG64([seed & (2**64 - 1), epoch]))
    if len(sizes) <= num_mixed:
        return draws.permutation(int(sizes.sum())).astype(np.int64, copy=False)
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    shards = draws.permutation(len(sizes))
    mixed: list[Ids] = []
    for first in range(0, len(shards), num_mixed):
        group = [np.arange(starts[shard], starts[shard] + sizes[shard]) for shard in shards[first : first + num_mixed]]
        mixed.append(draws.permutation(np.concatenate(group)))
    return np.concatenate(mixed)


def by_shard(ids: npt.NDArray[Any] | Sequence[int], shard_sizes: Sequence[int]) -> Ids:
    """The ids of one batch, grouped by shard and otherwise in the order given.

    Replicas take contiguous parts of a batch. With grouped ids, replica r of n reads about the same n-th part of the
    open shards in every batch, instead of all of them.
    """
    given = np.asarray(ids, dtype=np.int64)
    ends = np.cumsum(np.asarray(shard_sizes, dtype=np.int64))
    return given[np.argsort(np.searchsorted(ends, given, side="right"), kind="stable")]
