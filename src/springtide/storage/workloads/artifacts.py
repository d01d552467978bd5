"""Artifacts: objects in a store under the digest of their bytes, which is checked at every read.

They hold code bundles and shards of data, as the object store of SMLT's end client does (sections 4.1 and 4.3).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import ObjectMissing, StorageError
from springtide.core.ports import Store
from springtide.storage.bundles import DEFAULT_LIMITS, BundleLimits, pack, unpack

# An artifact is one object; larger content is cut into several artifacts.
MAX_ARTIFACT_BYTES = 1 << 30
MAX_MARK_BYTES = 4096
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """The name of an artifact: the SHA-256 of its bytes (hexadecimal) and their number."""

    sha256: str
    num_bytes: int


def checked_digest(sha256: str) -> str:
    """Return the digest. Raises StorageError if it cannot be one."""
    if _DIGEST.fullmatch(sha256) is None:
        raise StorageError(f"{sha256[:80]!r} is no digest of an artifact: it needs 64 hexadecimal digits")
    return sha256


class ArtifactDamaged(StorageError):
    """The bytes stored under an artifact's digest do not match it."""


class Artifacts:
    """The artifacts under a prefix of a store, as `PREFIX/sha256/DIGEST`, each with a small object `.mark` beside it.

    The mark is written after the bytes: an artifact without it does not count, and with it a small read shows that the
    artifact exists. Artifacts are immutable, so any number of writers may put the same one.
    """

    def __init__(self, store: Store, prefix: str = "artifacts", max_bytes: int = MAX_ARTIFACT_BYTES) -> None:
        self._store = store
        self._prefix = prefix.rstrip("/")
        self._max_bytes = max_bytes

    def key(self, sha256: str) -> str:
        """The key of the bytes with this digest. Raises StorageError for anything that is not a digest."""
        return f"{self._prefix}/sha256/{checked_digest(sha256)}"

    def find(self, sha256: str) -> Artifact | None:
        """The artifact, or None if it does not exist; one small read. Raises StorageError."""
        try:
            data = self._store.get(f"{self.key(sha256)}.mark")
        except ObjectMissing:
            return None
        try:
            if len(data) > MAX_MARK_BYTES:
                raise ValueError(f"it has {len(data)} bytes")
            found = decode_json(data, Artifact)
        except (msgspec.MsgspecError, ValueError):
            # An unreadable mark counts as missing, so that the bytes are put again.
            return None
        return found if found.sha256 == sha256 else None

    def put(self, data: bytes | bytearray | memoryview) -> Artifact:
        """Store bytes unless they exist already, which costs one small read to find out.

        Raises StorageError, also above the limit.
        """
        artifact = self.artifact_of(data)
        if self.find(artifact.sha256) != artifact:
            self.put_unseen(artifact, data)
        return artifact

    def put_unseen(self, artifact: Artifact, data: bytes | bytearray | memoryview) -> None:
        """Store bytes without checking whether they exist already. Raises StorageError.

        `artifact` must be their name (`artifact_of`).
        """
        key = self.key(artifact.sha256)
        self._store.put(key, data)
        self._store.put(f"{key}.mark", msgspec.json.encode(artifact))

    def artifact_of(self, data: bytes | bytearray | memoryview) -> Artifact:
        """The name of these bytes as an artifact. Raises StorageError above the limit."""
        num_bytes = memoryview(data).nbytes
        if num_bytes > self._max_bytes:
            raise StorageError(
                f"an artifact has at most {self._max_bytes:,} bytes, this one {num_bytes:,}; cut it into parts"
            )
        return Artifact(sha256=hashlib.sha256(data).hexdigest(), num_bytes=num_bytes)

    def get(self, artifact: Artifact) -> bytes:
        """Read an artifact and check its digest. Raises ObjectMissing, ArtifactDamaged."""
        key = self.key(artifact.sha256)
        if not 0 <= artifact.num_bytes <= self._max_bytes:
            raise StorageError(f"{key} is said to have {artifact.num_bytes:,} bytes: over {self._max_bytes:,}")
        data = self._store.get(key)
        if len(data) != artifact.num_bytes or hashlib.sha256(data).hexdigest() != artifact.sha256:
            raise ArtifactDamaged(f"{key} is damaged: its {len(data):,} bytes do not have its digest; put it again")
        return data

    def remove(self, digests: Sequence[str]) -> None:
        """Delete artifacts; missing ones are ignored. Raises StorageError."""
        keys = [self.key(digest) for digest in digests]
        # Marks first, so that an interrupted removal leaves no artifact that counts.
        self._store.delete([f"{key}.mark" for key in keys])
        self._store.delete(keys)

    def put_bundle(
        self, filename: str, text: str, import_root: Path | None = None, limits: BundleLimits = DEFAULT_LIMITS
    ) -> Artifact:
        """Store a user's file with its neighbours (bundles.py); the same files give the same artifact.

        Raises InvalidRequest for files that cannot be shipped, StorageError.
        """
        return self.put(pack(filename, text, import_root, limits))

    def get_bundle(self, artifact: Artifact, into: Path, limits: BundleLimits = DEFAULT_LIMITS) -> list[Path]:
        """Unpack a bundle into `into`, which must not exist or be empty. Returns the paths written, in order.

        Raises ObjectMissing, and StorageError for a bundle that is damaged, over the limits, or names a path outside
        its root; then nothing is written.
        """
        return unpack(self.get(artifact), into, limits)


def fetch_code(store: Store, reference: bytes, into: Path, limits: BundleLimits = DEFAULT_LIMITS) -> list[Path]:
    """Unpack the code of a job. `reference` is an artifact's name (JSON), or for older jobs the bundle itself (a zip).

    Raises like `Artifacts.get_bundle`.
    """
    if not reference.startswith(b"{"):
        return unpack(reference, into, limits)
    try:
        if len(reference) > MAX_MARK_BYTES:
            raise ValueError(f"it has {len(reference)} bytes")
        artifact = decode_json(reference, Artifact)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StorageError(
            f"the job's code cannot be found ({error}); nothing was written; submit the job again"
        ) from None
    return Artifacts(store).get_bundle(artifact, into, limits)
