"""What a dataset is made of, as records in a store, and how a change becomes one: numbered parts, never replaced.

    datasets/NAME/manifest           DatasetManifest: all parts up to its version; written anew after each of them
    dataset-parts/NAME/000000001     DatasetPart: what that version brought; put if absent, so that one writer wins
    dataset-shards/NAME/sha256/D     shards (frames) and full pages of the list of shards, by content (artifacts.py)

The parts are the truth. The manifest is where a reader begins; it then asks for the next part until there is none, so
a writer that died before it wrote the manifest, or wrote an old one over a newer one, is never noticed.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, TypeVar

import msgspec

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
# From so many appends the rate of arrivals is told.
MAX_ARRIVALS = 32
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Text = Annotated[str, msgspec.Meta(max_length=128)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Moment = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
RecordT = TypeVar("RecordT")


class DatasetLost(StorageError):
    """A dataset, or a record or shard of it, is not there (any more), is damaged, or not the one that was read before.

    Trying again does not help; putting it again does.
    """


class DatasetArray(msgspec.Struct, frozen=True):
    """One named array: its type as in frames (F32, I64, ...) and the shape of one sample."""

    name: Text
    dtype: Text
    shape: tuple[Count, ...]


class ShardEntry(msgspec.Struct, frozen=True, array_like=True):
    """One shard: the digest of its frame, how many samples it has, and how many bytes."""

    sha256: Digest
    num_samples: Count
    num_bytes: Count


class PageEntry(msgspec.Struct, frozen=True, array_like=True):
    """`PAGE_SHARDS` shards listed in an object of their own: its digest, its bytes, and their samples together."""

    sha256: Digest
    num_bytes: Count
    num_samples: Count


class AppendedPart(msgspec.Struct, frozen=True, array_like=True):
    """When a part came (Unix time, by its writer's clock), how many samples there were then, and which part it was."""

    at_unix_s: Moment
    num_samples: Count
    part_id: Text


class DatasetPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one version brings. `part_id` is its writer's own: a writer whose put had no answer looks for it.

    `born` is the part_id of the first one: a dataset that was removed and put anew has another.
    """

    part_id: Text
    born: Text
    at_unix_s: Moment
    arrays: Annotated[tuple[DatasetArray, ...], msgspec.Meta(max_length=MAX_ARRAYS)] = ()
    shards: Annotated[tuple[ShardEntry, ...], msgspec.Meta(max_length=MAX_SHARDS_PER_PART)] = ()
    is_growing: bool = False
    closes: bool = False


class DatasetManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All of a dataset but its bytes, after `version` parts. Samples are numbered from 0, shard after shard.

    `pages` list the first shards, `tail` those after them. A growing dataset takes more until it is closed. `digest`
    chains the arrays and the shards, so that equal ones hold the same. `arrivals` are the newest, oldest first.
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
        """Samples a second over the newest appends; up to now, where that is given: the rate falls while none come."""
        if len(self.arrivals) < 2:
            return 0.0
        first, last = self.arrivals[0], self.arrivals[-1]
        elapsed_s = max(last.at_unix_s, now_unix_s or 0.0) - first.at_unix_s
        return (last.num_samples - first.num_samples) / elapsed_s if elapsed_s > 0.0 else 0.0


def array_words(arrays: tuple[DatasetArray, ...]) -> str:
    """The arrays as sentences name them: x (F32 [8, 8]), y (I64 [])."""
    return ", ".join(f"{array.name} ({array.dtype} {list(array.shape)})" for array in arrays)


def check_alike(name: str, held: tuple[DatasetArray, ...], arrays: tuple[DatasetArray, ...]) -> None:
    """Raise InvalidRequest unless what is appended is like what the dataset holds."""
    if arrays != held:
        raise InvalidRequest(
            f"what is appended to {name!r} must be like what it holds: {array_words(held)}, not {array_words(arrays)}"
        )


def manifest_key(name: str) -> str:
    return f"datasets/{name}/manifest"


def part_key(name: str, version: int) -> str:
    return f"{parts_prefix(name)}{version:09d}"


def parts_prefix(name: str) -> str:
    """With what the keys of all its parts begin."""
    return f"dataset-parts/{name}/"


def shards_prefix(name: str) -> str:
    """Under what a dataset's shards and pages lie."""
    return f"dataset-shards/{name}"


def first_manifest(name: str, part: DatasetPart) -> DatasetManifest:
    """What a dataset is after its first part."""
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
    """What the dataset is after one more part. Raises DatasetLost for a part of another dataset of the name."""
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
        # A whole dataset is all there is of it: it is closed from the beginning.
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
    """The manifest with a short tail, and the pages that it names anew; every writer makes the same pages.

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
    """Read a manifest that came from a store. Raises StorageError for anything that is not wholly one."""
    manifest = _decoded(f"the manifest of the dataset {name!r}", data, DatasetManifest)
    listed = sum(page.num_samples for page in manifest.pages) + sum(shard.num_samples for shard in manifest.tail)
    num_shards = len(manifest.pages) * PAGE_SHARDS + len(manifest.tail)
    if manifest.name != name or listed != manifest.num_samples or num_shards != manifest.num_shards:
        raise _broken(f"the manifest of the dataset {name!r}", "it contradicts itself")
    return manifest


def decode_part(name: str, version: int, data: bytes) -> DatasetPart:
    """Read a part that came from a store. Raises StorageError for anything that is not wholly one."""
    return _decoded(f"version {version} of the dataset {name!r}", data, DatasetPart)


def decode_page(name: str, entry: PageEntry, data: bytes) -> tuple[ShardEntry, ...]:
    """Read a page's shards. Raises StorageError for anything that is not wholly one."""
    what = f"a list of shards of the dataset {name!r}"
    shards = _decoded(what, data, tuple[ShardEntry, ...])
    if len(shards) != PAGE_SHARDS or sum(shard.num_samples for shard in shards) != entry.num_samples:
        raise _broken(what, "it contradicts the manifest")
    return shards


def _decoded(what: str, data: bytes, kind: type[RecordT]) -> RecordT:
    if len(data) > MAX_RECORD_BYTES:
        raise _broken(what, f"it has {len(data):,} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _broken(what, str(error)) from None


def _broken(what: str, why: str) -> DatasetLost:
    return DatasetLost(f"{what} cannot be read ({why}); remove the dataset and put it again")


class DatasetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What users are told of a dataset. `arrivals_per_s` are samples a second over the newest appends."""

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
    """What a client asks for once the shards are there: put them whole, append them, or close. `part_id` is its own."""

    verb: Literal["put", "append", "close"]
    part_id: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._-]{1,64}$")]
    arrays: Annotated[tuple[DatasetArray, ...], msgspec.Meta(max_length=MAX_ARRAYS)] = ()
    shards: Annotated[tuple[ShardEntry, ...], msgspec.Meta(max_length=MAX_SHARDS_PER_PART)] = ()
