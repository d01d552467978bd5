"""Artifacts: bytes in a store under their own digest, put once and checked whenever they are read.

The object store's part of SMLT's end client (sections 4.1 and 4.3): code bundles and shards of data.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from springtide.core.errors import ObjectMissing, StorageError
from springtide.core.ports import Store
from springtide.storage.bundles import DEFAULT_LIMITS, BundleLimits, pack, unpack

# One object holds all of an artifact; larger things are cut into several.
MAX_ARTIFACT_BYTES = 1 << 30
MAX_MARK_BYTES = 4096
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """What names an artifact: the SHA-256 of its bytes, in hexadecimal, and how many there are."""

    sha256: str
    num_bytes: int


def checked_digest(sha256: str) -> str:
    """The digest as it is. Raises StorageError for what cannot be one."""
    if _DIGEST.fullmatch(sha256) is None:
        raise StorageError(f"{sha256[:80]!r} is no digest of an artifact: it needs 64 hexadecimal digits")
    return sha256


class ArtifactDamaged(StorageError):
    """The bytes stored under an artifact's digest do not match it."""


class Artifacts:
    """The artifacts under a prefix of a store, as `PREFIX/sha256/DIGEST`; beside each lies a small mark.

    The mark is written after the bytes and makes them count, so that asking for one costs a small read. Nothing here
    changes an artifact, so any number of writers may put the same one.
    """

    def __init__(self, store: Store, prefix: str = "artifacts", max_bytes: int = MAX_ARTIFACT_BYTES) -> None:
        self._store = store
        self._prefix = prefix.rstrip("/")
        self._max_bytes = max_bytes

    def key(self, sha256: str) -> str:
        """Where the bytes of that digest lie. Raises StorageError for what is no digest."""
        return f"{self._prefix}/sha256/{checked_digest(sha256)}"

    def find(self, sha256: str) -> Artifact | None:
        """The artifact if it was put; one small read. Raises StorageError."""
        try:
            data = self._store.get(f"{self.key(sha256)}.mark")
        except ObjectMissing:
            return None
        try:
            if len(data) > MAX_MARK_BYTES:
                raise ValueError(f"it has {len(data)} bytes")
            found = msgspec.json.decode(data, type=Artifact)
        except (msgspec.MsgspecError, ValueError):
            # An unreadable mark counts as none: the bytes are put again.
            return None
        return found if found.sha256 == sha256 else None

    def put(self, data: bytes | bytearray | memoryview) -> Artifact:
        """Store bytes unless they are there; a second put of the same content costs one small read.

        Raises StorageError, also for more bytes than the limit.
        """
        artifact = self.artifact_of(data)
        if self.find(artifact.sha256) != artifact:
            self.put_unseen(artifact, data)
        return artifact

    def put_unseen(self, artifact: Artifact, data: bytes | bytearray | memoryview) -> None:
        """Store bytes of which it is known that they are not there, or do not matter if they are. Raises StorageError.

        `artifact` must be theirs (`artifact_of`).
        """
        key = self.key(artifact.sha256)
        self._store.put(key, data)
        self._store.put(f"{key}.mark", msgspec.json.encode(artifact))

    def artifact_of(self, data: bytes | bytearray | memoryview) -> Artifact:
        """What these bytes are called. Raises StorageError for more than the limit."""
        num_bytes = memoryview(data).nbytes
        if num_bytes > self._max_bytes:
            raise StorageError(
                f"an artifact has at most {self._max_bytes:,} bytes, this one {num_bytes:,}; cut it into parts"
            )
        return Artifact(sha256=hashlib.sha256(data).hexdigest(), num_bytes=num_bytes)

    def get(self, artifact: Artifact) -> bytes:
        """Read an artifact and check that it is what it is called. Raises ObjectMissing, ArtifactDamaged."""
        key = self.key(artifact.sha256)
        if not 0 <= artifact.num_bytes <= self._max_bytes:
            raise StorageError(f"{key} is said to have {artifact.num_bytes:,} bytes: over {self._max_bytes:,}")
        data = self._store.get(key)
        if len(data) != artifact.num_bytes or hashlib.sha256(data).hexdigest() != artifact.sha256:
            raise ArtifactDamaged(f"{key} is damaged: its {len(data):,} bytes do not have its digest; put it again")
        return data

    def remove(self, digests: Sequence[str]) -> None:
        """Take artifacts away; those that are not there are none. Raises StorageError."""
        keys = [self.key(digest) for digest in digests]
        # Marks go first: what has none does not count.
        self._store.delete([f"{key}.mark" for key in keys])
        self._store.delete(keys)

    def put_bundle(
        self, filename: str, text: str, import_root: Path | None = None, limits: BundleLimits = DEFAULT_LIMITS
    ) -> Artifact:
        """Store a user's file with its neighbours (bundles.py); the same files are one artifact.

        Raises InvalidRequest for what cannot be shipped, StorageError.
        """
        return self.put(pack(filename, text, import_root, limits))

    def get_bundle(self, artifact: Artifact, into: Path, limits: BundleLimits = DEFAULT_LIMITS) -> list[Path]:
        """Unpack a bundle under `into`, which must not exist or be empty; the paths written, in order.

        Raises ObjectMissing, and StorageError for one that is damaged, over the limits, or names a path outside its
        root: nothing is written then.
        """
        return unpack(self.get(artifact), into, limits)


def fetch_code(store: Store, reference: bytes, into: Path, limits: BundleLimits = DEFAULT_LIMITS) -> list[Path]:
    """Unpack the code that a job refers to: an artifact's name, or the bundle itself (a zip), as older jobs have it.

    Raises as `Artifacts.get_bundle` does.
    """
    if not reference.startswith(b"{"):
        return unpack(reference, into, limits)
    try:
        if len(reference) > MAX_MARK_BYTES:
            raise ValueError(f"it has {len(reference)} bytes")
        artifact = msgspec.json.decode(reference, type=Artifact)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StorageError(
            f"the job's code cannot be found ({error}); nothing was written; submit the job again"
        ) from None
    return Artifacts(store).get_bundle(artifact, into, limits)
