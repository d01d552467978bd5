"""The closed form of a step's time (equations 7 to 11) beside a walk through its tasks, lane by lane."""

from __future__ import annotations

import msgspec

from springtide.core.functions import FunctionPlan, ModelProfile
from springtide.core.wire.functions import Place
from springtide.perf.functions.pipeline.step_time import StageTimes, estimate_step
from springtide.perf.functions.pipeline.tasks import StageTask, finish_times, step_tasks


class PipelineWalk(msgspec.Struct, frozen=True, kw_only=True):
    """A step's time by the closed form and by the walk."""

    closed_s: float
    walked_s: float

    @property
    def difference_fraction(self) -> float:
        """By how much the closed form is above the walk."""
        return self.closed_s / self.walked_s - 1.0


def walk(profile: ModelProfile, plan: FunctionPlan) -> PipelineWalk:
    """Both times of one plan. Every task takes what the profile says; updates take nothing, as in section 3.4.2.

    Raises InvalidRequest where a stage does not fit.
    """
    estimate = estimate_step(profile, plan)
    num_stages = len(plan.stages)
    graphs = {
        Place(stage, replica): step_tasks(Place(stage, replica), num_stages, plan.num_replicas, plan.num_micro_batches)
        for stage in range(num_stages)
        for replica in range(plan.num_replicas)
    }
    ends = finish_times(graphs, lambda place, task: _duration_s(estimate.stages[place.stage], task))
    return PipelineWalk(closed_s=estimate.step_s, walked_s=max(max(times) for times in ends.values()))


def _duration_s(stage: StageTimes, task: StageTask) -> float:
    match task.kind:
        case "forward":
            return stage.forward_s
        case "backward":
            return stage.backward_s
        case "send-output":
            return stage.upload_s
        case "take-input":
            return stage.download_s
        case "send-gradient":
            return stage.gradient_upload_s
        case "take-gradient":
            return stage.gradient_download_s
        case "exchange":
            return stage.sync_s
        case "update":
            return 0.0
