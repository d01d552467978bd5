"""Small layer profiles drawn from a seed, and the best plans of one."""

import numpy as np

from springtide.core.functions import LayerProfile, ModelProfile
from springtide.perf.functions.pipeline.plan import CHEAPEST, WEIGHTS, PipelinePlanner, PlannedPipeline, with_deltas


def drawn_profile(
    seed: int, num_layers: int, memory_mb=(512, 1024, 2048, 4096), *, megabytes: float = 20.0, micro_batch_size: int = 4
) -> ModelProfile:
    rng = np.random.default_rng(seed)
    layers = []
    for number in range(num_layers):
        forward_s = float(rng.lognormal(-1.5, 0.6))
        backward_s = forward_s * float(rng.uniform(1.0, 2.5))
        sizes = [int(value) for value in rng.lognormal(np.log(megabytes * 2**20), 0.8, 2)]
        border = int(rng.lognormal(14, 1.0))
        layers.append(
            LayerProfile(
                name=f"layer{number}",
                parameter_bytes=sizes[0],
                activation_bytes=sizes[1],
                output_bytes=border,
                gradient_bytes=border,
                forward_s=tuple(forward_s * 1024 / size for size in memory_mb),
                backward_s=tuple(backward_s * 1024 / size for size in memory_mb),
            )
        )
    return ModelProfile(
        model=f"drawn-{seed}",
        micro_batch_size=micro_batch_size,
        memory_mb=tuple(memory_mb),
        bytes_per_s=tuple(40e6 + 5e6 * number for number in range(len(memory_mb))),
        layers=tuple(layers),
        slowdown=1.1,
        base_bytes=100 * 2**20,
        source="synthetic",
    )


def plan_pipeline(
    profile: ModelProfile, num_micro_batches: int, *, weights=WEIGHTS, **options
) -> list[PlannedPipeline]:
    """The best plan for each pair of weights, with its delta. Raises InvalidRequest if none fits."""
    planner = PipelinePlanner(profile, num_micro_batches, weights=[*weights, CHEAPEST], **options)
    return with_deltas([planner.plan(pair) for pair in weights], planner.plan(CHEAPEST).estimate)
