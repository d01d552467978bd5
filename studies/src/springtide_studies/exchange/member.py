"""One rank of the measurement of all-reduces: a process that reads its tasks line by line."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.collectives.communicator import Communicator
from springtide.core.functions import Collective
from springtide.core.ports import Store, StoreRequests
from springtide.storage.stores.linked import DuplexLink, LinkedStore
from springtide.storage.stores.open import open_store

# The longest exchange takes a tenth of this: a member that waits longer waits for a dead rank.
LIMIT_S = 120.0


class MemberTask(msgspec.Struct, frozen=True, kw_only=True):
    """One all-reduce: its ranks, their links, and what the values are (drawn from the seed and the rank)."""

    store_url: str
    prefix: str
    rank: int
    num_ranks: int
    collective: Collective
    num_chunks: int
    num_in_flight: int
    num_elements: int
    bytes_per_s: float
    latency_s: float
    seed: int
    doublings: int = 0
    num_shards: int = 0


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """When the last of each kind of request ended, in seconds from the beginning; 0.0 where there was none.

    Raw objects are gradients or parts of them, sums what a member has added up (SMLT, figures 5 and 7).
    """

    raw_put_s: float = 0.0
    raw_got_s: float = 0.0
    sum_put_s: float = 0.0
    sum_got_s: float = 0.0


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """When the all-reduce began and ended on the machine's monotonic clock, and the digest of what came out."""

    began_s: float = 0.0
    ended_s: float = 0.0
    cpu_s: float = 0.0
    num_misses: int = 0
    marks: Marks = Marks()
    sha256: str = ""
    error: str = ""


def drawn(seed: int, rank: int, num_elements: int, doublings: int) -> NDArray[np.float32]:
    """A rank's values: floats whose sum depends on the order of addition, doubled so many times.

    Doubling is exact, for the sum, too: results of repetitions differ and can still be told from the first one's.
    """
    values = np.random.default_rng((seed, rank)).standard_normal(num_elements, dtype=np.float32)
    return values * np.float32(2.0**doublings)


def expected_sha256(seed: int, num_ranks: int, num_elements: int, doublings: int) -> str:
    """The digest of the sum of all ranks' values, added in the order of ranks."""
    total = drawn(seed, 0, num_elements, doublings)
    for rank in range(1, num_ranks):
        total += drawn(seed, rank, num_elements, doublings)
    return hashlib.sha256(total.tobytes()).hexdigest()


class MarkedStore:
    """A store that remembers when the last put and the last wait of each kind ended; both come in threads."""

    def __init__(self, store: Store, now_s: Callable[[], float]) -> None:
        self._store = store
        self._clock = now_s
        self._lock = threading.Lock()
        self._last_s: dict[str, float] = {}

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write an object, and mark the end."""
        self._store.put(key, data)
        self._mark("raw_put_s" if "/raw/" in key else "sum_put_s")

    def wait(self, key: str, timeout_s: float) -> bytes:
        """Wait for an object, and mark the end."""
        data = self._store.wait(key, timeout_s)
        self._mark("raw_got_s" if "/raw/" in key else "sum_got_s")
        return data

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> bool:
        """Write an object unless there is one; whether it was written."""
        return self._store.put_if_absent(key, data)

    def get(self, key: str) -> bytes:
        """Read an object."""
        return self._store.get(key)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects."""
        self._store.delete(keys)

    def keys(self, prefix: str) -> list[str]:
        """The keys with this prefix."""
        return self._store.keys(prefix)

    def requests(self) -> StoreRequests:
        """All requests made so far."""
        return self._store.requests()

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def marks(self, began_s: float) -> Marks:
        """The marks, in seconds from `began_s` on the same clock."""
        with self._lock:
            return Marks(**{name: at_s - began_s for name, at_s in self._last_s.items()})

    def _mark(self, name: str) -> None:
        with self._lock:
            self._last_s[name] = self._clock()


def run_task(task: MemberTask, store: Store, values: NDArray[Any]) -> Done:
    """Do one all-reduce over a link of the task's rate, in place."""
    link = DuplexLink(up_bytes_per_s=task.bytes_per_s, down_bytes_per_s=task.bytes_per_s, latency_s=task.latency_s)
    marked = MarkedStore(LinkedStore(store, link), time.monotonic)
    communicator = Communicator(
        marked,
        task.rank,
        task.num_ranks,
        now_s=time.monotonic,
        collective=task.collective,
        num_chunks=task.num_chunks,
        num_shards=task.num_shards,
        num_in_flight=task.num_in_flight,
    )
    misses = store.requests().num_misses
    cpu_s = time.process_time()
    began_s = time.monotonic()
    communicator.all_reduce(values, task.prefix, timeout_s=LIMIT_S)
    ended_s = time.monotonic()
    cpu_s = time.process_time() - cpu_s
    misses = store.requests().num_misses - misses
    communicator.flush()
    return Done(
        began_s=began_s,
        ended_s=ended_s,
        cpu_s=cpu_s,
        num_misses=misses,
        marks=marked.marks(began_s),
        sha256=hashlib.sha256(values.tobytes()).hexdigest(),
    )


def main() -> int:
    """Read tasks from standard input, one a line: prepare, say `ready`, wait for a line, go, say what came of it."""
    stores: dict[str, Store] = {}
    for line in sys.stdin:
        try:
            task = msgspec.json.decode(line, type=MemberTask)
            if task.store_url not in stores:
                stores[task.store_url] = open_store(task.store_url)
            values = drawn(task.seed, task.rank, task.num_elements, task.doublings)
            _say(b"ready")
            if not sys.stdin.readline():
                return 0
            done = run_task(task, stores[task.store_url], values)
        except Exception as error:
            # The measuring process decides what an error means; a member only reports it.
            done = Done(error=f"{type(error).__name__}: {error}")
        _say(msgspec.json.encode(done))
    return 0


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
