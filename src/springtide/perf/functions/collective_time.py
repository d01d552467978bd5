"""The time of an all-reduce over a store (closed forms, a lower bound) and the cost of its requests.

S is the gradient in bytes, w the bytes per second of each of a worker's two links, n the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from springtide.collectives.schedule import COLLECTIVES
from springtide.core.errors import InvalidRequest
from springtide.core.functions import Collective, FunctionPrices

# The chunk counts to try: between these the time changes by less than the noise of measurements.
CHUNK_CHOICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Collectives with a free number of chunks; in the others it follows from the number of workers or shards.
CHUNKED: tuple[Collective, ...] = ("duplex", "parameter-server", "all-to-all")


class SyncRequests(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of all workers in one all-reduce, without reads that find nothing."""

    num_puts: int
    num_gets: int

    def usd(self, prices: FunctionPrices) -> float:
        """The cost of these requests. Deletes are free on all object stores that we know."""
        return self.num_puts * prices.usd_per_put + self.num_gets * prices.usd_per_get


def sync_time_s(
    name: Collective,
    n: int,
    num_bytes: float,
    bytes_per_s: float,
    latency_s: float,
    chunks: int = 1,
    in_flight: int = 4,
    *,
    shards: int = 0,
    total_bytes_per_s: float = math.inf,
) -> float:
    """Seconds of an all-reduce of `num_bytes` as the communicator executes it, among n workers with equal links.

    Objects of one lane follow each other without a pause or, if too few requests are in flight to hide the latency,
    `in_flight` of them per request time. `shards` is SMLT's m (0: chunks x n). `total_bytes_per_s` is the rate of the
    store's machine in each direction for all workers together. Convex, piecewise linear and nondecreasing in
    `num_bytes`. Raises InvalidRequest.
    """
    if min(n, chunks, in_flight) < 1 or shards < 0 or not total_bytes_per_s > 0.0:
        raise InvalidRequest(
            f"{n} workers, {chunks} chunks, {in_flight} requests in flight: each must be at least 1, "
            "and the store must carry something"
        )
    if name not in COLLECTIVES:
        raise InvalidRequest(f"there is no collective {name!r}; choose one of {', '.join(COLLECTIVES)}")
    if n == 1 or num_bytes <= 0:
        return 0.0
    sizes = (num_bytes, bytes_per_s, latency_s)
    took_s: float = seconds_of(name, n, sizes, (chunks, shards, in_flight), total_bytes_per_s, max, min)
    return took_s


def seconds_of(
    name: Collective,
    n: Any,
    sizes: tuple[Any, Any, Any],
    counts: tuple[int, Any, int],
    total_bytes_per_s: float,
    most: Callable[[Any, Any], Any],
    least: Callable[[Any, Any], Any],
) -> Any:
    """`sync_time_s` for numbers, or for arrays with NumPy's maximum and minimum. Unchecked; n must be 2 or more.

    `sizes` are the gradient's bytes, a link's bytes per second and the latency; `counts` are chunks, shards (0: chunks
    x n) and requests in flight.
    """
    num_bytes, bytes_per_s, latency_s = sizes
    chunks, shards, in_flight = counts
    # All workers transfer at the same time and share the link of the store's machine.
    shared = least(bytes_per_s, total_bytes_per_s / n)
    piece_bytes = num_bytes / num_pieces(name, n, chunks, shards)

    def more_s(num_objects: Any, rate: Any) -> Any:
        piece_s = piece_bytes / rate
        rounds_s = num_objects // in_flight * most(latency_s + piece_s, in_flight * piece_s)
        return rounds_s + num_objects % in_flight * piece_s

    def phase_s(num_objects: Any, rate: Any) -> Any:
        return latency_s + piece_bytes / rate + more_s(num_objects - 1, rate)

    if name == "lambdaml":
        return 3.0 * phase_s(n - 1, shared) + phase_s(1, shared)
    if name == "smlt":
        m = num_pieces(name, n, chunks, shards)
        per_worker = -(-m // n)
        # In the last round only workers with one shard more than others are left, and they share the store's link.
        alone = least(bytes_per_s, total_bytes_per_s / (m - (per_worker - 1) * n))
        left_s = n * piece_bytes * (1.0 / shared - 1.0 / alone)
        merge_s = phase_s(per_worker * n, shared) - left_s
        return 2.0 * phase_s(m, shared) + merge_s + phase_s(per_worker, alone)
    if name == "parameter-server":
        # All wait for the server's download link, plus the upload of a chunk before and its download afterwards. While
        # workers download a sum, the server has only its share of the store's link.
        many = least(bytes_per_s, total_bytes_per_s / most(n - 1, 1))
        one = least(bytes_per_s, total_bytes_per_s)
        beside_s = (chunks - 1) * piece_bytes * (1.0 / shared - 1.0 / one)
        return 2.0 * phase_s(1, many) + phase_s((n - 1) * chunks, one) + phase_s(1, one) + beside_s
    request_s = latency_s + piece_bytes / shared
    if name == "all-to-all":
        return 2.0 * request_s + more_s((n - 1) * chunks - 1, shared)
    parts = chunks if name == "duplex" else 1
    # Either the download link never pauses after its first piece, or all workers wait for the last sum.
    return most(
        2.0 * request_s + more_s(2 * (n - 1) * parts - 1, shared),
        4.0 * request_s + more_s((n - 1) * parts - 1, shared) + more_s(n - 2, shared),
    )


def num_pieces(name: Collective, n: Any, chunks: int = 1, shards: Any = 0) -> Any:
    """The number of objects in which a gradient is sent, for a number of workers or an array of them."""
    if name == "smlt":
        return shards + (shards == 0) * (n * chunks)
    if name == "duplex":
        return n * chunks
    return chunks if name in ("parameter-server", "all-to-all") else n


def requests_of(name: Collective, n: Any, chunks: int = 1, shards: Any = 0) -> tuple[Any, Any]:
    """Puts and gets of all workers in one all-reduce, for a number of workers or an array of them, 2 or more."""
    if name == "parameter-server":
        return n * chunks, 2 * (n - 1) * chunks
    if name == "all-to-all":
        return n * chunks, n * (n - 1) * chunks
    if name == "smlt":
        m = num_pieces(name, n, chunks, shards)
        return m * (n + 1), 2 * n * m
    parts = chunks if name == "duplex" else 1
    return n * n * parts, 2 * n * (n - 1) * parts


def sync_requests(name: Collective, n: int, chunks: int = 1, shards: int = 0) -> SyncRequests:
    """The puts and gets of all workers in one all-reduce of at least n x chunks elements. Raises InvalidRequest."""
    if name not in COLLECTIVES:
        raise InvalidRequest(f"there is no collective {name!r}; choose one of {', '.join(COLLECTIVES)}")
    if n == 1:
        return SyncRequests(num_puts=0, num_gets=0)
    num_puts, num_gets = requests_of(name, n, chunks, shards)
    return SyncRequests(num_puts=num_puts, num_gets=num_gets)


def held_of(
    name: Collective, n: Any, num_bytes: Any, counts: tuple[int, Any, int], least: Callable[[Any, Any], Any]
) -> Any:
    """The most memory that a worker needs besides the gradient: waiting addends and one sum.

    For numbers, or for arrays with NumPy's minimum; n is 2 or more, `counts` as in `seconds_of`.
    """
    chunks, shards, in_flight = counts
    pieces = num_pieces(name, n, chunks, shards)
    if name == "smlt":
        waiting = -(-pieces // n) * n
    else:
        parts = chunks if name in ("duplex", "parameter-server", "all-to-all") else 1
        waiting = least((n - 1) * parts, n - 1 + in_flight)
    return (waiting + 1) * num_bytes / pieces


def sync_usd(
    name: Collective,
    n: int,
    num_bytes: float,
    bytes_per_s: float,
    latency_s: float,
    chunks: int,
    in_flight: int,
    usd_per_s: float,
    prices: FunctionPrices,
) -> float:
    """US dollars of one all-reduce: its time at `usd_per_s` (all workers together), and its requests."""
    took_s = sync_time_s(name, n, num_bytes, bytes_per_s, latency_s, chunks, in_flight)
    return took_s * usd_per_s + sync_requests(name, n, chunks).usd(prices)


def best_chunks(
    name: Collective,
    n: int,
    num_bytes: float,
    bytes_per_s: float,
    latency_s: float,
    in_flight: int,
    usd_per_s: float,
    prices: FunctionPrices,
) -> int:
    """The number of chunks with the lowest cost of an all-reduce (time and requests); the fewest of nearly equal ones.

    `usd_per_s` is the value of a second of all workers: their cost, or more if time matters more than money.
    """
    if n == 1 or num_bytes <= 0:
        return 1
    choices = CHUNK_CHOICES if name in CHUNKED else (1,)
    costs = {
        chunks: sync_usd(name, n, num_bytes, bytes_per_s, latency_s, chunks, in_flight, usd_per_s, prices)
        for chunks in choices
        if chunks == 1 or chunks * n <= num_bytes / 4
    }
    # More chunks that save less than a thousandth are not worth their overhead, which the model does not include.
    least = min(costs.values())
    return next(chunks for chunks, usd in costs.items() if usd <= least * 1.001)
