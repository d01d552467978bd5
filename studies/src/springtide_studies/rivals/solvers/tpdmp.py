"""The published baseline that partitions and allocates one after the other: TPDMP's partition for throughput on fixed
equal resources (Tarnawski and others 2021), with a grid search over the resources (FuncPipe, section 5.1).
"""

from __future__ import annotations

import numpy as np

from springtide.solvers.pipeline.problem import (
    TOLERANCE,
    Floats,
    PipelineProblem,
    PipelineSolution,
    Stage,
    StageTables,
    stage_tables,
)


def tpdmp(problem: PipelineProblem, weights: tuple[float, float]) -> PipelineSolution | None:
    """The best of the grid under equation 3a with `weights`; None where nothing fits.

    The grid is over the degree of parallelism, the memory size, which all stages share, and the number of stages. For
    each point the model is cut so that its slowest stage is as fast as can be: what TPDMP maximises. It knows nothing
    of the time that a gradient's exchange takes, nor of different sizes for different stages. `bound` is the value
    itself: nothing is claimed beyond the grid.
    """
    best: PipelineSolution | None = None
    for degree in problem.degrees:
        tables = stage_tables(problem, degree)
        loads = stage_loads(problem, tables)
        for size in range(loads.shape[2]):
            for stages in fastest_cuts(loads[:, :, size], size):
                step_s, memory_mb = tables.score(stages)
                value = (weights[0] * memory_mb + weights[1]) * step_s
                if best is None or value < best.value * (1.0 - TOLERANCE):
                    best = PipelineSolution(
                        stages=stages, degree=degree, value=value, step_s=step_s, memory_mb=memory_mb, bound=value
                    )
    return best


def stage_loads(problem: PipelineProblem, tables: StageTables) -> Floats:
    """For how long a micro-batch occupies each stage [L + 1, L + 1, J], in seconds; infinite where it does not fit.

    The longest of computation, forward and backward, and of each link's transfers: all three go on at a time.
    """
    num_layers, num_sizes = problem.forward_s.shape
    unfit = ~(np.isfinite(problem.forward_s) & np.isfinite(problem.backward_s))
    both = np.where(unfit, 0.0, problem.forward_s + problem.backward_s)
    sums = np.concatenate([np.zeros((1, num_sizes)), np.cumsum(both, axis=0)])
    # Bytes over the cut below layer i, in either direction; nothing crosses the ends of the model.
    out, back = np.zeros((num_layers + 1, 1)), np.zeros((num_layers + 1, 1))
    out[1:-1, 0], back[1:-1, 0] = problem.output_bytes[:-1], problem.gradient_bytes[1:]
    crosses = np.zeros((num_layers + 1, 1))
    crosses[1:-1] = problem.latency_s
    over, under = out / problem.bytes_per_s + crosses, back / problem.bytes_per_s + crosses
    # A stage sends its output over its upper cut and its gradient over the lower one, and receives the other two.
    upload_s = over[None] + under[:, None]
    download_s = under[None] + over[:, None]
    loads = np.maximum(sums[None] - sums[:, None], np.maximum(upload_s, download_s))
    return np.where(tables.fits, loads, np.inf)


def fastest_cuts(loads: Floats, size: int) -> list[tuple[Stage, ...]]:
    """For each number of stages that fits, the cut whose slowest stage is fastest, of `loads` [L + 1, L + 1]."""
    num_layers = len(loads) - 1
    # slowest[i]: of the best way to put layers 0 to i into so many stages; before[k][i]: where its last stage begins.
    slowest = loads[0].copy()
    before = [np.zeros(num_layers + 1, dtype=np.int64)]
    found = []
    for _ in range(num_layers):
        if np.isfinite(slowest[num_layers]):
            found.append(_walk_back(before, num_layers, size))
        ways = np.maximum(slowest[:, None], loads)
        before.append(np.argmin(ways, axis=0))
        slowest = np.min(ways, axis=0)
    return found


def _walk_back(before: list[np.ndarray], end: int, size: int) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    for first_of in reversed(before):
        first = int(first_of[end])
        stages.append((first, end, size))
        end = first
    return tuple(reversed(stages))
