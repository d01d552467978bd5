"""Datasets in a store: put whole, or growing by appends until closed. Shards are written before the record of them.

This is the storage of SMLT's data iterator (section 4.2): named arrays, cut into shards, that workers read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from springtide.core.errors import Conflict, InvalidRequest, NotFound
from springtide.core.ports import Store
from springtide.storage.datasets.cut import DEFAULT_SHARD_BYTES, checked_arrays, cut, described
from springtide.storage.datasets.log import DatasetLog
from springtide.storage.datasets.manifest import (
    DatasetArray,
    DatasetLost,
    DatasetManifest,
    DatasetPart,
    DatasetStatus,
    ShardEntry,
    check_alike,
    first_manifest,
    status_of,
)

_LISTED = "datasets/"


def put_dataset(
    store: Store,
    name: str,
    arrays: Mapping[str, Any],
    *,
    at_unix_s: float,
    part_id: str,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> DatasetManifest:
    """Store named arrays (equal first dimension) as a whole dataset. The same content again changes nothing.

    Raises InvalidRequest for invalid arrays or an invalid name, Conflict if a different dataset has the name,
    StorageError.
    """
    log, checked = DatasetLog(store, name), checked_arrays(arrays)
    # If the name is taken, nothing is uploaded: the digests show whether the content is the same.
    writes = log.find() is None
    shards = [_stored(log, frame, count, writes=writes, looks=True) for frame, count in cut(checked, shard_bytes)]
    spec = described(checked)
    return log.commit(lambda manifest: whole_part(name, manifest, spec, shards, at_unix_s, part_id))


def append_dataset(
    store: Store,
    name: str,
    arrays: Mapping[str, Any],
    *,
    at_unix_s: float,
    part_id: str,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> DatasetManifest:
    """Add samples to a growing dataset, which the first append creates. They become visible atomically.

    `part_id` identifies this append: repeating it with the same id adds nothing. Raises like `put_dataset`.
    """
    log, checked = DatasetLog(store, name), checked_arrays(arrays)
    spec = described(checked)
    standing = log.find()
    if standing is not None:
        # Raises early, before anything is uploaded. The commit checks again.
        appended_part(standing.name, standing, spec, (), at_unix_s, part_id)
    shards = [_stored(log, frame, count, writes=True, looks=False) for frame, count in cut(checked, shard_bytes)]
    return log.commit(lambda manifest: appended_part(name, manifest, spec, shards, at_unix_s, part_id))


def close_dataset(store: Store, name: str, *, at_unix_s: float, part_id: str) -> DatasetManifest:
    """Close a growing dataset: it gets no more samples. Raises NotFound, Conflict, StorageError."""
    return DatasetLog(store, name).commit(lambda manifest: closing_part(name, manifest, at_unix_s, part_id))


def list_datasets(store: Store, now_unix_s: float | None = None) -> list[DatasetStatus]:
    """All datasets, sorted by name: a listing and two small reads for each. Raises StorageError."""
    found = []
    for name in (key.removeprefix(_LISTED).partition("/")[0] for key in store.keys(_LISTED)):
        try:
            manifest = DatasetLog(store, name).find()
        except (DatasetLost, InvalidRequest):
            # An unreadable dataset must not hide the others. Reading it by its name raises the error.
            found.append(DatasetStatus(name=name, kind="unreadable"))
            continue
        if manifest is not None:
            found.append(status_of(manifest, now_unix_s))
    return found


def remove_dataset(store: Store, name: str) -> None:
    """Delete a dataset and its shards; jobs that read it fail with a clear error. Raises NotFound, StorageError."""
    if DatasetLog(store, name).remove() == 0:
        raise _unknown(name)


def whole_part(
    name: str,
    manifest: DatasetManifest | None,
    arrays: tuple[DatasetArray, ...],
    shards: Sequence[ShardEntry],
    at_unix_s: float,
    part_id: str,
) -> DatasetPart | None:
    """The part that makes a whole dataset; None if it exists already with this content. Raises Conflict."""
    part = DatasetPart(part_id=part_id, born=part_id, at_unix_s=at_unix_s, arrays=arrays, shards=tuple(shards))
    if manifest is None:
        return part
    if not manifest.is_growing and first_manifest(name, part).digest == manifest.digest:
        return None
    what = "growing" if manifest.is_growing else "with other content or shards of another size"
    raise Conflict(
        f"there is a dataset {name!r} already ({manifest.num_samples:,} samples), {what}; remove it with "
        f"`springtide data rm {name}`, or choose another name"
    )


def appended_part(
    name: str,
    manifest: DatasetManifest | None,
    arrays: tuple[DatasetArray, ...],
    shards: Sequence[ShardEntry],
    at_unix_s: float,
    part_id: str,
) -> DatasetPart | None:
    """The part that adds samples; None if this append was committed before. Raises Conflict, InvalidRequest."""
    born = part_id if manifest is None else manifest.born
    part = DatasetPart(
        part_id=part_id, born=born, at_unix_s=at_unix_s, arrays=arrays, shards=tuple(shards), is_growing=True
    )
    if manifest is None:
        return part
    if any(arrival.part_id == part_id for arrival in manifest.arrivals):
        return None
    if not manifest.is_growing:
        raise Conflict(
            f"the dataset {name!r} was put whole ({manifest.num_samples:,} samples) and does not grow; append to "
            f"another name, or remove it with `springtide data rm {name}`"
        )
    if manifest.is_closed:
        raise Conflict(
            f"the dataset {name!r} is closed at {manifest.num_samples:,} samples; append to another name, or remove "
            f"it with `springtide data rm {name}`"
        )
    check_alike(name, manifest.arrays, arrays)
    return part


def closing_part(name: str, manifest: DatasetManifest | None, at_unix_s: float, part_id: str) -> DatasetPart | None:
    """The part that closes a growing dataset; None if it is closed already. Raises NotFound, Conflict."""
    if manifest is None:
        raise _unknown(name)
    if not manifest.is_growing:
        raise Conflict(f"the dataset {name!r} was put whole: it does not grow, so there is nothing to close")
    if manifest.is_closed:
        return None
    return DatasetPart(part_id=part_id, born=manifest.born, at_unix_s=at_unix_s, is_growing=True, closes=True)


def _stored(log: DatasetLog, frame: bytes, num_samples: int, *, writes: bool, looks: bool) -> ShardEntry:
    artifact = log.shards.artifact_of(frame)
    if writes and not (looks and log.shards.find(artifact.sha256) == artifact):
        log.shards.put_unseen(artifact, frame)
    return ShardEntry(artifact.sha256, num_samples, artifact.num_bytes)


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no dataset {name!r}; `springtide data ls` lists what there is")
