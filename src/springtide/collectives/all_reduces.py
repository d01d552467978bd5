"""The steps of one rank in each all-reduce through a store: by splits, by shards, by one server, or all to all."""

from __future__ import annotations

from springtide.collectives.steps import Step, StepList, bounds


def lambdaml_steps(rank: int, num_workers: int, num_elements: int) -> tuple[Step, ...]:
    """LambdaML's scatter-reduce in three phases, one link at a time (FuncPipe, section 3.3, figure 4a, equation 1).

    Put the splits that others merge; get the rank's own split from all others; put its sum, then get the other sums. No
    phase begins before the previous one has ended.
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
    """Our chunked full-duplex all-reduce: on each link the raw chunks of all splits first, then the merged chunks.

    Each worker merges one of n splits, as in FuncPipe's scatter-reduce, but a split is sent in chunks, and the merged
    chunks follow the raw ones on both links without a pause. With equal links the last get ends after (2 (n - 1) / n +
    1 / (n chunks)) x size / rate for two chunks or more; the lower bound of any schedule is 2 (n - 1) / n x size /
    rate.
    """
    steps = StepList()
    splits = [bounds(*split, num_chunks) for split in bounds(0, num_elements, num_workers)]
    others = range(1, num_workers)
    raw_puts: dict[tuple[int, int], int | None] = {}
    reduced: list[int | None] = []
    for chunk in range(num_chunks):
        # Each rank serves the others in a different order, so that no split is the last one on every upload link.
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
            # The sum overwrites the values of this rank's own put, so it waits until the put has ended.
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

    In step k a rank puts split rank + k and gets its own split from rank - (k - 1); then it exchanges the sums. This is
    the full-duplex all-reduce with whole splits: a split is merged only when its last raw part has arrived, so that in
    the third phase sums are first put and then got. A worker's own split is part of its sum, as in the paper; the
    released code omits it.
    """
    return duplex_steps(rank, num_workers, num_elements, 1)


def smlt_steps(rank: int, num_workers: int, num_elements: int, num_shards: int) -> tuple[Step, ...]:
    """SMLT's hierarchical aggregation (section 3.3, figure 5): m shards, each merged by one of n workers.

    Put all shards; get the shards to merge from all workers; put their sums; get all sums. A worker's own shards and
    sums go through the store, too: with m = n each worker moves 3 + 1/n times the gradient's size. Shard s is merged by
    worker s modulo n: with fewer shards than workers some only wait, with more some merge several (SMLT, footnote 5).
    No phase begins before the previous one has ended.
    """
    steps = StepList()
    if num_workers == 1:
        return ()
    shards = bounds(0, num_elements, num_shards)
    own_shards = range(rank, num_shards, num_workers)
    first = [steps.put(f"raw/{shard}.{rank}", shards[shard], num_readers=1) for shard in range(num_shards)]
    second = {
        shard: [
            steps.get(f"raw/{shard}.{writer}", shards[shard], writer, num_readers=1, is_final=False, after=first)
            for writer in range(num_workers)
        ]
        for shard in own_shards
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

    Workers send their gradient in chunks to `server`, which puts the sums for all others. The server is worker 0, so
    that it needs no further function; or rank `num_workers`, a separate machine without a gradient (HybridPS).
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
    """All workers upload their whole gradient and download those of all others (Siren; SMLT, 5.2), chunk by chunk.

    Each worker moves n times the gradient, but waits only once for each other worker: no schedule has fewer phases.
    """
    steps = StepList()
    if num_workers == 1:
        return ()
    chunks = bounds(0, num_elements, num_chunks)
    num_readers = num_workers - 1
    put = [steps.put(f"raw/{chunk}.{rank}", where, num_readers=num_readers) for chunk, where in enumerate(chunks)]
    for chunk, where in enumerate(chunks):
        # Each rank reads the others in a different order, as in the other schedules.
        got = [
            steps.get(f"raw/{chunk}.{writer}", where, writer, num_readers=num_readers, is_final=False)
            for writer in ((rank - distance) % num_workers for distance in range(1, num_workers))
        ]
        # The sum overwrites the values of this rank's own put, so it waits until the put has ended.
        steps.reduce(where, num_workers, after=[put[chunk], *got])
    return steps.steps()
