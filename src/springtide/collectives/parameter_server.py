"""One rank merges everything: Cirrus, and the parameter server of HybridPS (FuncPipe, section 5.1)."""

from __future__ import annotations

from springtide.collectives.steps import Step, StepList, bounds


def parameter_server_steps(
    rank: int, num_workers: int, num_elements: int, num_chunks: int, *, server: int = 0
) -> tuple[Step, ...]:
    """One rank's steps: workers put their gradient to `server` in chunks, which puts the sums that all others get.

    The server is worker 0, so that no more functions run than without; or rank `num_workers`, a machine of its own
    that has no gradient (HybridPS).
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
