"""What `st.dataset(name)` and `st.stream(name)` become where samples are needed: batches as numpy arrays."""

from __future__ import annotations

import os
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
from springtide.storage.stores.open import open_store

# Shards of so many bytes together are mixed at a time: less than what one function keeps of them on its disk, so that
# each is fetched once in an epoch.
MIXED_BYTES = 256 << 20
Array = npt.NDArray[Any]


class SampleReader:
    """The samples of one dataset by number, the data iterator of one worker (SMLT, section 4.2).

    `fetch` reads only the shards that hold what is asked for and keeps them on this machine's disk, bounded. Not for
    several threads at once. Methods raise StorageError, with one sentence that names the dataset and the mend.
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
        """Whether these are all there will ever be."""
        return self._reader.manifest.is_closed

    @property
    def array_names(self) -> tuple[str, ...]:
        """What `fetch` gives, in its order: x and y first."""
        return tuple(array.name for array in self._reader.manifest.arrays)

    @property
    def digest(self) -> str:
        """The same for the same content."""
        return self._reader.manifest.digest

    @property
    def served(self) -> ServedSamples:
        return self._reader.served

    @property
    def num_fetched(self) -> int:
        return self._reader.num_fetched

    def refresh(self) -> int:
        """See what was appended since; how many samples there are. One small read where nothing is new."""
        return self._reader.refresh()

    def fetch(self, ids: Sequence[int] | Array) -> tuple[Array, ...]:
        """The samples of these numbers, in this order: an array (len(ids), ...) for each of `array_names`.

        They are the caller's own. Of a stream, what was appended meanwhile is seen.
        """
        wanted = np.asarray(ids, dtype=np.int64)
        if self.is_stream and len(wanted) and int(wanted.max()) >= self.num_samples:
            self.refresh()
        found = self._reader.read(wanted)
        return tuple(found[name] for name in self.array_names)

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """The order in which an epoch visits the samples (int64, each once); a stream's is that of arrival."""
        if self.is_stream:
            return np.arange(self.num_samples, dtype=np.int64)
        sizes = self._sizes()
        shard_bytes = max(1, self._reader.manifest.num_bytes // max(1, len(sizes)))
        return shard_order(seed, epoch, sizes, self._num_mixed or max(1, MIXED_BYTES // shard_bytes))

    def arranged(self, ids: Sequence[int] | Array) -> npt.NDArray[np.int64]:
        """The ids of one global batch, those of a shard next to each other; a stream's are so already."""
        if self.is_stream:
            return np.asarray(ids, dtype=np.int64)
        return by_shard(ids, self._sizes())

    def close(self) -> None:
        """Remove what is kept on the disk."""
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
    """Open the dataset that a task names. Raises StorageError, InvalidRequest.

    `store` is the job's object store; without one it is that of the platform of this `state_dir` (SPRINGTIDE_STATE, or
    the usual place), for runs on its machine. Shards are kept in a folder of its own under `cache_dir`.
    """
    opened = open_store(data_store_url(state_dir or _usual_state_dir())) if store is None else store
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


def _usual_state_dir() -> Path:
    given = os.environ.get("SPRINGTIDE_STATE")
    return Path(given).expanduser() if given else Path.home() / ".local" / "state" / "springtide"
