"""What the tests of datasets share: samples that say their own number, and stores that fail on purpose."""

from __future__ import annotations

import numpy as np

from springtide.core.errors import StorageError
from springtide.storage.datasets.store import append_dataset, put_dataset
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.memory import MemoryStore

SAMPLE_BYTES = 3 * 4 + 8


def numbered(first, end):
    """Samples from `first` to `end`: x holds the number three times, y once."""
    ids = np.arange(first, end)
    return {"x": np.repeat(ids[:, None], 3, axis=1).astype("float32"), "y": ids.astype("int64")}


def put(store, name="digits", num_samples=100, per_shard=10, **options):
    named = {"at_unix_s": 1000.0, "part_id": "put-1", "shard_bytes": per_shard * SAMPLE_BYTES, **options}
    return put_dataset(store, name, numbered(0, num_samples), **named)


def append(store, first, end, name="clicks", **options):
    named = {"at_unix_s": 1000.0 + first, "part_id": f"append-{first}", **options}
    return append_dataset(store, name, numbered(first, end), **named)


class DyingMemory(MemoryStore):
    """A raw store that dies with the n-th write or removal, before it (or, where `is_answer_lost`, just after it)."""

    def __init__(self, name, *, dies_at, is_answer_lost=False):
        super().__init__(name)
        self.left = dies_at
        self.is_answer_lost = is_answer_lost

    def _spend(self):
        self.left -= 1
        return self.left < 0

    def write(self, key, data, *, only_if_absent):
        is_dead = self._spend()
        if is_dead and not (self.is_answer_lost and self.left == -1):
            raise StorageError("dead")
        written = super().write(key, data, only_if_absent=only_if_absent)
        if is_dead:
            raise StorageError("the answer was lost")
        return written

    def remove(self, keys):
        if self._spend():
            raise StorageError("dead")
        super().remove(keys)


def dying_store(name, **named):
    return CheckedStore(DyingMemory(name, **named))
