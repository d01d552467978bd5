"""The store that carries messages and gradients, if it is not the one that holds states and samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from springtide.core.errors import ObjectMissing, StorageError
from springtide.core.ports import Store, StoreRequests


class WireTrouble(StorageError):
    """Messages between functions cannot be exchanged; a new attempt may succeed."""


class WireStore:
    """A store whose StorageErrors are raised as WireTrouble, to tell them from those of the object store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, key: str, data: Any) -> None:
        with _as_wire_trouble():
            self._store.put(key, data)

    def put_if_absent(self, key: str, data: Any) -> bool:
        with _as_wire_trouble():
            return self._store.put_if_absent(key, data)

    def get(self, key: str) -> bytes:
        with _as_wire_trouble():
            return self._store.get(key)

    def wait(self, key: str, timeout_s: float) -> bytes:
        with _as_wire_trouble():
            return self._store.wait(key, timeout_s)

    def delete(self, keys: Sequence[str]) -> None:
        with _as_wire_trouble():
            self._store.delete(keys)

    def keys(self, prefix: str) -> list[str]:
        with _as_wire_trouble():
            return self._store.keys(prefix)

    def requests(self) -> StoreRequests:
        return self._store.requests()

    def close(self) -> None:
        self._store.close()


@contextmanager
def _as_wire_trouble() -> Iterator[None]:
    try:
        yield
    except ObjectMissing:
        raise
    except StorageError as error:
        raise WireTrouble(str(error)) from error
