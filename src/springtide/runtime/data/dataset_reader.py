"""Reading the datasets behind `st.dataset(name)` and `st.stream(name)` as numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from springtide.core.errors import ObjectMissing, StorageError
from springtide.core.ports import Store
from springtide.storage.datasets.cache import DEFAULT_DISK_BYTES, DEFAULT_MEMORY_BYTES, ShardCache
from springtide.storage.datasets.manifest import DatasetLost
from springtide.storage.datasets.order import by_shard, shard_order
from springtide.storage.datasets.place import data_store_url
from springtide.storage.datasets.reading import DatasetReader, ServedSamples
from springtide.storage.datasets.reference import DatasetReference
from springtide.storage.state_directory import default_state_directory
from springtide.storage.stores.open import open_store

# Samples are shuffled within groups of shards of this total size. It is less than a function's disk cache, so that each
# shard is fetched only once in an epoch.
MIXED_BYTES = 256 << 20
Array = npt.NDArray[Any]


class SampleReader:
    """Reads samples of one dataset by number for one worker (SMLT, section 4.2: the data iterator).

    `fetch` reads only the shards that hold the samples and caches them on the local disk, up to a limit. Not
    thread-safe. Methods raise StorageError with one sentence that names the dataset and what to do.
    """

    def __init__(self, reference: DatasetReference, store: Store, cache: ShardCache, *, owns_store: bool) -> None:
        self.name = reference.name
        self.is_stream = reference.is_stream
        self._num_mixed = reference.num_mixed
        self._store = store
        self._owns_store = owns_store
        self._reader = DatasetReader(store, reference.name, cache)
        self._shard_sizes: tuple[int, ...] | None = None
        if not self.is_stream and not self.is_closed:
            raise StorageError(
                f"the dataset {self.name!r} still grows, so an epoch of it has no end: read it with "
                f"st.stream({self.name!r}), or close it with `springtide data close {self.name}`"
            )

    @property
    def num_samples(self) -> int:
        return self._reader.num_samples

    @property
    def is_closed(self) -> bool:
        """Whether the dataset is complete, so that no samples will be appended."""
        return self._reader.manifest.is_closed

    @property
    def array_names(self) -> tuple[str, ...]:
        """The names of the arrays that `fetch` returns, in its order: x and y first."""
        return tuple(array.name for array in self._reader.manifest.arrays)

    @property
    def digest(self) -> str:
        """A digest of the content: equal for equal datasets."""
        return self._reader.manifest.digest

    @property
    def served(self) -> ServedSamples:
        return self._reader.served

    @property
    def num_fetched(self) -> int:
        return self._reader.num_fetched

    def refresh(self) -> int:
        """Read what was appended since the last look; returns the number of samples. One small read if nothing was."""
        return self._reader.refresh()

    def fetch(self, ids: Sequence[int] | Array) -> tuple[Array, ...]:
        """The samples with these numbers, in this order: an array (len(ids), ...) for each of `array_names`.

        The caller owns the arrays. A stream is refreshed if a number lies beyond its known samples.
        """
        wanted = np.asarray(ids, dtype=np.int64)
        if self.is_stream and len(wanted) and int(wanted.max()) >= self.num_samples:
            self.refresh()
        found = self._reader.read(wanted)
        return tuple(found[name] for name in self.array_names)

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """The order in which an epoch visits all samples (int64); for a stream, the order of arrival."""
        if self.is_stream:
            return np.arange(self.num_samples, dtype=np.int64)
        sizes = self._sizes()
        shard_bytes = max(1, self._reader.manifest.num_bytes // max(1, len(sizes)))
        return shard_order(seed, epoch, sizes, self._num_mixed or max(1, MIXED_BYTES // shard_bytes))

    def arranged(self, ids: Sequence[int] | Array) -> npt.NDArray[np.int64]:
        """The ids of one global batch, reordered so that ids of one shard are adjacent; unchanged for a stream."""
        if self.is_stream:
            return np.asarray(ids, dtype=np.int64)
        return by_shard(ids, self._sizes())

    def close(self) -> None:
        """Remove the cached shards from the disk, and close the store if this reader opened it."""
        self._reader.close()
        if self._owns_store:
            self._store.close()

    def _sizes(self) -> tuple[int, ...]:
        if self._shard_sizes is None:
            self._shard_sizes = self._reader.shard_sizes()
        return self._shard_sizes


def open_dataset(
    reference: DatasetReference,
    store: Store | None = None,
    cache_dir: Path | None = None,
    *,
    state_dir: Path | None = None,
    disk_bytes: int = DEFAULT_DISK_BYTES,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
) -> SampleReader:
    """Open a named dataset or stream. Raises StorageError, InvalidRequest.

    `store` is the job's object store. Without one, the dataset is read from the store of the platform on this machine
    with this `state_dir` (default: SPRINGTIDE_STATE, else the usual one). Shards are cached in a new folder
    below `cache_dir`: at most `disk_bytes` on disk and `memory_bytes` in memory.
    """
    opened = open_store(data_store_url(state_dir or default_state_directory())) if store is None else store
    try:
        cache = ShardCache(cache_dir, disk_bytes, memory_bytes)
        return SampleReader(reference, opened, cache, owns_store=store is None)
    except BaseException as error:
        if store is None:
            opened.close()
        if isinstance(error, ObjectMissing):
            verb = "append" if reference.is_stream else "put"
            raise DatasetLost(
                f"there is no {'stream' if reference.is_stream else 'dataset'} {reference.name!r} in the platform's "
                f"store; make it with `springtide data {verb} {reference.name} FILE.npz`"
            ) from None
        raise
