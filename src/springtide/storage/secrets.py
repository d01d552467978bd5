"""The values of a workload's secrets: a file in its directory that its owner and its workers alone can read.

Whatever else is written of a workload has the names and the file's name, which is drawn at random: a digest would let
short values be guessed.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import StorageError
from springtide.core.workload import SecretSet
from springtide.storage.files import make_private, write_durable

_FOLDER = "secrets"


def write_secrets(work_dir: Path, values: Mapping[str, str], before: str = "") -> str:
    """Keep the values by name, durably, and return the reference under which workers find them.

    `before` is an earlier reference of the workload's, which is returned if it stands for the same values. Raises
    StorageError.
    """
    if before and _are_same(work_dir, before, values):
        return before
    folder = work_dir / _FOLDER
    try:
        make_private(folder)
    except OSError as error:
        raise StorageError(f"cannot make the directory {folder}: {error.strerror}") from error
    reference = secrets.token_hex(16)
    write_durable(folder / reference, msgspec.json.encode(dict(values)))
    return reference


def read_secrets(work_dir: Path, reference: str) -> dict[str, str]:
    """The values by name. Raises StorageError, without any value in it."""
    path = work_dir / _FOLDER / reference
    try:
        return decode_json(path.read_bytes(), dict[str, str])
    except OSError as error:
        raise StorageError(f"the secrets in {path} cannot be read: {error.strerror}; submit it anew") from None
    except (ValueError, RecursionError):
        raise StorageError(f"the secrets in {path} are damaged; submit it anew") from None


def keep_secrets(work_dir: Path, values: Mapping[str, str], before: SecretSet | None = None) -> SecretSet | None:
    """What a workload's record has of the values, which are kept as by `write_secrets`; None if there are none."""
    if not values:
        return None
    reference = write_secrets(work_dir, values, "" if before is None else before.reference)
    return SecretSet(names=tuple(sorted(values)), reference=reference)


def are_kept(work_dir: Path, secrets: SecretSet) -> bool:
    """Whether the values are still there."""
    return (work_dir / _FOLDER / secrets.reference).exists()


def remove_secrets(work_dir: Path, keep: Collection[str] = (), before_unix_s: float = math.inf) -> None:
    """Remove the values of all references but those to keep, of what was written before that time. Raises OSError."""
    folder = work_dir / _FOLDER
    for path in folder.glob("*"):
        if path.name not in keep and path.stat().st_mtime < before_unix_s:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        # It stays where something is left in it.
        folder.rmdir()


def folders_with_secrets(workloads_dir: Path) -> list[Path]:
    """The directories of workloads in which there are values."""
    return [folder.parent for folder in workloads_dir.glob(f"*/{_FOLDER}")]


def _are_same(work_dir: Path, reference: str, values: Mapping[str, str]) -> bool:
    try:
        known = read_secrets(work_dir, reference)
    except StorageError:
        return False
    return hmac.compare_digest(*(msgspec.json.encode(sorted(each.items())) for each in (known, values)))
