"""Counts the requests to a store, from all threads: object stores charge per request."""

from __future__ import annotations

import threading

from springtide.core.ports import StoreRequests


class RequestCount:
    """Adds up requests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = StoreRequests()

    def add(self, *, puts: int = 0, gets: int = 0, misses: int = 0, lists: int = 0, deletes: int = 0) -> None:
        """Count requests; a miss is counted beside its get."""
        with self._lock:
            old = self._total
            self._total = StoreRequests(
                num_puts=old.num_puts + puts,
                num_gets=old.num_gets + gets,
                num_misses=old.num_misses + misses,
                num_lists=old.num_lists + lists,
                num_deletes=old.num_deletes + deletes,
                bytes_up=old.bytes_up,
                bytes_down=old.bytes_down,
            )

    def add_bytes(self, *, up: int = 0, down: int = 0) -> None:
        with self._lock:
            old = self._total
            self._total = StoreRequests(
                num_puts=old.num_puts,
                num_gets=old.num_gets,
                num_misses=old.num_misses,
                num_lists=old.num_lists,
                num_deletes=old.num_deletes,
                bytes_up=old.bytes_up + up,
                bytes_down=old.bytes_down + down,
            )

    def total(self) -> StoreRequests:
        with self._lock:
            return self._total
