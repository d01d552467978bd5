"""SMLT's hierarchical aggregation (section 3.3, figure 5): m shards, each merged by one of n workers.

Everything goes through the store, a worker's own shards and sums, too: with m = n each moves 3 + 1/n times its size.
"""

from __future__ import annotations

from springtide.collectives.steps import Step, StepList, bounds


def smlt_steps(rank: int, num_workers: int, num_elements: int, num_shards: int) -> tuple[Step, ...]:
    """One rank's steps: put all shards; get those it merges from everyone; put the sums; get all sums.

    Shard s is merged by worker s modulo n: with fewer shards than workers some only wait, with more some merge several
    (SMLT, footnote 5). No phase begins before the one before it has ended.
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
