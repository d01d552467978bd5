"""LambdaML's scatter-reduce in three phases, one link at a time (FuncPipe, section 3.3, figure 4a, equation 1)."""

from __future__ import annotations

from springtide.collectives.steps import Step, StepList, bounds


def lambdaml_steps(rank: int, num_workers: int, num_elements: int) -> tuple[Step, ...]:
    """One rank's steps: put all splits that others merge; get the own one from all; put its sum, then get the others'.

    No phase begins before the one before it has ended.
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
