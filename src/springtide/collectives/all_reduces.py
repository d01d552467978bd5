"""What one rank does in each all-reduce through a store: by split, by shard, by one server, or all to all."""

from __future__ import annotations

from springtide.collectives.steps import Step, StepList, bounds


def lambdaml_steps(rank: int, num_workers: int, num_elements: int) -> tuple[Step, ...]:
    """LambdaML's scatter-reduce in three phases, one link at a time (FuncPipe, section 3.3, figure 4a, equation 1).

    Put all splits that others merge; get the own one from all; put its sum, then get the others'. No phase begins
    before the one before it has ended.
    """
    steps = StepList()
    if num_workers == 1:
        return ()
    splits = bounds(0, num_elements, num_workers)
    others = [(rank + distance) % num_workers for distance in range(1, num_workers)]
    first = [steps.put(f"raw/{split}.{rank}", splits[split], num_readers=1) for split in others]
    second = [
        steps.get(f"raw/{rank}.{writer}", splits[rank], writer, num_readers=1, is_final=False, after=first)
        for writer in reversed(others)
    ]
    merged = steps.reduce(splits[rank], num_workers, after=[*first, *second])
    put = steps.put(f"sum/{rank}", splits[rank], num_readers=num_workers - 1, after=[merged])
    for split in reversed(others):
        steps.get(f"sum/{split}", splits[split], split, num_readers=num_workers - 1, is_final=True, after=[*first, put])
    return steps.steps()


def duplex_steps(rank: int, num_workers: int, num_elements: int, num_chunks: int) -> tuple[Step, ...]:
    """Our chunked full-duplex all-reduce: raw chunks first, over all splits, then the merged ones, on either link.

    Each worker merges one of n splits, as in FuncPipe's scatter-reduce, but a split travels in chunks, and the merged
    chunks follow the raw ones on both links without a break. With equal links the last get ends after (2 (n - 1) / n +
    1 / (n chunks)) x size / rate for two chunks or more; no schedule ends before 2 (n - 1) / n.
    """
    steps = StepList()
    splits = [bounds(*split, num_chunks) for split in bounds(0, num_elements, num_workers)]
    others = range(1, num_workers)
    raw_puts: dict[tuple[int, int], int | None] = {}
    reduced: list[int | None] = []
    for chunk in range(num_chunks):
        # Which rank is served first differs from rank to rank: no first piece comes last on every upload link.
        for distance in others:
            split = (rank + distance) % num_workers
            raw_puts[split, chunk] = steps.put(f"raw/{split}.{chunk}.{rank}", splits[split][chunk], num_readers=1)
    for chunk in range(num_chunks):
        got = [
            steps.get(f"raw/{rank}.{chunk}.{writer}", splits[rank][chunk], writer, num_readers=1, is_final=False)
            for writer in ((rank - distance) % num_workers for distance in others)
        ]
        if num_workers > 1:
            reduced.append(steps.reduce(splits[rank][chunk], num_workers, after=got))
    for chunk, end in enumerate(reduced):
        steps.put(f"sum/{rank}.{chunk}", splits[rank][chunk], num_readers=num_workers - 1, after=[end])
    for chunk in range(num_chunks):
        for split in ((rank - distance) % num_workers for distance in others):
            # The sum replaces what this rank has put: not before that put is over.
            steps.get(
                f"sum/{split}.{chunk}",
                splits[split][chunk],
                split,
                num_readers=num_workers - 1,
                is_final=True,
                after=[raw_puts[split, chunk]],
            )
    return steps.steps()


def funcpipe_steps(rank: int, num_workers: int, num_elements: int) -> tuple[Step, ...]:
    """FuncPipe's pipelined scatter-reduce (section 3.3, figure 4b, equation 2): raw splits go up as others come down.

    In step k a rank puts split rank + k and gets its own one from rank - (k - 1); then all sums. It is the full-duplex
    all-reduce with whole splits: a split is merged only when its last raw one has come down, so that in the third phase
    sums go up first and come down then. A worker's own split is part of its sum, as in the paper; the released code
    leaves it out.
    """
    return duplex_steps(rank, num_workers, num_elements, 1)


def smlt_steps(rank: int, num_workers: int, num_elements: int, num_shards: int) -> tuple[Step, ...]:
    """SMLT's hierarchical aggregation (section 3.3, figure 5): m shards, each merged by one of n workers.

    Put all shards; get those it merges from all workers; put the sums; get all sums. Everything goes through the store,
    a worker's own shards and sums, too: with m = n each moves 3 + 1/n times its size. Shard s is merged by worker s
    modulo n: with fewer shards than workers some only wait, with more some merge several (SMLT, footnote 5). No phase
    begins before the one before it has ended.
    """
    steps = StepList()
    if num_workers == 1:
        return ()
    shards = bounds(0, num_elements, num_shards)
    mine = range(rank, num_shards, num_workers)
    first = [steps.put(f"raw/{shard}.{rank}", shards[shard], num_readers=1) for shard in range(num_shards)]
    second = {
        shard: [
            steps.get(f"raw/{shard}.{writer}", shards[shard], writer, num_readers=1, is_final=False, after=first)
            for writer in range(num_workers)
        ]
        for shard in mine
    }
    all_got = [index for got in second.values() for index in got]
    merged = {shard: steps.reduce(shards[shard], num_workers, after=got) for shard, got in second.items()}
    third = [
        steps.put(f"sum/{shard}", shards[shard], num_readers=num_workers, after=[*all_got, end])
        for shard, end in merged.items()
    ]
    for shard in range(num_shards):
        steps.get(
            f"sum/{shard}",
            shards[shard],
            shard % num_workers,
            num_readers=num_workers,
            is_final=True,
            after=[*first, *third],
        )
    return steps.steps()


def parameter_server_steps(
    rank: int, num_workers: int, num_elements: int, num_chunks: int, *, server: int = 0
) -> tuple[Step, ...]:
    """One rank merges everything: Cirrus, and the parameter server of HybridPS (FuncPipe, section 5.1).

    Workers put their gradient to `server` in chunks, which puts the sums that all others get. The server is worker 0,
    so that no more functions run than without; or rank `num_workers`, a machine of its own that has no gradient
    (HybridPS).
    """
    steps = StepList()
    chunks = bounds(0, num_elements, num_chunks)
    senders = [worker for worker in range(num_workers) if worker != server]
    if rank == server:
        for chunk, where in enumerate(chunks):
            got = [
                steps.get(f"raw/{chunk}.{worker}", where, worker, num_readers=1, is_final=False) for worker in senders
            ]
            merged = steps.reduce(where, num_workers, after=got) if senders else None
            steps.put(f"sum/{chunk}", where, num_readers=len(senders), after=[merged])
        return steps.steps()
    put = [steps.put(f"raw/{chunk}.{rank}", where, num_readers=1) for chunk, where in enumerate(chunks)]
    for chunk, where in enumerate(chunks):
        steps.get(f"sum/{chunk}", where, server, num_readers=len(senders), is_final=True, after=[put[chunk]])
    return steps.steps()


def all_to_all_steps(rank: int, num_workers: int, num_elements: int, num_chunks: int) -> tuple[Step, ...]:
    """All workers upload their whole gradient and download all others' (Siren; SMLT, 5.2), in chunks, one after
    another.

    Each worker moves n times the gradient, but waits for one object of any other only: of all schedules it has the
    fewest phases.
    """
    steps = StepList()
    if num_workers == 1:
        return ()
    chunks = bounds(0, num_elements, num_chunks)
    num_readers = num_workers - 1
    put = [steps.put(f"raw/{chunk}.{rank}", where, num_readers=num_readers) for chunk, where in enumerate(chunks)]
    for chunk, where in enumerate(chunks):
        # The rank that is read first differs from rank to rank, as everywhere.
        got = [
            steps.get(f"raw/{chunk}.{writer}", where, writer, num_readers=num_readers, is_final=False)
            for writer in ((rank - distance) % num_workers for distance in range(1, num_workers))
        ]
        # The sum replaces what this rank puts: not before that put is over.
        steps.reduce(where, num_workers, after=[put[chunk], *got])
    return steps.steps()
