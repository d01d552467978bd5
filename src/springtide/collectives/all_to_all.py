"""Everyone uploads its whole gradient and downloads all others' (Siren; SMLT, 5.2): nobody adds up for others."""

from __future__ import annotations

from springtide.collectives.steps import Step, StepList, bounds


def all_to_all_steps(rank: int, num_workers: int, num_elements: int, num_chunks: int) -> tuple[Step, ...]:
    """One rank's steps: put the own gradient, get those of all others, add them up; in chunks, one after another.

    Each worker moves n times the gradient, but waits for one object of anybody only: of all schedules it has the fewest
    phases.
    """
    steps = StepList()
    if num_workers == 1:
        return ()
    chunks = bounds(0, num_elements, num_chunks)
    num_readers = num_workers - 1
    put = [steps.put(f"raw/{chunk}.{rank}", where, num_readers=num_readers) for chunk, where in enumerate(chunks)]
    for chunk, where in enumerate(chunks):
        # Who is read first differs from rank to rank, as everywhere.
        got = [
            steps.get(f"raw/{chunk}.{writer}", where, writer, num_readers=num_readers, is_final=False)
            for writer in ((rank - distance) % num_workers for distance in range(1, num_workers))
        ]
        # The sum replaces what this rank puts: not before that put is over.
        steps.reduce(where, num_workers, after=[put[chunk], *got])
    return steps.steps()
