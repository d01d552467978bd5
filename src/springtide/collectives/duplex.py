"""Our chunked full-duplex all-reduce: both links busy from the first piece to the last.

Each worker merges one of n splits, as in FuncPipe's scatter-reduce, but a split travels in chunks, and the merged
chunks follow the raw ones on both links without a break. With equal links the last get ends after
(2 (n - 1) / n + 1 / (n chunks)) x size / rate for two chunks or more; no schedule ends before 2 (n - 1) / n.
"""

from __future__ import annotations

from springtide.collectives.steps import Step, StepList, bounds


def duplex_steps(rank: int, num_workers: int, num_elements: int, num_chunks: int) -> tuple[Step, ...]:
    """One rank's steps: raw chunks first, chunk by chunk over all splits, then the merged ones, on either link."""
    steps = StepList()
    splits = [bounds(*split, num_chunks) for split in bounds(0, num_elements, num_workers)]
    others = range(1, num_workers)
    raw_puts: dict[tuple[int, int], int | None] = {}
    reduced: list[int | None] = []
    for chunk in range(num_chunks):
        # Who is served first differs from rank to rank: nobody's first piece comes last on every upload link.
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
