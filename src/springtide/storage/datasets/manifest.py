"""The records of a dataset in a store. Every change is a numbered part, which is never replaced.

    datasets/NAME/manifest           DatasetManifest: the sum of all parts up to its version; rewritten after each part
    dataset-parts/NAME/000000001     DatasetPart: the change of that version; put if absent, so that one writer wins
    dataset-shards/NAME/sha256/D     shards (frames) and full pages of the list of shards, by content (artifacts.py)

The parts are authoritative. A reader starts from the manifest and then reads the following parts until there is none.
So it does no harm if a writer dies before it writes the manifest, or replaces a newer manifest by an older one.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, TypeVar

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest, StorageError

# The paper cuts datasets into parts of up to 250 MB (SMLT, section 5.1); a frame is longer by its header.
MAX_SHARD_BYTES = 250_000_000
MAX_FRAME_BYTES = MAX_SHARD_BYTES + (1 << 20)
PAGE_SHARDS = 512
MAX_PAGES = 4096
MAX_ARRAYS = 64
MAX_DIMENSIONS = 16
MAX_SHARDS_PER_PART = 16_384
MAX_RECORD_BYTES = 4 << 20
# The rate of arrivals is computed from this many appends.
MAX_ARRIVALS = 32
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Text = Annotated[str, msgspec.Meta(max_length=128)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Moment = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
RecordT = TypeVar("RecordT")


class DatasetLost(StorageError):
    """A dataset, or a record or shard of it, is missing or damaged, or the dataset was replaced since it was read.

    A retry does not help; the dataset has to be put again.
    """


class DatasetArray(msgspec.Struct, frozen=True):
    """One named array: its type as in frames (F32, I64, ...) and the shape of one sample."""

    name: Text
    dtype: Text
    shape: tuple[Count, ...]


class ShardEntry(msgspec.Struct, frozen=True, array_like=True):
    """One shard: the digest of its frame, its samples and its bytes."""

    sha256: Digest
    num_samples: Count
    num_bytes: Count


class PageEntry(msgspec.Struct, frozen=True, array_like=True):
    """An object that lists `PAGE_SHARDS` shards: its digest, its bytes, and the total samples of the shards."""

    sha256: Digest
    num_bytes: Count
    num_samples: Count


class AppendedPart(msgspec.Struct, frozen=True, array_like=True):
    """An append: its Unix time by its writer's clock, the samples of the dataset after it, and its part's id."""

    at_unix_s: Moment
    num_samples: Count
    part_id: Text


class DatasetPart(msgspec.Struct, frozen=True, kw_only=True):
    """The change of one version. `part_id` is unique: a writer that got no answer to its put finds its part by it.

    `born` is the part_id of the first part: a dataset that was removed and put again has another one.
    """

    part_id: Text
    born: Text
    at_unix_s: Moment
    arrays: Annotated[tuple[DatasetArray, ...], msgspec.Meta(max_length=MAX_ARRAYS)] = ()
    shards: Annotated[tuple[ShardEntry, ...], msgspec.Meta(max_length=MAX_SHARDS_PER_PART)] = ()
    is_growing: bool = False
    closes: bool = False


class DatasetManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A dataset without its bytes, after `version` parts. Samples are numbered from 0, shard after shard.

    `pages` list the first shards, `tail` the others. A growing dataset gets more until it is closed. `digest` chains
    the arrays and the shards, so that datasets with equal digests have equal content. `arrivals` are the latest
    appends, oldest first.
    """

    name: Text
    born: Text
    version: Count
    arrays: Annotated[tuple[DatasetArray, ...], msgspec.Meta(max_length=MAX_ARRAYS)]
    num_samples: Count
    num_bytes: Count
    num_shards: Count
    pages: Annotated[tuple[PageEntry, ...], msgspec.Meta(max_length=MAX_PAGES)]
    tail: tuple[ShardEntry, ...]
    is_growing: bool
    is_closed: bool
    digest: Text
    arrivals: Annotated[tuple[AppendedPart, ...], msgspec.Meta(max_length=MAX_ARRIVALS)]

    def arrivals_per_s(self, now_unix_s: float | None = None) -> float:
        """Samples a second over the latest appends; up to `now_unix_s`, if given, so that the rate falls over time."""
        if len(self.arrivals) < 2:
            return 0.0
        first, last = self.arrivals[0], self.arrivals[-1]
        elapsed_s = max(last.at_unix_s, now_unix_s or 0.0) - first.at_unix_s
        return (last.num_samples - first.num_samples) / elapsed_s if elapsed_s > 0.0 else 0.0


def arrays_text(arrays: tuple[DatasetArray, ...]) -> str:
    """The arrays for messages: x (F32 [8, 8]), y (I64 [])."""
    return ", ".join(f"{array.name} ({array.dtype} {list(array.shape)})" for array in arrays)


def check_alike(name: str, held: tuple[DatasetArray, ...], arrays: tuple[DatasetArray, ...]) -> None:
    """Raise InvalidRequest unless the appended arrays have the names, types and shapes of the dataset's."""
    if arrays != held:
        raise InvalidRequest(
            f"what is appended to {name!r} must be like what it holds: {arrays_text(held)}, not {arrays_text(arrays)}"
        )


def manifest_key(name: str) -> str:
    return f"datasets/{name}/manifest"


def part_key(name: str, version: int) -> str:
    return f"{parts_prefix(name)}{version:09d}"


def parts_prefix(name: str) -> str:
    """The prefix of the keys of all parts."""
    return f"dataset-parts/{name}/"


def shards_prefix(name: str) -> str:
    """The prefix of a dataset's shards and pages."""
    return f"dataset-shards/{name}"


def first_manifest(name: str, part: DatasetPart) -> DatasetManifest:
    """The manifest of a dataset after its first part."""
    empty = DatasetManifest(
        name=name,
        born=part.born,
        version=0,
        arrays=part.arrays,
        num_samples=0,
        num_bytes=0,
        num_shards=0,
        pages=(),
        tail=(),
        is_growing=part.is_growing,
        is_closed=False,
        digest=_chained(msgspec.json.encode(part.arrays).decode(), ()),
        arrivals=(),
    )
    return after(empty, part)


def after(manifest: DatasetManifest, part: DatasetPart) -> DatasetManifest:
    """The manifest after one more part. Raises DatasetLost if the part belongs to a later dataset of the same name."""
    if part.born != manifest.born:
        raise DatasetLost(
            f"the dataset {manifest.name!r} was removed and put anew while it was read; submit the job again"
        )
    num_samples = manifest.num_samples + sum(shard.num_samples for shard in part.shards)
    arrival = AppendedPart(part.at_unix_s, num_samples, part.part_id)
    return msgspec.structs.replace(
        manifest,
        version=manifest.version + 1,
        num_samples=num_samples,
        num_bytes=manifest.num_bytes + sum(shard.num_bytes for shard in part.shards),
        num_shards=manifest.num_shards + len(part.shards),
        tail=(*manifest.tail, *part.shards),
        # A whole dataset gets no more parts: it is closed from the beginning.
        is_closed=manifest.is_closed or part.closes or not manifest.is_growing,
        digest=_chained(manifest.digest, part.shards),
        arrivals=(*manifest.arrivals, arrival)[-MAX_ARRIVALS:],
    )


def _chained(digest: str, shards: tuple[ShardEntry, ...]) -> str:
    found = hashlib.sha256(digest.encode())
    for shard in shards:
        found.update(f"{shard.sha256} {shard.num_samples}\n".encode())
    return found.hexdigest()


def sealed(manifest: DatasetManifest) -> tuple[DatasetManifest, list[bytes]]:
    """Move the start of a long tail into pages. Returns the manifest and the new pages, the same for every writer.

    Raises StorageError for more shards than a dataset may have.
    """
    pages, tail = list(manifest.pages), list(manifest.tail)
    written: list[bytes] = []
    while len(tail) >= 2 * PAGE_SHARDS:
        page, tail = tail[:PAGE_SHARDS], tail[PAGE_SHARDS:]
        data = msgspec.json.encode(page)
        entry = PageEntry(hashlib.sha256(data).hexdigest(), len(data), sum(shard.num_samples for shard in page))
        pages.append(entry)
        written.append(data)
    if len(pages) > MAX_PAGES:
        raise StorageError(
            f"the dataset {manifest.name!r} has over {MAX_PAGES * PAGE_SHARDS:,} shards: append more samples at a time"
        )
    return msgspec.structs.replace(manifest, pages=tuple(pages), tail=tuple(tail)), written


def decode_manifest(name: str, data: bytes) -> DatasetManifest:
    """Decode a manifest from a store. Raises StorageError for anything that is not a valid one."""
    manifest = _decoded(f"the manifest of the dataset {name!r}", data, DatasetManifest)
    listed = sum(page.num_samples for page in manifest.pages) + sum(shard.num_samples for shard in manifest.tail)
    num_shards = len(manifest.pages) * PAGE_SHARDS + len(manifest.tail)
    if manifest.name != name or listed != manifest.num_samples or num_shards != manifest.num_shards:
        raise _broken(f"the manifest of the dataset {name!r}", "it contradicts itself")
    return manifest


def decode_part(name: str, version: int, data: bytes) -> DatasetPart:
    """Decode a part from a store. Raises StorageError for anything that is not a valid one."""
    return _decoded(f"version {version} of the dataset {name!r}", data, DatasetPart)


def decode_page(name: str, entry: PageEntry, data: bytes) -> tuple[ShardEntry, ...]:
    """Decode the shards of a page. Raises StorageError for anything that is not a valid page."""
    what = f"a list of shards of the dataset {name!r}"
    shards = _decoded(what, data, tuple[ShardEntry, ...])
    if len(shards) != PAGE_SHARDS or sum(shard.num_samples for shard in shards) != entry.num_samples:
        raise _broken(what, "it contradicts the manifest")
    return shards


def _decoded(what: str, data: bytes, kind: type[RecordT]) -> RecordT:
    if len(data) > MAX_RECORD_BYTES:
        raise _broken(what, f"it has {len(data):,} bytes")
    try:
        return decode_json(data, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _broken(what, str(error)) from None


def _broken(what: str, why: str) -> DatasetLost:
    return DatasetLost(f"{what} cannot be read ({why}); remove the dataset and put it again")


class DatasetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A dataset as users see it. `arrivals_per_s` is in samples a second, over the latest appends."""

    name: str
    kind: Literal["whole", "growing", "closed", "unreadable"]
    num_samples: int = 0
    num_bytes: int = 0
    num_shards: int = 0
    version: int = 0
    digest: str = ""
    arrays: tuple[DatasetArray, ...] = ()
    changed_at_unix_s: float = 0.0
    arrivals_per_s: float = 0.0


def status_of(manifest: DatasetManifest, now_unix_s: float | None = None) -> DatasetStatus:
    is_open = manifest.is_growing and not manifest.is_closed
    return DatasetStatus(
        name=manifest.name,
        kind="growing" if is_open else "closed" if manifest.is_growing else "whole",
        num_samples=manifest.num_samples,
        num_bytes=manifest.num_bytes,
        num_shards=manifest.num_shards,
        version=manifest.version,
        digest=manifest.digest,
        arrays=manifest.arrays,
        changed_at_unix_s=manifest.arrivals[-1].at_unix_s if manifest.arrivals else 0.0,
        arrivals_per_s=manifest.arrivals_per_s(now_unix_s if is_open else None),
    )


class DatasetChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client's request after it has uploaded the shards: put them whole, append them, or close the dataset."""

    verb: Literal["put", "append", "close"]
    part_id: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._-]{1,64}$")]
    arrays: Annotated[tuple[DatasetArray, ...], msgspec.Meta(max_length=MAX_ARRAYS)] = ()
    shards: Annotated[tuple[ShardEntry, ...], msgspec.Meta(max_length=MAX_SHARDS_PER_PART)] = ()
