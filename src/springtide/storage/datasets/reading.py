"""Reads a dataset's samples by number: only the shards that hold them are fetched, checked and cached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from springtide.core.errors import ObjectMissing, StorageError
from springtide.core.ports import Store
from springtide.storage.datasets.cache import ShardCache
from springtide.storage.datasets.cut import Arrays, read_shard
from springtide.storage.datasets.log import DatasetLog, vanished
from springtide.storage.datasets.manifest import PAGE_SHARDS, DatasetArray, DatasetLost, DatasetManifest, ShardEntry
from springtide.storage.frames import FrameTensor
from springtide.storage.workloads.artifacts import Artifact, ArtifactDamaged

# How many shards of one read are fetched concurrently, and about how many bytes.
NUM_AT_ONCE = 8
BYTES_AT_ONCE = 32 << 20
Ids = npt.NDArray[np.int64]


class ServedSamples:
    """Which samples were returned: one bit per sample, without order and number of times."""

    def __init__(self) -> None:
        self._bits = np.zeros(64, dtype=np.uint8)
        self.num_reads = 0

    def add(self, ids: Ids) -> None:
        if not len(ids):
            return
        needed = (int(ids.max()) >> 3) + 1
        if needed > len(self._bits):
            self._bits = np.concatenate((self._bits, np.zeros(max(needed, len(self._bits)), dtype=np.uint8)))
        np.bitwise_or.at(self._bits, ids >> 3, np.left_shift(1, ids & 7).astype(np.uint8))
        self.num_reads += len(ids)

    def ids(self) -> Ids:
        """The numbers of all samples returned, ascending."""
        return np.flatnonzero(np.unpackbits(self._bits, bitorder="little")).astype(np.int64)

    def forget(self) -> None:
        """Start again, for example with a new epoch."""
        self._bits[:] = 0
        self.num_reads = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """A shard that a read needs: the id of its first sample, and where its samples go in the result."""

    number: int
    entry: ShardEntry
    first_id: int
    places: Ids

    def fill(self, found: Arrays, arrays: Arrays, wanted: Ids) -> None:
        """Copy the wanted samples of the shard into the result."""
        for name, array in arrays.items():
            found[name][self.places] = array[wanted[self.places] - self.first_id]


class DatasetReader:
    """Samples of one dataset, by number from 0. Not thread-safe; call `close` when done.

    A whole dataset never changes; `refresh` finds the samples appended to a growing one. `served` records what was
    read. Raises ObjectMissing if there is no such dataset, StorageError.
    """

    def __init__(self, store: Store, name: str, cache: ShardCache | None = None) -> None:
        self._log = DatasetLog(store, name)
        self._cache = cache or ShardCache()
        self._threads: ThreadPoolExecutor | None = None
        self._lists: dict[int, tuple[tuple[ShardEntry, ...], Ids]] = {}
        self.served = ServedSamples()
        self.num_fetched = 0
        self.manifest = self._log.read()
        self._list_ends = self._ends_of_lists()

    @property
    def num_samples(self) -> int:
        return self.manifest.num_samples

    def refresh(self) -> int:
        """Find appended samples; one small read if there are none. Returns `num_samples`. Raises StorageError."""
        changed = self._log.advanced(self.manifest)
        if changed.version != self.manifest.version:
            self.manifest = changed
            # The tail has grown. Pages never change, so those that were read stay.
            self._lists.pop(len(changed.pages), None)
            self._list_ends = self._ends_of_lists()
        return self.num_samples

    def read(self, ids: Sequence[int] | npt.NDArray[Any]) -> Arrays:
        """Return copies of the samples with these numbers, in this order. Raises StorageError.

        A shard that is not cached is fetched whole, so reading many of its samples costs no more than reading one.
        """
        wanted = np.asarray(ids, dtype=np.int64).reshape(-1)
        if len(wanted) and (int(wanted.min()) < 0 or int(wanted.max()) >= self.num_samples):
            raise StorageError(
                f"the dataset {self.manifest.name!r} has {self.num_samples:,} samples; sample {int(wanted.max()):,} "
                "was asked for"
            )
        found = {array.name: _empty_array(array, len(wanted)) for array in self.manifest.arrays}
        missing: list[_Need] = []
        for need in self._needs(wanted):
            arrays = self._cache.get(need.entry.sha256)
            if arrays is not None:
                need.fill(found, arrays, wanted)
                continue
            missing.append(need)
            # Several small shards are fetched together; several large ones would not fit in memory.
            if len(missing) == NUM_AT_ONCE or sum(each.entry.num_bytes for each in missing) > BYTES_AT_ONCE:
                self._fetch(missing, found, wanted)
                missing = []
        self._fetch(missing, found, wanted)
        self.served.add(wanted)
        return found

    def shard_sizes(self) -> tuple[int, ...]:
        """Number of samples of each shard, in order. Reads the whole list of shards. Raises StorageError."""
        return tuple(entry.num_samples for entry in self._log.shards_of(self.manifest))

    def close(self) -> None:
        """Release memory, disk space and threads."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._cache.close()

    def _ends_of_lists(self) -> Ids:
        """The end of the samples of each page and of the tail (exclusive, as sample numbers)."""
        manifest: DatasetManifest = self.manifest
        tail = sum(shard.num_samples for shard in manifest.tail)
        return _ends([*(page.num_samples for page in manifest.pages), tail])

    def _list(self, index: int) -> tuple[tuple[ShardEntry, ...], Ids]:
        """The shards of a page, or of the tail after the last page, and the end of the samples of each within it."""
        if index not in self._lists:
            is_tail = index == len(self.manifest.pages)
            entries = self.manifest.tail if is_tail else self._log.page(self.manifest, index)
            self._lists[index] = (entries, _ends(entry.num_samples for entry in entries))
        return self._lists[index]

    def _needs(self, wanted: Ids) -> Iterator[_Need]:
        """Yield the shards that hold these samples, in order, with the samples that each holds."""
        lists = np.searchsorted(self._list_ends, wanted, side="right")
        for index in np.unique(lists).tolist():
            entries, ends = self._list(index)
            base = int(self._list_ends[index - 1]) if index else 0
            inside = np.flatnonzero(lists == index)
            shards = np.searchsorted(ends, wanted[inside] - base, side="right")
            for shard in np.unique(shards).tolist():
                yield _Need(
                    number=index * PAGE_SHARDS + shard,
                    entry=entries[shard],
                    first_id=base + (int(ends[shard - 1]) if shard else 0),
                    places=inside[shards == shard],
                )

    def _fetch(self, needs: Sequence[_Need], found: Arrays, wanted: Ids) -> None:
        """Read shards from the store, and copy the wanted samples of each into the result."""
        if len(needs) > 1 and self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="springtide-data")
        read = map if len(needs) <= 1 or self._threads is None else self._threads.map
        for need, data in zip(needs, read(self._bytes_of, needs), strict=True):
            held = partial(read_shard, arrays=self.manifest.arrays, num_samples=need.entry.num_samples)
            need.fill(found, self._cache.add(need.entry.sha256, data, held), wanted)
            self.num_fetched += 1

    def _bytes_of(self, need: _Need) -> bytes:
        entry, name = need.entry, self.manifest.name
        try:
            return self._log.shards.get(Artifact(sha256=entry.sha256, num_bytes=entry.num_bytes))
        except ObjectMissing:
            raise vanished(name, f"shard {need.number + 1} of {self.manifest.num_shards}") from None
        except ArtifactDamaged as error:
            raise DatasetLost(
                f"the dataset {name!r} is damaged ({error}): remove it with `springtide data rm {name}`, put it again "
                "and run the job again"
            ) from None


def _ends(counts: Iterable[int]) -> Ids:
    return np.cumsum(np.fromiter(counts, dtype=np.int64))


def _empty_array(array: DatasetArray, count: int) -> npt.NDArray[Any]:
    # An empty tensor yields the numpy type as which `FrameTensor.array` reads the array.
    dtype = FrameTensor(array.dtype, (0,), b"").array().dtype
    return np.empty((count, *array.shape), dtype=dtype)
