"""Chooses the cheapest collective, with its chunks or shards, for one configuration or a whole grid of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.collectives.schedule import COLLECTIVES
from springtide.core.errors import InvalidRequest
from springtide.core.functions import Collective, FunctionPrices, FunctionService
from springtide.perf.functions.collective_time import CHUNK_CHOICES, CHUNKED, held_of, requests_of, seconds_of

# A request to a Redis in the functions' own network: a round trip and the time in the server.
PARAMETER_STORE_LATENCY_S = 0.001
# The network of the machine with the Redis, in each direction: 5 Gbit/s.
PARAMETER_STORE_BYTES_PER_S = 5e9 / 8
# In order of preference: of equivalent ones (duplex with one chunk is FuncPipe's) the first is chosen.
CHOICES: tuple[Collective, ...] = ("duplex", "all-to-all", "smlt", "parameter-server", "funcpipe", "lambdaml")
# Choices that save less than a thousandth are not worth their overhead, which the model does not include.
_WORTH = 1.001


class SyncStore(msgspec.Struct, frozen=True, kw_only=True):
    """A store for exchanges: latency and prices of requests, and the total rate in each direction."""

    latency_s: float = 0.0
    prices: FunctionPrices = FunctionPrices(usd_per_gb_s=0.0)
    total_bytes_per_s: float = math.inf


class SyncChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A collective with its chunks and shards, and the time and cost (of time and requests) of an all-reduce."""

    collective: Collective
    num_chunks: int
    num_shards: int
    sync_s: float
    usd: float


class SyncTable(msgspec.Struct, frozen=True, kw_only=True):
    """The choices for a grid, as arrays of its shape; seconds are infinite where nothing fits the memory."""

    collectives: NDArray[np.str_]
    num_chunks: NDArray[np.int64]
    num_shards: NDArray[np.int64]
    sync_s: NDArray[np.float64]
    usd: NDArray[np.float64]
    num_puts: NDArray[np.int64]
    num_gets: NDArray[np.int64]

    def at(self, *index: int) -> SyncChoice:
        name: Collective = str(self.collectives[index])  # type: ignore[assignment]
        return SyncChoice(
            collective=name,
            num_chunks=int(self.num_chunks[index]),
            num_shards=int(self.num_shards[index]),
            sync_s=float(self.sync_s[index]),
            usd=float(self.usd[index]),
        )


def object_store_of(service: FunctionService) -> SyncStore:
    """The service's object store: its latency and prices, without a limit of the total rate."""
    return SyncStore(latency_s=service.latency_s, prices=service.prices)


def parameter_store_of(
    service: FunctionService,
    *,
    latency_s: float = PARAMETER_STORE_LATENCY_S,
    total_bytes_per_s: float = PARAMETER_STORE_BYTES_PER_S,
) -> SyncStore:
    """A Redis on one machine near the service's functions. Requests are free; its hours are billed separately.

    For an emulated service the Redis is on the same machine, without network limits and latency.
    """
    free = msgspec.structs.replace(service.prices, usd_per_put=0.0, usd_per_get=0.0)
    if service.total_vcpus is not None:
        return SyncStore(prices=free)
    return SyncStore(latency_s=latency_s, prices=free, total_bytes_per_s=total_bytes_per_s)


def sync_store_of(service: FunctionService, has_parameter_store: bool) -> SyncStore:
    """The store for exchanges between functions of this service."""
    return parameter_store_of(service) if has_parameter_store else object_store_of(service)


def shard_choices(n: Any) -> tuple[Any, ...]:
    """The values of SMLT's m to try for n workers (a number or an array): 1, n/2, 2n/3, n and 2n."""
    return (n // n, -(-n // 2), -(-2 * n // 3), n, 2 * n)


def choose_collectives(
    n: Any,
    num_bytes: Any,
    bytes_per_s: Any,
    usd_per_s: Any,
    store: SyncStore,
    *,
    in_flight: int = 4,
    spare_bytes: Any = math.inf,
    among: Sequence[Collective] = CHOICES,
) -> SyncTable:
    """For a grid of configurations, choose the collective with the lowest cost of an all-reduce (time and requests).

    `n` workers, gradients of `num_bytes`, links of `bytes_per_s` each way, `usd_per_s` for a second of all workers
    together (their cost, or more if time matters more than money) and `spare_bytes` of memory besides the gradient are
    numbers or arrays that broadcast. Of choices with the same cost within a thousandth, the one with the fewest
    requests wins. A single worker exchanges nothing. Raises InvalidRequest.
    """
    unknown = [name for name in among if name not in COLLECTIVES]
    if unknown or not among:
        raise InvalidRequest(f"there is no collective {unknown[:1]}; choose among {', '.join(COLLECTIVES)}")
    workers, size, rate, worth, spare = np.broadcast_arrays(
        np.asarray(n, dtype=np.int64), *(np.asarray(given, float) for given in (num_bytes, bytes_per_s, usd_per_s)),
        np.asarray(spare_bytes, float),
    )  # fmt: skip
    if workers.size and (workers.min() < 1 or rate.min() <= 0.0 or size.min() < 0.0 or in_flight < 1):
        raise InvalidRequest("a grid to choose collectives for needs workers, links that carry, and bytes of 0 or more")
    # A single worker is computed as two, to avoid a division by zero; its cost is set to 0 at the end.
    many = np.maximum(workers, 2)
    rows = [
        _row(name, many, size, rate, worth, spare, store, (chunks, shards, in_flight))
        for name in among
        for chunks, shards in _candidates(name, many)
    ]
    seconds, usd, puts, gets = (np.stack([row[part] for row in rows]) for part in range(4))
    is_good = usd <= usd.min(axis=0) * _WORTH
    best = np.argmin(np.where(is_good, puts + gets, np.iinfo(np.int64).max), axis=0)
    names, chunk_counts, shard_counts = _named(among, many)
    is_idle = (workers == 1) | (size == 0.0)

    def picked(values: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(np.take_along_axis(values, best[np.newaxis], axis=0)[0])

    def unless_idle(values: NDArray[Any]) -> NDArray[Any]:
        return np.where(is_idle, 0, picked(values)).astype(values.dtype)

    return SyncTable(
        collectives=np.asarray(names[best]),
        num_chunks=np.where(is_idle, 1, chunk_counts[best]),
        num_shards=unless_idle(shard_counts),
        sync_s=unless_idle(seconds),
        usd=unless_idle(usd),
        num_puts=unless_idle(puts),
        num_gets=unless_idle(gets),
    )


def _candidates(name: Collective, n: NDArray[np.int64]) -> list[tuple[int, Any]]:
    if name == "smlt":
        return [(1, shards) for shards in shard_choices(n)]
    return [(chunks, 0) for chunks in (CHUNK_CHOICES if name in CHUNKED else (1,))]


def _row(
    name: Collective,
    n: NDArray[np.int64],
    size: NDArray[np.float64],
    rate: NDArray[np.float64],
    usd_per_s: NDArray[np.float64],
    spare: NDArray[np.float64],
    store: SyncStore,
    counts: tuple[int, Any, int],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Seconds, dollars, puts and gets of one candidate for every configuration; infinite where it is impossible."""
    chunks, shards, _ = counts
    puts, gets = requests_of(name, n, chunks, shards)
    sizes = (size, rate, store.latency_s)
    seconds = seconds_of(name, n, sizes, counts, store.total_bytes_per_s, np.maximum, np.minimum)
    # Pieces smaller than an element of four bytes are impossible.
    is_possible = ((chunks == 1) | (chunks * n <= size / 4)) & (held_of(name, n, size, counts, np.minimum) <= spare)
    seconds = np.where(is_possible, seconds, math.inf)
    usd = np.where(is_possible, np.where(is_possible, seconds, 0.0) * usd_per_s, math.inf)
    usd = usd + puts * store.prices.usd_per_put + gets * store.prices.usd_per_get
    return seconds, usd, np.broadcast_to(puts, size.shape), np.broadcast_to(gets, size.shape)


def _named(
    among: Sequence[Collective], n: NDArray[np.int64]
) -> tuple[NDArray[np.str_], NDArray[np.int64], NDArray[np.int64]]:
    """Names, chunks, and shards (for every configuration) of all candidates, in the order of their rows."""
    found = [(name, chunks, shards) for name in among for chunks, shards in _candidates(name, n)]
    names = np.array([name for name, _, _ in found])
    chunk_counts = np.array([chunks for _, chunks, _ in found], dtype=np.int64)
    shard_counts = np.stack([np.broadcast_to(np.asarray(shards, dtype=np.int64), n.shape) for _, _, shards in found])
    return names, chunk_counts, shard_counts
