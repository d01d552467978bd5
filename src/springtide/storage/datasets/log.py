"""A dataset's records in its store: reading, following a growing dataset, committing changes of concurrent writers."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from springtide.core.errors import ObjectMissing, StorageError
from springtide.core.function_search import StreamView
from springtide.core.ports import Store
from springtide.core.quantities import validate_name
from springtide.storage.datasets.manifest import (
    MAX_FRAME_BYTES,
    MAX_RECORD_BYTES,
    PAGE_SHARDS,
    DatasetLost,
    DatasetManifest,
    DatasetPart,
    ShardEntry,
    after,
    decode_manifest,
    decode_page,
    decode_part,
    first_manifest,
    manifest_key,
    part_key,
    parts_prefix,
    sealed,
    shards_prefix,
)
from springtide.storage.key_names import checked_key
from springtide.storage.workloads.artifacts import Artifacts

# A writer that loses this many races in a row has met a defect, since each lost race is a commit of another writer.
MAX_RACES = 1000
# After this many looks a watch checks that the stream still exists.
LOOKS_PER_CHECK = 16


class DatasetLog:
    """The records of one dataset. Stateless; any number of readers and writers may run concurrently.

    Raises InvalidRequest for an invalid name, StorageError.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.name = validate_name(name, "the dataset's name")
        checked_key(manifest_key(name))
        self._store = store
        self.shards = Artifacts(store, shards_prefix(name), MAX_FRAME_BYTES)

    def read(self) -> DatasetManifest:
        """The present dataset: two small reads, more if a writer was killed. Raises ObjectMissing, StorageError."""
        found = self.find()
        if found is None:
            raise ObjectMissing(
                f"there is no dataset {self.name!r}; put one with `springtide data put {self.name} FILE.npz`"
            )
        return found

    def find(self) -> DatasetManifest | None:
        """The present dataset, or None if it does not exist. Raises StorageError."""
        try:
            manifest = decode_manifest(self.name, self._store.get(manifest_key(self.name)))
        except ObjectMissing:
            part = self._part(1)
            if part is None:
                return None
            manifest = first_manifest(self.name, part)
        return self.advanced(manifest)

    def is_still(self, manifest: DatasetManifest) -> bool:
        """Whether this dataset was neither removed nor replaced: one small read. Raises StorageError."""
        try:
            standing = decode_manifest(self.name, self._store.get(manifest_key(self.name)))
        except ObjectMissing:
            return False
        return standing.born == manifest.born

    def advanced(self, manifest: DatasetManifest) -> DatasetManifest:
        """The manifest after all later changes: one small read, and one more for each change."""
        while not (manifest.is_closed and manifest.version > 0):
            part = self._part(manifest.version + 1)
            if part is None:
                return manifest
            manifest = after(manifest, part)
        return manifest

    def shards_of(self, manifest: DatasetManifest) -> tuple[ShardEntry, ...]:
        """All shards in order; one read per page. Raises StorageError."""
        listed = [entry for index in range(len(manifest.pages)) for entry in self.page(manifest, index)]
        return (*listed, *manifest.tail)

    def page(self, manifest: DatasetManifest, index: int) -> tuple[ShardEntry, ...]:
        """The shards of one page. Raises StorageError."""
        entry = manifest.pages[index]
        try:
            data = self._store.get(self.shards.key(entry.sha256))
        except ObjectMissing:
            raise vanished(self.name, f"its list of shards from {index * PAGE_SHARDS} on") from None
        return decode_page(self.name, entry, data)

    def commit(
        self,
        make: Callable[[DatasetManifest | None], DatasetPart | None],
        standing: DatasetManifest | None = None,
    ) -> DatasetManifest:
        """Add the part that `make` returns for the present dataset. Returns the dataset with it.

        `standing`, a recent state of the dataset, saves a read. `make` is called again if another writer was first; it
        may return None (nothing to change) or raise. Raises StorageError.
        """
        manifest = self.find() if standing is None else standing
        for _ in range(MAX_RACES):
            part = make(manifest)
            if part is None:
                assert manifest is not None
                return manifest
            if self._claim(1 if manifest is None else manifest.version + 1, part):
                changed = first_manifest(self.name, part) if manifest is None else after(manifest, part)
                return self._publish(changed)
            manifest = self.find() if manifest is None else self.advanced(manifest)
        raise StorageError(f"the dataset {self.name!r} has too many writers at once; append less often, more at a time")

    def remove(self) -> int:
        """Delete all objects of the dataset. Returns how many there were. Raises StorageError."""
        # The manifest first and the shards last, so that after an interruption the next removal finds the rest.
        manifest = [key for key in self._store.keys(manifest_key(self.name)) if key == manifest_key(self.name)]
        parts = self._store.keys(parts_prefix(self.name))
        shards = self._store.keys(f"{shards_prefix(self.name)}/")
        for keys in (manifest, parts, shards):
            self._store.delete(keys)
        return len(manifest) + len(parts) + len(shards)

    def _part(self, version: int) -> DatasetPart | None:
        try:
            return decode_part(self.name, version, self._store.get(part_key(self.name, version)))
        except ObjectMissing:
            return None

    def _claim(self, version: int, part: DatasetPart) -> bool:
        """Try to store the part as this version. Returns whether it won."""
        data = msgspec.json.encode(part)
        if len(data) > MAX_RECORD_BYTES:
            raise StorageError(f"one change of {len(part.shards):,} shards is too large: use larger shards")
        try:
            return self._store.put_if_absent(part_key(self.name, version), data)
        except StorageError:
            # The answer may have been lost: the stored part shows which writer won.
            standing = self._part(version)
            if standing is None:
                raise
            return standing.part_id == part.part_id

    def _publish(self, manifest: DatasetManifest) -> DatasetManifest:
        """Write the manifest, repeatedly until no other writer has changed the dataset meanwhile.

        Moves the start of a long list of shards into pages.
        """
        published = manifest
        while True:
            published, pages = sealed(published)
            for page in pages:
                self.shards.put(page)
            self._store.put(manifest_key(self.name), msgspec.json.encode(published))
            newer = self.advanced(published)
            if newer.version == published.version:
                return published
            published = newer


def vanished(name: str, what: str) -> DatasetLost:
    """The error for a dataset whose records name an object that does not exist."""
    return DatasetLost(
        f"the dataset {name!r} has vanished ({what} is gone from the store); put it again with "
        f"`springtide data put {name} FILE` and run the job again"
    )


def view_of(manifest: DatasetManifest, now_unix_s: float | None = None) -> StreamView:
    return StreamView(
        name=manifest.name,
        num_samples=manifest.num_samples,
        arrivals_per_s=manifest.arrivals_per_s(None if manifest.is_closed else now_unix_s),
        is_closed=manifest.is_closed,
    )


class StreamWatch:
    """Follows one stream: a look costs one small read if nothing is new. Not thread-safe."""

    def __init__(self, store: Store, name: str) -> None:
        self._log = DatasetLog(store, name)
        self._manifest: DatasetManifest | None = None
        self._num_looks = 0

    def look(self, now_unix_s: float | None = None) -> StreamView:
        """The present state of the stream. Raises ObjectMissing if it never existed, DatasetLost if it has vanished."""
        if self._manifest is None:
            self._manifest = self._log.read()
            return view_of(self._manifest, now_unix_s)
        self._num_looks += 1
        if self._num_looks % LOOKS_PER_CHECK == 0 and not self._log.is_still(self._manifest):
            name = self._log.name
            raise DatasetLost(
                f"the stream {name!r} has vanished from the store: nothing more can come of it; append to it anew "
                f"with `springtide data append {name} FILE` and submit the job again"
            )
        self._manifest = self._log.advanced(self._manifest)
        return view_of(self._manifest, now_unix_s)
