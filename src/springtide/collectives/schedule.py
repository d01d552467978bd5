"""The all-reduces by name: the steps of every rank, for any number of workers and elements."""

from __future__ import annotations

from springtide.collectives.all_reduces import (
    all_to_all_steps,
    duplex_steps,
    funcpipe_steps,
    lambdaml_steps,
    parameter_server_steps,
    smlt_steps,
)
from springtide.collectives.steps import CollectiveSchedule, Step
from springtide.core.errors import InvalidRequest
from springtide.core.functions import Collective

COLLECTIVES: tuple[Collective, ...] = ("lambdaml", "funcpipe", "smlt", "parameter-server", "duplex", "all-to-all")
# More ranks or chunks than this are surely a mistake, and the schedule would not fit in memory.
MAX_RANKS, MAX_CHUNKS, MAX_SHARDS = 4096, 4096, 16_384


def rank_steps(
    name: Collective, rank: int, n: int, num_elements: int, chunks: int = 1, shards: int = 0
) -> tuple[Step, ...]:
    """The steps of `rank` of `n` workers in the all-reduce `name`.

    `chunks` is the number of parts in which each worker's split is sent (duplex), or the whole gradient
    (parameter-server, all-to-all). `shards` is SMLT's m; if it is 0, each worker merges `chunks` shards (m = chunks x
    n). LambdaML and FuncPipe ignore both: they send whole splits. Raises InvalidRequest.
    """
    if not 1 <= n <= MAX_RANKS or not 0 <= rank < n or num_elements < 0:
        raise InvalidRequest(f"rank {rank} of {n} with {num_elements} elements is no place in an all-reduce")
    if not 1 <= chunks <= MAX_CHUNKS:
        raise InvalidRequest(f"{chunks} chunks are not possible; choose 1 to {MAX_CHUNKS}")
    if not 0 <= shards <= MAX_SHARDS:
        raise InvalidRequest(f"{shards} shards are not possible; choose 1 to {MAX_SHARDS}, or 0 for as many as workers")
    if name == "duplex":
        return duplex_steps(rank, n, num_elements, chunks)
    if name == "funcpipe":
        return funcpipe_steps(rank, n, num_elements)
    if name == "lambdaml":
        return lambdaml_steps(rank, n, num_elements)
    if name == "smlt":
        return smlt_steps(rank, n, num_elements, shards or chunks * n)
    if name == "parameter-server":
        return parameter_server_steps(rank, n, num_elements, chunks)
    if name == "all-to-all":
        return all_to_all_steps(rank, n, num_elements, chunks)
    raise InvalidRequest(f"there is no collective {name!r}; choose one of {', '.join(COLLECTIVES)}")


def make_schedule(name: Collective, n: int, num_elements: int, chunks: int = 1, shards: int = 0) -> CollectiveSchedule:
    """The steps of all ranks in the all-reduce `name` among `n` workers (see `rank_steps`). Raises InvalidRequest."""
    ranks = tuple(rank_steps(name, rank, n, num_elements, chunks, shards) for rank in range(n))
    return CollectiveSchedule(name=name, num_workers=n, num_elements=num_elements, ranks=ranks)


def make_served_schedule(n: int, num_elements: int, chunks: int = 1) -> CollectiveSchedule:
    """`n` workers with a separate parameter server (HybridPS): rank `n`, which adds nothing to the sum."""
    ranks = tuple(parameter_server_steps(rank, n, num_elements, chunks, server=n) for rank in range(n + 1))
    return CollectiveSchedule(name="parameter-server", num_workers=n, num_elements=num_elements, ranks=ranks)
