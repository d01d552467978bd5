"""Small plans of pipelines."""

from springtide.core.functions import FunctionPlan, FunctionStage


def nothing():
    return None


def plan_of(num_layers, num_stages, num_replicas, *, num_micro_batches, micro_batch_size, **fields):
    ends = [(stage + 1) * num_layers // num_stages for stage in range(num_stages)]
    stages = tuple(
        FunctionStage(first_layer=first, end_layer=end, memory_mb=512)
        for first, end in zip([0, *ends[:-1]], ends, strict=True)
    )
    return FunctionPlan(
        stages=stages,
        num_replicas=num_replicas,
        num_micro_batches=num_micro_batches,
        micro_batch_size=micro_batch_size,
        **fields,
    )
