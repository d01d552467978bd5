"""What reports of a job's workers say beyond how far it has come: changes to its record, named by field."""

from __future__ import annotations

from typing import Any

from springtide.control.records import JobRecord, PlatformState
from springtide.core import events
from springtide.core.decision import MAX_STEP_TIMES, GradientNoise, StepTime


def learnt(record: JobRecord, event: events.ProgressReported, state: PlatformState) -> dict[str, Any]:
    """What a report says beyond steps: progress over changing batches, how long a step takes there, gradient noise."""
    found: dict[str, Any] = {}
    if event.progress is not None:
        found["progress"] = event.progress
    if record.job.is_on_functions and event.global_batch_size:
        # On functions the batch follows the job's own schedule; elsewhere it is what was decided.
        found["global_batch_size"] = event.global_batch_size
    if event.total_progress is not None:
        found["total_progress"] = event.total_progress
    if event.grad_sqr is not None and event.grad_var is not None:
        found["noise"] = GradientNoise(grad_sqr=event.grad_sqr, grad_var=event.grad_var)
    if event.step_s is not None and event.local_batch_size and event.generation == record.generation:
        node_of = state.topology().node_of
        device_of = {replica.replica_id: replica.device_id for replica in record.replicas}
        nodes = [node_of.get(device_of[member]) for member in record.members if member in device_of]
        placement = tuple(sorted((nodes.count(node) for node in dict.fromkeys(nodes)), reverse=True))
        if len(nodes) == event.world_size and None not in nodes:
            measured = StepTime(
                placement=placement, local_batch_size=event.local_batch_size, step_s=event.step_s, sync_s=event.sync_s
            )
            key = (placement, event.local_batch_size)
            others = [known for known in record.step_times if (known.placement, known.local_batch_size) != key]
            found["step_times"] = (*others, measured)[-MAX_STEP_TIMES:]
    return found


def enlarged(record: JobRecord, event: events.FunctionsMeasured) -> dict[str, Any]:
    """What follows where functions ran out of memory and were given more than was decided, below the control plane."""
    plan, measured = record.plan, event.measurement.plan
    is_present = event.generation == record.generation and record.is_confirmed
    if plan is None or not is_present or record.job.search is None or len(plan.stages) != len(measured.stages):
        return {}
    had_mb, has_mb = plan.stages[0].memory_mb, measured.stages[0].memory_mb
    if has_mb <= had_mb:
        return {}
    return {"plan": measured, "too_small_mb": max(record.too_small_mb, had_mb)}
