"""How many virtual shards a job's batches are cut into: fixed at submission, the same wherever it is worked out."""

from __future__ import annotations

from springtide.core.workload import AdaptiveBatch

LEAST_SHARDS = 4


def shards_for(max_workers: int, batch: AdaptiveBatch | None = None, *, least: int = LEAST_SHARDS) -> int:
    """Return the smallest power of two that is at least `least` and `max_workers`, and cuts the largest batch small.

    A shard is one forward and backward pass, so with a `max_local_size` the largest batch needs so many of them.
    """
    needed = max(least, max_workers)
    if batch is not None and batch.max_local_size is not None:
        needed = max(needed, -(-batch.max_size // batch.max_local_size))
    return 1 << (needed - 1).bit_length()
