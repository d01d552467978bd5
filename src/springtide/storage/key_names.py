"""The check of keys, the same for all stores, so that a key that one store accepts is valid in every other."""

from __future__ import annotations

import re
from collections.abc import Iterable

from springtide.core.errors import StorageError

MAX_KEY_CHARS = 512
# A part becomes a file name if the store is a directory, with room for a suffix that the store appends.
MAX_PART_CHARS = 240
_KEY = re.compile(r"[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9._/-]*", re.ASCII)


def checked_key(key: str) -> str:
    """Return the key. Raises StorageError unless it is parts of letters, digits, `.`, `_`, `-`, joined by `/`."""
    if len(key) > MAX_KEY_CHARS:
        raise StorageError(f"a key has at most {MAX_KEY_CHARS} characters, this one {len(key)}: {key[:60]}...")
    if _KEY.fullmatch(key) is None:
        raise StorageError(
            f"{key!r} is no key: it needs parts of letters, digits, '.', '_' and '-', joined by single slashes"
        )
    if any(part in {".", ".."} or len(part) > MAX_PART_CHARS for part in key.split("/")):
        raise StorageError(
            f"{key!r} is no key: its parts must not be '.' or '..' and have at most {MAX_PART_CHARS} characters each"
        )
    return key


def checked_keys(keys: Iterable[str]) -> list[str]:
    """Return the keys without duplicates, in the order given. Raises like `checked_key`."""
    return [checked_key(key) for key in dict.fromkeys(keys)]


def checked_prefix(prefix: str) -> str:
    """Return the prefix, which may be empty or end within a part. Raises StorageError if no key can begin with it."""
    if (
        len(prefix) > MAX_KEY_CHARS
        or _PREFIX.fullmatch(prefix) is None
        or prefix.startswith("/")
        or "//" in prefix
        or any(part in {".", ".."} for part in prefix.split("/")[:-1])
    ):
        raise StorageError(f"no key begins with {prefix[:60]!r}")
    return prefix
