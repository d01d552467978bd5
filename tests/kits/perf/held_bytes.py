"""The memory of one all-reduce; the product asks for whole tables of them."""

from __future__ import annotations

from springtide.core.functions import Collective
from springtide.perf.functions.collective_time import held_of


def held_bytes(
    name: Collective, n: int, num_bytes: float, chunks: int = 1, in_flight: int = 4, *, shards: int = 0
) -> float:
    """The most memory that a worker needs besides the gradient: waiting addends and one sum."""
    return 0.0 if n == 1 else float(held_of(name, n, num_bytes, (chunks, shards, in_flight), min))
